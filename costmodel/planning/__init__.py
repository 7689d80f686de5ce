"""Capacity planning: from traffic, goals and prices to GPUs, tree sizes and cost.

`search.plan` is the way in: it takes a `request.PlanRequest` and returns a `result.Plan`. Times
come from a profile (`sources`, `forwards`); `exports` writes engine settings, `simulation` adds
percentiles. The folder may import all of costmodel but online/.
"""
