"""Options that describe what is trained and where, shared by all commands that simulate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter, Token

from autohete.cli.groups import HARDWARE, MODEL, TRAINING
from autohete.cli.named import HardwareName
from autohete.errors import InputError, check_fields
from autohete.workload import AttentionMask, FusedAttention, Kernels, LossKernels, Precision, Units, Workload, named_workload
from autohete.workload.config import read_model
from autohete.workload.optimizers import Optimizer
from autohete.workload.training import Adapters, GaLore, Lora, Training

if TYPE_CHECKING:
    from autohete.answer.site import Site
    from autohete.hardware import Hardware, Parallelism
    from autohete.profile import Profile

DEFAULT_HARDWARE = "a100-40gb-epyc7713"
#: Host memory of the operating system and other programs; see :data:`autohete.answer.SYSTEM_BYTES`.
SYSTEM_MEMORY = "4GiB"
#: Values of ``Optimizer``, written out: the parser would spell names of members its own way.
_OptimizerName = Literal[
    "adamw",
    "adamw_bf16",
    "adamw_pure_bf16",
    "adamw8bit",
    "adamw8bit_pure_bf16",
    "sgd",
    "sgd_momentum",
    "adafactor",
    "adafactor_pure_bf16",
    "muon",
    "muon_pure_bf16",
    "came",
    "lomo",
    "adalomo",
]
#: Options that together are one field of ``Workload``.
_TRAINING = (
    "optimizer",
    "foreach",
    "galore",
    "galore_gap",
    "lora",
    "lora_targets",
    "qlora",
    "adapters",
    "prepared",
    "train_last",
)
#: Those that describe adapters.
_OF_ADAPTERS = ("lora_targets", "qlora", "adapters", "prepared")
#: Options that are short for a hardware figure.
SHORT_FOR = {"gpu-memory": "gpu.memory", "host-memory": "host.memory", "pinned-memory": "host.pinned_memory"}


def _whole(_: object, tokens: Sequence[Token]) -> int:
    """Read a whole number; the parser by itself would round 1.5 to 2."""
    text = tokens[0].value
    number, _, fraction = text.partition(".")
    try:
        if fraction.strip("0"):
            raise ValueError
        return int(number)
    except ValueError:
        raise ValueError(f"{text[:40]!r} is not a whole number, such as 8") from None


def _wholes(option: str, text: str) -> tuple[int, ...]:
    """Read whole numbers with commas between them."""
    try:
        return tuple([int(part) for part in text.split(",")])
    except ValueError:
        raise InputError(f"{option} is {text[:40]!r}: give whole numbers with commas between, such as 50,700,4096") from None


#: The value of an option that counts something.
Whole = Annotated[int, Parameter(converter=_whole)]


@Parameter(name="*", group=TRAINING)
@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Figures of a workload; None leaves a figure unchanged. Fields are named as in ``Workload``; each becomes an option.

    Parameters
    ----------
    hidden_size:
        Hidden size; with --blocks and --heads it defines your own shape.
    transformer_blocks:
        Transformer blocks, not counting embedding and head.
    heads:
        Attention heads; must divide the hidden size.
    vocabulary_size:
        Rows of the embedding.
    sequence_length:
        Tokens per sequence.
    batch_size:
        Sequences that the GPU processes at a time.
    micro_batches:
        Batches per iteration; their gradients are accumulated before the update.
    clip_norm:
        Scale gradients so that their global norm is at most this, such as 1.0. Without it they are not clipped.
    precision:
        bf16 and fp16 are mixed precision with fp32 master weights; fp8 is bf16 with the products of blocks in 8 bit.
    autocast:
        Train under torch.autocast: parameters and gradients are in fp32, matrix products and attention in bf16 or fp16 (Trainer
        with bf16=True and a model in fp32, nanoGPT, Lightning). Implies --precision fp32.
    tied_embeddings:
        Whether the head uses the embedding's matrix.
    kernels:
        Implementation of a block: fused (Megatron with FlashAttention), lean (the same, but backward makes results of norms and
        of the activation function again), fused_softmax (attention scores in memory), eager (transformers, a kernel per
        operation), eager_flash (the same with PyTorch's attention), fused_norms (the same with fused norms and rotations, as
        in fms-acceleration) or liger (with Liger Kernel; --chunked-loss is its loss).
    attention:
        Implementation of attention where scores are not in memory: FlashAttention fa1, fa2 or fa3, cudnn, triton (of
        2023) or efficient (xFormers). Default: what PyTorch takes on the GPU.
    attention_mask:
        Attention gets a mask as a tensor, as transformers makes one of padded sequences, so that it computes all scores: bool
        (transformers 5, a copy in each block) or additive (transformers 4, shared by all blocks). For eager_flash, fused_norms
        and liger kernels.
    units:
        Smallest part that is planned by itself: block, or sublayer (attention and MLP of each block).
    loss:
        Cross-entropy of all logits at a time: plain (PyTorch's, in the format of the logits), shifted (the same, of a copy
        without last tokens: transformers' GPT-2 up to 4.45), fp32 (of a copy in fp32: transformers from 4.49), fp32_shifted
        (4.46 to 4.48), fp32_output (other decoders up to 4.45), megatron (in fp32, in place) or in_place (one kernel that
        overwrites the logits). Default: that of the kernels.
    chunked_loss:
        Compute the logits in chunks of tokens, as Liger Kernel does.
    loss_chunks:
        Number of chunks, instead of Liger Kernel's. Implies --chunked-loss.
    sample_lengths:
        Tokens of samples where they differ: some evenly spaced quantiles from the shortest to the longest, such as 50,700,4096.
        A batch is padded to its longest sample. Times and peaks are those of whole sequences, what PyTorch reserves is not.
    expandable_segments:
        PyTorch's allocator runs with expandable_segments:True, with which it reserves little more than is allocated.
    document_length:
        Tokens per document, of which each sequence packs several; attention stays within a document.
    optimizer:
        adamw (states in fp32), adamw_bf16 (masters and states in bf16), adamw_pure_bf16 (states in bf16, no masters),
        adamw8bit, sgd, sgd_momentum, adafactor, muon, came, or without masters adamw8bit_pure_bf16, adafactor_pure_bf16,
        muon_pure_bf16, lomo, adalomo.
    foreach:
        The GPU updates with torch's foreach kernels, as torch.optim.AdamW does unless it is fused; adamw and adamw_pure_bf16.
    galore:
        Rank to which GaLore projects the gradients of linear layers of blocks, such as 1024; with adamw or adamw8bit, also
        without masters.
    galore_gap:
        Updates between two decompositions of a gradient, which give GaLore's projectors. Default: 200.
    lora:
        Rank of low-rank adapters, such as 16; all other parameters are frozen.
    lora_targets:
        Linear layers that have adapters: all, attention, mlp, or names such as q_proj,v_proj.
    qlora:
        Keep linear layers of blocks in 4 bits (NF4); needs --lora.
    adapters:
        How adapters are held: plain (as other trained parameters), cast (PEFT: in fp32, with inputs cast to it) or autocast
        (the same under autocast, as in transformers' Trainer with bf16; the default with its kernels).
    prepared:
        Embedding, head, norms and the residual stream are in fp32 (PEFT's prepare_model_for_kbit_training); the default with
        --qlora under autocast.
    train_last:
        Train only this many of the last transformer blocks, and the head; all other parameters are frozen.
    """

    hidden_size: Annotated[Whole | None, Parameter(name="--hidden", group=MODEL)] = None
    transformer_blocks: Annotated[Whole | None, Parameter(name="--blocks", group=MODEL)] = None
    heads: Annotated[Whole | None, Parameter(group=MODEL)] = None
    vocabulary_size: Annotated[Whole | None, Parameter(name="--vocabulary", group=MODEL)] = None
    sequence_length: Whole | None = None
    batch_size: Whole | None = None
    micro_batches: Whole | None = None
    clip_norm: float | None = None
    precision: Literal["bf16", "fp16", "fp32", "fp8"] | None = None
    autocast: Literal["bf16", "fp16"] | None = None
    tied_embeddings: Annotated[bool | None, Parameter(group=MODEL)] = None
    kernels: Kernels | None = None
    attention: FusedAttention | None = None
    attention_mask: AttentionMask | None = None
    units: Units | None = None
    loss: LossKernels | None = None
    chunked_loss: bool | None = None
    loss_chunks: Whole | None = None
    sample_lengths: str | None = None
    expandable_segments: bool | None = None
    document_length: Annotated[Whole | None, Parameter(name="--documents")] = None
    optimizer: _OptimizerName | None = None
    foreach: bool | None = None
    galore: Whole | None = None
    galore_gap: Whole | None = None
    lora: Whole | None = None
    lora_targets: str | None = None
    qlora: bool | None = None
    adapters: Adapters | None = None
    prepared: bool | None = None
    train_last: Whole | None = None

    def __post_init__(self) -> None:
        check_fields(self)

    def changes(self) -> dict[str, object]:
        """Return the figures that were given."""
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        changed = {name: value for name, value in given.items() if value is not None}
        if [name for name in _TRAINING if changed.pop(name, None) is not None]:
            changed["training"] = self.training()
        if self.sample_lengths is not None:
            changed["sample_lengths"] = _wholes("--sample-lengths", self.sample_lengths)
        if self.loss_chunks is not None:
            changed.setdefault("chunked_loss", True)
        if self.precision is not None:
            changed["precision"] = Precision.BF16 if self.precision == "fp8" else Precision(self.precision)
        if self.autocast is not None:
            changed["autocast"] = Precision(self.autocast)
            changed.setdefault("precision", Precision.FP32)
        if self.precision == "fp8":
            changed["training"] = self.training()
        return changed

    def training(self) -> Training:
        """Return how the model is trained."""
        optimizer, fp8 = Optimizer(self.optimizer or Optimizer.ADAMW), self.precision == "fp8"
        described = next((name for name in _OF_ADAPTERS if getattr(self, name)), None)
        if self.lora is None and described:
            raise InputError(
                f"--{described.replace('_', '-')} describes adapters, but there are none: give --lora RANK as well, such as "
                "--lora 16"
            )
        if self.galore is None and self.galore_gap is not None:
            raise InputError(
                "--galore-gap describes GaLore, but there is none: give --galore RANK as well, such as --galore 1024"
            )
        galore = None if self.galore is None else GaLore(self.galore, 200 if self.galore_gap is None else self.galore_gap)
        foreach = bool(self.foreach)
        if self.lora is None:
            return Training(last_blocks=self.train_last, optimizer=optimizer, fp8=fp8, galore=galore, foreach=foreach)
        targets = tuple(name.strip() for name in ("all" if self.lora_targets is None else self.lora_targets).split(","))
        lora = Lora(self.lora, targets, bool(self.qlora), self.adapters, self.prepared)
        return Training(lora, self.train_last, optimizer, fp8, galore=galore, foreach=foreach)

    def workload(self, name: str | None, model: str | None = None) -> Workload:
        """Return the named workload, or the model of a ``config.json``, with these figures changed; without either, one of this
        shape.
        """
        changes = self.changes()
        if model is not None:
            if name is not None:
                raise InputError(f"--workload {name} and --model {model} are two models: give one")
            fixed = [option for option, value in (("--hidden", self.hidden_size), ("--heads", self.heads)) if value is not None]
            if fixed:
                raise InputError(f"{' and '.join(fixed)} would change what the blocks of --model {model} are: leave it out")
            return replace(read_model(model), **changes)  # type: ignore[arg-type]
        if name is not None:
            return named_workload(name, **changes)
        needed = {"--hidden": self.hidden_size, "--blocks": self.transformer_blocks, "--heads": self.heads}
        missing = [option for option, value in needed.items() if value is None]
        if missing:
            raise InputError(
                "no workload: give --model NAME|FILE (such as llama-3.1-8b), --module FILE.py:FUNCTION, --workload NAME (such "
                f"as gpt-10b), or a shape with {' '.join(missing)}"
            )
        return Workload(f"{self.transformer_blocks}x{self.hidden_size}", **changes)  # type: ignore[arg-type]


@Parameter(name="*", group=HARDWARE)
@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """The subject of a simulation: a workload on a hardware, or a measured profile.

    Parameters
    ----------
    model:
        A named model (`autohete presets models` lists them), also as the Hugging Face Hub names it, such as Qwen/Qwen3-8B; one
        in the Hub's local cache; a config.json, or a folder with it; or a table written by `autohete trace`. The options below
        change single figures.
    module:
        Trace any module on the CPU, without weights: FILE.py:FUNCTION that returns it, a model type or class of transformers
        with changed keys (NAME[:key=value,...]), or a config.json. Needs torch. `autohete trace` writes the table for --model.
    block_names:
        Names of the blocks of --module, such as encoder.layer,decoder.layer, if they are not found by themselves.
    workload:
        A named GPT-like workload of the paper (`autohete presets workloads` lists them).
    profile:
        A file written by `autohete profile`: measured times and sizes instead of a workload and a hardware.
    hardware:
        A preset's name (`autohete presets hardware` lists them) or a part of it, such as 4090; a TOML file, or the profile
        (.json) of a machine.
    set_:
        Change a hardware figure: KEY=VALUE, with its unit, such as links.h2d.bandwidth=50GB/s. Repeatable.
    gpu_memory:
        GPU memory, such as 16GiB; short for --set gpu.memory=16GiB.
    host_memory:
        Host memory, such as 64GiB.
    pinned_memory:
        Limit of page-locked host memory, such as 32GiB. Default: all of it.
    system_memory:
        Host memory that is left to the system.
    gpus:
        GPUs that train together, each with its own batch. If the hardware has no table [interconnect], they are assumed to be
        joined over PCIe without peer-to-peer.
    parallel:
        How they divide each batch: tp=N (N GPUs share the tensors of each block, as in Megatron), with sp=off without sequence
        parallelism, and cp=N (N GPUs share each sequence, and pass keys and values on in a ring, or with comm=a2a exchange
        heads as DeepSpeed Ulysses does), such as tp=4,cp=2. The other GPUs have batches of their own; dp=N says how many.
        ep=N of those with tokens of their own share the experts of a block. pp=N have stages of a pipeline, which policies
        such as pipeline plan. Without --gpus as many as these take.
    """

    model: Annotated[str | None, Parameter(group=MODEL)] = None
    module: Annotated[str | None, Parameter(group=MODEL)] = None
    block_names: Annotated[str | None, Parameter(group=MODEL)] = None
    workload: Annotated[str | None, Parameter(group=MODEL)] = None
    shape: Shape = Shape()
    profile: Annotated[str | None, Parameter(group=MODEL)] = None
    hardware: HardwareName = DEFAULT_HARDWARE
    set_: Annotated[tuple[str, ...], Parameter(name="--set", negative=(), show_default=False)] = ()
    gpu_memory: str | None = None
    host_memory: str | None = None
    pinned_memory: str | None = None
    system_memory: str = SYSTEM_MEMORY
    gpus: Whole | None = None
    parallel: str | None = None

    def answerable(self) -> Profile:
        """Return the measured profile, or the analytic profile of the workload, on the hardware less the system's memory.

        Raises:
            InputError: something is missing, contradictory or invalid.
        """
        from autohete.answer.site import without_system

        whole = self.with_system()
        return replace(whole, hardware=without_system(whole.hardware, self.system_bytes()))

    def with_system(self) -> Profile:
        """Return the profile on the whole hardware, the system's memory included.

        Raises:
            InputError: something is missing, contradictory or invalid.
        """
        if self.profile is not None:
            return self._measured(self.profile)
        from autohete.profile import analytic_profile

        return analytic_profile(self.of_workload(), self._whole_hardware())

    @property
    def names_workload(self) -> bool:
        """Whether a model is named, or figures of one are given."""
        return any(one is not None for one in (self.model, self.module, self.workload)) or bool(self.shape.changes())

    @property
    def searches_batch(self) -> bool:
        """Whether nothing names a batch: neither an option, nor the paper's workloads, nor a profile."""
        return self.shape.batch_size is None and self.workload is None and self.profile is None

    def of_workload(self) -> Workload:
        """Return the workload. A measured profile has its own."""
        if self.module is not None:
            if self.workload is not None or self.model is not None:
                raise InputError("--module is a model of its own: leave out --model and --workload")
            return self._of_module(self.module)
        if self.block_names is not None:
            raise InputError("--block-names are those of a module: give --module as well, or leave it out")
        return self.shape.workload(self.workload, self.model)

    def _of_module(self, module: str) -> Workload:
        from autohete.cli.trace_module import traced

        shape = self.shape
        precision = None if shape.precision in (None, "fp8") else Precision(shape.precision)
        table = traced(module, shape.sequence_length, precision, shape.kernels, shape.batch_size, self.block_names)
        return replace(table, **shape.changes())  # type: ignore[arg-type]

    def on_hardware(self) -> Hardware:
        """Return one GPU's share of the hardware, less the system's memory. A measured profile has its own."""
        from autohete.answer.site import without_system

        return without_system(self._whole_hardware(), self.system_bytes())

    def _whole_hardware(self) -> Hardware:
        from autohete.hardware import load_hardware

        return load_hardware(self.hardware, self.overrides()).shared_by(*self.divided())

    def divided(self) -> tuple[int, Parallelism]:
        """Return the number of GPUs, and how they divide each batch.

        Raises:
            InputError: they are contradictory or invalid.
        """
        from autohete.hardware import parse_parallel

        return parse_parallel(self.parallel, self.gpus)

    def ranks(self) -> int:
        """Return the number of GPUs, or of groups that divide tensors, that have all parameters."""
        gpus, parallelism = self.divided()
        return parallelism.ranks(gpus)

    def site(self) -> Site:
        """Return where training runs, by name."""
        from autohete.answer.site import Site

        gpus, parallelism = self.divided()
        return Site(self.hardware, self.overrides(), gpus, self.system_bytes(), parallelism)

    def system_bytes(self) -> int:
        """Return the host memory of the node that is left to the system."""
        from autohete.quantities import parse_quantity

        return round(parse_quantity(self.system_memory, "bytes"))

    def overrides(self) -> dict[str, str]:
        """Return the hardware figures that were given: dotted key -> text with unit.

        Raises:
            InputError: one is given twice, or is not KEY=VALUE.
        """
        short = zip(SHORT_FOR.values(), (self.gpu_memory, self.host_memory, self.pinned_memory), strict=True)
        overrides: dict[str, str] = {}
        for item in [*self.set_, *(f"{key}={text}" for key, text in short if text is not None)]:
            key, value = key_value(item)
            if key in overrides:
                raise InputError(f"{key} is set twice, to {overrides[key]!r} and {value!r}: set it once")
            overrides[key] = value
        return overrides

    def _measured(self, path: str) -> Profile:
        from autohete.profile.profile_file import read_profile
        from autohete.quantities import parse_quantity

        if (
            self.workload is not None
            or self.model is not None
            or self.module is not None
            or self.shape.changes()
            or self.set_
            or self.hardware != DEFAULT_HARDWARE
        ):
            raise InputError(
                "a profile includes its workload and hardware: leave out --model, --module, --workload, its shape, --hardware "
                "and --set, or leave out --profile"
            )
        if self.gpus not in (None, 1) or self.parallel is not None:
            raise InputError("a profile was measured on one GPU: leave out --gpus and --parallel, or leave out --profile")
        profile = read_profile(path)
        gpu, host = profile.hardware.gpu, profile.hardware.host
        if self.gpu_memory is not None:
            gpu = replace(gpu, memory_bytes=round(parse_quantity(self.gpu_memory, "bytes")) + gpu.reserved_bytes)
        if self.host_memory is not None:
            host = replace(host, memory_bytes=round(parse_quantity(self.host_memory, "bytes")))
        if self.pinned_memory is not None:
            host = replace(host, pinned_bytes=round(parse_quantity(self.pinned_memory, "bytes")))
        return replace(profile, hardware=replace(profile.hardware, gpu=gpu, host=host))


def key_value(item: str) -> tuple[str, str]:
    """Split an item of ``--set``, ``KEY=VALUE``."""
    key, equals, value = item.partition("=")
    if not (key and equals and value):
        raise InputError(f"--set {item!r} is not KEY=VALUE: write it such as links.h2d.bandwidth=50GB/s")
    return key, value


#: The defaults.
BLANK = Question()
