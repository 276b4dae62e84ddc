"""RoundPipe: stages of a model that rests on the host go to the GPUs in turn (arXiv 2604.27085).

Based on github ITcarrot/RoundPipe at e813c67.

- Forward and backward are cut into stages independently (``roundpipe/scheduler.py``, ``ModelExecutePlan.auto``): no stage is
  longer than T, and none has more than half of 0.6 times the GPU's memory of parameters, and of gradients in backward. Stages
  are filled from the last layer down in forward, from the first layer up in backward. The highest stage of backward is filled
  first and computes its forward as well, so that forward ends below it. T is tried for all sums of times of consecutive layers
  from the longest layer's to 1.1 times that; the T that minimises ``max(stages, GPUs) * T`` wins. A layer's time in backward
  is that of its recomputation and its backward.
- Stage after stage goes to the next GPU (``roundpipe/device.py``, ``get_next_device``), which runs it for all micro-batches.
  Its parameters are uploaded while the GPU computes the stage before, between the uploads of inputs (``roundpipe/transfer.py``,
  ``upload_layers``, ``chunk_layer_params``). Gradients are summed on the GPU and leave after the last micro-batch.
- Backward recomputes a stage from the stage's input, which rests on the host (``recompute_grain="stage"``), or layer by layer
  from the inputs of all layers (``"layer"``).
- The CPU updates once all gradients are there, beside the next iteration, which so trains with parameters that lack the last
  gradients: ``step`` has ``is_async=True``. With ``synchronous`` the next iteration waits for the updates.

The host has fp32 masters, two moments and fp32 gradients of each parameter for the CPU, and parameters and gradients in 16 bits
for the GPUs (``roundpipe/roundpipe.py``, ``optim_dtype``). An update copies gradients to fp32, and masters to parameters.

Differences:

- What a stage leaves for the next goes from GPU to GPU in one transfer, and on one GPU stays there; in RoundPipe it goes
  through the host. Inputs of stages of backward are copied to the host by the GPU that has read them.
- Each iteration begins with the same GPU. In RoundPipe it begins with the next one in turn, so that GPUs are loaded evenly if
  they do not divide the stages.
- The CPU updates the units whose backward a GPU computes once that GPU's gradients are there, with the GPU's part of the CPU;
  RoundPipe waits for the gradients of all GPUs, and updates on all cores. It copies masters to parameters once all uploads of
  an iteration have begun; here that is a part of the update.
- Copies to a GPU go unit by unit, the most urgent first; RoundPipe puts parameters, in pieces of up to 256 MB, between the
  uploads of inputs. A stage's uploads begin when the stage before the one before it has ended, in both.
- The host's second copy of parameters in 16 bits is not counted, as the masters take its place in RoundPipe.
- T depends on computed times, in RoundPipe on times that it measures; embedding and head are layers like others.
- A matrix that embedding and head share is uploaded and updated for each of them.
- Gradients are complete after one call of ``forward_backward``: none come back to the GPU for a further one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate

from autohete.errors import InputError, check_fields
from autohete.plan import DealtStages, Footprint, Plan
from autohete.plan.policy import Judge
from autohete.plan.rules import ByPriority, UpdatesAfterBackward
from autohete.policies.stages_in_turn import FP32_BYTES, bytes_of_units, check_dealt, dealt_units, seconds_of_units
from autohete.profile import Profile

#: Of the GPU's memory, what two stages may have of parameters and gradients (``model_memory_limit``); how much longer than the
#: longest layer a stage may be (``upper_threshold``).
_MEMORY, _LONGER = 0.6, 1.1
#: DRAM traffic of an update, bytes a parameter: reading gradient, master and two moments, writing the last three; and of casts:
#: gradients of 16 bits to fp32, and masters to parameters of 16 bits.
_UPDATE_BYTES, _CAST_BYTES = 28, 12


class Grain(StrEnum):
    """What backward recomputes at a time: a stage from its input, or a layer from its own."""

    STAGE = "stage"
    LAYER = "layer"


@dataclass(frozen=True, slots=True)
class RoundPipe:
    """Stages dealt to the GPUs in turn.

    Args:
        recompute_grain: what backward recomputes at a time.
        synchronous: an iteration waits for the updates of the one before. Otherwise its parameters lack the last gradients,
            which changes the mathematics.
    """

    recompute_grain: Grain = Grain.STAGE
    synchronous: bool = False

    def __post_init__(self) -> None:
        check_fields(self)

    def plan(self, profile: Profile, judge: Judge) -> Plan:
        """See :class:`autohete.plan.policy.Policy`."""
        check_dealt("roundpipe", profile)
        dealt = cut(profile)
        layer_by_layer = self.recompute_grain is Grain.LAYER
        element = profile.element_bytes
        return Plan(
            policy="roundpipe",
            units=dealt_units(dealt, len(profile.units), ahead=1, layer_by_layer=layer_by_layer),
            rules=(ByPriority(), UpdatesAfterBackward()),
            update_bytes=_UPDATE_BYTES,
            elementwise_bytes=_CAST_BYTES,
            footprint=Footprint(host_parameter_bytes=element, host_optimizer_bytes=FP32_BYTES + element),
            dealt=dealt,
            delayed=not self.synchronous,
        )


def cut(profile: Profile) -> DealtStages:
    """The stages of RoundPipe.

    Raises:
        InputError: there are fewer than GPUs.
    """
    units, first, gpus = profile.units, profile.first_trained, profile.hardware.gpus
    (forward, backward), (sizes, gradients) = seconds_of_units(profile), bytes_of_units(profile)
    with_gradients = [size + gradient for size, gradient in zip(sizes, gradients, strict=True)]
    most = max(profile.hardware.gpu_capacity_bytes * _MEMORY / 2, *with_gradients)
    longest = max(*forward, *backward)
    best: tuple[float, tuple[int, ...], tuple[int, ...]] | None = None
    for seconds in _candidates((forward, backward), longest):
        fused = _filled(backward, with_gradients, seconds, most, range(len(units) - 1, -1, -1))[0]
        lows = _filled(forward, sizes, seconds, most, range(fused - 1, -1, -1))
        highs = [first, *(end + 1 for end in _filled(backward, with_gradients, seconds, most, range(first, fused)))]
        stages = lows[::-1], (fused, *(start for start in reversed(highs) if start < fused))
        cost = max(sum(map(len, stages)), gpus) * seconds
        if best is None or cost < best[0]:
            best = cost, tuple(stages[0]), tuple(stages[1])
    assert best is not None, "the longest layer alone is a candidate"
    if (count := len(best[1]) + len(best[2])) < gpus:
        raise InputError(f"roundpipe cuts this model into {count} stages for {gpus} GPUs: give at most {count} GPUs")
    return DealtStages(gpus, best[1], best[2])


def _candidates(times: Sequence[Sequence[float]], longest: float) -> list[float]:
    """Sums of times of consecutive layers from the longest layer's to 1.1 times that, the shortest first."""
    found = set()
    for some in times:
        for start in range(len(some)):
            for total in accumulate(some[start:]):
                if total > longest * _LONGER:
                    break
                if total >= longest:
                    found.add(total)
    return sorted(found)


def _filled(times: Sequence[float], sizes: Sequence[int], seconds: float, most: float, layers: Sequence[int]) -> list[int]:
    """The last layer, in this order, of each stage that is filled up to ``seconds`` and ``most`` bytes."""
    ends: list[int] = []
    total, size = 0.0, 0
    for layer in layers:
        if not ends or total + times[layer] > seconds * (1 + 1e-9) or size + sizes[layer] > most:
            ends.append(layer)
            total, size = 0.0, 0
        ends[-1] = layer
        total, size = total + times[layer], size + sizes[layer]
    return ends


SYSTEM = RoundPipe
