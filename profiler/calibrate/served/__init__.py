"""Calibration of a server over its OpenAI-compatible HTTP interface, without access to its insides.

Imports from `profiler.calibrate`, `decoder` and `costmodel`.
"""
