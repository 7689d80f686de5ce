"""Drafters: their protocol (`base`), one file or folder for each kind, and what they share.

Another kind of drafter subclasses `base.Drafter`; `factory` finds drafters by name. Nothing here
imports the decode loop or training.
"""
