"""Profiles for devices that are not at hand: summed from measured operators, or scaled."""
