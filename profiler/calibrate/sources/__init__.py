"""Sources of a calibration: this decoder, vLLM in this process, and a server by its URL.

Each module has one class that `profiler.calibrate.run` asks (`CalibrationSource`).
"""
