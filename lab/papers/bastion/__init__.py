"""BASTION as its authors released and printed it: two budget rules and their calibration."""
