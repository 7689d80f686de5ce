"""Timing: timers, samples, stopping rules, the machine's state and the journal.

It imports costmodel and decoder, and nothing else of profiler.
"""
