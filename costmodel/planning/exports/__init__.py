"""Settings of serving engines from a plan: `settings` writes them, `step_tables` DSpark's costs.

The folder may import all of planning/; nothing in planning/ imports it.
"""
