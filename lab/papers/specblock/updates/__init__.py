"""Updates of a drafter while it serves (SpecBlock, section 3.4).

`adaptation` keeps the positions that the drafter got wrong, and updates it when `bandit` decides
so; `specblock` says what a SpecBlock drafter learns.
"""
