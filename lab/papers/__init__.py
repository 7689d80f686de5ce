"""One folder a paper: its policy, drafter, fit and training, built on the core."""
