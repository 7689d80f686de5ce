"""Tables, pictures and pages of profiles, fits and plans.

Imports costmodel; `console` prints for all commands.
"""
