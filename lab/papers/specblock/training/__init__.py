"""Training of SpecBlock drafters.

`rows` computes the blocks of one text, `objective` their losses, `recipe` runs the training and
writes the drafter's folder.
"""
