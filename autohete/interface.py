"""The questions of the commands ``plan`` and ``simulate``, from Python, with everything by name or as an object."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from autohete.answer import SYSTEM_BYTES, Answer, Sampling, Site, find_answer
from autohete.hardware import Hardware, load_hardware, parse_parallel
from autohete.plan.policy import Policy
from autohete.policies import parse_policy
from autohete.profile import analytic_profile
from autohete.simulate import Simulation, simulate
from autohete.simulate.largest import GrowingFigure
from autohete.workload import WORKLOADS, Workload
from autohete.workload.config import read_model


def simulate_training(
    workload: Workload | str,
    hardware: Hardware | str | Path,
    policy: Policy | str = "autohete",
    *,
    overrides: Mapping[str, str] | None = None,
    gpus: int | None = None,
    parallel: str | None = None,
) -> Simulation:
    """Simulate training under one policy, with all of the host's memory.

    Args:
        workload: a workload, or the name of a model, see :func:`~autohete.workload.config.read_model`, or of a workload of the
            paper.
        hardware: the whole node, or where :func:`~autohete.hardware.load_hardware` reads it.
        policy: a policy, or its name with flags.
        overrides: hardware figures by dotted key, as text with unit, if the hardware is read.
        gpus: GPUs that train together; None: one, or as many as ``parallel`` takes.
        parallel: how they divide each batch, such as ``tp=4,dp=2``; see :class:`~autohete.hardware.Parallelism`.

    Raises:
        InputError: something is unknown or invalid.
        InfeasibleError: the policy searches for a plan and finds none.
    """
    node = hardware if isinstance(hardware, Hardware) else load_hardware(hardware, overrides)
    asked = parse_policy(policy) if isinstance(policy, str) else policy
    return simulate(_workload(workload), node.shared_by(*parse_parallel(parallel, gpus)), asked)


def plan_training(
    workload: Workload | str,
    hardware: str | Path,
    *,
    overrides: Mapping[str, str] | None = None,
    gpus: int | None = None,
    parallel: str | None = None,
    policies: Sequence[str] | None = None,
    tokens: int = 10**9,
    system_bytes: int = SYSTEM_BYTES,
    sampling: Sampling | None = None,
    sizes: Sequence[GrowingFigure] = (),
) -> Answer:
    """Judge all policies, and simulate what more hardware would bring, in this process.

    Args:
        workload: as for :func:`simulate_training`.
        hardware: a preset's name or a file, whose figures are varied.
        overrides: hardware figures by dotted key, as text with unit.
        gpus: GPUs that train together; None: one, or as many as ``parallel`` takes.
        parallel: how they divide each batch, such as ``tp=4,dp=2``; see :class:`~autohete.hardware.Parallelism`.
        policies: names with flags; None: all.
        tokens: of the whole training.
        system_bytes: host memory that is left to the system.
        sampling: draws of uncertain figures for the interval; None: as many as by default.
        sizes: figures whose largest value is looked for.

    Raises:
        InputError: something is unknown or invalid.
    """
    count, parallelism = parse_parallel(parallel, gpus)
    site = Site(str(hardware), overrides or {}, count, parallelism=parallelism)
    profile = analytic_profile(_workload(workload), site.whole().shared_by(count, parallelism))
    return find_answer(
        profile,
        site,
        system_bytes=system_bytes,
        policies=policies,
        tokens=tokens,
        sampling=sampling,
        sizes=sizes,
        given={"hardware", *(key.replace(".", "_") for key in overrides or {})},
    )


def _workload(given: Workload | str) -> Workload:
    if isinstance(given, Workload):
        return given
    return WORKLOADS[given] if given in WORKLOADS else read_model(given)
