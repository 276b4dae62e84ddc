"""Plans with what they are for, as frameworks get them."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

from autohete.frameworks import FRAMEWORKS, Decided, Framework, ModelFiles
from autohete.frameworks.model_files import model_files
from autohete.hardware import load_hardware
from autohete.hardware.parallelism import ALONE, Parallelism
from autohete.policies import parse_policy
from autohete.profile import analytic_profile
from autohete.simulate import simulate_policy
from autohete.workload import Workload
from autohete.workload.config import read_model

BY_NAME: dict[str, Framework] = {each.name: each for each in FRAMEWORKS}
MODEL = "llama-3.2-1b"
TINY = Workload(
    "tiny",
    hidden_size=64,
    transformer_blocks=2,
    heads=4,
    vocabulary_size=128,
    batch_size=2,
    sequence_length=32,
    micro_batches=2,
)


@cache
def decided(
    policy: str,
    workload: Workload | None = None,
    gpu_memory: str = "24GiB",
    gpus: int = 1,
    parallelism: Parallelism = ALONE,
    node: str = "a100-40gb-epyc7543p",
) -> Decided:
    """The plan of a policy for a workload, of two sequences of Llama-3.2-1B by default; ``node`` has several GPUs."""
    figures = {"gpu.memory": gpu_memory, "host.memory": "512GiB"}
    hardware = load_hardware(node if gpus > 1 else "rtx4090-workstation", figures).shared_by(gpus, parallelism)
    profile = analytic_profile(replace(read_model(MODEL), batch_size=2) if workload is None else workload, hardware)
    named = parse_policy(policy)
    simulation = simulate_policy(profile, named)
    return Decided(profile, named.system, simulation.plan, simulation.iteration_seconds, simulation.gpu.peak_bytes)


def schema(name: str) -> set[str]:
    """The names of a tool's options at the stated version."""
    version, *names = (Path(__file__).parent / "schemas" / f"{name}.txt").read_text().splitlines()
    assert BY_NAME[name].version in version
    return {word for line in names for word in line.split()}


def files_of(framework: str, one: Decided) -> dict[str, str]:
    """What is written for a framework."""
    model = MODEL if one.workload.architecture is not None else None
    files: ModelFiles = model_files(model, one.workload)
    return BY_NAME[framework].files(one, files)
