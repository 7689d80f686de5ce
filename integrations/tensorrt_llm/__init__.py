"""TensorRT-LLM: its settings from a plan."""
