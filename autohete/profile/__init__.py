"""Profiles: seconds and bytes of every unit of one workload on one hardware, computed or measured."""

from autohete.profile.costs import LONGEST_TASK_SECONDS, LossProfile, Profile, SavedTensors, UnitProfile
from autohete.profile.roofline import analytic_profile

__all__ = ["LONGEST_TASK_SECONDS", "LossProfile", "Profile", "SavedTensors", "UnitProfile", "analytic_profile"]
