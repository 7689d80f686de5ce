"""Ray (extra `fleet`): `fleet` shares out the devices of any cluster, `cluster` is Ray as one."""
