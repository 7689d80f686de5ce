"""The benchmark harness: arms over the same prompts, what they did, and what it means."""
