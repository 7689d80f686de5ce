"""transformers: this decoder inside `model.generate`, and scripts of it from a plan.

The folder may import the core.
"""
