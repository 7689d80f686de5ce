"""Figures of a benchmark result: rates, paired ratios with intervals, acceptance, hindsight.

Pure functions of a `lab.bench.record.Result`; no text, no drawing, no files.
"""
