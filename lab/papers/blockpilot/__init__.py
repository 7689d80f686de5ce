"""Training of BlockPilot predictors.

`sweeps` records how every block size does, `sources` runs the prompts or texts, `recipe` trains
the predictor and writes its folder.
"""
