"""One calibration for each kind of device of a cluster.

`scheduler` shares out the devices of any cluster, `ray_cluster` is Ray as one (extra `fleet`).
"""
