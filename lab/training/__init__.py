"""Training of drafters: texts that the target writes, its features, objectives, and the loop.

DFlash drafters are trained by the modules here; what trains others is in `lab.papers`.
"""
