"""The DFlash 2 drafter: DFlash with convolutions, and a selector that scores pairs of candidates.

It imports the DFlash drafter's files, and what that imports.
"""
