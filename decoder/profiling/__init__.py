"""The decoder's costs at its start: profile lookup, quick probe, and the making of profiles.

Imports targets, drafters and policies; nothing of the decode loop.
"""
