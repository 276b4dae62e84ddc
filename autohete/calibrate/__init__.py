"""Calibrates a hardware and a profile with a recording that a profiler made of a training."""
