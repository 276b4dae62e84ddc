"""Stages that GPUs are dealt in turn, with cuts of their own for forward and backward."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from autohete.errors import InputError, check_fields


class DealtStage(NamedTuple):
    """A stage, which one GPU computes for all micro-batches before its next stage.

    Args:
        units: its units.
        forward: whether it computes their forward.
        backward: whether it computes their backward. With both, those of a micro-batch follow each other.
    """

    units: range
    forward: bool
    backward: bool


@dataclass(frozen=True, slots=True)
class DealtStages:
    """Two cuts of a model into stages of consecutive units: one for forward, one for backward.

    Stage after stage goes to the next GPU, first those of forward, lowest first, then those of backward, highest first. So a
    GPU has several stages in a row, and the one that computes a unit's backward need not be the one of its forward, unless
    stages return.

    Args:
        ranks: GPUs.
        forward: the first unit of each stage of forward.
        backward: the first unit of each stage of backward, highest first. The first of these stages has the head, and computes
            the forward of its units as well. Units below the last one have no backward.
        returns: a stage of backward goes to the GPU that computes the forward of its lowest unit instead of the next one.
    """

    ranks: int
    forward: tuple[int, ...]
    backward: tuple[int, ...]
    returns: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        if self.ranks < 1:
            raise InputError(f"stages are dealt to {self.ranks} GPUs: give at least 1")
        starts = (*self.forward, *self.backward[:1])
        rising = starts[:1] == (0,) and all(a < b for a, b in pairwise(starts))
        if not (self.backward and rising and all(a > b for a, b in pairwise((*self.backward, -1)))):
            raise InputError(
                f"stages of forward begin at units {list(self.forward)}, those of backward at {list(self.backward)}: let the "
                "first begin at 0 and rise up to the highest stage of backward, and the others fall from there"
            )
        if (count := len(self.forward) + (1 if self.returns else len(self.backward))) < self.ranks:
            raise InputError(f"{count} stages are dealt to {self.ranks} GPUs: give each at least one")

    def stages(self, units: int) -> tuple[DealtStage, ...]:
        """The stages of a model of so many units, in the order in which they are dealt."""
        forward, backward = self.forward, self.backward
        ends = zip(forward, (*forward[1:], backward[0]), strict=False)
        below = zip(backward[1:], backward, strict=False)
        return (
            *(DealtStage(range(*pair), forward=True, backward=False) for pair in ends),
            DealtStage(range(backward[0], units), forward=True, backward=True),
            *(DealtStage(range(*pair), forward=False, backward=True) for pair in below),
        )

    def turns(self, units: int) -> tuple[tuple[DealtStage, int], ...]:
        """The stages of a model of so many units, in the order in which they are dealt, each with its rank."""
        found: list[tuple[DealtStage, int]] = []
        ranks_of_forward: dict[int, int] = {}
        for turn, stage in enumerate(self.stages(units)):
            rank = turn % self.ranks
            if stage.forward:
                ranks_of_forward.update(dict.fromkeys(stage.units, rank))
            elif self.returns:
                rank = ranks_of_forward[stage.units.start]
            found.append((stage, rank))
        return tuple(found)
