"""Capacity planning: from traffic, goals and prices to GPUs, tree sizes and cost.

`search.plan` is the way in: it takes a `request.PlanRequest` and returns a `result.Plan`.

Layers from the bottom: `traffic`, `engines` and `request` describe the question; `forwards` (found
by `sources`), `drafting` and `acceptance` give seconds of forwards and tokens per cycle; `batching`
adds up one cycle of an engine and `servers` picks its best tree; `sizing` counts GPUs; `simulation`
adds percentiles; `search` tries all options. `options` reads requests
from text, `exports` writes engine settings. The folder may import all of costmodel but online/.
"""
