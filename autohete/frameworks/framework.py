"""What a training framework has to offer here, and what its files are made of."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from autohete.errors import InputError, check_fields
from autohete.hardware import Hardware
from autohete.plan import Activations, Plan, Processor, UnitPlan
from autohete.policies import System
from autohete.profile import Profile
from autohete.profile.attention import default_attention
from autohete.workload import EAGER_KERNELS, Kernels, Precision, Units, Workload
from autohete.workload.config import model_names, read_model
from autohete.workload.model import Attention
from autohete.workload.optimizers import Optimizer
from autohete.workload.traced import TracedWorkload
from autohete.workload.training import Adapters


@dataclass(frozen=True, slots=True)
class Decided:
    """A plan, and what it is for.

    Args:
        profile: of the workload on the hardware.
        system: the policy with its flags.
        plan: its decisions.
        seconds: simulated time of an iteration.
        gpu_peak_bytes: simulated peak of the GPU's memory.
    """

    profile: Profile
    system: System
    plan: Plan
    seconds: float
    gpu_peak_bytes: int

    @property
    def workload(self) -> Workload:
        """The model, and how it is trained."""
        return self.profile.workload

    @property
    def hardware(self) -> Hardware:
        """One GPU's share of the node."""
        return self.profile.hardware

    @property
    def blocks(self) -> tuple[UnitPlan, ...]:
        """The decisions for transformer blocks, or for their sublayers."""
        return self.plan.units[1:-1]

    @property
    def stays(self) -> bool:
        """Whether parameters, gradients and states stay on the GPU, which updates them."""
        return not any(
            unit.parameters.leaves or unit.gradients.leaves or unit.states.leaves or unit.update.on is not Processor.GPU
            for unit in self.plan.units
        )

    @property
    def recomputes(self) -> bool:
        """Whether all blocks recompute their activations; otherwise all keep them.

        Raises:
            InputError: blocks differ, recompute in part, or offload what they keep.
        """
        decided = {each.activations for each in self.blocks}
        if decided - {Activations.KEEP, Activations.RECOMPUTE} or len(decided) > 1:
            raise InputError("recomputes some blocks or some operations only, where it offers all or none")
        if any(each.results for each in self.blocks):
            raise InputError("keeps results of some products, where it recomputes all or nothing: plan with checkpointing=full")
        if any(each.activations_leave for each in self.blocks):
            raise InputError("offloads activations, which it does not")
        return Activations.RECOMPUTE in decided


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """The model as frameworks name it.

    Args:
        config: the keys of its ``config.json``.
        weights: its name on the Hugging Face Hub, or the folder of its weights; empty if unknown.
    """

    config: Mapping[str, Any]
    weights: str


@dataclass(frozen=True, slots=True)
class Abilities:
    """The ways of training that a framework offers.

    Args:
        optimizers: those that it has.
        precisions: arithmetic.
        lora: low-rank adapters; ``quantised`` base in NF4.
        adapters: how the files hold them in mixed precision; None: as ``Workload.adapters`` says.
        prepared: whether the files hold in fp32 what is not quantised; None: as ``Workload.is_prepared`` says.
        chunked_loss: logits a chunk at a time.
        several_gpus: more than one.
        parallel: GPUs that divide each batch.
        pipelines: stages on different GPUs.
        traced: modules that were traced.
        autocast: formats of ``torch.autocast`` over fp32 parameters.
    """

    optimizers: Collection[Optimizer]
    precisions: Collection[Precision] = tuple(Precision)
    lora: bool = False
    adapters: Adapters | None = None
    prepared: bool | None = None
    quantised: bool = False
    chunked_loss: bool = False
    several_gpus: bool = True
    parallel: bool = False
    pipelines: bool = False
    traced: bool = False
    autocast: Collection[Precision] = ()

    def __post_init__(self) -> None:
        check_fields(self)

    def held(self, workload: Workload) -> Workload:
        """Return the workload with adapters, and what is beside them, as the files hold them where it leaves that open."""
        lora = workload.training.lora
        if lora is None:
            return workload
        if self.adapters is not None and lora.adapters is None and not lora.prepared and workload.precision.is_mixed:
            lora = replace(lora, adapters=self.adapters)
        if lora.prepared is None:
            lora = replace(lora, prepared=self.prepared)
        return replace(workload, training=replace(workload.training, lora=lora))

    def check(self, decided: Decided) -> None:
        """Refuse a training that the framework does not offer.

        Raises:
            InputError: the reason, as the end of a sentence that begins with the framework's name.
        """
        workload, training = decided.workload, decided.workload.training
        if training.optimizer not in self.optimizers:
            raise InputError(f"has no {training.optimizer}: plan with optimizer {' or '.join(self.optimizers)}")
        if workload.precision not in self.precisions:
            raise InputError(f"has no {workload.precision}: plan with precision {' or '.join(self.precisions)}")
        lora = training.lora
        if lora is not None and self.adapters is not None and lora.adapters not in (None, self.adapters):
            raise InputError(f"is written here with adapters {self.adapters}: plan with these")
        if lora is not None and lora.prepared and self.prepared is False:
            raise InputError(
                "does not hold norms, embedding and head in fp32: plan without prepared (in Python, prepared=False)"
            )
        taken = default_attention(decided.hardware.gpu.compute_capability)
        refused = {
            "fp8 products": training.fp8,
            f"autocast to {workload.autocast}": workload.autocast not in (None, *self.autocast),
            "GaLore": training.galore is not None,
            "foreach kernels": training.foreach,
            "adapters": lora is not None and not self.lora,
            "a base in GPTQ's format": lora is not None and lora.gptq,
            "a base in NF4": lora is not None and lora.quantised and not self.quantised,
            "frozen lower blocks": training.last_blocks is not None,
            "attention other than PyTorch's": workload.attention not in (None, taken),
            "masks of padded sequences": workload.attention_mask is not None,
            "documents within a sequence": workload.document_length is not None,
            "a loss in chunks": workload.chunked_loss and not self.chunked_loss,
            "a loss other than its own": workload.loss is not None,
            "that number of chunks of the loss": workload.loss_chunks is not None,
            "sublayers as units": workload.units is Units.SUBLAYER,
            "several GPUs": decided.hardware.gpus > 1 and not self.several_gpus,
            "tensor and context parallelism": decided.hardware.parallelism.divides and not self.parallel,
            "pipelines": decided.plan.is_pipeline and not self.pipelines,
            "modules that were traced": isinstance(workload, TracedWorkload) and not self.traced,
        }
        for what, given in refused.items():
            if given:
                raise InputError(f"is written here without {what}")


def kernels_of(framework: Framework, workload: Workload) -> Kernels:
    """Return what computes the workload's blocks in the framework's files.

    Models of ``transformers`` compute attention eagerly whose scores have a cap or a sink, which PyTorch's fused attention does
    not know (5.23: ``_attn_implementation`` of Gemma 2 and gpt-oss is ``eager``, of all others here ``sdpa``).
    """
    if isinstance(workload, TracedWorkload) or framework.kernels not in EAGER_KERNELS:
        return framework.kernels
    mixers = [workload.block(unit).mixer for unit in range(1, workload.unit_count - 1)]
    eagerly = any(isinstance(one, Attention) and (one.soft_cap or one.sinks) for one in mixers)
    return Kernels.EAGER if eagerly else framework.kernels


def as_run(framework: Framework, workload: Workload) -> Workload:
    """Return the workload with the kernels of the framework, and adapters as its files hold them."""
    return framework.abilities.held(replace(workload, kernels=kernels_of(framework, workload)))


def check_published(decided: Decided, names: Collection[str]) -> None:
    """Refuse a model that is not one of ``names``, as it is published.

    Raises:
        InputError: it is not.
    """
    workload = decided.workload
    if workload.name not in names or workload.name not in model_names():
        raise InputError(f"has no {workload.name}: its models that are written here are {', '.join(names)}")
    published = read_model(workload.name)
    for figure in ("architecture", "transformer_blocks", "vocabulary_size", "tied_embeddings"):
        if getattr(workload, figure) != getattr(published, figure):
            raise InputError(f"has {workload.name} as it is published, without another {figure}")


class Framework(Protocol):
    """A tool that trains, at the version that its files are for.

    Implementations raise :class:`~autohete.errors.InputError` with the end of a sentence that begins with their name.
    """

    @property
    def name(self) -> str:
        """As ``--runnable`` names it."""
        ...

    @property
    def version(self) -> str:
        """The version whose options are written; read there."""
        ...

    @property
    def kernels(self) -> Kernels:
        """What computes a block in the files that are written: nearest to the tool's own modules."""
        ...

    @property
    def abilities(self) -> Abilities:
        """The ways of training that can be written."""
        ...

    def check(self, decided: Decided) -> None:
        """Refuse a plan that the tool cannot run.

        Raises:
            InputError: why.
        """
        ...

    def files(self, decided: Decided, model: ModelFiles) -> dict[str, str]:
        """Return what the tool needs to run the plan: file names and their text.

        Raises:
            InputError: it cannot run it.
        """
        ...

    def command(self, decided: Decided) -> str:
        """Return the command that starts training, run where the files are."""
        ...
