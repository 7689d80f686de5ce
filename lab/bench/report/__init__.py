"""Tables, pictures and the HTML page of a benchmark result.

Imports `lab.bench.analysis` and the shared parts of `profiler.report`.
"""
