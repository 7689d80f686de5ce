"""BlockPilot: a DFlash drafter whose block size a predictor chooses for each text.

`drafter` drafts with it. `sources` counts the rounds of every block size along texts, `sweeps`
keeps them, and `recipe` trains the predictor and writes its folder.
"""
