"""Discrete-event simulation of a server with continuous batching.

`steps` gives the seconds of a step, `engine` runs them, `percentiles` sizes a fleet by its results.
Imports the planning modules below the search.
"""
