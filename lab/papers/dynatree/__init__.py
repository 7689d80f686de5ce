"""DynaTree: confident growth, its history of acceptance, and the baselines beside it."""
