"""Measuring a device, and the `rooftree` command.

`measure` times, `calibrate` writes profiles, `report` shows results and `commands` is the command
line. Imports decoder and costmodel.
"""
