"""The arms of a benchmark: this project's decoder under each policy, and transformers' generate.

Imports the decoder and the record of a result; clocks and schedules are not its concern.
"""
