"""Choosing a plan by search: the integer program, and the prefetch tuning after it."""
