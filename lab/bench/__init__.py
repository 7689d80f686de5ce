"""The benchmark harness behind `rooftree bench`.

`record` is the schema of a result, `store` its files, `prompts` and `environment` fill parts of
it. `analysis` derives figures from a result and `report` shows them. `arms` decode, so do
`engines` in processes of their own; `schedule` gives them their turns under `response_timer`, and
`session` joins everything into one run.
Imports point back in this order.
"""
