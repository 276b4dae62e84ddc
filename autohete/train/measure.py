"""Measures one block of each kind: seconds and bytes of every pass, on the device that will train.

The passes run through the same actions as in training, one after another in the calling thread, so the measurement reflects
what the lanes will do. The calling thread belongs to a worker, which checks between tasks whether to stop: an interrupt inside
a pass would abort the process. Equal blocks are measured once: the model runs the first of each kind, and the others pass their
input through.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial, wraps
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from autohete.errors import InputError
from autohete.hardware import Hardware
from autohete.lowering import lower
from autohete.plan import Activations
from autohete.profile import LossProfile, Profile, SavedTensors, UnitProfile, analytic_profile
from autohete.profile.costs import within
from autohete.runtime.batch import Batch, Inputs, leading, named, padded
from autohete.runtime.device import AllocatorMemory, device_for
from autohete.runtime.forward_pass import HOOKS, call_of, replaced_forwards, with_hidden
from autohete.runtime.lanes import LaneThreads
from autohete.runtime.ledger import Ledger
from autohete.runtime.loss_call import LossCall
from autohete.runtime.model_state import Snapshot, unchanged_random_state
from autohete.runtime.optimizer import Layout, states_of_unit
from autohete.runtime.partition import Partition
from autohete.runtime.precision import DTYPES
from autohete.runtime.probe import probe
from autohete.runtime.settings import Recipe
from autohete.runtime.takeover import Ledgers, Takeover
from autohete.runtime.update_rules import UpdateSettings
from autohete.schedule import Kind, Schedule, Task, TaskId, Value, parse_schedule
from autohete.train.as_executed import everything_resident
from autohete.train.machine import forget_cache
from autohete.train.worker import check_stop
from autohete.workload import Precision, Units, Workload
from autohete.workload.config import parse_model
from autohete.workload.families import FAMILIES

#: Number of timed iterations; one more before them warms up.
_REPEATS = 5
#: Of those that recompute selectively, of which only the recomputation is timed.
_SELECTIVE_REPEATS = 3
_NOTHING = torch.empty(0, dtype=torch.float32, device="cpu")
_PRECISIONS = {dtype: precision for precision, dtype in DTYPES.items()}


def workload_of(partition: Partition, inputs: Inputs, name: str = "model") -> Workload:
    """Return the workload of a model and a batch, determined by one forward pass in the calling thread.

    A model whose list has attention and MLP of each block one after the other says so with an attribute ``units``, which is
    ``Units.SUBLAYER``; otherwise each module in the list counts as a block.

    Args:
        partition: the model, cut into blocks.
        inputs: token ids (batch, sequence), or the model's arguments by name.
        name: name of the workload.
    """
    found, ids = probe(partition, inputs), leading(inputs)
    config = getattr(partition.model, "config", None)
    modules, units = len(partition.modules), getattr(partition.model, "units", None)
    if units is Units.SUBLAYER and modules % 2:
        raise InputError(f"a model of units {units} has attention and MLP by turns, but lists {modules} modules: set its units")
    elsewhere = frozenset[int]().union(*(found.used[unit] for unit in found.used if unit))
    tied = any(id(parameter) in elsewhere for parameter in partition.owned[0])
    heads = getattr(config, "num_attention_heads", getattr(partition.modules[0], "heads", 1))
    known = _by_config(config, name, modules)
    if known is not None:
        return replace(
            known,
            vocabulary_size=found.logits.shape[-1],
            sequence_length=ids.shape[1],
            batch_size=ids.shape[0],
            precision=_precision(partition),
            tied_embeddings=tied,
        )
    return Workload(
        name=name,
        hidden_size=found.hidden.shape[-1],
        transformer_blocks=modules // 2 if units is Units.SUBLAYER else modules,
        heads=heads if isinstance(heads, int) and found.hidden.shape[-1] % heads == 0 else 1,
        vocabulary_size=found.logits.shape[-1],
        sequence_length=ids.shape[1],
        batch_size=ids.shape[0],
        precision=_precision(partition),
        tied_embeddings=tied,
        units=units if isinstance(units, Units) else Units.BLOCK,
    )


def _precision(partition: Partition) -> Precision:
    """The precision of what is trained, which decides on masters and gradients. Of several types it is the narrowest, and of
    those the largest share; frozen parameters may have any type, and are counted in bytes.
    """
    types = Counter[torch.dtype]()
    for parameter in (parameter for owned in partition.owned for parameter in owned):
        types[parameter.dtype] += parameter.numel()
    return _PRECISIONS[min(types, key=lambda dtype: (dtype.itemsize, -types[dtype]))]


def _by_config(config: object, name: str, units: int) -> Workload | None:
    """What a Hugging Face configuration says of a model with so many blocks; None if it is of no known family."""
    keys = config.to_dict() if hasattr(config, "to_dict") else {}
    if keys.get("model_type") not in FAMILIES:
        return None
    try:
        found = parse_model(keys, name)
    except InputError:  # a variant that is not known
        return None
    return found if found.transformer_blocks == units else None


def measure(
    partition: Partition,
    workload: Workload,
    hardware: Hardware,
    batch: Batch,
    recipe: Recipe | None = None,
    torch_device: torch.device | None = None,
) -> Profile:
    """Measure the profile of ``partition``'s model for batches like ``batch``; copies take as long as on ``hardware``.

    Times are medians. Gradients are not clipped. The model, the random state and the optimizer are restored.
    """
    kinds = _kinds_of(partition)
    first = {kind: place for place, kind in reversed(list(enumerate(kinds)))}
    chosen = sorted(first.values())
    small = replace(
        partition,
        modules=tuple(partition.modules[place] for place in chosen),
        owned=(partition.owned[0], *(partition.owned[1 + place] for place in chosen), partition.owned[-1]),
        frozen=(partition.frozen[0], *(partition.frozen[1 + place] for place in chosen), partition.frozen[-1]),
        effects=partition.effects.of_units([0, *(1 + place for place in chosen)]),
    )
    shape = replace(workload, transformer_blocks=len(chosen), units=Units.BLOCK)  # as many units as there are modules
    left_out = {place for place in range(len(kinds)) if place not in chosen}
    left = (p for place in left_out for p in (*partition.owned[1 + place], *partition.frozen[1 + place]))
    elsewhere = sum(parameter.nbytes for parameter in left)
    recipe, device = recipe or Recipe(), torch_device or torch.device("cpu")
    recipe = replace(recipe, clip_norm=None, updates=replace(recipe.updates, loss_scale=1.0))
    measured = _Measurement(small, analytic_profile(shape, hardware), batch, recipe, device, elsewhere)
    with _unchanged(partition, device, recipe.loss_call), _handing_on(partition.modules, kinds):
        blocks, loss = measured.units()
    inner = [blocks[1 + chosen.index(first[kind])] for kind in kinds]
    units = (replace(unit, role=workload.role(i)) for i, unit in enumerate((blocks[0], *inner, blocks[-1])))
    return _with_handover(Profile(workload, hardware, tuple(units), loss))


def with_parameters_of(partition: Partition, profile: Profile) -> Profile:
    """``profile`` with the parameters of ``partition``'s model, if it does not know its frozen ones."""
    units, element = profile.units, profile.element_bytes
    if len(units) != partition.last + 1 or all(partition.frozen_bytes(i) == profile.frozen_bytes(i) for i in range(len(units))):
        return profile
    known = []
    for i, unit in enumerate(units):
        sizes = _sizes(partition, i, element)
        trained = sizes["parameters"] - sizes["frozen_parameters"]
        states = None if unit.state_bytes is None else profile.state_bytes(i, trained)
        known.append(replace(unit, **sizes, state_bytes=states))
    return replace(profile, units=tuple(known))


def _sizes(partition: Partition, i: int, element_bytes: int) -> dict[str, Any]:
    """The fields of a block's profile about its parameters."""
    trained = _trained(partition, i, element_bytes)
    frozen = sum(parameter.numel() for parameter in partition.frozen[i])
    return {
        "parameters": sum(trained) + frozen,
        "frozen_parameters": frozen,
        "frozen_bytes": partition.frozen_bytes(i),
        "largest_parameter": max(trained, default=None),
    }


def _trained(partition: Partition, i: int, element_bytes: int) -> list[int]:
    """Number of elements of each trained parameter of a block. Those of a type that is larger than what the profile counts in
    count as several, so that the schedule has their bytes.
    """
    return [-(-parameter.nbytes // element_bytes) for parameter in partition.owned[i]]


def _with_handover(profile: Profile) -> Profile:
    """Add the time to go on to the next task to every task; in lanes other than the GPU's, also the time to wake up."""
    here, across = _handover_seconds()
    units = tuple(
        replace(
            unit,
            forward_seconds=unit.forward_seconds + here,
            backward_seconds=unit.backward_seconds + here,
            gpu_update_seconds=unit.gpu_update_seconds + here,
            cpu_update_seconds=(unit.cpu_update_seconds or 0.0) + across,
            saved=tuple(one if one.seconds is None else replace(one, seconds=one.seconds + here) for one in unit.saved),
        )
        for unit in profile.units
    )
    h2d, d2h = (
        replace(link, latency_seconds=link.latency_seconds + across) for link in (profile.hardware.h2d, profile.hardware.d2h)
    )
    loss = replace(profile.loss, seconds=profile.loss.seconds + here)
    places = tuple(replace(place, latency_seconds=place.latency_seconds + across) for place in profile.hardware.places)
    return replace(profile, hardware=replace(profile.hardware, h2d=h2d, d2h=d2h, places=places), units=units, loss=loss)


_LANES = "autohete-schedule 2\nlane gpu fifo\nlane h2d priority\nlane d2h priority\nlane cpu priority\n"
#: Tasks that do nothing: in the GPU's lane, and once around all lanes.
_CHAIN = parse_schedule(f"{_LANES}task F0 gpu 0\ntask F1 gpu 0 after=F0\ntask F2 gpu 0 after=F1\ntask F3 gpu 0 after=F2\n")
_RING = parse_schedule(
    f"{_LANES}task F0 gpu 0 after=H0@-1\ntask G0 d2h 0 after=F0\ntask U0 cpu 0 after=G0\ntask H0 h2d 0 after=U0\n"
)
_HANDOVER_ITERATIONS = 50


def _handover_seconds() -> tuple[float, float]:
    """Return the overhead of a task between two others of its lane, and of one in another lane, which wakes a sleeping lane."""
    chain, ring = (_seconds_of_nothing(schedule) for schedule in (_CHAIN, _RING))
    here = chain / len(_CHAIN.tasks)
    return here, max(here, (ring - here) / (len(_RING.tasks) - 1))


def _seconds_of_nothing(schedule: Schedule) -> float:
    """Return the time of one iteration of ``schedule`` with empty tasks."""
    with LaneThreads(schedule, lambda task, iteration: None) as lanes:
        for _ in range(_HANDOVER_ITERATIONS):
            lanes.admit()
    return lanes.trace().makespan_seconds / _HANDOVER_ITERATIONS


def _kinds_of(partition: Partition) -> list[object]:
    """Return a key for each block. Blocks with the same modules, tensor shapes, modes and numbers of hooks have equal keys.

    Numeric attributes are not compared, since a block may store its own index in the list.
    """

    def kind_of(module: nn.Module) -> object:
        tensors = {**module._parameters, **module._buffers}
        shapes = [(name, (t.shape, t.dtype, t.requires_grad) if t is not None else None) for name, t in tensors.items()]
        modes = [(name, value) for name, value in vars(module).items() if isinstance(value, (str, bool, type(None)))]
        return (type(module), *shapes, *modes, *(len(getattr(module, hooks)) for hooks in HOOKS))

    unlike = {unit for unit, _ in partition.effects.handed} | partition.effects.between
    taken = dict(partition.effects.beside)
    return [
        (*map(kind_of, module.modules()), unit if unit in unlike else 0, taken.get(unit))
        for unit, module in enumerate(partition.modules, 1)
    ]


@contextmanager
def _unchanged(partition: Partition, torch_device: torch.device, loss: LossCall) -> Iterator[None]:
    """Restore parameters, buffers, attributes, the loss function's state and random states on exit."""
    before = [[parameter.detach().clone() for parameter in owned] for owned in partition.owned]
    others, of_loss = Snapshot(partition.model.named_modules(), partition.effects.changing), loss.state(partition.model)
    try:
        with unchanged_random_state(torch_device):
            yield
    finally:
        others.restore()
        of_loss.restore()
        for owned, values in zip(partition.owned, before, strict=True):
            for parameter, value in zip(owned, values, strict=True):
                parameter.data = value


def _handing_on(modules: Sequence[nn.Module], kinds: list[object]) -> AbstractContextManager[None]:
    """Make each block that equals an earlier one return its input, in the same structure as the earlier one's result, with
    those of its arguments that the earlier one returned of its own.
    """
    returned: dict[object, tuple[Any, list[object]]] = {}

    def noting(kind: object, forward: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(forward)
        def note(*args: Any, **kwargs: Any) -> Any:
            result, given = forward(*args, **kwargs), _arguments(args, kwargs)
            others = result[1:] if isinstance(result, tuple) else ()
            places = [next((name for name, value in given.items() if value is other), None) for other in others]
            returned[kind] = with_hidden(result, _NOTHING), places
            return result

        return note

    def handing(kind: object, forward: Callable[..., Any]) -> Callable[..., Any]:
        def hand(*args: Any, **kwargs: Any) -> Any:
            hidden, given, (result, places) = call_of(0, forward, args, kwargs).hidden, _arguments(args, kwargs), returned[kind]
            if not isinstance(result, tuple):
                return hidden
            others = (given.get(place, other) for place, other in zip(places, result[1:], strict=True))
            return (hidden, *others)

        return hand

    return replaced_forwards(
        (module, (handing if kind in kinds[:place] else noting)(kind, module.forward))
        for place, (module, kind) in enumerate(zip(modules, kinds, strict=True))
    )


def _arguments(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[object, Any]:
    """Arguments by place or by name."""
    return dict[object, Any](enumerate(args)) | dict(kwargs)


@dataclass(frozen=True, slots=True)
class _MeasuredPass:
    """Measurements of one pass.

    Args:
        seconds: median time.
        peak: peak bytes during the pass, above the bytes before it, not counting those handed over by the pass before.
        kept: bytes that stay after the pass, not counting those it hands on.
        given: bytes of hidden states, logits or gradient from the pass before.
        brought, handed_on: the same as far as they are counted, and for the next pass.
        made: bytes of gradient storage that it allocates.
        keeps_output: whether backward needs the output that is handed on.
    """

    seconds: float
    peak: int
    kept: int
    given: int
    brought: int
    handed_on: int
    made: int
    keeps_output: bool


#: Something that can be recomputed; its size and time do not matter.
_SAVED = (SavedTensors("recomputed", 0, 0.0, selective=True),)


@dataclass(frozen=True, slots=True)
class _MeasuredSaved:
    """Measurements of what a forward saves.

    Args:
        saved: what has a name, and how long it takes to make it again.
        workspaces: temporaries of a forward that releases what is selected, and of the pass that makes it again.
    """

    saved: tuple[SavedTensors, ...]
    workspaces: tuple[int, int]


@dataclass(frozen=True, slots=True)
class _Measurement:
    """What is measured.

    Args:
        partition: the model, with one block of each kind.
        analytic: profile of the same shape, whose times and sizes are meaningless.
        batch: the training data of an iteration.
        recipe: what it computes.
        torch_device: where it is computed.
        elsewhere: bytes of the parameters of the blocks left out of ``partition``.
    """

    partition: Partition
    analytic: Profile
    batch: Batch
    recipe: Recipe
    torch_device: torch.device
    elsewhere: int

    def units(self) -> tuple[list[UnitProfile], LossProfile]:
        """Measure all blocks of the partition, and the loss."""
        passes = self._passes(Activations.KEEP, _REPEATS)
        try:
            checkpointed = self._passes(Activations.RECOMPUTE, 0)
        except InputError:  # the model can only be trained without recomputation
            checkpointed = {}
        updates = self.recipe.updates
        hosts = [_cpu_update_seconds(owned, updates) for owned in self.partition.owned]
        saved = self._saved()
        inputs = sum(_size(value) for value in named(self.batch.inputs).values() if isinstance(value, Tensor))
        last = self.partition.last
        units = []
        for i in range(last + 1):
            forward, backward, update = (passes[TaskId(k, i)] for k in (Kind.FORWARD, Kind.BACKWARD, Kind.GPU_UPDATE))
            given = forward.given if i else inputs
            kept = max(forward.kept, given)
            # An output that backward keeps outlives its use as the input of the block above.
            twice = forward.handed_on if forward.keeps_output else 0
            above = passes[TaskId(Kind.FORWARD, i + 1)].given if i < last else backward.brought
            handed = min(backward.brought, above) + min(backward.handed_on, given)  # each may be a view of something larger
            alone = checkpointed.get(TaskId(Kind.FORWARD, i))
            selected = saved.get(i)
            units.append(
                UnitProfile(
                    role=self.analytic.workload.role(i),
                    forward_seconds=forward.seconds,
                    backward_seconds=backward.seconds,
                    gpu_update_seconds=update.seconds,
                    input_bytes=given,
                    activation_bytes=kept + twice,
                    forward_workspace_bytes=max(0, forward.peak - kept - forward.handed_on),
                    backward_workspace_bytes=max(0, backward.peak - backward.made - handed),
                    gpu_update_workspace_bytes=max(0, update.peak - update.brought),
                    cpu_update_seconds=hosts[i],
                    measured_checkpointed_workspace_bytes=None if alone is None else _workspace(alone),
                    saved=() if selected is None else within(selected.saved, kept + twice - given),
                    measured_selective_workspace_bytes=None if selected is None else selected.workspaces,
                    state_bytes=updates.unit_bytes(self.partition.owned[i]),
                    is_whole=Layout.of(self.partition.owned[i]).is_mixed
                    or not updates.may_be_cut(map(updates.group_of, self.partition.owned[i])),
                    **_sizes(self.partition, i, self.analytic.element_bytes),
                )
            )
        found = passes[TaskId(Kind.LOSS, last)]
        return units, LossProfile(found.seconds, found.brought, max(0, found.peak - found.brought - found.handed_on))

    def _saved(self) -> dict[int, _MeasuredSaved]:
        """What forwards of the blocks save by name, and how long it takes to make each again; of those that save something."""
        named: dict[int, tuple[SavedTensors, ...]] = {}

        def list_saved(training: Takeover, unit: int) -> None:
            named[unit] = tuple(self._named(training, unit))

        try:
            passes = self._passes(Activations.SELECTIVE, _SELECTIVE_REPEATS, list_saved)
        except (RuntimeError, InputError):  # torch.func lets nobody see what is saved, or something read has changed
            return {}
        found = {}
        for i, saved in named.items():
            forward, again = (passes[TaskId(kind, i)] for kind in (Kind.FORWARD, Kind.RECOMPUTE))
            selected = sum(one.seconds or 0.0 for one in saved if one.selective)
            share = again.seconds / selected if selected else 1.0  # one pass costs less than one for each name
            saved = tuple(one if one.seconds is None else replace(one, seconds=one.seconds * share) for one in saved)
            workspaces = (
                max(0, forward.peak - forward.kept - forward.handed_on),
                max(0, again.peak - again.brought - again.kept),
            )
            found[i] = _MeasuredSaved(saved, workspaces)
        return found

    def _named(self, training: Takeover, unit: int) -> Iterator[SavedTensors]:
        """What a unit has saved, all of which is there now."""
        named = training.states.units[unit].named
        assert named is not None, "a selective forward has saved something"
        for one in named.listed():
            if one.remaking is None:
                yield SavedTensors(one.name, one.size_bytes)
                continue
            if not one.remaking.repeats(training.passes.outside(unit)):  # an operation does what its schema does not say
                yield SavedTensors(one.name, one.size_bytes)
                continue
            begin = time.perf_counter()
            training.passes.make_again(unit, one.remaking)
            device_for(self.torch_device).settle()
            yield SavedTensors(one.name, one.size_bytes, time.perf_counter() - begin, selective=one.selective)

    def _passes(
        self, activations: Activations, repeats: int, before_release: Callable[[Takeover, int], None] | None = None
    ) -> dict[TaskId, _MeasuredPass]:
        """Measure each task of fully resident training: seconds are the median of several iterations after the first, and bytes
        those of the second iteration of another run, because counting takes time. In the very first iteration,
        ``before_release`` sees all that a forward of a unit has saved.
        """
        schedule = self._schedule(activations)
        seconds = self._seconds(schedule, repeats, before_release)
        memory = device_for(self.torch_device).memory()
        passes: dict[TaskId, _MeasuredPass] = {}
        with closing(self._run(schedule, 2, memory)) as tasks:
            for training, task, iteration in tasks:
                before, given = memory.used_bytes, _size(training.passes.in_transit)
                brought = _counted(memory, training.passes.in_transit)
                memory.reset_peak()
                training.actions.perform(task, iteration)
                left, handed_on = memory.used_bytes, _size(training.passes.in_transit)
                base = before - brought
                made = sum(buffer.size_bytes for buffer in task.allocates if buffer.id.value is Value.GRADIENTS)
                peak = max(memory.peak_bytes, before) - base
                with training.guard.inside():  # a use of the caller's would bring the parameters that are kept to the host
                    keeps_output = training.passes.keeps(training.passes.in_transit, task.id.unit)
                kept = left - _counted(memory, training.passes.in_transit) - base
                passes[task.id] = _MeasuredPass(seconds[task.id], peak, kept, given, brought, handed_on, made, keeps_output)
        return passes

    def _seconds(
        self, schedule: Schedule, repeats: int, before_release: Callable[[Takeover, int], None] | None
    ) -> dict[TaskId, float]:
        """Measure the seconds of each task; without repetitions they are 0."""
        device, seconds = device_for(self.torch_device), defaultdict[TaskId, list[float]](list)
        if not repeats:
            return dict.fromkeys((task.id for task in schedule.tasks), 0.0)
        with closing(self._run(schedule, 1 + repeats)) as tasks:
            for training, task, iteration in tasks:
                training.passes.before_release = partial(before_release, training) if before_release and not iteration else None
                if device.on_cpu:
                    forget_cache(self.elsewhere)  # as the passes of the blocks left out would
                begin = time.perf_counter()
                training.actions.perform(task, iteration)
                device.settle()
                seconds[task.id].append(time.perf_counter() - begin)
        return {task: median(each[1:]) for task, each in seconds.items()}

    def _run(
        self, schedule: Schedule, iterations: int, memory: Ledger | AllocatorMemory | None = None
    ) -> Generator[tuple[Takeover, Task, int]]:
        """The tasks of some iterations of a training, each of which the caller performs at once; ``memory`` counts."""
        training = Takeover(self.partition, schedule, self.recipe, Ledgers(device_for(self.torch_device), memory))
        try:
            training.passes.adds_to_zeros = True
            for iteration in range(iterations):
                training.passes.give(iteration, replace(self.batch, inputs=padded(self.batch.inputs)))
                for task in schedule.tasks:
                    check_stop()
                    yield training, task, iteration
        finally:
            training.close()

    def _schedule(self, activations: Activations) -> Schedule:
        """Return the schedule of fully resident training; its durations are meaningless."""
        inner = range(1, self.partition.last)
        units = tuple(
            replace(
                unit,
                parameters=sum(_trained(self.partition, i, self.analytic.element_bytes)),  # all have a backward to measure
                activation_bytes=unit.input_bytes,
                saved=_SAVED if i in inner else (),
                state_bytes=self.recipe.updates.unit_bytes(self.partition.owned[i]),
            )
            for i, unit in enumerate(self.analytic.units)
        )
        profile = replace(self.analytic, units=units)
        return lower(profile, everything_resident(profile, activations))


def _workspace(alone: _MeasuredPass) -> int:
    """Temporaries of a forward that keeps only its input."""
    return max(0, alone.peak - alone.brought - alone.handed_on)


def _cpu_update_seconds(owned: tuple[nn.Parameter, ...], updates: UpdateSettings) -> float:
    """Measure an update of these parameters on the host."""
    if not owned:
        return 0.0
    layout = Layout.of(owned)
    flat = torch.zeros(sum(layout.sizes), dtype=layout.dtype, device="cpu")
    states = states_of_unit(updates, flat, layout, list(map(updates.group_of, owned)))
    gradients = [view.view(-1) for view in layout.views(torch.zeros_like(flat))]
    scratch = states.scratch()
    times = []
    for _ in range(1 + _REPEATS):
        check_stop()
        forget_cache()
        begin = time.perf_counter()
        states.update(flat, gradients, scratch)
        times.append(time.perf_counter() - begin)
    return median(times[1:])


def _counted(memory: Ledger | AllocatorMemory, tensor: Tensor | None) -> int:
    """Size of ``tensor``, if it is counted: one that an attribute keeps is not."""
    return _size(tensor) if tensor is not None and memory.counts(tensor) else 0


def _size(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.untyped_storage().nbytes()
