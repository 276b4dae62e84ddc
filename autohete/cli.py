"""The command line. Exit code 0: an answer, also that it does not fit; 2: something that was given cannot be taken;
130: interrupted; 143: terminated.

Heavy imports (SciPy, SimPy, matplotlib) wait until a command needs them, so that ``--help`` is quick.
"""

from __future__ import annotations

import io
import json
import os
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Literal, NoReturn, TextIO

from cyclopts import App, CycloptsError, Parameter

from autohete.errors import AutoHeteError, InputError
from autohete.interrupt import interruptible
from autohete.question import Question

if TYPE_CHECKING:
    from autohete.simulate import Simulation
    from autohete.summary import Summary

app = App(
    name="autohete",
    help="Simulate transformer training that does not fit on the GPU: what to keep, what to move, how fast, and why.",
    help_format="markdown",
)

#: Nothing asked yet.
_BLANK = Question()


@app.command
def simulate(
    *,
    question: Question = _BLANK,
    policy: Annotated[list[str] | None, Parameter(negative=())] = None,
    trace: str | None = None,
    gantt: str | None = None,
    memory: str | None = None,
    json_: Annotated[bool, Parameter(name="--json", negative=())] = False,
) -> None:
    """Simulate training under one or several policies.

    Parameters
    ----------
    policy:
        NAME[:flag,flag=value], or MODULE:CLASS[,flag=value] of your own; repeat to compare. Without it: the paper's systems,
        with --gpus those that share a model, with --clip-norm without those that cannot clip (stronghold).
    trace:
        Write the timeline for ui.perfetto.dev and `autohete compare` to this file (one policy).
    gantt:
        Draw two steady iterations and the GPU's memory to this .png, .pdf or .svg file (one policy).
    memory:
        Draw GPU and host memory over two steady iterations to this .png, .pdf or .svg file (one policy).
    json_:
        Print JSON: one object, or a list of them for several policies.
    """
    from autohete.policies import CANNOT_CLIP, COMPARED, COMPARED_BY_SEVERAL, parse_policy
    from autohete.summary import answer

    chosen = question.answerable()
    compared: tuple[str, ...] = COMPARED if question.gpus == 1 else COMPARED_BY_SEVERAL
    if chosen.workload.clips:
        compared = tuple(name for name in compared if name not in CANNOT_CLIP)
    files = {"--trace": trace, "--gantt": gantt, "--memory": memory}
    outputs = {option: path for option, path in files.items() if path is not None}
    policies = [parse_policy(text) for text in policy or compared]
    if outputs and len(policies) > 1:
        raise InputError(f"{' and '.join(outputs)} show one policy, not {len(policies)}: choose it with --policy")
    _check_outputs(outputs)
    answers = [answer(chosen, each) for each in policies]
    summaries = [summary for summary, _ in answers]
    if outputs:
        _write_outputs(answers[0], outputs)
    if json_:
        objects = [asdict(summary) for summary in summaries]
        print(json.dumps(objects[0] if len(objects) == 1 else objects, indent=2, ensure_ascii=True))
    else:
        from autohete.report.tables import print_summaries

        print_summaries(summaries, chosen.workload)


@app.command
def compare(
    a: str,
    b: str,
    /,
    *,
    json_: Annotated[bool, Parameter(name="--json", negative=())] = False,
    gantt: str | None = None,
) -> None:
    """Explain where two runs of one schedule differ, such as a simulated and a measured one.

    Parameters
    ----------
    a:
        A timeline that --trace wrote; differences are in percent of it.
    b:
        Another one, of the same schedule; durations may differ.
    json_:
        Print JSON: one object.
    gantt:
        Draw one iteration of A above and of B below to this .png, .pdf or .svg file.
    """
    from autohete.compare import compare as compare_traces
    from autohete.report.perfetto import read_trace

    outputs = {"--gantt": gantt} if gantt is not None else {}
    _check_outputs(outputs)
    traces = read_trace(a), read_trace(b)
    comparison = compare_traces(*traces, names=(a, b))
    if gantt is not None:
        from autohete.report.gantt import two_row_figure
        from autohete.report.style import save_figure

        # Both have settled by the later one's first; the last iteration runs without a successor to compete with.
        settled = max(side.steady.first for side in (comparison.a, comparison.b))
        last = min(trace.iterations for trace in traces) - 1
        title = f"{os.path.basename(a)} above, {os.path.basename(b)} below"
        save_figure(two_row_figure(*traces, min(settled, max(0, last - 1)), title), gantt)
    if json_:
        print(json.dumps(asdict(comparison), indent=2, ensure_ascii=True))
    else:
        from autohete.report.comparison import print_comparison

        print_comparison(comparison)


@app.command
def train(
    *,
    policy: str = "autohete",
    device: Literal["emulated", "cuda"] = "emulated",
    gpu_memory: str = "25%",
    host_memory: str | None = None,
    steps: int = 60,
    data: str | None = None,
    tokenizer: str = "byte",
    hidden: int = 256,
    blocks: int = 8,
    heads: int = 4,
    sequence_length: int = 128,
    batch_size: int = 4,
    precision: Literal["fp32", "bf16"] = "fp32",
    dropout: float = 0.1,
    lr: float = 1e-3,
    clip_norm: float | None = None,
    seed: int = 0,
    mode: Literal["native", "paced"] = "native",
    hardware: str | None = None,
    profile: str | None = None,
    skip_nonfinite: bool = False,
    trace: str | None = None,
    predicted_trace: str | None = None,
    gantt: str | None = None,
) -> None:
    """Train a GPT on text, within a memory budget, and hold the prediction against what was measured.

    Parameters
    ----------
    policy:
        NAME[:flag,flag=value].
    device:
        emulated: the CPU stands for a GPU, with a byte-exact memory budget.
    gpu_memory:
        Budget, such as 64MiB; or a share of what the training would need resident, such as 25%.
    host_memory:
        Budget for the host's part of the model states.
    steps:
        Iterations.
    data:
        Text file, or folder of text files. Without it: the source of Python's standard library.
    tokenizer:
        byte, or a vocabulary size to train a tokenizer with.
    hidden:
        Hidden size.
    blocks:
        Transformer blocks.
    heads:
        Attention heads; must divide the hidden size.
    sequence_length:
        Tokens of a sequence.
    batch_size:
        Sequences per iteration.
    precision:
        bf16 has fp32 master weights.
    dropout:
        Its probability.
    lr:
        Learning rate of AdamW.
    clip_norm:
        Scale gradients so that their global norm is at most this, such as 1.0.
    seed:
        Of weights, batches and dropout.
    mode:
        native: as fast as this machine; paced: as a --hardware would be, slowed down until this machine can keep up.
    hardware:
        A preset's name or a TOML file; without it this machine is measured.
    profile:
        A file written by `autohete profile` for this model, instead of measuring.
    skip_nonfinite:
        Skip a step whose loss is NaN or infinite, instead of stopping.
    trace:
        Write the measured timeline for ui.perfetto.dev to this file.
    predicted_trace:
        Write the simulated timeline; `autohete compare` explains the difference of both.
    gantt:
        Draw one iteration, simulated above and measured below, to this .png, .pdf or .svg file.
    """
    from autohete.training_session import TextModel
    from autohete.training_session import train as run
    from autohete.workload import Precision

    outputs = {"--trace": trace, "--predicted-trace": predicted_trace, "--gantt": gantt}
    _check_outputs({option: path for option, path in outputs.items() if path is not None})
    text_model = TextModel(
        hidden, blocks, heads, sequence_length, batch_size, Precision(precision), dropout, data, tokenizer, seed
    )
    _with_runtime()
    run(
        text_model,
        policy=policy,
        device=device,
        gpu_memory=gpu_memory,
        host_memory=host_memory,
        steps=steps,
        lr=lr,
        clip_norm=clip_norm,
        mode=mode,
        hardware=hardware,
        profile=profile,
        skip_nonfinite=skip_nonfinite,
        trace=trace,
        predicted_trace=predicted_trace,
        gantt=gantt,
    )


@app.command
def profile(
    out: str,
    *,
    device: Literal["emulated", "cuda"] = "emulated",
    gpu_memory: str | None = None,
    hidden: int = 256,
    blocks: int = 8,
    heads: int = 4,
    sequence_length: int = 128,
    batch_size: int = 4,
    precision: Literal["fp32", "bf16"] = "fp32",
    dropout: float = 0.1,
    data: str | None = None,
    tokenizer: str = "byte",
    quick: bool = False,
) -> None:
    """Measure this machine, and one block of each kind of a GPT on it; write both to OUT (.json).

    Parameters
    ----------
    out:
        The file to write; `autohete simulate --profile` and `autohete train --profile` read it.
    device:
        emulated: the CPU stands for a GPU.
    gpu_memory:
        Memory of the device, such as 64MiB.
    hidden:
        Hidden size.
    blocks:
        Transformer blocks; equal blocks are measured once.
    heads:
        Attention heads.
    sequence_length:
        Tokens of a sequence.
    batch_size:
        Sequences per iteration.
    precision:
        Of parameters and passes.
    dropout:
        Its probability.
    data:
        Text file, or folder of text files, as for `autohete train`.
    tokenizer:
        byte, or a vocabulary size to train a tokenizer with.
    quick:
        Copies up to 64 MiB instead of 1 GiB.
    """
    from autohete.training_session import TextModel
    from autohete.training_session import profile as run
    from autohete.workload import Precision

    _check_outputs({"OUT": out})
    _with_runtime()
    text_model = TextModel(
        hidden, blocks, heads, sequence_length, batch_size, Precision(precision), dropout, data, tokenizer, seed=0
    )
    run(text_model, device=device, gpu_memory=gpu_memory, path=out, quick=quick)


def _with_runtime() -> None:
    """Say what to install where PyTorch is missing."""
    import importlib.util

    missing = [name for name in ("torch", "greenlet") if importlib.util.find_spec(name) is None]
    if missing:
        raise InputError(f"training needs {' and '.join(missing)}, not installed here: pip install 'autohete[runtime]'")


@app.command
def plan(
    *,
    question: Question = _BLANK,
    policy: str = "autohete",
    schedule: str | None = None,
    json_: Annotated[bool, Parameter(name="--json", negative=())] = False,
) -> None:
    """Show what a policy decides for each block.

    Parameters
    ----------
    policy:
        NAME[:flag,flag=value].
    schedule:
        Write the schedule that the plan becomes to this file: a line per task.
    json_:
        Print JSON: the object of `autohete simulate --json`, and the decisions for each run of equal blocks.
    """
    from autohete.policies import parse_policy
    from autohete.report.write import write_text
    from autohete.summary import answer, runs_of_equal_units

    chosen = question.answerable()
    _check_outputs({"--schedule": schedule} if schedule is not None else {})
    summary, simulation = answer(chosen, parse_policy(policy))
    if schedule is not None:
        if simulation is None:
            raise InputError(f"there is no schedule to write: {summary.explanation}")
        write_text(schedule, str(simulation.schedule))
    if json_:
        runs = runs_of_equal_units(simulation.plan) if simulation else []
        decisions = [{"first_block": first, "last_block": last} | asdict(unit) for first, last, unit in runs]
        rules = [str(rule) for rule in simulation.plan.rules] if simulation else []
        print(json.dumps(asdict(summary) | {"decisions": decisions, "rules": rules}, indent=2, ensure_ascii=True))
    else:
        from autohete.report.tables import print_plan

        print_plan(summary, simulation)


@app.command
def presets() -> None:
    """List named workloads, hardware presets and policies with their flags."""
    from autohete.report.tables import print_presets

    print_presets()


#: Outputs that are data; the others are pictures.
_DATA_OUTPUTS = ("--trace", "--predicted-trace", "--schedule", "OUT")


def _check_outputs(outputs: dict[str, str]) -> None:
    """Refuse what cannot be written before anything is computed."""
    files: dict[str, str] = {}
    for option, path in outputs.items():
        other = files.setdefault(os.path.realpath(path), option) if path else option
        if other != option:
            raise InputError(f"{other} and {option} name the same file {path!r}: give each its own")
    for option, path in outputs.items():
        if not path:
            raise InputError(
                f"{option} names no file: give one, such as timeline.{'json' if option in _DATA_OUTPUTS else 'png'}"
            )
        if option not in _DATA_OUTPUTS:
            from autohete.report.style import figure_format

            figure_format(path)
        _check_writable(path)


def _check_writable(path: str) -> None:
    folder = os.path.dirname(os.path.realpath(path))
    if os.path.isdir(path):
        reason = "it is a folder"
    elif os.path.exists(path) and not os.path.isfile(path):
        return  # such as /dev/stdout
    elif not os.path.isdir(folder):
        reason = f"there is no folder {folder!r}"
    elif not os.access(folder, os.W_OK | os.X_OK):
        reason = f"folder {folder!r} is not writable"
    else:
        return
    raise InputError(f"{path!r} cannot be written: {reason}; give a file in a folder that exists and is writable")


def _write_outputs(found: tuple[Summary, Simulation | None], outputs: dict[str, str]) -> None:
    from autohete.summary import node_text

    summary, simulation = found
    if simulation is None:
        raise InputError(f"there is no timeline to write: {summary.explanation}")
    trace, steady = simulation.trace, simulation.steady
    first, last = steady.first, min(steady.first + 1, trace.iterations - 1)
    title = f"{summary.workload} on {node_text(summary.hardware, summary.gpus)}: {summary.policy}"
    occupancies = [simulation.gpu, simulation.host]
    if "--trace" in outputs:
        from autohete.report.perfetto import write_perfetto

        write_perfetto(outputs["--trace"], trace, occupancies)
    if "--gantt" in outputs:
        from autohete.report.gantt import combined_figure
        from autohete.report.style import save_figure

        save_figure(combined_figure(trace, simulation.gpu, first, last, title), outputs["--gantt"])
    if "--memory" in outputs:
        from autohete.report.gantt import memory_figure, window_ns
        from autohete.report.style import save_figure

        figure = memory_figure(occupancies, *window_ns(trace, first, last), title, trace.clock)
        save_figure(figure, outputs["--memory"])


def _refuse(app: App, message: str) -> NoReturn:
    try:
        print(f"{app.name[0]}: {' '.join(message.split())}", file=sys.stderr, flush=True)
    except OSError:
        _silence(sys.stderr)
    sys.exit(2)


def run_app(app: App) -> None:
    """Run a command line: one line and exit code 2 for every error that a person can mend, 130 or 143 for a signal."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a terminal of few letters shows the rest by number
    try:
        with interruptible(app.name[0]):
            app(exit_on_error=False, print_error=False, result_action="return_value")
            print(end="", flush=True)
    except AutoHeteError as error:
        _refuse(app, str(error))
    except CycloptsError as error:
        _refuse(app, f"{str(error).rstrip('.')}: --help says what is allowed")
    except BrokenPipeError:
        _silence(sys.stdout)  # the reader has had enough (``| head``)
    except SystemExit as ending:
        if not isinstance(ending.__context__, BrokenPipeError):  # rich ends the program itself, with exit code 1
            raise
        _silence(sys.stdout)
    except OSError as error:
        _silence(sys.stdout)
        _refuse(app, f"the output cannot be written: {error.strerror or error}; send it elsewhere")


def _silence(stream: TextIO) -> None:
    """Let the interpreter's last flush of ``stream`` go nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def main() -> None:
    """Run the command line; :mod:`autohete.__main__` is the program's entry point."""
    run_app(app)
