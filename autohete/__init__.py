"""What fits, how fast it will be, and why: transformer training that does not fit on the GPU, simulated and run.

    from autohete import plan_training, simulate_training

The functions are not called ``plan`` and ``simulate``, as the commands are: those names belong to packages. Importing anything
in a package sets its name here to the package, so a function of that name would be there only until then.
"""

from __future__ import annotations

TYPE_CHECKING = False  # a type checker's; importing typing would delay what catches interrupts
if TYPE_CHECKING:
    from autohete.answer import Answer
    from autohete.errors import AutoHeteError, InfeasibleError, InputError
    from autohete.hardware import Hardware, load_hardware
    from autohete.interface import plan_training, simulate_training
    from autohete.policies import parse_policy
    from autohete.profile import Profile, analytic_profile
    from autohete.simulate import Simulation
    from autohete.train.trainer import Trainer
    from autohete.workload import Workload
    from autohete.workload.config import read_model

#: Names that are loaded when they are first used, since some load SciPy or PyTorch, and their modules.
_HOMES = {
    "Answer": "answer",
    "AutoHeteError": "errors",
    "Hardware": "hardware",
    "InfeasibleError": "errors",
    "InputError": "errors",
    "Profile": "profile",
    "Simulation": "simulate",
    "Trainer": "train.trainer",
    "Workload": "workload",
    "analytic_profile": "profile",
    "load_hardware": "hardware",
    "parse_policy": "policies",
    "plan_training": "interface",
    "read_model": "workload.config",
    "simulate_training": "interface",
}

__all__ = [
    "Answer",
    "AutoHeteError",
    "Hardware",
    "InfeasibleError",
    "InputError",
    "Profile",
    "Simulation",
    "Trainer",
    "Workload",
    "__version__",
    "analytic_profile",
    "load_hardware",
    "parse_policy",
    "plan_training",
    "read_model",
    "simulate_training",
]

__version__ = "0.1.0"  # the only place; pyproject.toml reads it here


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'autohete' has no attribute {name!r}")
    from importlib import import_module

    found: object = getattr(import_module(f"autohete.{_HOMES[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
