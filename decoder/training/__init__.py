"""Training of drafters: the target's own texts, its features, objectives and the loop."""
