"""``autohete simulate``."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from autohete.cli.groups import JsonSwitch, OutputFile, Policies
from autohete.cli.outputs import check_outputs
from autohete.cli.question import BLANK, Question
from autohete.errors import InputError

if TYPE_CHECKING:
    from autohete.simulate import Simulation
    from autohete.simulate.summary import Summary


def simulate(
    *,
    question: Question = BLANK,
    policy: Policies = None,
    trace: OutputFile = None,
    gantt: OutputFile = None,
    memory: OutputFile = None,
    json_: JsonSwitch = False,
) -> None:
    """Simulate training under one or more policies.

    Parameters
    ----------
    policy:
        NAME[:flag,flag=value], or your own MODULE:CLASS[,flag=value]; repeat to compare. Default: the paper's systems; with
        --gpus those that share a model; with --clip-norm without stronghold, which cannot clip; with --micro-batches
        without patrickstar, which cannot accumulate.
    trace:
        Write the timeline for ui.perfetto.dev and `autohete compare` to this file (one policy).
    gantt:
        Draw two steady iterations and the GPU's memory to this .png, .pdf or .svg file (one policy).
    memory:
        Draw GPU, host and limited pinned memory over two steady iterations to this .png, .pdf or .svg file (one policy).
    json_:
        Print JSON: one object, or a list for several policies.
    """
    from autohete.plan.policy import Verdict
    from autohete.policies import (
        CANNOT_ACCUMULATE,
        CANNOT_CLIP,
        COMPARED,
        COMPARED_BY_SEVERAL,
        PIPELINES,
        UPDATE_ON_CPU,
        parse_policy,
    )
    from autohete.simulate.summary import answer_or_refusal
    from autohete.workload.optimizers import updates_in_backward

    chosen = question.answerable()
    compared: tuple[str, ...] = COMPARED if question.ranks() == 1 else COMPARED_BY_SEVERAL
    if chosen.hardware.parallelism.pipeline > 1:
        compared = PIPELINES
    cannot = (
        *(CANNOT_CLIP if chosen.workload.clips else ()),
        *(CANNOT_ACCUMULATE if chosen.workload.micro_batches > 1 else ()),
    )
    if not chosen.workload.training.has_cpu_kernel:
        cannot += UPDATE_ON_CPU
    compared = tuple(name for name in compared if name not in cannot)
    if updates_in_backward(chosen.workload.training.optimizer):
        compared = tuple("resident:in_backward" if name.startswith("resident") else name for name in compared)
    files = {"--trace": trace, "--gantt": gantt, "--memory": memory}
    outputs = {option: path for option, path in files.items() if path is not None}
    policies = [parse_policy(text) for text in policy or compared]
    if outputs and len(policies) > 1:
        raise InputError(f"{' and '.join(outputs)} show one policy, not {len(policies)}: choose one with --policy")
    check_outputs(outputs)
    answers = [answer_or_refusal(chosen, each) for each in policies]
    summaries = [summary for summary, _ in answers]
    if all(summary.verdict is Verdict.INVALID for summary in summaries):
        raise InputError(summaries[0].explanation)
    if outputs:
        _write_outputs(answers[0], outputs)
    if json_:
        from autohete.simulate.plan_document import simulation_json

        objects = list(map(simulation_json, summaries))
        print(json.dumps(objects[0] if len(objects) == 1 else objects, indent=2, ensure_ascii=True))
    else:
        from autohete.report.tables import print_summaries

        print_summaries(summaries, chosen.workload)


def _write_outputs(result: tuple[Summary, Simulation | None], outputs: dict[str, str]) -> None:
    from autohete.hardware import node_text

    summary, simulation = result
    if simulation is None:
        raise InputError(f"there is no timeline to write: {summary.explanation}")
    trace, steady = simulation.trace, simulation.steady
    first, last = steady.first, min(steady.first + 1, trace.iterations - 1)
    title = f"{summary.workload} on {node_text(summary.hardware, summary.gpus, summary.parallelism)}: {summary.policy}"
    occupancies = simulation.memories
    if "--trace" in outputs:
        from autohete.report.perfetto import write_perfetto

        write_perfetto(outputs["--trace"], trace, occupancies)
    if "--gantt" in outputs:
        from autohete.report.style import save_figure

        save_figure(simulation.gantt(), outputs["--gantt"])
    if "--memory" in outputs:
        from autohete.report.gantt import memory_figure, window_ns
        from autohete.report.style import save_figure

        figure = memory_figure(occupancies, *window_ns(trace, first, last), title, trace.clock)
        save_figure(figure, outputs["--memory"])
