"""The SpecBlock drafter.

`model` is the checkpoint format, the draft model and its rank head; `tree` shapes the draft tree
by the rank head; `drafter` drafts with them.
"""
