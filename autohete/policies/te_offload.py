"""Transformer Engine's CPU offloading: what the first layers save for backward, on the host.

Based on github NVIDIA/TransformerEngine at 2.18, ``transformer_engine/pytorch/cpu_offload.py``
(``DefaultOffloadSynchronizer``). Of L layers the first n are offloaded, so that the GPU holds what L - n of them save:

- What layer i saves is copied on a stream of its own, in order, into pinned memory. The forward of layer L - n + i waits for
  this copy, whose source is released there (``fwd_step``, ``release_activation_forward_gpu_memory``).
- The copy back begins before the backward of layer L - 1 - n + i, when the backward above it has ended (``bwd_step``,
  ``start_reload``). With only one layer that stays, it begins when the layer's own backward could.
- The user gives n. The last layer is never offloaded (``get_cpu_offload_context``).

Megatron-LM (``--cpu-offloading-num-layers``) calls the same code. Layers are the transformer blocks, which keep their
activations. Parameters, gradients and optimizer states stay on the GPU, which updates after backward.

Differences: a tensor is copied there as soon as it is saved, here when the forward of its layer has ended; backward waits there
for each tensor when it uses it, here for all of its layer. The GPU releases a tensor here when its copy has ended, there not
before the pass that waits for it; neither holds what more than L - n layers save. Tensors of less than 262,144 elements, such
as the statistics of norms, stay on the GPU there; here they go with the others.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from autohete.errors import InputError, check_fields
from autohete.plan import Plan, Route, UnitPlan
from autohete.plan.policy import Judge, Verdict
from autohete.plan.rules import BlockingCopies, GpuUpdatesAfterBackward
from autohete.policies.too_large import surely_exceeds_gpu
from autohete.profile import Profile
from autohete.schedule import HOST_MEMORY, Kind


@dataclass(frozen=True, slots=True)
class TransformerEngineOffload:
    """Offloading of what the first layers save.

    Args:
        layers: n; at most all but the last, which always stays. None: the fewest with which the model fits.
    """

    layers: int | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        if self.layers is not None and self.layers < 0:
            raise InputError(f"te_offload:layers={self.layers}: give 0 or more layers, or leave it out")

    def plan(self, profile: Profile, judge: Judge) -> Plan:
        """See :class:`autohete.plan.policy.Policy`."""
        most = profile.workload.transformer_blocks - 1

        def fits(layers: int) -> bool:
            plan = _plan(profile, layers)
            return not surely_exceeds_gpu(profile, plan) and judge(plan).verdict is Verdict.OK

        return _plan(profile, bisect_left(range(most), True, key=fits) if self.layers is None else min(self.layers, most))


def _plan(profile: Profile, layers: int) -> Plan:
    parts = (len(profile.units) - 2) // profile.workload.transformer_blocks  # of a layer: two sublayers, or one block
    leaves = layers * parts
    staying = len(profile.units) - 2 - leaves
    later = staying - parts  # passes between what one layer does and what the layer does that takes its turn
    leaving = UnitPlan(kept=Route(HOST_MEMORY, ahead=later))
    return Plan(
        policy="te_offload",
        units=(UnitPlan(), *[leaving] * leaves, *[UnitPlan()] * staying, UnitPlan()),
        rules=(
            *([BlockingCopies(Kind.OFFLOAD_ACTIVATIONS, overlapped=later)] if layers else []),
            GpuUpdatesAfterBackward(),
        ),
    )


SYSTEM = TransformerEngineOffload
