"""The benchmark harness behind `rooftree bench`.

`record` is a result and its file. `analysis` derives figures from it, and `report` shows them.
`arms` decode, so do `engines` in processes of their own; `schedule` gives them their turns, and
`session` joins everything into one run. Imports point back in this order.
"""
