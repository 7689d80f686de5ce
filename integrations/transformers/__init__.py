"""transformers: a script for this project's decoder, from a plan.

The folder may import the core.
"""
