"""How little GPU memory suffices for ten models, and how fast is training with a quarter of what it takes without offload?

Command: ``python benchmarks/budgets.py [--jobs N]``. Takes some minutes on two cores; everything is simulated. Each model is
planned by ``joint`` on an H100 with two micro-batches of 8 x 1024 tokens, AdamW in pure bf16, and a chunked loss: with the
smallest memory for tensors that ``joint`` states, and with a quarter of the peak of ``resident``.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from cyclopts import App
from joblib import Parallel, delayed

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for `python benchmarks/budgets.py` from anywhere

from autohete.cli.app import run_app
from autohete.errors import InfeasibleError
from autohete.hardware import load_hardware
from autohete.policies import parse_policy
from autohete.profile import Profile, analytic_profile
from autohete.quantities import format_bytes
from autohete.report.tables import console, table
from autohete.schedule import GPU_MEMORY
from autohete.simulate import simulate_policy, with_memory
from autohete.workload.config import read_model
from autohete.workload.optimizers import Optimizer

NODE = "h100-pcie5"
MODELS = (
    "gpt2-xl", "llama-3.2-1b", "gemma-2-2b", "llama-3.2-3b", "qwen2.5-7b", "llama-3.1-8b", "gemma-2-9b", "llama-2-13b",
    "qwen3-14b", "phi-4",
)  # fmt: skip
#: Room for everything, and for nothing.
_PLENTY, _NOTHING = 2**50, 1


def profile_of(model: str) -> Profile:
    """Return the model with two micro-batches on the node."""
    workload = replace(read_model(model), batch_size=8, sequence_length=1024, micro_batches=2, chunked_loss=True)
    training = replace(workload.training, optimizer=Optimizer.ADAMW_PURE_BF16)
    return analytic_profile(replace(workload, training=training), load_hardware(NODE))


def row_of(model: str) -> tuple[str, ...]:
    """Return what one model needs, and how fast it is."""
    profile, joint = profile_of(model), parse_policy("joint")

    def speed(budget: int) -> str:
        try:
            found = simulate_policy(with_memory(profile, GPU_MEMORY, budget), joint)
        except InfeasibleError:
            return "does not fit"
        return f"{found.tokens_per_second:,.0f}"

    resident = simulate_policy(with_memory(profile, GPU_MEMORY, _PLENTY), parse_policy("resident")).gpu.peak_bytes
    try:
        simulate_policy(with_memory(profile, GPU_MEMORY, _NOTHING), joint)
    except InfeasibleError as error:
        least = error.needed_bytes
    quarter = resident // 4
    return model, format_bytes(resident), format_bytes(least), speed(least), format_bytes(quarter), speed(quarter)


def main(*, jobs: int = 2) -> None:
    """Plan all models.

    Parameters
    ----------
    jobs:
        Processes.
    """
    columns = ["model", "resident", "smallest budget", "tokens/s", "a quarter", "tokens/s"]
    shown = table(f"{NODE}, 2 x 8 x 1024 tokens, memory for tensors, simulated", columns)
    for row in Parallel(n_jobs=jobs)(delayed(row_of)(model) for model in MODELS):
        shown.add_row(*row)
    console().print(shown)


if __name__ == "__main__":
    run_app(App(name="budgets", default_command=main, help=__doc__))
