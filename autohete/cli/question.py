"""Options that describe a training, shared by every command that simulates one."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from autohete.errors import InputError, check_fields
from autohete.workload import Kernels, Precision, Units, Workload, named_workload

if TYPE_CHECKING:
    from autohete.profile import Profile

DEFAULT_HARDWARE = "a100-40gb-epyc7713"


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Figures of a workload; None leaves a figure as it is. Each field is named as in ``Workload``: one more makes an option.

    Parameters
    ----------
    hidden_size:
        Hidden size; with --blocks and --heads a shape of your own.
    transformer_blocks:
        Transformer blocks; embedding and head come on top.
    heads:
        Attention heads; must divide the hidden size.
    vocabulary_size:
        Rows of the embedding.
    sequence_length:
        Tokens of a sequence.
    batch_size:
        Sequences that the GPU computes with at a time.
    micro_batches:
        Batches per iteration, whose gradients are accumulated before the update.
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

    def __post_init__(self) -> None:
        check_fields(self)

    def changes(self) -> dict[str, object]:
        """The figures that were given."""
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in given.items() if value is not None}

    def workload(self, name: str | None) -> Workload:
        """The named workload with these figures; without a name, one of this shape."""
        changes = self.changes()
        if name is not None:
            return named_workload(name, **changes)
        needed = {"--hidden": self.hidden_size, "--blocks": self.transformer_blocks, "--heads": self.heads}
        missing = [option for option, value in needed.items() if value is None]
        if missing:
            raise InputError(
                f"what to train is missing: give --workload NAME (such as gpt-10b), or a shape with {' '.join(missing)}"
            )
        return Workload(f"{self.transformer_blocks}x{self.hidden_size}", **changes)  # type: ignore[arg-type]


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A training: a workload on a hardware, or what was measured of both.

    Parameters
    ----------
    workload:
        A named workload (`autohete presets` lists them); the options below change single figures of it.
    profile:
        A file written by `autohete profile`: measured times and sizes instead of a workload and a hardware.
    hardware:
        A preset's name or a TOML file.
    set_:
        KEY=VALUE changes a hardware figure, with its unit: links.h2d.bandwidth=50GB/s. Repeatable.
    gpu_memory:
        GPU memory, such as 16GiB; short for --set gpu.memory=16GiB.
    host_memory:
        Host memory, such as 64GiB.
    pinned_memory:
        What of the host's memory may be page-locked, such as 32GiB; without it all of it.
    gpus:
        GPUs that train together, each with a batch of its own; needs hardware that says what joins them.
    """

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
        """The profile in the file, or the analytic one of the workload on the hardware.

        Raises:
            InputError: something is missing, contradictory or invalid.
        """
        if self.profile is not None:
            return self._measured(self.profile)
        from autohete.hardware import load_hardware
        from autohete.profile import analytic_profile

        short = {"gpu.memory": self.gpu_memory, "host.memory": self.host_memory, "host.pinned_memory": self.pinned_memory}
        overrides: dict[str, str] = {}
        for item in [*self.set_, *(f"{key}={text}" for key, text in short.items() if text is not None)]:
            key, value = _key_value(item)
            if key in overrides:
                raise InputError(f"{key} is set twice, to {overrides[key]!r} and {value!r}: say it once")
            overrides[key] = value
        hardware = load_hardware(self.hardware, overrides).shared_by(self.gpus)
        return analytic_profile(self.shape.workload(self.workload), hardware)

    def _measured(self, path: str) -> Profile:
        from autohete.profile.file import read_profile
        from autohete.quantities import parse_quantity

        if self.workload is not None or self.shape.changes() or self.set_ or self.hardware != DEFAULT_HARDWARE:
            raise InputError(
                "a profile holds its workload and its hardware: leave out --workload, its shape, --hardware and --set, or "
                "leave out --profile"
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


def _key_value(item: str) -> tuple[str, str]:
    key, equals, value = item.partition("=")
    if not (key and equals and value):
        raise InputError(f"--set {item!r} is not KEY=VALUE: write it such as links.h2d.bandwidth=50GB/s")
    return key, value


#: The defaults.
BLANK = Question()
