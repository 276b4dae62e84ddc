"""``autohete train`` and ``autohete profile``: a small GPT on text, from the command line's values to tables and files."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from autohete.errors import InputError
from autohete.hardware import load_hardware
from autohete.profile_file import read_profile, write_profile
from autohete.report.tables import console, table
from autohete.report.terminal import print_iteration
from autohete.units import format_bytes, format_seconds
from autohete.workload import Precision, Workload

if TYPE_CHECKING:
    from autohete.runtime.data import TextData
    from autohete.runtime.model import GPT
    from autohete.runtime.trainer import Trainer
    from autohete.trace import Trace

#: How often the lanes' use is averaged anew.
_REFRESH_SECONDS = 0.5
_MOST_VALIDATION_BATCHES = 8


@dataclass(frozen=True, slots=True)
class TextModel:
    """A GPT and the text that it learns.

    Args:
        hidden, blocks, heads, sequence_length, batch_size: its shape and batch.
        precision: of parameters and passes.
        dropout: probability.
        data: text file or folder; None: the standard library's source.
        tokenizer: ``byte``, or the vocabulary size of a tokenizer to train on the text.
        seed: of weights, batches and dropout.
    """

    hidden: int
    blocks: int
    heads: int
    sequence_length: int
    batch_size: int
    precision: Precision
    dropout: float
    data: str | None
    tokenizer: str
    seed: int

    def build(self) -> tuple[GPT, TextData, Workload]:
        """The model with fresh weights, its data and its shape.

        Raises:
            InputError: the shape, the text or the tokenizer cannot be taken.
        """
        if not 0 <= self.dropout < 1:
            raise InputError(f"dropout is {self.dropout}: it must be at least 0 and less than 1")
        import torch

        from autohete.runtime.data import ByteTokenizer, TextData, Tokenizer, read_text, train_tokenizer
        from autohete.runtime.model import GPT

        text = read_text(self.data)
        tokenizer: Tokenizer = ByteTokenizer()
        if self.tokenizer != "byte":
            if not self.tokenizer.isdecimal():
                raise InputError(f"tokenizer {self.tokenizer!r}: write byte, or a vocabulary size such as 4096 to train one")
            tokenizer = train_tokenizer(text, int(self.tokenizer))
        workload = Workload(
            f"gpt-{self.blocks}x{self.hidden}",
            self.hidden,
            self.blocks,
            self.heads,
            vocabulary_size=tokenizer.vocabulary_size,
            sequence_length=self.sequence_length,
            batch_size=self.batch_size,
            precision=self.precision,
        )
        data = TextData(text, tokenizer, self.sequence_length, self.batch_size, seed=self.seed)
        torch.manual_seed(self.seed)
        dtype = {Precision.FP32: torch.float32, Precision.BF16: torch.bfloat16, Precision.FP16: torch.float16}[self.precision]
        return GPT(workload, self.dropout).to(dtype), data, workload


def train(
    text_model: TextModel,
    *,
    trainer_arguments: Mapping[str, Any],
    hardware: str | None,
    profile: str | None,
    steps: int,
    trace: str | None,
    predicted_trace: str | None,
    gantt: str | None,
) -> None:
    """Train, show how it goes, and hold the prediction against what was measured."""
    if steps < 1:
        raise InputError(f"steps is {steps}: train at least 1")
    from autohete.runtime.trainer import Trainer

    out = console()
    trainer_hardware = load_hardware(hardware) if hardware is not None else None
    measured_profile = read_profile(profile) if profile is not None else None
    model, data, workload = text_model.build()
    batches = data.train()
    with Trainer(model, hardware=trainer_hardware, profile=measured_profile, **trainer_arguments) as trainer:
        first = next(batches)
        begin = time.perf_counter()
        prediction = trainer.prepare(first)
        prepared = time.perf_counter() - begin
        out.print(
            f"{workload.name}: {workload.parameters / 1e6:.1f} M parameters, batch {workload.batch_size} x "
            f"{workload.sequence_length} tokens, {workload.precision}; text: {data.train_tokens:,} tokens to train on, "
            f"{data.validation_tokens:,} held back",
            soft_wrap=True,
        )
        share = prediction.gpu.capacity_bytes / trainer.resident_bytes
        budget = format_bytes(prediction.gpu.capacity_bytes) if share < 1000 else "no limit"
        out.print(
            f"{prediction.plan.policy}: plan {prediction.plan.counts}; device memory {budget}, resident it would need "
            f"{format_bytes(trainer.resident_bytes)}; measured and planned in {prepared:.1f} s",
            soft_wrap=True,
        )
        if trainer.slowdown > 1:
            out.print(f"paced: one second of the hardware takes {trainer.slowdown:.3g} s here", soft_wrap=True)
        begin = time.perf_counter()
        losses = _steps(trainer, first, batches, steps, workload.tokens)
        seconds = time.perf_counter() - begin
        measured = trainer.trace()
        validation = _validation(trainer, data)
        _print_end(out, trainer, losses, validation, steps * workload.tokens / seconds)
        print_iteration(out, measured, max(0, min(measured.steady().first, measured.iterations - 2)))
        _write_files(out, trainer, measured, workload, trace, predicted_trace, gantt)


def _steps(trainer: Trainer, first: Any, batches: Any, steps: int, tokens: int) -> list[float]:
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
            if step + 1 < steps:
                batch = next(batches)
            progress.advance(bar)
            now = time.perf_counter()
            if now - since > _REFRESH_SECONDS:
                current = trainer.busy_seconds
                use = " ".join(f"{name} {(current[name] - busy[name]) / (now - since):.0%}" for name in current)
                status = (
                    f"loss {losses[-1]:.3f}  {(step + 1 - done) * tokens / (now - since):,.0f} tokens/s  "
                    f"{format_bytes(trainer.device_bytes)}  {use}"
                )
                progress.update(bar, status=status)
                busy, since, done = current, now, step + 1
    return losses


def _validation(trainer: Trainer, data: TextData) -> float:
    batches = [batch for batch, _ in zip(data.validation(), range(_MOST_VALIDATION_BATCHES), strict=False)]
    return trainer.evaluate(batches)


def _print_end(out: Console, trainer: Trainer, losses: list[float], validation: float, tokens_per_second: float) -> None:
    found = trainer.comparison()
    skipped = f", {trainer.skipped_steps} steps skipped (loss not finite)" if trainer.skipped_steps else ""
    out.print(
        f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, on held-back text {validation:.3f} (perplexity "
        f"{math.exp(min(validation, 700.0)):.1f}); {tokens_per_second:,.0f} tokens/s{skipped}",
        soft_wrap=True,
    )
    shown = table("predicted beside measured", ["", "predicted", f"{found.clock}", "difference"])
    rows = [
        ("iteration", found.predicted_seconds, found.measured_seconds, format_seconds),
        ("device memory, peak", found.predicted_peak_bytes, found.measured_peak_bytes, format_bytes),
        ("host memory, peak", found.predicted_host_bytes, found.measured_host_bytes, format_bytes),
    ]
    for name, predicted, measured, written in rows:
        difference = f"{100 * (predicted / measured - 1):+.2f} %" if measured else "-"
        shown.add_row(name, written(predicted), written(measured), difference)
    out.print(shown)


def _write_files(
    out: Console,
    trainer: Trainer,
    measured: Trace,
    workload: Workload,
    trace: str | None,
    predicted_trace: str | None,
    gantt: str | None,
) -> None:
    from autohete.memory import occupancy
    from autohete.report.gantt import two_row_figure
    from autohete.report.perfetto import write_perfetto
    from autohete.report.style import save_figure
    from autohete.schedule import GPU_MEMORY, HOST_MEMORY

    assert trainer.prediction is not None
    for path, timeline in ((trace, measured), (predicted_trace, trainer.prediction.trace)):
        if path is not None:
            write_perfetto(path, timeline, [occupancy(timeline, memory) for memory in (GPU_MEMORY, HOST_MEMORY)])
            out.print(f"written: {path}")
    if gantt is not None:
        predicted = trainer.prediction.trace
        iteration = min(predicted.iterations, measured.iterations) - 2
        title = f"{workload.name}: {trainer.prediction.plan.policy}"
        save_figure(two_row_figure(predicted, measured, max(iteration, 0), title), gantt)
        out.print(f"written: {gantt}")


def profile(text_model: TextModel, *, device: str, gpu_memory: str | None, path: str, quick: bool) -> None:
    """Measure the machine and one block of each kind, show both, and write the file."""
    from autohete.runtime.trainer import measured_profile

    model, data, workload = text_model.build()
    found, document, measured = measured_profile(model, next(data.train()), device, gpu_memory, workload.name, quick=quick)
    write_profile(path, found, document, measured)
    out = console()
    out.print(f"{measured['machine']}; {measured['versions']}; {measured['date']}", soft_wrap=True)
    columns = ["block", "parameters", "forward", "backward", "device update", "CPU update", "input", "activations", "workspace"]
    shown = table(f"one block of each kind of {workload.name}, measured", columns)
    for block in {block.role: block for block in found.blocks}.values():
        shown.add_row(
            block.role,
            f"{block.parameters:,}",
            *(format_seconds(s) for s in (block.forward_seconds, block.backward_seconds, block.gpu_update_seconds)),
            format_seconds(block.cpu_update_seconds or 0.0),
            *(format_bytes(n) for n in (block.input_bytes, block.activation_bytes, block.backward_workspace_bytes)),
        )
    out.print(shown)
    h2d, d2h, host = found.hardware.h2d, found.hardware.d2h, found.hardware.host
    links = table("copies and memory, measured", ["", "alone", "both ways at once", "latency"])
    for name, link in (("host to device", h2d), ("device to host", d2h)):
        links.add_row(
            name,
            f"{link.bandwidth / 1e9:.1f} GB/s",
            f"{link.duplex_bandwidth / 1e9:.1f} GB/s",
            format_seconds(link.latency_seconds),
        )
    update = found.hardware.cpu.update_bandwidth
    links.add_row(
        "CPU update; with copies",
        f"{update / 1e9:.1f} GB/s",
        f"{host.memory_bandwidth / 1e9:.1f} GB/s",
        "-",
    )
    out.print(links)
    out.print(f"written: {path}; use it with autohete simulate --profile {path}", soft_wrap=True)
