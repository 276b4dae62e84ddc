"""Training under a memory budget: measure, plan, execute, compare. Stands above ``runtime``, which executes the schedule."""
