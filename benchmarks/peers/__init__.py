"""Other engines and this decoder on the same prompts, in one interleaved run.

`workers` runs in the environment of each engine and imports nothing of this project but for its
own decoder.
"""
