"""The subcommands of `rooftree`: each module exposes one click command named `command`."""
