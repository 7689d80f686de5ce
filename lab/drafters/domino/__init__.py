"""The Domino drafter: DFlash's block, corrected along each path by a recurrent state.

It imports the DFlash drafter's files, and what that imports.
"""
