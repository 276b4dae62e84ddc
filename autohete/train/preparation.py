"""What happens before a Trainer's first step: the model is observed and measured, and a policy plans."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from autohete.errors import InputError
from autohete.plan import Plan
from autohete.plan.policy import Judge, Policy
from autohete.plan.trained import check_trained
from autohete.profile import Profile, analytic_profile
from autohete.runtime.batch import Batch, Form
from autohete.runtime.gradient_norm import NO_CLIPPING
from autohete.runtime.observe import observed
from autohete.runtime.partition import Partition
from autohete.runtime.precision import DTYPES
from autohete.runtime.takeover import only_gpu_works
from autohete.runtime.update_rules import UpdateSettings
from autohete.simulate import Simulation, safety, simulate_plan, simulate_safely
from autohete.train.as_executed import as_executed, everything_resident
from autohete.train.buckets import keeping_more
from autohete.train.machine import cpu_threads, measure_machine, usable_bytes
from autohete.train.measure import measure, with_parameters_of, workload_of
from autohete.train.measured import hardware_of
from autohete.train.options import Mode, TrainingOptions
from autohete.train.slowed import slowed
from autohete.train.training_ranks import TrainingRanks
from autohete.train.worker import stoppable

#: By how much a plan must be faster than another that moves less, or is there already.
LEAST_GAIN = 0.03


@dataclass(frozen=True, slots=True)
class Prepared:
    """A model that is ready to be trained.

    Args:
        partition: the model, cut into blocks, as observed.
        form: what all batches have in common.
        prediction: the plan, its schedule, and how long and how large it will be.
        resident_bytes: device memory that fully resident training would need.
        slowdown: factor by which a paced device is slower than the hardware, so that the CPU can keep up.
        threads: number of CPU threads in the emulated device's passes.
    """

    partition: Partition
    form: Form
    prediction: Simulation
    resident_bytes: int
    slowdown: float
    threads: int


@dataclass(frozen=True, slots=True)
class Buckets:
    """Plans for batches of several lengths.

    Args:
        largest: for all batches that fit into no bucket.
        shorter: for those that fit into one, the shortest first.
    """

    largest: Prepared
    shorter: tuple[Prepared, ...]

    def next(self, present: Prepared, batch: Batch) -> Prepared | None:
        """The plan for a batch; None: the present one."""
        wanted = next((one for one in self.shorter if one.form.admits(batch)), self.largest)
        return None if wanted is present else wanted


class Preparation:
    """Measures a model and plans its training.

    Args:
        options: how to train.
        ranks: this process as one of several, of which the first plans for all; None: it trains alone.
    """

    def __init__(self, options: TrainingOptions, ranks: TrainingRanks | None = None) -> None:
        self._options, self._ranks = options, ranks
        #: Measured once, if it is not given.
        self._hardware = options.hardware

    def prepare(self, partition: Partition, batch: object, states: Mapping[str, Mapping[str, Any]] | None = None) -> Prepared:
        """Observe, measure and plan for batches like ``batch``.

        Args:
            partition: the model.
            batch: as it is given.
            states: of the optimizer, by the parameter's name, with which training begins.

        Raises:
            InputError: the batch does not fit the model, or the model or the plan cannot be trained.
            InfeasibleError: the plan, or every plan, needs more memory than there is.
        """
        options, loss = self._options, self._options.recipe.loss_call
        if self._ranks is not None:
            self._ranks.connect()  # first: what goes wrong here ends the others, too
        first = Batch.of(batch, partition.model, loss)
        part = first.split(options.micro_batches, equal=not loss.adds_up)[0]
        with cpu_threads(options.torch_device, 1):
            partition, form = observed(partition, first, loss, options.micro_batches)
        if self._ranks is not None:
            partition = replace(partition, frozen=((),) * len(partition.owned))  # frozen parameters stay on each device
            self._ranks.compare("the training", options.described() | {"the first batch": first.described()})
            self._ranks.check_model(partition, states or {})
        prepared = self._planned(partition, form, part, 1)
        threads = torch.get_num_threads()
        if threads > 1 and options.may_use_threads and only_gpu_works(prepared.prediction.schedule):
            quicker = self._planned(partition, form, part, threads)
            if only_gpu_works(quicker.prediction.schedule):
                prepared = quicker
        self._check_plan(partition, prepared.prediction.plan)
        return prepared

    def prepare_shorter(self, prepared: Prepared, batch: object, lengths: Sequence[int]) -> Buckets:
        """Measure and plan for the beginnings of ``batch``, with all states where they are for the whole.

        Args:
            prepared: for the whole.
            batch: the largest one.
            lengths: of the beginnings, in order.

        Raises:
            InputError: it has no longer sequences.
        """
        options, loss = self._options, self._options.recipe.loss_call
        whole, found = Batch.of(batch, prepared.partition.model, loss), list[Prepared]()
        for length in lengths:
            if length > whole.length:
                raise InputError(
                    f"a bucket of length {length} is longer than the first batch, which has {whole.length}: call prepare "
                    "with a batch of the largest shape first"
                )
            if length < whole.length:
                short = whole.shorter(length)
                part = short.split(options.micro_batches, equal=not loss.adds_up)[0]
                profile, slowdown = self._profile_of(prepared.partition, part, prepared.threads)
                prediction, form = keeping_more(prepared.prediction, profile), prepared.form.of(short)
                found.append(replace(prepared, form=form, prediction=prediction, slowdown=slowdown))
        return Buckets(prepared, tuple(found))

    def planned_again(self, prepared: Prepared, profile: Profile) -> Prepared:
        """Plan again with a profile that has other times, or a smaller budget.

        Raises:
            InputError: the new plan cannot be trained, or computes other bits.
            InfeasibleError: no plan fits.
        """
        found = self._simulated_safely(profile, prepared.partition.lasting_bytes)
        if prepared.threads > 1 and not only_gpu_works(found.schedule):
            raise InputError(f"passes with {prepared.threads} threads need all cores, and the new plan has tasks of the CPU")
        self._check_plan(prepared.partition, found.plan)
        return replace(prepared, prediction=found)

    def _check_plan(self, partition: Partition, plan: Plan) -> None:
        """Check that a plan can be trained.

        Raises:
            InputError: it cannot; says why.
        """
        options = self._options
        clip_norm = options.recipe.clip_norm
        scaled_by = None if clip_norm is None else "grad_scaler" if clip_norm == NO_CLIPPING else "clip_norm"
        check_trained(plan, scaled_by=scaled_by, micro_batches=options.micro_batches)
        has_masters = options.recipe.updates.has_masters
        replacing = [
            i
            for i, (owned, unit) in enumerate(zip(partition.owned, plan.units, strict=True))
            if unit.gradients_replace_parameters and not all(has_masters(parameter.dtype) for parameter in owned)
        ]
        if replacing:
            raise InputError(
                f"{plan.policy} overwrites parameters with their gradients, but some of block {replacing[0]} have no master "
                "weights, and the update needs them: choose another policy, such as zero_offload, or give all trained "
                "parameters one type"
            )
        if partition.effects.keeps_parameters and plan.offloaded_parameter_units:
            raise InputError(
                "a block keeps parameters until backward by saved_tensors_hooks of its own, but the plan lets parameters leave "
                f"the GPU meanwhile ({plan.policy}): let the hooks keep copies, or choose a policy that keeps parameters "
                "there, such as resident or zero_offload"
            )

    def _planned(self, partition: Partition, form: Form, batch: Batch, threads: int) -> Prepared:
        """Plan and simulate, on a profile whose passes use ``threads`` threads."""
        profile, slowdown = self._profile_of(partition, batch, threads)
        lasting = partition.lasting_bytes
        if self._ranks is None:
            prediction, resident = self._simulated(profile, lasting)
        else:
            profile = replace(profile, hardware=self._ranks.shared(profile.hardware))
            prediction, resident = self._ranks.from_first("planning", partial(self._simulated, profile, lasting))
            self._ranks.check_schedule(prediction.schedule)
        return Prepared(partition, form, prediction, resident, slowdown, threads)

    def _profile_of(self, partition: Partition, batch: Batch, threads: int) -> tuple[Profile, float]:
        """The profile of the training, with passes that use ``threads`` threads, and the slowdown of a paced device."""
        options = self._options
        with cpu_threads(options.torch_device, threads):
            profile, slowdown = self._profile(partition, batch)
        # Measured times and sizes do not depend on these.
        workload = replace(profile.workload, clip_norm=options.recipe.clip_norm, micro_batches=options.micro_batches)
        return replace(profile, workload=workload), slowdown

    def _simulated(self, profile: Profile, lasting: int) -> tuple[Simulation, int]:
        """Plan and simulate; also return the device memory that fully resident training would need."""
        options = self._options
        resident = simulate_plan(profile, everything_resident(profile)).gpu.peak_bytes + lasting
        profile = options.limits.applied(profile, resident, lasting)
        return self._simulated_safely(profile, lasting), resident

    def _simulated_safely(self, profile: Profile, lasting: int) -> Simulation:
        """Simulate the plan of the policy, or, of one that searches, plain training if nothing that moves makes it faster."""
        policy = _Watched(self._options.policy)
        found = simulate_safely(profile, policy, partial(as_executed, pins=self._options.on_gpu), lasting)
        if not policy.searches or profile.hardware.gpus > 1:
            return found
        plain = safety(simulate_plan(profile, replace(everything_resident(profile), policy=found.plan.policy))).safe
        pays = plain is None or plain.iteration_seconds * (1 - LEAST_GAIN) > found.iteration_seconds
        return found if pays or plain is None else plain

    def _profile(self, partition: Partition, batch: Batch) -> tuple[Profile, float]:
        """Return the profile, and the slowdown of a paced device."""
        options = self._options
        if self._ranks is not None:
            self._ranks.exchange("measuring")  # at once on all ranks, which share the machine in training, too
        if options.profile is not None:
            workload = options.profile.workload
            wanted = options.recipe.updates.simulated_by(DTYPES[workload.precision])
            if workload.training.update_name != wanted:
                raise InputError(
                    f"the profile is of training with {workload.training.update_name}, the optimizer is {wanted}: measure a "
                    "profile with it, or leave the profile out"
                )
            profile = with_parameters_of(partition, options.profile)
            _check_states(profile, partition, options.recipe.updates)
            return profile, 1.0
        if self._hardware is None:
            available = options.limits.gpu_bytes or usable_bytes(options.torch_device)
            self._hardware = hardware_of(measure_machine(options.torch_device, available, quick=True, drive=options.drive))
        workload = workload_of(partition, batch.inputs, type(partition.model).__name__)
        updated = replace(workload.training, optimizer=options.recipe.updates.simulated_by(DTYPES[workload.precision]))
        workload = replace(workload, training=updated)
        profile = measure(partition, workload, self._hardware, batch, options.recipe, options.torch_device)
        if options.mode is Mode.PACED:
            return slowed(profile, analytic_profile(workload, self._hardware))
        return profile, 1.0


def _check_states(profile: Profile, partition: Partition, updates: UpdateSettings) -> None:
    """Check that a given profile has the bytes of the states that updates use.

    Raises:
        InputError: it has not.
    """
    for i, (unit, owned) in enumerate(zip(profile.units, partition.owned, strict=False)):
        told, used = profile.state_bytes(i), updates.unit_bytes(owned)
        if unit.trained_parameters == sum(parameter.numel() for parameter in owned) and told != used:
            raise InputError(
                f"the profile has {told} bytes of optimizer states of unit {i}, but this optimizer keeps {used}: measure a "
                "profile with it, or leave the profile out"
            )


@dataclass(slots=True)
class _Watched:
    """A policy that can be stopped whenever it tries its next plan.

    Attributes:
        searches: whether its last plan was found by a search that knows how fast a plan can be.
    """

    policy: Policy
    searches: bool = False

    @property
    def name(self) -> str:
        return self.policy.name

    def plan(self, profile: Profile, judge: Judge) -> Plan:
        plan = self.policy.plan(profile, stoppable(judge))
        self.searches = plan.bound_seconds is not None
        return plan
