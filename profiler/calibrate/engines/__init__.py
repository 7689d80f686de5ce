"""Calibration of serving engines: their own steps, by the rules of the own decoder's calibration.

Imports from `profiler.calibrate`, `integrations`, `decoder` and `costmodel`.
"""
