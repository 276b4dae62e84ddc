"""``autohete largest``."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from autohete.cli.groups import MODEL, JsonSwitch, Policies
from autohete.cli.parallel import Stages
from autohete.cli.question import BLANK, Question, Whole
from autohete.errors import InputError
from autohete.quantities import format_bytes, format_seconds

if TYPE_CHECKING:
    from autohete.answer.members import LargestMember
    from autohete.workload import Workload


def largest(
    *,
    family: Annotated[str, Parameter(group=MODEL)],
    question: Question = BLANK,
    policy: Policies = None,
    tokens_per_second: float = 0.0,
    jobs: Whole | None = None,
    json_: JsonSwitch = False,
) -> None:
    """Name the largest bundled model of a family that trains on a hardware, and the fastest policy for it.

    Without --batch-size, the batch is one sequence.

    Parameters
    ----------
    family:
        The beginning of the names of models, such as qwen3 or llama-3 (`autohete presets models` lists them).
    policy:
        NAME[:flag,flag=value]; repeat for several. Default: all policies.
    tokens_per_second:
        Leave out models that train more slowly than this.
    jobs:
        Processes; default: one per core.
    json_:
        Print JSON: one object.
    """
    from autohete.answer.members import family_members, largest_member
    from autohete.policies import parse_policy

    given = {
        "--model": question.model,
        "--module": question.module,
        "--block-names": question.block_names,
        "--workload": question.workload,
        "--profile": question.profile,
    }
    for option, value in given.items():
        if value is not None:
            raise InputError(f"{option} is one model, and --family {family} asks for the largest of several: give one of them")
    for name in policy or ():
        parse_policy(name)  # refuses what is none, which would be a reason against each model
    if question.shape.batch_size is None:
        question = replace(question, shape=replace(question.shape, batch_size=1))
    models = [question.shape.workload(None, name) for name in family_members(family)]
    hardware = question.on_hardware()
    found = largest_member(models, hardware, policy, tokens_per_second, Stages(jobs, None))
    if json_:
        print(json.dumps(_document(found), indent=2, ensure_ascii=True))
    else:
        _print(found, hardware.title)


def _document(found: LargestMember) -> dict[str, object]:
    best = found.best
    return {
        "model": None if found.workload is None else found.workload.name,
        "policy": None if best is None else best.name,
        "iteration_seconds": None if best is None else best.summary.iteration_seconds,
        "tokens_per_second": None if best is None else best.summary.tokens_per_second,
        "gpu_peak_bytes": None if best is None else best.summary.gpu_peak_bytes,
        "host_peak_bytes": None if best is None else best.summary.host_peak_bytes,
        "too_large": {workload.name: reason for workload, reason in found.too_large},
        "smaller": [workload.name for workload in found.smaller],
    }


def _print(found: LargestMember, node: str) -> None:
    from autohete.report.tables import console, print_text

    out, best, model = console(), found.best, found.workload
    if best is None or model is None:
        print_text(out, f"no model of the family trains on {node}")
    else:
        s = best.summary
        print_text(
            out,
            f"{_sized(model)} is the largest that trains on {node}: {best.name}, {format_seconds(best.seconds)} "
            f"for {_batch(model)}, {s.tokens_per_second or 0:,.0f} tokens/s, {format_bytes(s.gpu_peak_bytes or 0)} of GPU and "
            f"{format_bytes(s.host_peak_bytes or 0)} of host memory ({s.clock})",
        )
    for larger, reason in found.too_large:
        print_text(out, f"larger: {_sized(larger)}: {reason}")
    if found.smaller:
        print_text(out, f"smaller: {', '.join(map(_sized, found.smaller))}")


def _sized(model: Workload) -> str:
    return f"{model.name} ({model.parameters / 1e9:.2f}B)"


def _batch(model: Workload) -> str:
    times = f"{model.micro_batches} x " if model.micro_batches > 1 else ""
    return f"{times}{model.batch_size} x {model.sequence_length} tokens"
