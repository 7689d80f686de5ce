"""BlockPilot: a DFlash drafter whose block size a predictor chooses for each text.

`drafter` drafts with it. `sweeps` counts the rounds of every block size along texts, and `recipe`
trains the predictor and writes its folder.
"""
