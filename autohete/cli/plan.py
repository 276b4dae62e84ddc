"""``autohete plan``."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from autohete.cli.interrupt import in_processes
from autohete.cli.outputs import check_outputs
from autohete.cli.question import BLANK, DEFAULT_HARDWARE, Question, Whole
from autohete.errors import InputError
from autohete.quantities import parse_count, parse_quantity
from autohete.workload.traced import TracedWorkload

if TYPE_CHECKING:
    from autohete.answer import Answer, Run
    from autohete.answer.result import Gain
    from autohete.profile import Profile
    from autohete.simulate import Simulation
    from autohete.simulate.largest import GrowingFigure

_TOKENS, _SYSTEM = "1B", "4GiB"


def plan(
    *,
    question: Question = BLANK,
    policy: str | None = None,
    max_: Annotated[Literal["batch", "sequence", "blocks", "all"] | None, Parameter(name="--max")] = None,
    tokens: str | None = None,
    system_memory: str | None = None,
    draws: Whole = 16,
    seed: Whole = 0,
    jobs: Whole | None = None,
    schedule: str | None = None,
    html: str | None = None,
    gantt: str | None = None,
    json_: Annotated[
        tuple[str, ...] | None, Parameter(name="--json", negative=(), consume_multiple=(0, 1), metavar="[FILE]")
    ] = None,
) -> None:
    """Answer whether a model trains on a hardware: the best plan, how fast it is, and what more hardware would bring.

    Parameters
    ----------
    policy:
        NAME[:flag,flag=value]: only show what this policy decides for each block. Without it all policies are judged.
    max_:
        The largest batch, sequence or number of blocks that fits, or all three. With --policy, that size is planned instead
        of the one given.
    tokens:
        Tokens of the whole training, such as 1B (the default) or 300M.
    system_memory:
        Host memory that is left to the system; default 4GiB. With --policy nothing is left.
    draws:
        How often uncertain hardware figures are drawn from their ranges, for an interval of the time; 0: never.
    seed:
        Seed of the draws.
    jobs:
        Processes; default: one per core.
    schedule:
        Write the plan's schedule to this file: one line per task.
    html:
        Write one page with the answer, the timeline of an iteration and its memory to this file.
    gantt:
        Draw two steady iterations and the GPU's memory to this .png, .pdf or .svg file.
    json_:
        Print JSON, or write it to FILE.
    """
    from autohete.simulate.largest import GrowingFigure

    if max_ is not None and question.profile is not None:
        raise InputError("a measured profile (--profile) has no other sizes: leave out --profile or --max")
    if jobs is not None and jobs < 1:
        raise InputError(f"--jobs is {jobs}: give at least 1, or leave it out for one per core")
    files = {"--schedule": schedule, "--html": html, "--gantt": gantt, "--json": json_[0] if json_ else None}
    outputs = {option: path for option, path in files.items() if path is not None and (option, path) != ("--json", "-")}
    if policy is not None:
        for option, value in {"--html": html, "--tokens": tokens, "--system-memory": system_memory}.items():
            if value is not None:
                raise InputError(f"{option} belongs to the whole answer: leave out --policy, or {option}")
    sizes = tuple(GrowingFigure) if max_ == "all" else () if max_ is None else (GrowingFigure[max_.upper()],)
    chosen = question.answerable()
    if isinstance(chosen.workload, TracedWorkload):
        sizes = _of_traced(chosen.workload, sizes)
    check_outputs(outputs)
    if policy is not None:
        _print_policy(chosen, policy, sizes, outputs, json_)
        return
    result = with_options(_answer(question, chosen, tokens, system_memory, draws, seed, sizes, _in_processes(jobs)))
    _write_outputs(result, outputs)
    if json_ is None or "--json" in outputs:
        from autohete.report.answer_text import answer_text
        from autohete.report.tables import console

        print(answer_text(result, console().width), end="")
    else:
        print(_json(result))


def _of_traced(workload: TracedWorkload, sizes: tuple[GrowingFigure, ...]) -> tuple[GrowingFigure, ...]:
    """The sizes that a traced model can have: other batches, if its table holds for them."""
    from autohete.simulate.largest import GrowingFigure

    grow = (GrowingFigure.BATCH,) if len(workload.table.batch_sizes) > 1 else ()
    if len(sizes) == 1 and sizes[0] not in grow:
        raise InputError(
            f"{sizes[0]} of a traced model is that of its trace: give --max batch if its table holds for any batch"
        )
    return tuple(size for size in sizes if size in grow)


def _answer(
    question: Question,
    chosen: Profile,
    tokens: str | None,
    system_memory: str | None,
    draws: int,
    seed: int,
    sizes: Sequence[GrowingFigure],
    run: Run,
) -> Answer:
    from autohete.answer import Sampling, Site, find_answer

    overrides = question.overrides()
    given = {*question.shape.changes()}
    options = {"tokens": tokens, "system_memory": system_memory}
    given |= {name for name, value in options.items() if value is not None}
    given |= {key.replace(".", "_") for key in overrides}
    if question.hardware != DEFAULT_HARDWARE or question.profile is not None:
        given.add("hardware")
    return find_answer(
        chosen,
        None if question.profile is not None else Site(question.hardware, overrides, question.gpus),
        system_bytes=round(parse_quantity(_SYSTEM if system_memory is None else system_memory, "bytes")),
        tokens=parse_count(_TOKENS if tokens is None else tokens),
        sampling=Sampling(draws, seed),
        sizes=sizes,
        given=given,
        run=run,
    )


def with_options(result: Answer) -> Answer:
    """Name changes of the training by the options that make them."""
    from autohete.answer.gains import CHUNKED_LOSS, LORA, QLORA

    options = {CHUNKED_LOSS: "--chunked-loss", LORA: "--lora 16", QLORA: "--lora 16 --qlora"}

    def named(gain: Gain) -> Gain:
        name, bracket, rest = gain.change.name.partition(" (")
        return replace(gain, change=replace(gain.change, name=options.get(name, name) + bracket + rest))

    return replace(result, free=tuple(map(named, result.free)), adapters=tuple(map(named, result.adapters)))


def _in_processes(jobs: int | None) -> Run:
    """Return what applies a function to many arguments in several processes."""

    def run(function: Callable[[Any], Any], arguments: Sequence[Any]) -> list[Any]:
        import joblib

        several = min(jobs or joblib.cpu_count(), len(arguments))
        if several <= 1:
            return [function(each) for each in arguments]
        # Batches of one: a policy that searches takes ten times as long as one that does not.
        return list(in_processes(function, ((each,) for each in arguments), several, ordered=True))

    return run


def _json(result: Answer) -> str:
    from autohete.report.answer_json import answer_json

    return json.dumps(answer_json(result), indent=2, ensure_ascii=True)


def _write_outputs(result: Answer, outputs: dict[str, str]) -> None:
    from autohete.files import write_text

    if "--json" in outputs:
        write_text(outputs["--json"], _json(result) + "\n")
    if "--html" in outputs:
        from autohete.report.answer_page import answer_page

        write_text(outputs["--html"], answer_page(result))
    drawn = [option for option in ("--schedule", "--gantt") if option in outputs]
    if drawn and result.simulation is None:
        raise InputError(f"there is nothing for {' and '.join(drawn)} to show: nothing fits")
    if result.simulation is not None:
        _write_simulation(result.simulation, outputs)


def _write_simulation(simulation: Simulation, outputs: dict[str, str]) -> None:
    from autohete.files import write_text

    if "--schedule" in outputs:
        write_text(outputs["--schedule"], str(simulation.schedule))
    if "--gantt" in outputs:
        from autohete.report.gantt import combined_figure
        from autohete.report.style import save_figure
        from autohete.simulate.summary import node_text

        trace, steady = simulation.trace, simulation.steady
        hardware = simulation.profile.hardware
        where = node_text(hardware.name, hardware.gpus)
        title = f"{simulation.profile.workload.name} on {where}: {simulation.plan.policy}"
        last = min(steady.first + 1, trace.iterations - 1)
        save_figure(combined_figure(trace, simulation.gpu, steady.first, last, title), outputs["--gantt"])


def _print_policy(
    chosen: Profile, policy: str, sizes: Sequence[GrowingFigure], outputs: dict[str, str], json_: tuple[str, ...] | None
) -> None:
    """Show one policy's decisions, for the workload given or for the largest that fits."""
    from autohete.files import write_text
    from autohete.policies import parse_policy
    from autohete.profile import analytic_profile
    from autohete.report.answer_json import plan_json
    from autohete.report.answer_text import largest_text
    from autohete.simulate.largest import largest
    from autohete.simulate.summary import answer

    asked = parse_policy(policy)
    grown = [largest(chosen.workload, chosen.hardware, asked, figure) for figure in sizes]
    if len(grown) == 1:
        chosen = analytic_profile(grown[0].workload, chosen.hardware)
    summary, simulation = answer(chosen, asked)
    if simulation is not None:
        _write_simulation(simulation, outputs)
    elif "--schedule" in outputs or "--gantt" in outputs:
        raise InputError(f"there is no schedule to write: {summary.explanation}")
    document = plan_json(summary, simulation)
    if len(grown) == 1:
        document |= {"largest": grown[0].value, "limit": grown[0].limit}
    elif grown:
        document["largest"] = [{"figure": one.figure, "value": one.value, "limit": one.limit} for one in grown]
    text = json.dumps(document, indent=2, ensure_ascii=True)
    if "--json" in outputs:
        write_text(outputs["--json"], text + "\n")
    if json_ is None or "--json" in outputs:
        from autohete.report.tables import console, print_plan, print_text

        print_plan(summary, simulation)
        for one in grown:
            print_text(console(), largest_text(one))
    else:
        print(text)
