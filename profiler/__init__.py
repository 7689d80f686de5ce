"""Measuring a device and using what was measured, and the `rooftree` command."""
