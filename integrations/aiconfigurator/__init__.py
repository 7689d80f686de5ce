"""aiconfigurator-core (NVIDIA): its operator tables (extra `operators`)."""
