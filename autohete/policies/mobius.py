"""Mobius: more stages than GPUs, which rest on the host, in a pipeline of GPipe (Feng et al., ASPLOS 2023).

Based on its code, github Zijie-Tian/pipe_train at c688b6d, ``torchmobius/`` (``kernel.py``, ``hook.py``, ``attribute.py``,
``balance/blockpartition.py``), and ``real_train.py``.

- Stages go to the GPUs in turn, the same number to each. A GPU computes the forward of a stage for all micro-batches, then that
  of its next stage, and so on; then their backwards in the opposite order. Each stage is recomputed from its input, which rests
  on the host until then.
- When the first micro-batch enters a stage, the GPU's next stage begins to be uploaded (``bind_fwd_tensor``), and in backward
  its stage before (``bind_bwd_tensor``). Parameters are dropped after forward, so the stage with which a GPU begins backward is
  uploaded anew, and not ahead.
- Gradients are summed on the GPU and go to pinned memory after the last micro-batch of a stage
  (``free_param_and_offload_grad``). ``torch.optim.Adam`` updates everything on the CPU once backward has ended, in a loop over
  tensors.
- An integer program chooses how many layers each stage has: in each round of stages over the GPUs, the first has as many as the
  others or one less; a stage and the next one of its GPU fit into half of its memory together (``mobius_ilp``,
  ``partition_ratio``). It minimises the end of the last backward for as many micro-batches as there are GPUs, where a stage
  waits for the one below and for the part of its upload that the stage before does not hide.
- The GPUs' order keeps those apart that share a root complex (``get_device_order``); presets of hardware have a link for each.

Differences:

- The program's time is computed for stages of as many layers as can be, for each number of stages, with what does not divide in
  the first rounds or in the last. Gurobi solves the program there, also for other rounds.
- The highest stage computes forward and backward of a micro-batch one after the other, and recomputes nothing. There all of its
  forwards come first, and it is recomputed as well.
- The workload has as many micro-batches as it says; there they are as many as GPUs.
- Updates begin when all gradients of a GPU have left, there when those of all GPUs have.
- Embedding and head are layers like others; a matrix that they share is uploaded and updated for each of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from autohete.errors import InputError, check_fields
from autohete.plan import DealtStages, Footprint, Plan
from autohete.plan.policy import Judge
from autohete.plan.rules import Barrier, UpdatesAfterBackward
from autohete.policies import traffic
from autohete.policies.stages_in_turn import FP32_BYTES, bytes_of_units, check_dealt, dealt_units, seconds_of_units
from autohete.profile import Profile

#: Of the GPU's memory, what two stages may take (``partition_ratio``).
_MEMORY = 0.5
#: DRAM traffic of ``_single_tensor_adam`` without decay, bytes a parameter: ``lerp_`` 12, ``mul_`` and ``addcmul_`` 20,
#: ``sqrt``, division and ``add_`` 24, ``addcdiv_`` 16.
_LOOP_BYTES = 72


@dataclass(frozen=True, slots=True)
class Mobius:
    """Stages that rest on the host, more of them than GPUs, as GPipe computes them.

    Args:
        rounds: stages of each GPU, if there are enough layers. 0: as many as the program finds fastest.
    """

    rounds: int = 0

    def __post_init__(self) -> None:
        check_fields(self)
        if self.rounds < 0:
            raise InputError(f"mobius:rounds={self.rounds}: give the stages of each GPU, or 0 to choose")

    def plan(self, profile: Profile, judge: Judge) -> Plan:
        """See :class:`autohete.plan.policy.Policy`. If no stages fit, each has as few layers as can be."""
        check_dealt("mobius", profile)
        units, gpus = len(profile.units), profile.hardware.gpus
        if not (most := units // gpus):
            raise InputError(f"mobius gives each GPU a stage, but {units} units are too few for {gpus}: give fewer GPUs")
        stages, counts = MobiusStages(profile), [min(self.rounds, most)] if self.rounds else range(1, most + 1)
        tried = [starts for rounds in counts for starts in even(units, gpus, rounds)]
        fitting = tried if self.rounds else [starts for starts in tried if stages.fit(starts)]
        return _plan(profile, min(fitting, key=stages.seconds) if fitting else tried[-1])


def even(units: int, gpus: int, rounds: int) -> Iterator[tuple[int, ...]]:
    """The first unit of each stage, with stages as even as the program allows.

    Args:
        units: their number.
        gpus: stages of a round.
        rounds: stages of each GPU.
    """
    each, more = divmod(units, gpus * rounds)
    for extra in dict.fromkeys((_extra(more, gpus, rounds), _extra(more, gpus, rounds)[::-1])):
        sizes = [each + (gpu >= gpus - some) for some in extra for gpu in range(gpus)]
        yield (0, *accumulate(sizes[:-1]))


def _extra(more: int, gpus: int, rounds: int) -> tuple[int, ...]:
    """The stages of each round that have one unit more than others, the fullest rounds first."""
    return tuple(min(max(more - turn * gpus, 0), gpus) for turn in range(rounds))


class MobiusStages:
    """What the program knows of stages: bytes and seconds of their layers, and the link.

    Args:
        profile: the layers and the hardware.
    """

    def __init__(self, profile: Profile) -> None:
        self._gpus, self._memory = profile.hardware.gpus, profile.hardware.gpu_capacity_bytes * _MEMORY
        sizes = list(zip(profile.units, *bytes_of_units(profile), strict=True))
        self._forward = [parameters + unit.checkpointed_workspace_bytes for unit, parameters, _ in sizes]
        self._backward = [sum(each) + unit.kept_bytes + unit.backward_workspace_bytes for unit, *each in sizes]
        self._forward_seconds, self._backward_seconds = seconds_of_units(profile)
        self._upload, self._send = profile.h2d_seconds, profile.units[-1].input_bytes

    def fit(self, starts: Sequence[int]) -> bool:
        """Whether each stage fits beside the next one of its GPU, in both directions."""
        pairs = [(j, j + self._gpus) for j in range(len(starts))]
        for sizes in (self._of(starts, self._forward), self._of(starts, self._backward)):
            if any(size > self._memory for size in sizes):
                return False
            if any(sizes[j] + sizes[k] > self._memory for j, k in pairs if k < len(sizes)):
                return False
        return True

    def seconds(self, starts: Sequence[int]) -> float:
        """The end of the last backward."""
        forward, lasts = self._of(starts, self._forward_seconds), self._of(starts, self._forward)
        ready = self._passes(forward, lasts, 0.0)
        back, sizes = self._of(starts, self._backward_seconds)[::-1], self._of(starts, self._backward)[::-1]
        return self._passes(back, sizes, ready)

    def _passes(self, seconds: Sequence[float], sizes: Sequence[float], begin: float) -> float:
        """When the last of these stages has computed the last micro-batch; each stage takes so long for one of them."""
        send, count = self._upload(self._send), self._gpus
        begins: list[list[float]] = []
        for j, each in enumerate(seconds):
            below = [start + seconds[j - 1] + send for start in begins[j - 1]] if j else [begin] * count
            first = below[0]
            if j >= count:
                own = begins[j - count]
                stays = own[-1] + seconds[j - count]
                hidden = min(stays - own[0], self._upload(max(0.0, self._memory - sizes[j - count])))
                first = max(first, stays + max(0.0, self._upload(sizes[j]) - hidden))
            starts = [first]
            for there in below[1:]:
                starts.append(max(there, starts[-1] + each))
            begins.append(starts)
        return begins[-1][-1] + seconds[-1]

    @staticmethod
    def _of(starts: Sequence[int], values: Sequence[float]) -> list[float]:
        return [sum(values[start:end]) for start, end in zip(starts, (*starts[1:], len(values)), strict=True)]


def _plan(profile: Profile, starts: Sequence[int]) -> Plan:
    first, gpus, element = profile.first_trained, profile.hardware.gpus, profile.element_bytes
    ends = (*starts[1:], len(profile.units))
    backward = [max(start, first) for start, end in zip(starts, ends, strict=True) if end > first]
    backward[-1] = starts[-1]  # computes its forward as well
    dealt = DealtStages(gpus, tuple(starts[:-1]), tuple(reversed(backward)), returns=True)
    units = dealt_units(dealt, len(profile.units), ahead=1)
    anew = starts[-gpus] if len(starts) >= gpus else 0
    units = tuple(
        replace(unit, parameters=replace(unit.parameters, ahead_in_backward=0)) if anew <= i < starts[-1] else unit
        for i, unit in enumerate(units)
    )
    return Plan(
        policy="mobius",
        units=units,
        rules=(UpdatesAfterBackward(), Barrier()),
        elementwise_bytes=_LOOP_BYTES + (2 * traffic.CAST if traffic.is_mixed(profile) else 0),
        footprint=Footprint(host_parameter_bytes=element, host_optimizer_bytes=FP32_BYTES),
        dealt=dealt,
    )


SYSTEM = Mobius
