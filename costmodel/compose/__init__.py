"""Profiles of devices that are not at hand: composed from measured operators, or transferred.

`aiconfigurator` and `llmservingsim` read operator tables of one format each; `matmul` and
`attention` interpolate them; `operators` sums a forward; `profiles` makes a profile of it.
`transfer` scales a profile to a sibling device. The folder may import calibration/,
profile/ and the modules beside.
"""
