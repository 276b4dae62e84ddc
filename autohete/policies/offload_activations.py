"""Activations on the host: vDNN (Rhu et al. 2016, arXiv 1602.08124), and checkpointing with the inputs on the host, as today.

Parameters, gradients and optimizer states stay on the GPU, which updates after backward.

- vDNN offloads what forward keeps (``vDNN_all``; its ``vDNN_conv``, of convolutions only, has no counterpart in a transformer).
  Compute and copy stream are both waited for at the end of each layer's forward, so the next layer waits for the copy;
  backward of a layer fetches what the one before it needs. Read in a reimplementation, github shriramsb/vDNN at 3209cf48,
  ``src/neural_net.cu``: a layer's copy begins with that layer, whose input it is. Here the copies of a block's layers are one,
  which begins when the block has ended: forward takes longer by what vDNN hides within blocks.
- Unsloth (github unslothai/unsloth-zoo at 0373fcc5, ``gradient_checkpointing.py``,
  ``Unsloth_Offloaded_Gradient_Checkpointer``) sends the input of a checkpointed block to the host and fetches it for
  backward, both in the compute stream, which does nothing else meanwhile. PyTorch pins the memory for such a copy
  (``aten/src/ATen/native/TensorConversions.cpp``, ``_to_copy``: ``non_blocking`` to the CPU).
- TRL (github huggingface/trl at 0167b7df, ``models/activation_offloading.py``, ``OffloadActivations``), after torchtune, has a
  stream of its own for the copies (``use_streams``, on by default) into pinned memory. Five tensors wait for their copy at most
  (``max_fwd_stash_size``), beside the one that forward makes. With checkpointing these tensors are the inputs. Here a copy
  begins when the block's forward has ended, there beside it: so there is one place more.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from autohete.errors import check_fields
from autohete.plan import Activations, Plan, Rest, UnitPlan
from autohete.plan.policy import Judge
from autohete.plan.rules import BlockingCopies, GpuUpdatesAfterBackward, Slots
from autohete.profile import Profile
from autohete.schedule import HOST_MEMORY, Kind

#: Tensors that wait for their copy at most (``max_fwd_stash_size``).
_STASH = 5


class What(StrEnum):
    """What of a block goes to the host: all that forward keeps, or the input, from which backward computes it again."""

    ALL = "all"
    INPUTS = "inputs"


@dataclass(frozen=True, slots=True)
class OffloadActivations:
    """Offloading of activations.

    Args:
        what: all that forward keeps (vDNN), or inputs (Unsloth).
        streams: copies wait for nothing but what they copy, and nothing but what needs them waits for them (TRL).
    """

    what: What = What.INPUTS
    streams: bool = False

    def __post_init__(self) -> None:
        check_fields(self)

    def plan(self, profile: Profile, judge: Judge) -> Plan:
        """See :class:`autohete.plan.policy.Policy`."""
        if self.what is What.ALL:
            inner = UnitPlan(Activations.KEEP, kept=Rest(HOST_MEMORY, ahead=1))
        else:  # the block above makes two passes
            inner = UnitPlan(Activations.RECOMPUTE, kept=Rest(HOST_MEMORY, ahead=2 if self.streams else 0))
        blocks = len(profile.blocks) - 2
        return Plan(
            policy="offload_activations",
            units=(UnitPlan(), *[inner] * blocks, UnitPlan()),
            rules=(
                *([] if self.streams else [BlockingCopies(Kind.OFFLOAD_ACTIVATIONS)]),
                GpuUpdatesAfterBackward(),
                *([Slots(Kind.OFFLOAD_ACTIVATIONS, _STASH + 2)] if self.streams and blocks > _STASH + 2 else []),
            ),
        )


SYSTEM = OffloadActivations
