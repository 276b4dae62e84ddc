"""What a schedule and its trace say: occupancy, worst case, usage, lower bounds, differences of two runs."""
