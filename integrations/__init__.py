"""Decisions from a profile inside other engines, and the engines' own interfaces.

The modules here need `costmodel` alone; the folder of an engine imports that engine only when it
is used. `costmodel` is the only other package that may be imported.
"""
