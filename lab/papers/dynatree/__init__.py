"""DynaTree: confident growth, its history of acceptance, and the static trees beside it."""
