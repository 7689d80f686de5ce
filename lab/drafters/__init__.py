"""Published block drafters beyond the decoder's own: DSpark, DFlash 2 and Domino.

They build on DFlash's backbone, and their checkpoints are found through `rooftree.drafters`.
"""
