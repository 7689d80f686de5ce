"""The DSpark drafter: a DFlash backbone whose scores depend on the tokens drafted before.

It imports DFlash and the shared parts of drafters.
"""
