"""Calibration: run.py tells it from beginning to end.

sources/ has what can be measured, points.py the points, sweep.py the loop over them, sections.py
the way from samples to a profile, files.py its files, and fleet/ a cluster. imported.py makes a
profile of times that another tool measured. It imports measure and report.
"""
