"""SGLang: its settings from a plan.

The folder may import the core.
"""
