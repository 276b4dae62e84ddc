"""The discrete-event executor. Imports SimPy, never torch."""

from autohete.sim.sim_executor import SimExecutor

__all__ = ["SimExecutor"]
