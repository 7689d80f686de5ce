"""Calibration profiles: the sections of the YAML, the profile, and the store that finds one.

Imports the calibrations; imported by the online costs, the composition and the planning.
"""
