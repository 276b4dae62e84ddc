"""The PyTorch executor: runs the same schedules for real. Imports torch, never SimPy."""
