"""Ray: one calibration for each kind of device of a cluster (extra `fleet`).

`fleet` shares out the devices of any cluster, `cluster` is Ray as one.
"""
