"""Measuring a device, and the `rooftree` command.

`measure` times, `calibrate` writes profiles, `bench` compares decoders, `report` shows results and
`commands` is the command line. Imports decoder and costmodel.
"""
