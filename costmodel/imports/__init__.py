"""Forward times that other tools measured, read from their files and made into profiles.

`table` is what every reader returns; `csv_points`, `llama_bench` and `sglang` read one tool's files
each; `profiles` picks the reader and makes a profile.
The folder may import calibration/, profile/ and the modules beside.
"""
