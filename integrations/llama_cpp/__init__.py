"""llama.cpp: its files of forward times.

The folder may import the core.
"""
