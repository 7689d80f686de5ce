"""Calibration of a target on a device: prepare, measure, write (calibrate.py).

workload.py has the timed calls, sweep_plan.py the points, sweep.py the loop over them, sections.py
the way from samples to a profile, files.py its files, and fleet/ a
cluster. It imports measure and report.
"""
