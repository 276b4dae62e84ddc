"""The discrete-event executor. Imports SimPy, never torch."""

from autohete.sim.executor import SimExecutor

__all__ = ["SimExecutor"]
