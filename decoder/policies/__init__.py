"""The budget policies, which choose the draft tree of each round.

They read draft trees, rounds and the cost model, and import neither the target nor the loop.
"""
