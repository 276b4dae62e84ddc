"""Activations on the host: vDNN (Rhu et al. 2016, arXiv 1602.08124), and checkpointing with the inputs on the host.

Parameters, gradients and optimizer states stay on the GPU, which updates after backward.

- vDNN offloads what forward keeps (``vDNN_all``; its ``vDNN_conv``, of convolutions only, has no counterpart in a transformer).
  The end of each layer's forward waits for both the compute and the copy stream, so the next layer waits for the copy. Backward
  of a layer fetches what the one before it needs. Based on a reimplementation, github shriramsb/vDNN at 3209cf48,
  ``src/neural_net.cu``: a layer's copy begins with that layer, whose input it is. Here the copies of a block's layers are
  one copy, which begins when the block has ended: forward is slower by what vDNN hides within blocks.
- Unsloth (github unslothai/unsloth-zoo at 0373fcc5, ``gradient_checkpointing.py``,
  ``Unsloth_Offloaded_Gradient_Checkpointer``) copies the input of a checkpointed block to the host and fetches it for
  backward, both on the compute stream, which is blocked meanwhile. PyTorch pins the memory for such a copy
  (``aten/src/ATen/native/TensorConversions.cpp``, ``_to_copy``: ``non_blocking`` to the CPU).
- TRL (github huggingface/trl at 0167b7df, ``models/activation_offloading.py``, ``OffloadActivations``), after torchtune, has a
  separate stream for the copies (``use_streams``, on by default) into pinned memory. At most five tensors wait for their copy
  (``max_fwd_stash_size``), in addition to the one that forward computes. With checkpointing these tensors are the inputs.
  Here a copy begins when the block's forward has ended, there during it, so there is one more slot.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from autohete.errors import check_fields
from autohete.plan import Activations, Plan, Route, UnitPlan
from autohete.plan.policy import Judge
from autohete.plan.rules import BlockingCopies, GpuUpdatesAfterBackward, Slots
from autohete.policies.flags import combinations
from autohete.profile import Profile
from autohete.schedule import HOST_MEMORY, Kind

#: Maximum number of tensors that wait for their copy (``max_fwd_stash_size``).
_STASH = 5


class What(StrEnum):
    """What is offloaded per block: everything forward keeps, or the input, from which backward recomputes it."""

    ALL = "all"
    INPUTS = "inputs"


@dataclass(frozen=True, slots=True)
class OffloadActivations:
    """Offloading of activations.

    Args:
        what: everything forward keeps (vDNN), or inputs (Unsloth).
        streams: copies wait only for their data, and only passes that need the data wait for them (TRL).
    """

    what: What = What.INPUTS
    streams: bool = False

    def __post_init__(self) -> None:
        check_fields(self)

    @classmethod
    def variants(cls, profile: Profile) -> Iterator[OffloadActivations]:
        """What users can choose; see :func:`autohete.policies.search_space`."""
        yield from combinations(cls, what=tuple(What), streams=(False, True))

    def plan(self, profile: Profile, judge: Judge) -> Plan:
        """See :class:`autohete.plan.policy.Policy`."""
        if self.what is What.ALL:
            inner = UnitPlan(Activations.KEEP, kept=Route(HOST_MEMORY, ahead=1))
        else:  # the block above has two passes
            inner = UnitPlan(Activations.RECOMPUTE, kept=Route(HOST_MEMORY, ahead=2 if self.streams else 0))
        units = len(profile.units) - 2
        return Plan(
            policy="offload_activations",
            units=(UnitPlan(), *[inner] * units, UnitPlan()),
            rules=(
                Slots(Kind.OFFLOAD_ACTIVATIONS, _STASH + 2) if self.streams else BlockingCopies(Kind.OFFLOAD_ACTIVATIONS),
                GpuUpdatesAfterBackward(),
            ),
        )


SYSTEM = OffloadActivations
