"""transformers: this decoder inside `model.generate`, and scripts of it from a plan."""
