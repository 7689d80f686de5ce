"""The workshop: what compares, trains, studies, or belongs to one paper.

It imports every other package and plugs in through the entry points of rooftree; none of them
imports it.
"""
