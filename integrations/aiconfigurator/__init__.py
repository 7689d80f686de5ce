"""aiconfigurator-core (NVIDIA): its operator tables (extra `operators`).

The folder may import the core.
"""
