"""What fits, how fast it will be, and why: transformer training that does not fit on the GPU, simulated and run."""

from __future__ import annotations

TYPE_CHECKING = False  # a type checker's; importing typing would delay what catches interrupts
if TYPE_CHECKING:
    from autohete.train.trainer import Trainer

__all__ = ["Trainer", "__version__"]

__version__ = "0.1.0"  # the only place; pyproject.toml reads it here


def __getattr__(name: str) -> object:
    if name == "Trainer":  # loads PyTorch only on demand
        from autohete.train.trainer import Trainer

        return Trainer
    raise AttributeError(f"module 'autohete' has no attribute {name!r}")
