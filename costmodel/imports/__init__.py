"""Forward times that other tools measured, read from their files and made into profiles.

`table` is what every reader returns; `csv_points`, `vllm_forward`, `llama_bench`, `sglang` and
`nvidia_forward` read one tool's files each, `formats` picks the reader; `profiles` makes a profile.
The folder may import calibration/, profile/ and the modules beside.
"""
