"""Calibrations: seconds of a forward by rows, context and batch, and their fits to points.

Each calibration is its own schema, as stored in a profile. Imports architecture, roofline,
fields and statistics; never the profile.
"""
