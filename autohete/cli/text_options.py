"""Options of ``autohete train`` and ``autohete profile``: a small GPT, the text it is trained on, and how."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal

from cyclopts import Parameter

from autohete.cli.groups import HARDWARE, MODEL, OUTPUT, POLICY, TRAINING
from autohete.cli.named import HardwareName
from autohete.cli.question import Whole
from autohete.errors import InputError, check_fields
from autohete.workload import Precision, Units, Workload


@Parameter(name="*", group=MODEL)
@dataclass(frozen=True, slots=True, kw_only=True)
class TextModel:
    """A GPT and the text to train it on.

    Parameters
    ----------
    hidden:
        Hidden size.
    blocks:
        Transformer blocks; equal blocks are measured once.
    heads:
        Attention heads; must divide the hidden size.
    sequence_length:
        Tokens per sequence.
    batch_size:
        Sequences that are processed at a time.
    precision:
        bf16 uses fp32 master weights.
    units:
        Smallest part that is planned by itself: block, or sublayer (attention and MLP of each block separately).
    dropout:
        Dropout probability.
    data:
        Text file, or folder of text files. Without it: the source of Python's standard library.
    tokenizer:
        byte, or a vocabulary size to train a tokenizer with.
    """

    hidden: int = 256
    blocks: Whole = 8
    heads: Whole = 4
    sequence_length: Whole = 128
    batch_size: Whole = 4
    precision: Literal["fp32", "bf16"] = "fp32"
    units: Literal["block", "sublayer"] = "block"
    dropout: float = 0.1
    data: str | None = None
    tokenizer: str = "byte"

    def __post_init__(self) -> None:
        check_fields(self)

    def check(self) -> None:
        """Check the values that do not depend on the text, before anything slow.

        Raises:
            InputError: a value is out of range.
        """
        self.workload(1)
        if not 0 <= self.dropout < 1:
            raise InputError(f"dropout is {self.dropout}: it must be at least 0 and less than 1")
        if self.tokenizer != "byte" and not (self.tokenizer.isdecimal() and len(self.tokenizer) < 10):
            raise InputError(f"tokenizer {self.tokenizer!r}: write byte, or a vocabulary size such as 4096 to train one")

    def workload(self, vocabulary_size: int) -> Workload:
        """Return the shape of the model and of a micro-batch."""
        return Workload(
            f"gpt-{self.blocks}x{self.hidden}",
            self.hidden,
            self.blocks,
            self.heads,
            vocabulary_size=vocabulary_size,
            sequence_length=self.sequence_length,
            batch_size=self.batch_size,
            precision=Precision(self.precision),
            units=Units(self.units),
        )


@Parameter(name="*", group=TRAINING)
@dataclass(frozen=True, slots=True, kw_only=True)
class TextTraining:
    """How the GPT is trained. Most options are those of :class:`autohete.Trainer`.

    Parameters
    ----------
    policy:
        NAME[:flag,flag=value].
    gpus:
        Emulate so many GPUs by as many processes on this machine, each with its own batches and budget.
    device:
        emulated: the CPU stands in for a GPU, with a byte-exact memory budget.
    gpu_memory:
        Device memory budget, such as 64MiB; or a share of what fully resident training would need, such as 25%.
    host_memory:
        Budget for the model states on the host.
    pinned_memory:
        Limit of page-locked host memory, such as 64MiB. Default: all of it. The emulated device pins nothing, but plans keep to
        the limit.
    steps:
        Number of iterations.
    micro_batches:
        Batches per iteration; their gradients are accumulated before the update.
    lr:
        Learning rate of AdamW. Default: 1e-3, with --model 2e-5.
    clip_norm:
        Scale gradients so that their global norm is at most this, such as 1.0.
    seed:
        Seed of weights, batches and dropout.
    mode:
        native: as fast as this machine; paced: like --hardware, slowed down so that this machine can keep up.
    hardware:
        A preset's name or a TOML file. Without it: this machine, measured.
    profile:
        A file written by `autohete profile` for this model, used instead of measuring.
    refine:
        Plan again once the first steps have measured how long tasks take.
    drive:
        A folder on a drive, which is the place `nvme`: measured, unless --hardware or --profile is given, and used for what
        rests there. Default: no such place; what rests in one of --hardware or --profile is in the system's temporary folder.
    skip_nonfinite:
        Skip a step whose loss is NaN or infinite, instead of stopping.
    verify:
        Instead of training, compare so many steps with plain PyTorch, bit by bit: losses, gradients, parameters and optimizer
        states. Exit code 1 if anything differs.
    """

    policy: Annotated[str, Parameter(group=POLICY)] = "autohete"
    gpus: Annotated[Whole, Parameter(group=HARDWARE)] = 1
    device: Annotated[Literal["emulated", "cuda"], Parameter(group=HARDWARE)] = "emulated"
    gpu_memory: Annotated[str, Parameter(group=HARDWARE)] = "25%"
    host_memory: Annotated[str | None, Parameter(group=HARDWARE)] = None
    pinned_memory: Annotated[str | None, Parameter(group=HARDWARE)] = None
    steps: Whole = 60
    micro_batches: Whole = 1
    lr: float | None = None
    clip_norm: float | None = None
    seed: Whole = 0
    mode: Annotated[Literal["native", "paced"], Parameter(group=HARDWARE)] = "native"
    hardware: Annotated[HardwareName | None, Parameter(group=HARDWARE)] = None
    profile: Annotated[str | None, Parameter(group=HARDWARE)] = None
    refine: bool = True
    drive: Annotated[str | None, Parameter(group=HARDWARE)] = None
    skip_nonfinite: bool = False
    verify: Whole | None = None

    def __post_init__(self) -> None:
        check_fields(self)

    def check(self) -> None:
        """Check the values that a Trainer does not see, before anything slow.

        Raises:
            InputError: a value is out of range, or two contradict each other.
        """
        if self.gpus < 1:
            raise InputError(f"gpus is {self.gpus}: train on at least 1")
        if self.gpus > 1 and self.device != "emulated":
            raise InputError(f"this command emulates {self.gpus} GPUs: choose the device emulated, or start torchrun yourself")
        if self.steps < 1:
            raise InputError(f"steps is {self.steps}: train at least 1")
        if self.verify is not None and self.verify < 1:
            raise InputError(f"verify is {self.verify}: compare at least 1 step")
        if self.lr is not None and not 0 < self.lr < math.inf:
            raise InputError(f"lr is {self.lr}: it must be positive and finite, such as 1e-3")
        if not 0 <= self.seed < 2**64:
            raise InputError(f"seed is {self.seed}: it must be a whole number from 0 to 2^64 - 1")
        if self.hardware is not None and self.profile is not None:
            raise InputError("a profile includes its hardware: leave out --hardware, or leave out --profile")


@Parameter(name="*", group=MODEL)
@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFolders:
    """A model of Hugging Face to train instead of a small GPT.

    Parameters
    ----------
    model:
        Folder with config.json, safetensors and tokenizer of a causal language model. Needs --data and --out.
    out:
        New folder for the trained model, in the same form.
    """

    model: str | None = None
    out: str | None = None

    def __post_init__(self) -> None:
        check_fields(self)

    def check(self, options: TextModel, training: TextTraining, *, writes: bool) -> None:
        """Check that the options belong together.

        Args:
            options: those of the GPT, which the folder replaces.
            training: how it is trained.
            writes: whether the model is to be written.

        Raises:
            InputError: names the option to give or to leave out.
        """
        if self.model is None:
            if self.out is not None:
                raise InputError("--out is for a model that --model names: leave it out, or give --model")
            return
        of_gpt = ("hidden", "blocks", "heads", "precision", "units", "dropout", "tokenizer")
        for name in of_gpt:
            if getattr(options, name) != getattr(PLAIN_MODEL, name):
                raise InputError(f"--{name} is of the small GPT; with --model the folder determines it: leave it out")
        if options.data is None:
            raise InputError("--model needs a text to train on: give --data, a text file or a folder of them")
        if training.profile is not None:
            raise InputError("a profile is of the small GPT, and cannot be used with --model: leave --profile out")
        if writes and self.out is None:
            raise InputError("--model needs --out: give a new folder for the trained model")


@Parameter(name="*", group=OUTPUT)
@dataclass(frozen=True, slots=True, kw_only=True)
class SavingOptions:
    """How to save a training, and to continue it.

    Parameters
    ----------
    save:
        Folder for checkpoints. SIGINT, SIGTERM and SIGHUP (Ctrl-C, kill, a closed terminal) save one before the program ends,
        and so does the last step.
    save_every:
        Also save after this many steps, again and again; the last three checkpoints stay.
    resume:
        Continue from the latest checkpoint in --save, bit-identically, up to --steps in all.
    """

    save: str | None = None
    save_every: Whole | None = None
    resume: bool = False

    def __post_init__(self) -> None:
        check_fields(self)

    def check(self) -> None:
        """Check that the options belong together.

        Raises:
            InputError: names the option to give or to leave out.
        """
        if self.save is None:
            for name, given in (("--save-every", self.save_every is not None), ("--resume", self.resume)):
                if given:
                    raise InputError(f"{name} needs --save: give a folder for checkpoints")
        if self.save is not None and not self.save:
            raise InputError("--save is empty: give a folder for checkpoints")
        if self.save_every is not None and self.save_every < 1:
            raise InputError(f"save_every is {self.save_every}: it must be at least 1 step")


@Parameter(name="*", group=OUTPUT)
@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineFiles:
    """The files that a training writes; None: it is not written.

    Parameters
    ----------
    trace:
        Write the measured timeline for ui.perfetto.dev to this file.
    predicted_trace:
        Write the simulated timeline; `autohete compare` explains how the two differ.
    gantt:
        Draw one iteration, simulated above and measured below, to this .png, .pdf or .svg file.
    """

    trace: str | None = None
    predicted_trace: str | None = None
    gantt: str | None = None

    @property
    def by_option(self) -> dict[str, str]:
        """The files to write, by option."""
        named = {"--trace": self.trace, "--predicted-trace": self.predicted_trace, "--gantt": self.gantt}
        return {option: path for option, path in named.items() if path is not None}


#: The defaults.
PLAIN_MODEL, PLAIN_TRAINING, NO_FILES = TextModel(), TextTraining(), TimelineFiles()
NO_FOLDERS, NO_SAVING = ModelFolders(), SavingOptions()
