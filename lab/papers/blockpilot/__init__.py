"""BlockPilot: a DFlash drafter whose block size a predictor chooses for each text.

`drafter` drafts with it. `recipe` counts the rounds of every block size along texts, trains the
predictor, and writes its folder.
"""
