"""Tables, pictures and the HTML page of a benchmark result.

Imports `profiler.bench.analysis` and the shared parts of `profiler.report`.
"""
