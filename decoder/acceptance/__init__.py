"""Exact acceptance of drafted tokens.

`rules` decides what is kept, `drawn` samples draft trees, `sampling` turns logits into
distributions. Imports draft trees.
"""
