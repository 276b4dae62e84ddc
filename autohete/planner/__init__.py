"""Search for a plan: the integer program and the prefetch tuning that follows it."""
