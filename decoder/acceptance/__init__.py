"""Which drafted tokens the target accepts: exact rules, and the sampled trees that go with them."""
