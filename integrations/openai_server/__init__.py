"""OpenAI-compatible servers, calibrated from outside by the times of their answers."""
