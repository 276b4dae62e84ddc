"""The largest model of a family that trains on a hardware."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from autohete.answer.policies import Judged, default_policies, longest_first, ranked
from autohete.answer.result import Candidate
from autohete.answer.run import Run, in_turn
from autohete.errors import InputError, suggestion
from autohete.hardware import Hardware
from autohete.policies import parse_policy
from autohete.profile import Profile, analytic_profile
from autohete.quantities import format_bytes
from autohete.simulate.largest import misfit
from autohete.workload import Workload
from autohete.workload.config import model_names, read_model


@dataclass(frozen=True, slots=True)
class LargestMember:
    """The largest model of a family that trains.

    Args:
        workload: that model; None: no model of the family trains.
        best: the fastest policy for it.
        too_large: larger models, largest first, and why each does not train, or is too slow.
        smaller: models below it, largest first.
    """

    workload: Workload | None
    best: Candidate | None
    too_large: tuple[tuple[Workload, str], ...]
    smaller: tuple[Workload, ...]


def family_members(family: str) -> list[str]:
    """Return the bundled models whose names begin with ``family``, in any case.

    Raises:
        InputError: there is none.
    """
    wanted = family.casefold()
    found = [name for name in model_names() if wanted and name.startswith(wanted)]
    if not found:
        raise InputError(
            f"no bundled model is of the family {family!r}: give the beginning of a name that autohete presets models lists, "
            f"such as qwen3 or llama-3{suggestion(family, model_names())}"
        )
    return found


def largest_member(
    models: Sequence[Workload],
    hardware: Hardware,
    policies: Sequence[str] | None = None,
    least_tokens_per_second: float = 0.0,
    run: Run = in_turn,
) -> LargestMember:
    """Return the largest of ``models``, by parameters, that trains under one of some policies.

    Args:
        models: with batch and training options.
        hardware: one GPU's share, without what is left to the system.
        policies: names with flags; None: all that are registered.
        least_tokens_per_second: models that train more slowly are too large.
        run: works through many calls, such as in several processes.

    Raises:
        InputError: the hardware trains none of them in this way.
    """
    names = longest_first(default_policies(hardware.gpus, hardware.parallelism.pipeline) if policies is None else policies)
    order = sorted(models, key=lambda model: (-model.parameters, model.name))
    too_large: list[tuple[Workload, str]] = []
    refused: list[Workload] = []
    for place, model in enumerate(order):
        try:
            profile = analytic_profile(model, hardware)
        except InputError as error:  # such as heads that the GPUs cannot divide
            if place == len(order) - 1 == len(refused):
                raise
            refused.append(model)
            too_large.append((model, str(error)))
            continue
        if not (reason := _why_not(profile, names)):
            best, *_ = ranked(run(model.name, [Judged(profile, (name,)) for name in names]))
            rate = best.summary.tokens_per_second or 0.0
            if rate >= least_tokens_per_second:
                return LargestMember(model, best, tuple(too_large), tuple(order[place + 1 :]))
            reason = f"only {rate:,.0f} tokens/s, with {best.name}"
        too_large.append((model, reason))
    return LargestMember(None, None, tuple(too_large), ())


def _why_not(profile: Profile, names: Sequence[str]) -> str:
    """Why no policy trains it; empty if one does. If several plan and none fits, the reason is that of the first, by name."""
    states, there = sum(profile.state_bytes(unit) for unit in range(len(profile.units))), _all_memory(profile.hardware)
    if states > there:  # no need to search for a plan
        return f"its optimizer states take {format_bytes(states)}, all memory together has {format_bytes(there)}"
    reasons, refusals = [], []
    for name in names:
        try:
            reason = misfit(profile, parse_policy(name))
        except InputError as error:
            refusals.append(str(error))
            continue
        if not reason:
            return ""
        reasons.append(reason if len(names) == 1 else f"{name}: {reason}")
    return (reasons or refusals)[0]


def _all_memory(hardware: Hardware) -> int:
    """The memory of all GPUs, hosts and places, among which states can be divided."""
    places = sum(place.capacity_bytes for place in hardware.places)
    return hardware.all_gpus * (hardware.gpu_capacity_bytes + hardware.host.memory_bytes + places)


def members(family: str, **changes: object) -> list[Workload]:
    """Return the bundled models of ``family`` with some fields changed, such as ``batch_size=4``."""
    return [replace(read_model(name), **changes) for name in family_members(family)]  # type: ignore[arg-type]
