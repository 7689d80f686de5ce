"""Tables of a benchmark result.

Imports `lab.bench.analysis`, and the console of `profiler.report`.
"""
