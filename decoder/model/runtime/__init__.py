"""Runtimes of the target's forwards: eager operations, packed weights or captured graphs.

`packed` is a CPU's runtime, over the products of `linear`. `tables` holds a forward's rows for a
graph, `fused` chooses Triton kernels on CUDA, `capture` records device work.
Imports the target's cache, and attention; never loading or the target itself.
"""
