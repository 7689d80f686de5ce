"""OpenAI-compatible servers, calibrated from outside by the times of their answers.

The folder may import the core.
"""
