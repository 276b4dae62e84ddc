"""Options that describe what is trained and where, shared by all commands that simulate."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from autohete.errors import InputError, check_fields
from autohete.workload import Kernels, Precision, Units, Workload, named_workload
from autohete.workload.config import read_model

if TYPE_CHECKING:
    from autohete.profile import Profile

DEFAULT_HARDWARE = "a100-40gb-epyc7713"
#: Options that are short for a hardware figure.
SHORT_FOR = {"gpu-memory": "gpu.memory", "host-memory": "host.memory", "pinned-memory": "host.pinned_memory"}


@Parameter(name="*")
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
        bf16 and fp16 are mixed precision with fp32 master weights.
    tied_embeddings:
        Whether the head uses the embedding's matrix.
    kernels:
        What computes a block: fused (Megatron with FlashAttention), fused_softmax (attention scores in memory), eager
        (Hugging Face GPT-2, a kernel per operation) or eager_flash (the same with PyTorch's attention).
    units:
        What is planned as one: block, or sublayer (attention and MLP of each block apart).
    chunked_loss:
        Logits are made, used and dropped some tokens at a time, as Liger Kernel does.
    """

    hidden_size: Annotated[int | None, Parameter(name="--hidden")] = None
    transformer_blocks: Annotated[int | None, Parameter(name="--blocks")] = None
    heads: int | None = None
    vocabulary_size: Annotated[int | None, Parameter(name="--vocabulary")] = None
    sequence_length: int | None = None
    batch_size: int | None = None
    micro_batches: int | None = None
    clip_norm: float | None = None
    precision: Precision | None = None
    tied_embeddings: bool | None = None
    kernels: Kernels | None = None
    units: Units | None = None
    chunked_loss: bool | None = None

    def __post_init__(self) -> None:
        check_fields(self)

    def changes(self) -> dict[str, object]:
        """Return the figures that were given."""
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in given.items() if value is not None}

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
                "no workload: give --model NAME|FILE (such as llama-3.1-8b), --workload NAME (such as gpt-10b), or a shape "
                f"with {' '.join(missing)}"
            )
        return Workload(f"{self.transformer_blocks}x{self.hidden_size}", **changes)  # type: ignore[arg-type]


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What to simulate: a workload on a hardware, or a measured profile.

    Parameters
    ----------
    model:
        A named model (`autohete presets` lists them), or a config.json as it lies beside a model's weights; the options below
        change single figures.
    workload:
        A named GPT-like workload of the paper (`autohete presets` lists them).
    profile:
        A file written by `autohete profile`: measured times and sizes instead of a workload and a hardware.
    hardware:
        A preset's name or a TOML file.
    set_:
        Change a hardware figure: KEY=VALUE, with its unit, such as links.h2d.bandwidth=50GB/s. Repeatable.
    gpu_memory:
        GPU memory, such as 16GiB; short for --set gpu.memory=16GiB.
    host_memory:
        Host memory, such as 64GiB.
    pinned_memory:
        What of the host's memory may be page-locked, such as 32GiB; without it all of it.
    gpus:
        GPUs that train together, each with its own batch; needs hardware with a table [interconnect].
    """

    model: str | None = None
    workload: str | None = None
    shape: Shape = Shape()
    profile: str | None = None
    hardware: str = DEFAULT_HARDWARE
    set_: Annotated[tuple[str, ...], Parameter(name="--set", negative=(), show_default=False)] = ()
    gpu_memory: str | None = None
    host_memory: str | None = None
    pinned_memory: str | None = None
    gpus: int = 1

    def answerable(self) -> Profile:
        """Return the measured profile, or the analytic profile of the workload on the hardware.

        Raises:
            InputError: something is missing, contradictory or invalid.
        """
        if self.profile is not None:
            return self._measured(self.profile)
        from autohete.hardware import load_hardware
        from autohete.profile import analytic_profile

        short = zip(SHORT_FOR.values(), (self.gpu_memory, self.host_memory, self.pinned_memory), strict=True)
        overrides: dict[str, str] = {}
        for item in [*self.set_, *(f"{key}={text}" for key, text in short if text is not None)]:
            key, value = key_value(item)
            if key in overrides:
                raise InputError(f"{key} is set twice, to {overrides[key]!r} and {value!r}: set it once")
            overrides[key] = value
        hardware = load_hardware(self.hardware, overrides).shared_by(self.gpus)
        return analytic_profile(self.shape.workload(self.workload, self.model), hardware)

    def _measured(self, path: str) -> Profile:
        from autohete.profile.file import read_profile
        from autohete.quantities import parse_quantity

        if (
            self.workload is not None
            or self.model is not None
            or self.shape.changes()
            or self.set_
            or self.hardware != DEFAULT_HARDWARE
        ):
            raise InputError(
                "a profile includes its workload and hardware: leave out --model, --workload, its shape, --hardware and "
                "--set, or leave out --profile"
            )
        if self.gpus != 1:
            raise InputError("a profile was measured on one GPU: leave out --gpus, or leave out --profile")
        found = read_profile(path)
        gpu, host = found.hardware.gpu, found.hardware.host
        if self.gpu_memory is not None:
            gpu = replace(gpu, memory_bytes=round(parse_quantity(self.gpu_memory, "bytes")) + gpu.reserved_bytes)
        if self.host_memory is not None:
            host = replace(host, memory_bytes=round(parse_quantity(self.host_memory, "bytes")))
        if self.pinned_memory is not None:
            host = replace(host, pinned_bytes=round(parse_quantity(self.pinned_memory, "bytes")))
        return replace(found, hardware=replace(found.hardware, gpu=gpu, host=host))


def key_value(item: str) -> tuple[str, str]:
    """Split an item of ``--set``, ``KEY=VALUE``."""
    key, equals, value = item.partition("=")
    if not (key and equals and value):
        raise InputError(f"--set {item!r} is not KEY=VALUE: write it such as links.h2d.bandwidth=50GB/s")
    return key, value


#: The defaults.
BLANK = Question()
