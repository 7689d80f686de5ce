"""Mutated files of every format."""
