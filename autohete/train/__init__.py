"""Training within a memory budget: measure, plan, execute, compare. Built on ``runtime``, which executes the schedule."""
