"""``autohete train`` and ``autohete profile``: train or measure a model on text, and write tables and files."""

from __future__ import annotations

import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, fields
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from autohete.cli.outputs import check_outputs
from autohete.cli.saved_training import SavedTraining
from autohete.cli.text_options import NO_FILES, ModelFolders, SavingOptions, TextModel, TextTraining, TimelineFiles
from autohete.errors import InputError
from autohete.hardware import load_hardware
from autohete.profile.profile_file import read_profile, write_profile
from autohete.quantities import format_bytes, format_seconds, parse_quantity
from autohete.report.tables import console, print_text, table, units_text
from autohete.report.terminal import print_iteration
from autohete.workload import Workload

if TYPE_CHECKING:
    from autohete.execution.trace import Trace
    from autohete.train.text_data import TextData
    from autohete.train.trainer import Trainer

#: Interval between updates of the displayed lane utilization.
_REFRESH_SECONDS = 0.5
_MOST_VALIDATION_BATCHES = 8
#: Bytes per parameter on this machine: weight, gradient and moments; only the weight; two copies of the weight.
_TRAINED, _HELD, _MEASURED = 16, 4, 8
#: The model, and two copies that are trained; gradients of both are kept.
_VERIFIED = _HELD + 2 * (_TRAINED + 4)
#: Differences that are listed.
_MOST_DIFFERENCES = 20


@dataclass(frozen=True, slots=True)
class _Subject:
    """What is trained on what.

    Args:
        model: the model.
        data: the text.
        name: of the model.
        kind: its number type and units, in words.
        blocks: name of its list of blocks; None: it is found.
    """

    model: Any
    data: TextData
    name: str
    kind: str
    blocks: str | None

    @property
    def parameters(self) -> int:
        """Number of parameters."""
        return sum(parameter.numel() for parameter in self.model.parameters())


def _gpt(
    options: TextModel, bytes_per_parameter: int, seed: int = 0, micro_batches: int = 1, rank: int = 0
) -> tuple[_Subject, Workload]:
    """Build the small GPT with fresh weights, its data and its shape.

    Args:
        options: shape and text.
        bytes_per_parameter: bytes of this machine's memory that each parameter will take.
        seed: seed of weights, batches and dropout.
        micro_batches: number of micro-batches in a step.
        rank: has batches and dropout of its own.

    Raises:
        InputError: the shape, the text or the tokenizer is invalid, or the model is too large for this machine.
    """
    options.check()
    from autohete.train.gpt import BLOCKS, seeded_gpt
    from autohete.train.text_data import ByteTokenizer, TextData, Tokenizer, read_text, train_tokenizer

    text = read_text(options.data)
    tokenizer: Tokenizer = ByteTokenizer() if options.tokenizer == "byte" else train_tokenizer(text, int(options.tokenizer))
    workload = options.workload(tokenizer.vocabulary_size)
    _check_memory(workload.parameters, bytes_per_parameter)
    own_seed = (seed + rank) % 2**64
    data = TextData(text, tokenizer, options.sequence_length, options.batch_size * micro_batches, seed=own_seed)
    model, kind = seeded_gpt(workload, options.dropout, seed, own_seed), f"{workload.precision}{units_text(workload)}"
    return _Subject(model, data, workload.name, kind, BLOCKS), workload


def _of_folder(folder: str, options: TextModel, bytes_per_parameter: int, seed: int, micro_batches: int) -> _Subject:
    """Read a model of Hugging Face, and its data.

    Raises:
        InputError: there is none, the text is invalid, or the model is too large for this machine.
    """
    from autohete.train.model_folder import check_model_folder, longest_sequence, read_model, read_tokenizer, seed_random
    from autohete.train.text_data import TextData, read_text

    check_model_folder(folder)
    text, tokenizer = read_text(options.data), read_tokenizer(folder)
    data = TextData(text, tokenizer, options.sequence_length, options.batch_size * micro_batches, seed=seed)
    model = read_model(folder)
    longest = longest_sequence(model)
    if longest is not None and options.sequence_length > longest:
        raise InputError(f"the model takes sequences of up to {longest} tokens: give --sequence-length {longest} or less")
    types = sorted({str(parameter.dtype).removeprefix("torch.") for parameter in model.parameters()})
    subject = _Subject(model, data, os.path.basename(os.path.abspath(folder)), " and ".join(types), None)
    _check_memory(subject.parameters, bytes_per_parameter)
    seed_random(seed)
    return subject


def _check_memory(parameters: int, bytes_per_parameter: int) -> None:
    needed, there = bytes_per_parameter * parameters, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > there:
        raise InputError(
            f"{parameters:,} parameters need {format_bytes(needed)} of memory, this machine has "
            f"{format_bytes(there)}: choose a smaller model"
        )


@contextmanager
def _memory_told() -> Iterator[None]:
    """Report exhausted memory in one line."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not (isinstance(error, MemoryError) or re.search("can't allocate memory|out of memory", str(error))):
            raise
        reason = str(error).partition("\n")[0] or "none is left"
        raise InputError(f"this machine's memory is exhausted ({reason}): choose a smaller model or batch") from error


@_memory_told()
def train(
    options: TextModel, training: TextTraining, folders: ModelFolders, saving: SavingOptions, files: TimelineFiles
) -> None:
    """Train, show the progress, and compare the prediction with the measurement."""
    training.check()
    folders.check(options, training, writes=training.verify is None)
    saving.check()
    if training.verify is not None:
        _check_nothing_written(folders, saving, files)
    if training.gpus == 1:
        _run(options, training, folders, saving, files)
        return
    if folders != ModelFolders() or saving != SavingOptions() or training.verify is not None:
        raise InputError(
            f"{training.gpus} GPUs are emulated with the small GPT, without checkpoints and verification: leave out --model, "
            "--save and --verify, or train from Python under torchrun"
        )
    from autohete.train.local_ranks import on_local_ranks

    on_local_ranks(training.gpus, _train_rank, options, training, files)


def _train_rank(rank: int, options: TextModel, training: TextTraining, files: TimelineFiles) -> None:
    """Train one of several ranks, of which the first one prints and writes."""
    with ExitStack() as silence:
        if rank:
            nowhere = silence.enter_context(open(os.devnull, "w", encoding="utf-8"))
            silence.enter_context(redirect_stdout(nowhere))
            silence.enter_context(redirect_stderr(nowhere))
        with _memory_told():
            _run(options, training, ModelFolders(), SavingOptions(), NO_FILES if rank else files, rank)


def _run(
    options: TextModel,
    training: TextTraining,
    folders: ModelFolders,
    saving: SavingOptions,
    files: TimelineFiles,
    rank: int = 0,
) -> None:
    hardware = load_hardware(training.hardware) if training.hardware is not None else None
    measured_profile = read_profile(training.profile) if training.profile is not None else None
    options.check()
    from autohete.runtime.update_rules import default_optimizer
    from autohete.train.gpt import BLOCKS, GPT
    from autohete.train.model_folder import check_new_folder, write_model
    from autohete.train.trainer import Mode, NonFinite, Trainer

    lr = training.lr if training.lr is not None else 1e-3 if folders.model is None else 2e-5

    keywords: dict[str, Any] = {
        "policy": training.policy,
        "gpu_memory": training.gpu_memory,
        "host_memory": training.host_memory,
        "pinned_memory": training.pinned_memory,
        "device": training.device,
        "mode": Mode(training.mode),
        "hardware": hardware,
        "profile": measured_profile,
        "drive": training.drive,
        "on_nonfinite": NonFinite.SKIP if training.skip_nonfinite else NonFinite.STOP,
        "clip_norm": training.clip_norm,
        "micro_batches": training.micro_batches,
        "refine": training.refine,
    }

    def trainer_of(model: Any, blocks: str | None) -> Trainer:
        return Trainer(model, blocks=blocks, optimizer=default_optimizer(model.parameters(), lr), **keywords)

    # Run the Trainer's checks on the smallest model first, before the text is read.
    trainer_of(GPT(Workload("smallest", 1, 1, 1, vocabulary_size=1, sequence_length=1, batch_size=1)), BLOCKS)
    if folders.out is not None:
        check_new_folder(folders.out)
    held = _TRAINED if training.device == "emulated" else _HELD
    if training.verify is not None:
        held = _VERIFIED
    if folders.model is not None:
        subject = _of_folder(folders.model, options, held, training.seed, training.micro_batches)
    else:
        subject, workload = _gpt(options, held, training.seed, training.micro_batches, rank)
        if measured_profile is not None:
            _check_same(measured_profile.workload, workload)
    check_outputs(files.by_option)  # before the training also that they are none of the files read above
    if training.verify is not None:
        _verify(subject, training.verify, lr, keywords)
        return
    settings = {
        "seed": training.seed,
        "lr": lr,
        "batch size": options.batch_size,
        "micro-batches": training.micro_batches,
        "sequence length": options.sequence_length,
        "dropout": options.dropout,
        "clip norm": training.clip_norm,
        "handling of non-finite losses": str(keywords["on_nonfinite"]),
        "text": subject.data.digest,
    }
    out = console()
    with trainer_of(subject.model, subject.blocks) as trainer:
        saved = SavedTraining(trainer, saving, settings)
        done = saved.begin(training.steps, may_have_ended=folders.out is not None)
        if done:
            print_text(out, f"resumed from {saving.save} after step {done}")
        if done < training.steps:
            _train(out, trainer, subject, options, training, saved, done, files)
    if folders.model is not None and folders.out is not None:
        write_model(subject.model, folders.model, folders.out)
        print_text(out, f"written: {folders.out}")


def _train(
    out: Console,
    trainer: Trainer,
    subject: _Subject,
    options: TextModel,
    training: TextTraining,
    saved: SavedTraining,
    done: int,
    files: TimelineFiles,
) -> None:
    """Make the steps after the first ``done`` ones, and print what there is to know about them."""
    data, steps = subject.data, training.steps - done
    tokens = options.batch_size * options.sequence_length * training.micro_batches * training.gpus
    batches = data.train(done)
    first = next(batches)
    begin = time.perf_counter()
    prediction = trainer.prepare(first)
    prepared = time.perf_counter() - begin
    times = "".join(f"{count} x " for count in (training.gpus, training.micro_batches) if count > 1)
    print_text(
        out,
        f"{subject.name}: {subject.parameters / 1e6:.1f} M parameters, batch {times}{options.batch_size} x "
        f"{options.sequence_length} tokens, {subject.kind}; text: "
        f"{data.train_tokens:,} tokens to train on, {data.validation_tokens:,} held back",
    )
    share = prediction.gpu.capacity_bytes / trainer.resident_bytes
    budget = format_bytes(prediction.gpu.capacity_bytes) if share < 1000 else "no limit"
    print_text(
        out,
        f"{prediction.plan.policy}: {prediction.plan.counts.words}; device memory {budget}, resident it would need "
        f"{format_bytes(trainer.resident_bytes)}; measured and planned in {prepared:.1f} s",
    )
    if trainer.slowdown > 1:
        print_text(out, f"paced: one second of the hardware takes {trainer.slowdown:.3g} s here")
    begin = time.perf_counter()
    with saved.saving():
        losses = _steps(trainer, first, batches, steps, tokens, saved.after_step)
    seconds = time.perf_counter() - begin
    measured = trainer.trace()
    validation = _validation(trainer, data, options.batch_size)
    _print_end(out, trainer, losses, validation, steps * tokens / seconds)
    print_iteration(out, measured, max(0, min(measured.steady().first, measured.iterations - 2)))
    _write_files(out, trainer, measured, subject.name, files)


def _check_nothing_written(folders: ModelFolders, saving: SavingOptions, files: TimelineFiles) -> None:
    """Check that no option asks for a file: a verification trains copies only."""
    given = {"--out": folders.out, "--save": saving.save, **files.by_option}
    for option, path in given.items():
        if path is not None:
            raise InputError(f"--verify trains copies and writes nothing: leave out {option}")


def _verify(subject: _Subject, steps: int, lr: float, keywords: dict[str, Any]) -> None:
    """Compare steps with plain PyTorch, print the result, and exit with code 1 if anything differs."""
    from autohete.runtime.update_rules import default_optimizer
    from autohete.train.verification import verify

    out, optimizer = console(), default_optimizer(subject.model.parameters(), lr)
    result = verify(subject.model, islice(subject.data.train(), steps), optimizer=optimizer, blocks=subject.blocks, **keywords)
    counts = ", ".join(f"{count:,} x {what}" for what, count in result.compared.items())
    print_text(out, f"{subject.name}: {result.steps} steps beside plain PyTorch, threads: {result.threads}; compared {counts}")
    for difference in result.differences[:_MOST_DIFFERENCES]:
        print_text(out, str(difference))
    if len(result.differences) > _MOST_DIFFERENCES:
        print_text(out, f"and {len(result.differences) - _MOST_DIFFERENCES} more in this step")
    print_text(out, "all bits are equal" if result.is_equal else f"{len(result.differences)} differ")
    if not result.is_equal:
        sys.exit(1)


def _check_same(measured: Workload, trained: Workload) -> None:
    """Check that a profile is of the same model and batch."""
    pairs = [(f.name, getattr(measured, f.name), getattr(trained, f.name)) for f in fields(Workload) if f.name != "name"]
    different = [f"{name} {theirs}, not {ours}" for name, theirs, ours in pairs if theirs != ours]
    if different:
        raise InputError(f"the profile does not match ({'; '.join(different)}): measure this model with autohete profile")


def _steps(
    trainer: Trainer, first: Any, batches: Any, steps: int, tokens: int, after_step: Callable[[int], None]
) -> list[float]:
    progress = Progress(
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[status]}"),
        TimeRemainingColumn(),
        console=console(stderr=True),
        disable=not sys.stderr.isatty(),
        transient=True,
    )
    losses: list[float] = []
    with progress:
        bar = progress.add_task("", total=steps, status="")
        busy, since, done = trainer.busy_seconds, time.perf_counter(), 0
        batch = first
        for step in range(steps):
            losses.append(trainer.step(batch))
            after_step(step + 1)
            if step + 1 < steps:
                batch = next(batches)
            progress.advance(bar)
            now = time.perf_counter()
            if now - since > _REFRESH_SECONDS:
                current = trainer.busy_seconds
                use = " ".join(f"{name} {(current[name] - busy.get(name, 0.0)) / (now - since):.0%}" for name in current)
                status = (
                    f"loss {losses[-1]:.3f}  {(step + 1 - done) * tokens / (now - since):,.0f} tokens/s  "
                    f"{format_bytes(trainer.device_bytes)}  {use}"
                )
                progress.update(bar, status=status)
                busy, since, done = current, now, step + 1
    return losses


def _validation(trainer: Trainer, data: TextData, sequences: int) -> float:
    """Return the mean validation loss, with as many sequences at a time as in training."""
    from autohete.runtime.batch import Batch

    parts = chain.from_iterable(Batch(*pair).split(len(pair[0]) // sequences) for pair in data.validation())
    return trainer.evaluate(islice(parts, _MOST_VALIDATION_BATCHES))


def _print_end(out: Console, trainer: Trainer, losses: list[float], validation: float, tokens_per_second: float) -> None:
    comparison = trainer.comparison()
    skipped = f", {trainer.skipped_steps} steps skipped (loss or gradient not finite)" if trainer.skipped_steps else ""
    print_text(
        out,
        f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, on held-back text {validation:.3f} (perplexity "
        f"{math.exp(min(validation, 700.0)):.1f}); {tokens_per_second:,.0f} tokens/s{skipped}",
    )
    if trainer.refinement is not None and trainer.refinement.changes:
        print_text(out, str(trainer.refinement))
    shown = table("predicted beside measured", ["", "predicted", f"{comparison.clock}", "difference"])
    rows = [
        ("iteration", comparison.predicted_seconds, comparison.measured_seconds, format_seconds),
        ("device memory, peak", comparison.predicted_peak_bytes, comparison.measured_peak_bytes, format_bytes),
        ("host memory, peak", comparison.predicted_host_bytes, comparison.measured_host_bytes, format_bytes),
    ]
    for name, predicted, measured, written in rows:
        difference = f"{100 * (predicted / measured - 1):+.2f} %" if measured else "-"
        shown.add_row(name, written(predicted), written(measured), difference)
    out.print(shown)


def _write_files(
    out: Console,
    trainer: Trainer,
    measured: Trace,
    name: str,
    files: TimelineFiles,
) -> None:
    from autohete.analysis.occupancy import occupancy
    from autohete.report.gantt import two_row_figure
    from autohete.report.perfetto import write_perfetto
    from autohete.report.style import save_figure
    from autohete.schedule import GPU_MEMORY, HOST_MEMORY

    assert trainer.prediction is not None
    for path, timeline in ((files.trace, measured), (files.predicted_trace, trainer.prediction.trace)):
        if path is not None:
            write_perfetto(path, timeline, [occupancy(timeline, memory) for memory in (GPU_MEMORY, HOST_MEMORY)])
            print_text(out, f"written: {path}")
    if files.gantt is not None:
        predicted = trainer.prediction.trace
        iteration = min(predicted.iterations, measured.iterations) - 2
        title = f"{name}: {trainer.prediction.plan.policy}"
        save_figure(two_row_figure(predicted, measured, max(iteration, 0), title), files.gantt)
        print_text(out, f"written: {files.gantt}")


@_memory_told()
def profile(
    options: TextModel, path: str, device: str, gpu_memory: str | None, *, quick: bool, drive: str | None = None
) -> None:
    """Measure the machine and one block of each kind, show both, and write the file."""
    size = None if gpu_memory is None else round(parse_quantity(gpu_memory, "bytes"))
    options.check()
    from autohete.train.machine import versions
    from autohete.train.measured import measured_machine, measured_profile

    subject, workload = _gpt(options, _MEASURED)
    machine, measured = measured_machine(device, size, quick=quick, drive=drive), versions()
    first = next(subject.data.train())
    result, document = measured_profile(machine, subject.model, first, device, workload.name, blocks=subject.blocks)
    write_profile(path, result, document, measured)
    out = console()
    print_text(out, f"{measured['machine']}; {measured['versions']}; {measured['date']}")
    columns = ["block", "parameters", "forward", "backward", "device update", "CPU update", "input", "activations", "workspace"]
    shown = table(f"one block of each kind of {workload.name}, measured", columns)
    for block in {block.role: block for block in result.units}.values():
        shown.add_row(
            block.role,
            f"{block.parameters:,}",
            *(format_seconds(s) for s in (block.forward_seconds, block.backward_seconds, block.gpu_update_seconds)),
            format_seconds(block.cpu_update_seconds or 0.0),
            *(format_bytes(n) for n in (block.input_bytes, block.activation_bytes, block.backward_workspace_bytes)),
        )
    out.print(shown)
    h2d, d2h, host = result.hardware.h2d, result.hardware.d2h, result.hardware.host
    links = table("copies and memory, measured", ["", "alone", "both ways at once", "latency"])
    for name, link in (("host to device", h2d), ("device to host", d2h)):
        links.add_row(
            name,
            f"{link.bandwidth / 1e9:.1f} GB/s",
            f"{link.duplex_bandwidth / 1e9:.1f} GB/s",
            format_seconds(link.latency_seconds),
        )
    update = result.hardware.cpu.update_bandwidth
    links.add_row(
        "CPU update; with copies",
        f"{update / 1e9:.1f} GB/s",
        f"{host.memory_bandwidth / 1e9:.1f} GB/s",
        "-",
    )
    for place in result.hardware.places:
        for name, rate in (("read", place.read_bandwidth), ("write", place.write_bandwidth)):
            links.add_row(
                f"{place.name}, {name}",
                f"{rate / 1e9:.2f} GB/s",
                f"{(place.both_bandwidth or rate) / 1e9:.2f} GB/s together",
                format_seconds(place.latency_seconds),
            )
    out.print(links)
    print_text(out, f"written: {path}; use it with autohete simulate --profile {path}")
