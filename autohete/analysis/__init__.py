"""Analysis of schedules and traces: occupancy, worst case, usage, lower bounds, and the differences between two runs."""
