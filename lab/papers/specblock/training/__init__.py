"""Training of SpecBlock drafters.

`objective` computes the blocks of texts and their losses, `recipe` runs the training and writes
the drafter's folder.
"""
