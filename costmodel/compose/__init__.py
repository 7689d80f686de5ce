"""Profiles of devices that are not at hand: composed from measured operators, or transferred.

`tables` are read by entry points, `matmul` and `attention` interpolate them, `operators` sums a
forward, `profiles` makes a profile of it, and `transfer` scales a profile to a sibling device. The
folder may import calibration/, profile/ and the modules beside.
"""
