"""NVIDIA Model-Optimizer: its files of acceptance, read and written."""
