"""The subcommands of `rooftree`, one file each.

Each module has one click command named `command`, which parses, calls one function and prints.
`options` holds the options that several commands share. Heavy imports stand inside functions.
"""
