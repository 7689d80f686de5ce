"""BASTION: its two budget rules as printed and as released, and their calibration."""
