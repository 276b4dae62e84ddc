"""Optimizer states on the host that stream through the GPU, as in LLMQ (arXiv 2512.15306): github IST-DASLab/llmq at b77d9691.

Adam runs on the GPU. Its data rests in pinned host memory and is fetched block by block.

- ``--offload-opt-m``, ``--offload-opt-v``, ``--offload-master``: the update of a block waits for the fetch of its states into
  one of two buffers. They are then copied back on another stream, for which the next fetch into that buffer waits
  (``src/training/adamw_optimizer.cpp``, ``fetch_block`` and ``store_block``; for masters the same in
  ``src/models/llama_weights.cpp``). Fetches wait for the last backward (``begin_optimizer``), which the clipped norm needs.
- ``--shard-weights`` with masters on the host, on one GPU: weights are fetched block by block into two buffers, those of the
  next block while one computes (``gather_block`` in ``src/models/llama_model.cpp``). The last two blocks and the head are still
  on the GPU when backward begins. Gradients stay on the GPU until the step, for which weights that are their own masters are
  fetched again, with the moments (``fetch_master_block``).
- ``--offload-residual``: the input of each block is copied to the host after forward and fetched back while backward computes
  the block above (``src/models/llama_run_state.cpp``, ``put_res_ffn`` and ``fetch_res_ffn``). Inputs have two buffers:
  a forward waits for the copy of the input whose buffer it overwrites. Here that copy begins one pass later, when the block has
  read its input, so there is one more slot. ``--recompute-block`` recomputes the rest of what backward needs.
- Products of backward add to the sums of micro-batches (``accumulate`` in ``src/models/llama_model.cpp``).
- Several GPUs shard the optimizer states.

Not modelled: moments and masters in 16 bit, as used in its benchmarks (states have the size given by the profile); updates of
the states of embedding and head that read them in place, over the link; updates in ascending block order (here they run in the
order of backward); backward of the embedding without weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from autohete.errors import InputError, check_fields
from autohete.plan import Activations, Footprint, Plan, Route, UnitPlan
from autohete.plan.policy import Judge
from autohete.plan.rules import GpuUpdatesAfterBackward, Slots
from autohete.policies.checkpointing import Checkpointing, choosable, with_checkpointing
from autohete.policies.flags import combinations
from autohete.policies.several_gpus import check_one_gpu, shared
from autohete.profile import Profile
from autohete.schedule import HOST_MEMORY, Kind

#: Buffers for the weights of blocks, for their states, and for their inputs.
_BUFFERS = 2


@dataclass(frozen=True, slots=True)
class StreamedStates:
    """Streamed optimizer states.

    Args:
        checkpointing: full, selective, alternate, none, or the better of full and none.
        weights: weights also rest on the host (``--shard-weights`` with ``--offload-master``).
        inputs: the inputs of blocks also rest on the host, and blocks are recomputed from them (``--offload-residual``).
    """

    checkpointing: Checkpointing = Checkpointing.BEST
    weights: bool = False
    inputs: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        if self.inputs and self.checkpointing is Checkpointing.NONE:
            raise InputError(
                "streamed_states:inputs sends to the host what recomputation begins with, and checkpointing=none recomputes "
                "nothing: leave one of them out, or give checkpointing=full"
            )

    @classmethod
    def variants(cls, profile: Profile) -> Iterator[StreamedStates]:
        """What users can choose; see :func:`autohete.policies.search_space`."""
        weights = (False, True) if profile.hardware.gpus == 1 else (False,)
        yield from combinations(cls, checkpointing=choosable(profile), weights=weights, inputs=(False, True))

    def plan(self, profile: Profile, judge: Judge) -> Plan:
        """See :class:`autohete.plan.policy.Policy`."""
        checkpointing = Checkpointing.FULL if self.inputs else self.checkpointing
        return with_checkpointing(checkpointing, lambda activations: self._plan(profile, activations), profile, judge)

    def _plan(self, profile: Profile, activations: Activations) -> Plan:
        if self.weights:
            check_one_gpu("streamed_states:weights", profile)
        last = len(profile.units) - 1
        passes = 1 if activations is Activations.KEEP else 2  # over a block in backward
        # Gradients stay until the step, and weights do not: they come again as masters. With masters besides, gradients of one
        # micro-batch and weights in one place take as much of the GPU; with several, the next one needs the weights.
        masters = profile.workload.has_masters
        in_one_place = masters and profile.workload.micro_batches == 1
        resident = UnitPlan(states=Route(HOST_MEMORY, ahead=_BUFFERS - 1))
        leaving = replace(
            resident,
            parameters=Route(HOST_MEMORY, ahead_in_backward=passes),
            gradients_replace_parameters=in_one_place,
            parameters_with_states=not masters,
        )
        cached = replace(leaving, parameters=replace(leaving.parameters, stays_after_forward=True))
        tied = profile.workload.tied_embeddings

        def unit_of(unit: int) -> UnitPlan:
            if not self.weights or (tied and unit in (0, last)):
                return resident
            return cached if unit >= max(1, last - _BUFFERS) else leaving

        kept = Route(HOST_MEMORY, ahead=passes) if self.inputs else Route()
        units = [
            replace(unit_of(unit), activations=activations, kept=kept) if 0 < unit < last else unit_of(unit)
            for unit in range(last + 1)
        ]
        return Plan(
            policy="streamed_states",
            units=shared(units, 1, profile),
            rules=(GpuUpdatesAfterBackward(), Slots(Kind.OFFLOAD_ACTIVATIONS, _BUFFERS + 1)),
            sums_in_place=True,
            footprint=Footprint(host_parameter_bytes=profile.element_bytes),
        )


SYSTEM = StreamedStates
