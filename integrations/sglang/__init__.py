"""SGLang: its settings from a plan."""
