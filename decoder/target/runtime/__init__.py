"""Runtimes of the target's forwards: eager operations, or captured graphs over buckets of rows.

`base` is the protocol, `tables` holds a forward's rows for a graph, `fused` chooses Triton kernels
on CUDA, `capture` records device work. Imports the target's cache, attention and ranks; never
loading or the target itself.
"""
