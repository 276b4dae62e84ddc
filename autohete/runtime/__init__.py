"""The real executor: the same schedules on PyTorch. Imports torch, never SimPy."""
