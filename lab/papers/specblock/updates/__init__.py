"""Updates of a drafter while it serves (SpecBlock, section 3.4).

`recording` keeps the positions that the drafter got wrong, `bandit` decides on an update,
`adaptation` makes it.
"""
