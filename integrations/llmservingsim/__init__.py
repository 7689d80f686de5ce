"""LLMServingSim: operator tables in the formats of its profilers.

The folder may import the core.
"""
