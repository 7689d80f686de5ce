"""The SpecBlock drafter, in the form that its authors released.

`model` is the checkpoint format, the draft model and its rank head; `tree` shapes the draft tree
by the rank head; `drafter` drafts with them; `figures` prints the paper's table 3 and figure 5.
"""
