"""The cost of a forward as numbers: rooflines, calibrations, profiles, and what to do with them.

Needs numpy, pydantic and PyYAML, and scipy inside some fits; never a model library or a GPU.
"""
