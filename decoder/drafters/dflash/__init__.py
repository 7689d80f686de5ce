"""The DFlash block-diffusion drafter.

`model` reads and runs the published checkpoint format, `drafter` drafts with it. Imports the
shared parts of drafters and the target.
"""
