"""NVIDIA Model-Optimizer: its files of acceptance, read and written.

The folder may import the core.
"""
