"""Routes: where the values of a unit rest between uses, how early they are fetched, and in which format they are copied."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

from autohete.errors import InputError, check_fields, check_member
from autohete.hashing import Hashed, hashed_once
from autohete.schedule import GPU_MEMORY, HOST_MEMORY, PINNED_MEMORY

#: The form of the name of a home.
_HOME = re.compile(r"[a-z][a-z0-9_]*")


class Activations(StrEnum):
    """What a forward keeps for backward: everything backward needs; only what is slow to compute, with the rest recomputed from
    it (selective recomputation); only the input, from which everything is recomputed; or nothing, in which case the input
    comes from the recomputation of the unit below.
    """

    KEEP = "keep"
    SELECTIVE = "selective"
    RECOMPUTE = "recompute"
    DROP = "drop"


class Processor(StrEnum):
    """The processor that updates a unit's parameters: the GPU, the CPU, or that of the place where its states rest."""

    GPU = "gpu"
    CPU = "cpu"
    PLACE = "place"


@dataclass(frozen=True, slots=True)
class Format:
    """Format of the elements in a copy.

    Args:
        element_bytes: bytes per element during the copy. None: the size the GPU computes with.
        pinned: the host side is pinned memory, which may be limited. Copies from pageable memory are slower.
        staged: the copy lands in a staging buffer on the GPU and is cast from there. The staged copies of an iteration share
            one buffer, which is freed when the last of them has ended.
        fresh: a copy to the host goes to pageable memory that is allocated for it, as by ``tensor.cpu()``. Each page is first
            touched by the copy, and the kernel has to find and clear it.
        returned_bytes: bytes per element of a gradient that are copied back to the GPU during a copy to the host, which takes
            that much longer. The system checks gradients there, and adds those of later micro-batches instead of the CPU.
    """

    element_bytes: int | None = None
    pinned: bool = True
    staged: bool = False
    fresh: bool = False
    returned_bytes: int = 0

    def __post_init__(self) -> None:
        check_fields(self)
        if self.fresh and self.pinned:
            raise InputError("fresh memory is not pinned: give pinned=False with fresh, or leave fresh out")
        if self.element_bytes is not None and not 0 <= self.element_bytes <= 64:
            raise InputError(f"element_bytes is {self.element_bytes}: give 0 to 64 bytes, or None for those of the precision")
        if not 0 <= self.returned_bytes <= 64:
            raise InputError(f"returned_bytes is {self.returned_bytes}: give 0 to 64 bytes per element")

    def bytes_of(self, elements: int, computed_bytes: int) -> int:
        """Bytes copied for ``elements`` that take ``computed_bytes`` each where the GPU computes with them."""
        return elements * (computed_bytes if self.element_bytes is None else self.element_bytes)


def _check_home(home: str) -> None:
    if not isinstance(home, str) or not _HOME.fullmatch(home) or home == PINNED_MEMORY:
        raise InputError(
            f"nothing can rest in {home!r}: a home is {GPU_MEMORY!r}, {HOST_MEMORY!r}, or the name of a place that the "
            "hardware has, such as 'nvme'"
        )


@dataclass(frozen=True, slots=True)
class Route:
    """Where a value rests between uses, and how it gets to a use.

    A use away from ``home`` fetches the value, and a change away from ``home`` is copied back. A copy away from ``home`` is
    released after its use unless it stays. What rests in a place behind the host is copied through pinned host memory.

    Args:
        home: ``gpu``, ``host``, or the name of a place of the hardware; of activations also ``rank3``, the memory of that rank
            of a pipeline.
        ahead: how early a fetch may run: how many GPU passes before the one that needs the value it may overlap; 0:
            synchronous. For optimizer states: how many others, or parts of others, may be in flight.
        carried: format of the copies to the GPU of parameters, and of those to the host of gradients; of no other value.
        parts: the value comes, is used and goes in so many parts, one after another; of optimizer states only.
        ahead_in_backward: of parameters, how early a fetch for backward may run. None: as ``ahead``.
        stays_after_forward: fetched parameters stay on the GPU from forward to backward.
        stays_after_backward: they stay from backward to the next forward.
        moves: they are copied home when they leave although they have not changed (systems that *move* instead of copy). After
            backward this is one copy with what the GPU has updated; where the CPU updates, the copy of the gradients counts.
        comes_again: of a unit that is recomputed several times, they leave after each recomputation but the last, and are
            fetched for the next one. Otherwise they stay from the first recomputation to backward.
        stays_for_batches: they are fetched for the first micro-batch and stay until the last has passed, in stages that all
            micro-batches pass one after another; ``ahead`` then counts the stages before theirs on the same GPU, not passes.
    """

    home: str = GPU_MEMORY
    ahead: int = 1
    carried: Format = Format()
    parts: int = 1
    ahead_in_backward: int | None = None
    stays_after_forward: bool = False
    stays_after_backward: bool = False
    moves: bool = False
    comes_again: bool = False
    stays_for_batches: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        _check_home(self.home)
        if self.ahead_in_backward == self.ahead:
            object.__setattr__(self, "ahead_in_backward", None)
        if min(self.ahead, self.ahead_in_backward or 0) < 0:
            raise InputError("a fetch cannot be a negative number of passes ahead: 0 means synchronous, 1 one pass ahead")
        if self.parts < 1:
            raise InputError(f"parts is {self.parts}: give at least 1, which moves a value as a whole")
        if self.home == GPU_MEMORY and (
            self.stays_after_forward or self.stays_after_backward or self.moves or self.stays_for_batches
        ):
            raise InputError("only parameters that leave the GPU stay or move: give them another home")
        if self.comes_again and (self.home != HOST_MEMORY or self.stays_after_forward or self.stays_after_backward):
            raise InputError(
                "parameters that are fetched for each recomputation rest on the host, and stay on the GPU after no pass: let "
                "them rest there, and leave stays_after_forward and stays_after_backward out"
            )
        if self.stays_for_batches and (self.moves or self.stays_after_backward):
            raise InputError("parameters that stay for all micro-batches of a stage neither move nor stay after its backward")
        if self.far and self.moves:
            raise InputError(f"parameters whose home is {self.home!r} are not copied there unchanged: leave moves out")

    @property
    def leaves(self) -> bool:
        """Whether the value ever leaves the GPU."""
        return self.home != GPU_MEMORY and not (self.stays_after_forward and self.stays_after_backward)

    @property
    def far(self) -> bool:
        """Whether it rests in another place than the GPU or the host."""
        return self.home not in (GPU_MEMORY, HOST_MEMORY)

    @property
    def ahead_of_backward(self) -> int:
        """How early a fetch of parameters for backward may run."""
        return self.ahead if self.ahead_in_backward is None else self.ahead_in_backward

    @property
    def is_of_parameters(self) -> bool:
        """Whether it says something that only parameters do."""
        stays = self.stays_after_forward or self.stays_after_backward or self.stays_for_batches
        return self.ahead_in_backward is not None or stays or self.moves or self.comes_again


@dataclass(frozen=True, slots=True)
class SavedRoute:
    """What becomes of some of the tensors that a forward saves for backward, by the name that the profile gives them.

    Args:
        name: their name.
        route: where they rest until backward, and how early they come back.
        recomputed: they are released after forward, and made again before backward from the input and the other ones.
        share: the fraction of their bytes that rests there; the others stay on the GPU. In pipelines only.
    """

    name: str
    route: Route = Route()
    recomputed: bool = False
    share: float = 1.0

    def __post_init__(self) -> None:
        check_fields(self)
        if not re.fullmatch(r"[^\s,#]+", self.name):
            raise InputError(f"saved tensors are named {self.name!r}: give a name without spaces, commas and '#'")
        if self.recomputed and self.route != Route():
            raise InputError(f"{self.name} is recomputed, so it rests nowhere: leave route out, or do not recompute it")
        if self.route != Route(self.route.home, self.route.ahead):
            raise InputError(f"{self.name} is copied as it is, and as a whole: give home and ahead only")
        if not 0 < self.share <= 1 or (self.share < 1 and not self.route.leaves):
            raise InputError(
                f"{self.share} of {self.name} leaves: give more than 0, at most 1, and 1 for what stays on the GPU"
            )


@dataclass(frozen=True, slots=True)
class Update:
    """Who updates a unit's parameters.

    Args:
        on: the processor that updates.
        share: fraction of the elements that the GPU updates, taken from the front, while the CPU updates the rest. The states
            of this fraction stay on the GPU. The gradients stay on the GPU until both processors have taken their part.
        norm_on: the processor that computes the norm of the gradients when they are clipped. None: the GPU, except for
            gradients that are accumulated on the host, which are complete only there.
        returned_bytes: bytes of an updated parameter on its way from a place that updates to the host. None: those with which
            the GPU computes.
    """

    on: Processor = Processor.GPU
    share: float = 0.0
    norm_on: Processor | None = None
    returned_bytes: int | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        if not 0 <= self.share < 1:
            raise InputError(f"share of the update is {self.share}: give 0 or more and less than 1; for all, update on the GPU")
        if self.share and self.on is not Processor.CPU:
            who = "GPU" if self.on is Processor.GPU else "place"
            raise InputError(f"share is {self.share}, but the {who} updates all: leave share out, or update on the CPU")
        if self.norm_on is Processor.PLACE:
            raise InputError("a place computes no norm of gradients: let the GPU do that, or leave norm_on out")
        if self.returned_bytes is not None and not (self.on is Processor.PLACE and 1 <= self.returned_bytes <= 64):
            raise InputError(
                f"returned_bytes is {self.returned_bytes}: give 1 to 64 bytes for an update in a place, or leave it out"
            )
        if self.share and self.norm_on is Processor.CPU:
            raise InputError(f"share is {self.share}: the host has no norm of gradients of which the GPU keeps a part")


@hashed_once
@dataclass(frozen=True, slots=True)
class UnitPlan(Hashed):
    """The decisions for one unit.

    Args:
        activations: keep everything backward needs; recompute it from the input; with ``selective``, recompute some of it from
            the rest: what ``saved`` says, or if that recomputes nothing, what the profile selects; with ``drop``, the unit is
            inside a segment that begins below it, and its input is recomputed as well.
        parameters: where they rest and how they are fetched.
        update: who updates.
        gradients: where the gradients of several micro-batches are summed, or rest between these, and their format on the way
            to the host. ``gpu``: they stay there until the last micro-batch has been added. ``host``: they are copied there
            after each micro-batch; for an update on the CPU, which adds them, and for one on the GPU to come back for the
            next backward, which adds to them. Another place: complete ones wait there for an update on the CPU, and are read
            with the states.
        refresh: format of the copy of updated parameters to a copy that stays on the GPU.
        gradients_replace_parameters: a finished gradient overwrites the 16-bit parameters on the GPU.
        kept: where the values that forward keeps rest: activations with the input, or with recomputation the input.
        saved: the tensors that forward saves and that go another way.
        results: results of products with weights that a forward keeps although the unit is recomputed. The recomputation takes
            them instead of computing them.
        states: where the optimizer states rest. States that the CPU updates rest on the host unless this names a place.
        parameters_with_states: parameters that rest on the host and are their own masters leave after backward and travel with
            the states to an update on the GPU, and home with them. Otherwise they stay from the last backward to the update.
        sum_bytes: bytes per element in which the CPU accumulates gradients, and in which they are copied after each micro-batch
            but the last. None: as in ``gradients``.
        sums_pinned: the host has pinned memory for these copies, even if not for that of the last micro-batch.
        again: for segments within segments, what each recomputation except the last keeps; the last keeps everything. The unit
            is recomputed one more time than there are entries.
        zero_stage: what several GPUs shard instead of replicating (ZeRO): from 1 on the optimizer states, from 2 on the
            gradients, with 3 the parameters.
        rank: index of the GPU that computes the unit, in a stage of a pipeline; of several pipelines side by side, those GPUs
            that have this place in theirs. None: every GPU does, each with its own data.
    """

    activations: Activations = Activations.KEEP
    parameters: Route = Route()
    update: Update = Update()
    gradients: Route = Route()
    refresh: Format = Format()
    gradients_replace_parameters: bool = False
    kept: Route = Route()
    saved: tuple[SavedRoute, ...] = ()
    results: tuple[SavedRoute, ...] = ()
    states: Route = Route()
    parameters_with_states: bool = False
    sum_bytes: int | None = None
    sums_pinned: bool = False
    again: tuple[Activations, ...] = ()
    zero_stage: int = 0
    rank: int | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        for kept in self.again:
            check_member("again", kept, Activations)
        if self.activations is Activations.KEEP and self.again:
            raise InputError("activations that forward keeps are not recomputed: leave again out")
        if self.activations is Activations.SELECTIVE and self.again:
            raise InputError("what a selective forward keeps is all that its one recomputation needs: leave again out")
        if Activations.SELECTIVE in self.again:
            raise InputError("only a forward is selective, not a recomputation: let again keep the input, or drop it")
        self._check_saved()
        if Activations.KEEP in self.again:
            raise InputError("the last recomputation always keeps everything, and only the last: leave keep out of again")
        if (Activations.RECOMPUTE, Activations.DROP) in pairwise(self.forwards):
            raise InputError("an input that a forward keeps is kept until backward: let again drop none after it")
        if self.activations is Activations.DROP and self.kept.leaves:
            raise InputError("a unit that drops its input has nothing to rest elsewhere: leave kept out, or keep its input")
        if self.update.on is Processor.CPU and self.states != Route() and not self.states.far:
            raise InputError(
                f"states rest with {self.states}, but the CPU updates them: they are on the host, so leave that out, let them "
                "rest in another place, or update on the GPU"
            )
        if self.update.on is Processor.PLACE and not (self.gradients.far and not self.parameters.far):
            raise InputError(
                "a place updates with states and gradients that rest in it, and parameters rest elsewhere: let both rest in "
                "one place, and parameters on the GPU or the host"
            )
        if self.gradients.far and not (self.states.home == self.gradients.home and self.update.on is not Processor.GPU):
            raise InputError(
                f"gradients wait in {self.gradients.home} only where they come back with states that the CPU updates: let the "
                f"states rest in {self.gradients.home} and the CPU update, or let the gradients rest on the host"
            )
        self._check_formats()
        if self.parameters.comes_again and self.zero_stage == 3:
            raise InputError("parameters that several GPUs share are gathered once for backward: leave comes_again out")
        if self.parameters_with_states and (
            not self.fetches_states
            or (self.parameters.home, self.states.home) != (HOST_MEMORY, HOST_MEMORY)
            or self.gradients_replace_parameters
            or self.parameters.moves
            or self.parameters.stays_after_backward
        ):
            raise InputError(
                "parameters_with_states is for parameters that rest on the host with the states, leave after backward, and are "
                "updated on the GPU: plan them so, or leave it out"
            )
        if not 0 <= self.zero_stage <= 3:
            raise InputError(f"zero_stage is {self.zero_stage}: give 0 to 3")
        if self.sum_bytes is not None and not (self.accumulates_on_host and 1 <= self.sum_bytes <= 64):
            raise InputError(
                f"sum_bytes is {self.sum_bytes}: give 1 to 64 bytes if the CPU accumulates gradients, or leave it out"
            )
        if self.sums_pinned and not self.accumulates_on_host:
            raise InputError("sums_pinned is for gradients that the CPU accumulates: leave it out")
        if self.update.norm_on is Processor.CPU and (self.update.on is Processor.GPU or self.gradients.far):
            raise InputError(
                "the CPU takes the norm of gradients that rest on the host, but these are "
                f"{f'in {self.gradients.home}' if self.gradients.far else 'updated with on the GPU'}: leave norm_on out"
            )
        if self.update.share:
            self._check_shared_update()
        if self.rank is not None and (self.rank < 0 or self.zero_stage > 1):
            raise InputError(
                f"rank is {self.rank} with zero_stage {self.zero_stage}: give the index of the rank that has the unit, from 0, "
                "and zero_stage 0 or 1"
            )

    def _check_saved(self) -> None:
        if self.saved and self.activations not in (Activations.KEEP, Activations.SELECTIVE):
            raise InputError(f"a forward that keeps at most its input ({self.activations}) saves no tensors: leave saved out")
        if self.results and (self.activations is not Activations.RECOMPUTE or self.again):
            raise InputError(
                "results are kept for the one recomputation of a whole unit: let it recompute without again, or leave them out"
            )
        if any(one.recomputed for one in self.results):
            raise InputError("a result that is kept is not recomputed: leave it out of results")
        for what, some in (("saved", self.saved), ("results", self.results)):
            names = [one.name for one in some]
            if len(set(names)) < len(names):
                raise InputError(f"{what} names {names}: give each name once")
        if self.rank is None and any(one.share < 1 for one in (*self.saved, *self.results)):
            raise InputError("a part of a tensor leaves the GPU in pipelines only: give share 1, or a rank")
        if self.activations is Activations.KEEP and (again := [one.name for one in self.saved if one.recomputed]):
            raise InputError(f"saved recomputes {again[0]}, but activations are kept: make them selective")

    def _check_formats(self) -> None:
        if self.gradients.is_of_parameters or self.kept.is_of_parameters or self.states.is_of_parameters:
            raise InputError(
                "only parameters stay after a pass, move, come again, or come earlier for one pass than for the other: leave "
                "stays_after_forward, stays_after_backward, moves, comes_again and ahead_in_backward out for all else"
            )
        if (self.kept.carried, self.states.carried) != (Format(), Format()):
            raise InputError("activations and optimizer states are copied as they are: leave carried out")
        parts = self.parameters.parts, self.kept.parts, self.gradients.parts, 1 if self.fetches_states else self.states.parts
        if max(parts) > 1:
            raise InputError("only optimizer states that are fetched to the GPU move in parts: leave parts out for others")

    def _check_shared_update(self) -> None:
        if self.parameters.home != GPU_MEMORY or self.gradients_replace_parameters or self.states != Route():
            raise InputError(
                f"the GPU updates a share ({self.update.share}), but parameters, gradients or states leave it: let parameters "
                "stay there, give gradients memory of their own, and leave states out; or leave share out"
            )

    @property
    def forwards(self) -> tuple[Activations, ...]:
        """What each forward of the unit keeps; the last keeps everything."""
        return (
            (Activations.KEEP,) if self.activations is Activations.KEEP else (self.activations, *self.again, Activations.KEEP)
        )

    @property
    def fetches_states(self) -> bool:
        """Whether the optimizer states are fetched to the GPU for each update."""
        return self.states.leaves and self.update.on is Processor.GPU

    @property
    def accumulates_on_host(self) -> bool:
        """Whether the gradients of each micro-batch are copied to the host, where they are added."""
        return self.update.on is Processor.CPU and self.gradients.home == HOST_MEMORY

    @property
    def cpu_adds(self) -> bool:
        """Whether the CPU adds them: it does unless the sums are copied back to the GPU."""
        return self.accumulates_on_host and not self.gradients.carried.returned_bytes

    @property
    def sums_leave(self) -> bool:
        """Whether the sums of several micro-batches rest on the host, though the GPU adds to them and updates."""
        return self.update.on is Processor.GPU and self.gradients.home == HOST_MEMORY

    @property
    def activations_leave(self) -> bool:
        """Whether anything that forward keeps leaves the GPU until backward."""
        return self.kept.leaves or any(one.route.leaves for one in (*self.saved, *self.results))

    @property
    def homes(self) -> tuple[str, ...]:
        """The homes of its values."""
        saved = tuple(one.route.home for one in (*self.saved, *self.results))
        return (self.parameters.home, self.kept.home, self.gradients.home, self.states.home, *saved)

    @property
    def refreshed(self) -> bool:
        """Whether the GPU has a copy of parameters that others update; otherwise they come with the next fetch."""
        stays = not self.parameters.leaves or self.parameters.stays_after_backward
        return self.update.on is not Processor.GPU and stays
