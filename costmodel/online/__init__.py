"""Costs while decoding: the cost of a cycle, its correction from observed times, and drift.

Imports profiles and calibrations.
"""
