"""The plans of the shipped systems, with every combination of flags that their users can choose."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from autohete import policies
from autohete.analysis.memory_waits import least_bytes
from autohete.errors import InfeasibleError, InputError
from autohete.lowering import lower
from autohete.lowering.budget import with_memory
from autohete.plan import Plan
from autohete.plan.policy import Judge, Judgement, Verdict
from autohete.planner.optimistic import OptimisticJudge, capacities
from autohete.policies.autohete import AutoHete
from autohete.policies.autotm import AutoTm
from autohete.policies.capuchin import Capuchin
from autohete.policies.dtr import Dtr
from autohete.policies.flashneuron import FlashNeuron
from autohete.policies.moccasin import Moccasin
from autohete.policies.offload_activations import OffloadActivations
from autohete.policies.pofo import Pofo
from autohete.policies.rotor import Rotor
from autohete.policies.sqrt_checkpoint import SqrtCheckpoint
from autohete.policies.superneurons import SuperNeurons
from autohete.profile import Profile
from autohete.schedule import GPU_MEMORY, is_gpu

#: Systems that never move parameters, gradients or states.
_STATES_ON_GPU = (
    OffloadActivations,
    AutoTm,
    Capuchin,
    SqrtCheckpoint,
    Rotor,
    Moccasin,
    Pofo,
    Dtr,
    FlashNeuron,
    SuperNeurons,
)


def shipped_plans(profile: Profile, judge: Judge, best: float, but: type[policies.System]) -> Iterator[Plan]:
    """Yield plans of the shipped systems that train synchronously and fit, each faster than ``best`` and those before it.

    Args:
        profile: times and sizes.
        judge: time and memory of a plan.
        best: a system whose plan surely takes as long, in seconds, is left out.
        but: the system that is not asked.
    """
    for bound, system in sorted(_hopeful(profile, best, but), key=lambda one: one[0]):
        if bound >= best:
            return
        answer = _judged(system, profile, judge)
        if answer is not None and answer[1].verdict is Verdict.OK:
            best = min(best, answer[1].seconds)
            yield answer[0]


def _hopeful(profile: Profile, best: float, but: type[policies.System]) -> Iterator[tuple[float, policies.System]]:
    """The variants that may fit and be faster than ``best``, each with a bound of its time."""
    optimist = OptimisticJudge(profile, best)
    if optimist.least_seconds >= best:
        return
    states = sum(profile.state_bytes(i) + profile.parameter_bytes(i) for i in range(len(profile.units)))
    for system in _systems(but):
        if system in _STATES_ON_GPU and states > profile.hardware.gpu_capacity_bytes:
            continue
        for variant in policies.variants(system, profile):
            if isinstance(variant, AutoHete):  # has bounds of its own
                relaxed = replace(variant.program(profile), pending=False).solve()
                bound = 0.0 if relaxed is None else relaxed.value
            elif (answer := _judged(variant, profile, optimist)) is None or answer[1].verdict is not Verdict.OK:
                continue
            else:
                bound = answer[1].seconds
            if bound < best:
                yield bound, variant


def least_shipped(
    profile: Profile, judge: Judge, memory: str, enough: float, but: type[policies.System]
) -> tuple[int, Plan] | None:
    """The plan of a shipped system that needs the least of one memory if copies wait for space, with its bytes. Those of a
    pipeline do not wait, and each of its GPUs needs what it needs.

    Args:
        profile: its other memories must suffice.
        judge: time and memory of a plan.
        memory: the memory.
        enough: bytes with which a plan is known. None is returned if no other needs less.
        but: the system that is not asked.
    """
    little = with_memory(profile, memory, 1)  # for which a system plans as thriftily as it can
    others = {name: size for name, size in capacities(profile.hardware).items() if name != memory}
    optimist, best = OptimisticJudge(little, 0.0), None
    for system in _systems(but):
        for variant in () if system is AutoHete else policies.variants(system, profile):
            answer = _judged(variant, little, optimist)
            if answer is None:
                continue
            plan, rests = answer[0], answer[1].peaks
            if rests[memory] >= enough or any(rests[other] > size for other, size in others.items()):
                continue
            try:
                needs = _needs(profile, judge, plan, (memory, *others))
            except (InfeasibleError, InputError):
                continue
            if needs[memory] < enough and all(needs[other] <= size for other, size in others.items()):
                enough, best = needs[memory], (needs[memory], plan)
    return best


def _needs(profile: Profile, judge: Judge, plan: Plan, memories: Iterable[str]) -> dict[str, int]:
    """Bytes of each of these memories with which ``plan`` can be carried out; of a GPU's memory those of the fullest."""
    if not plan.is_pipeline:
        schedule = lower(profile, plan)
        return {memory: least_bytes(schedule, memory) for memory in memories}
    peaks = judge(plan).peaks
    fullest = max(size for memory, size in peaks.items() if is_gpu(memory))
    return {memory: fullest if memory == GPU_MEMORY else peaks.get(memory, 0) for memory in memories}


def _systems(but: type[policies.System]) -> list[type[policies.System]]:
    """The systems that are asked."""
    return [one for name, one in policies.POLICIES.items() if one is not but and name not in policies.FOUND_SOONER]


def _judged(system: policies.System, profile: Profile, judge: Judge) -> tuple[Plan, Judgement] | None:
    """The plan of a system that trains synchronously; None if it has none here: for want of memory or drives, or because it
    cannot train like this.
    """
    try:
        plan = system.plan(profile, judge)
        return None if plan.delayed else (plan, judge(plan))
    except (InfeasibleError, InputError):
        return None
