"""Training of drafters: texts that the target writes, its features, objectives, and the loop.

DFlash drafters are trained by the modules here; SpecBlock drafters, BlockPilot predictors and
updates while serving each have a folder. Only `lab.bench` and the training commands import
this package.
"""
