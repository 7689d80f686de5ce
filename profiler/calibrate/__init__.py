"""Calibration: run.py tells it from beginning to end.

source.py says what can be measured, decoder.py is this decoder as such, points.py has the points,
sweep.py the loop over them, sections.py the way from samples to a profile, files.py its files.
imported.py fits times that another tool measured. It imports measure and report.
"""
