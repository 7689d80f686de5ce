"""DDTree: best-first trees of a fixed budget, which the decoder has as the policy `fixed:N`."""
