"""Other engines as peers, each in a process of its own.

`requested` reads the options and looks into an engine's interpreter, `model_file` gives the model
the engine's format, and `arm` talks to a `worker`.
"""
