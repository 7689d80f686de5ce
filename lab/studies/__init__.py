"""Scripts that produce every number the documentation states, and their stored results."""
