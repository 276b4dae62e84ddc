"""``autohete plan``."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from autohete.cli.frameworks import RunOptions, write_best, write_plan
from autohete.cli.from_config import advise, read_configuration
from autohete.cli.groups import HARDWARE, OUTPUT, POLICY, TRAINING, OutputFile
from autohete.cli.outputs import check_outputs
from autohete.cli.parallel import Stages
from autohete.cli.question import BLANK, DEFAULT_HARDWARE, SYSTEM_MEMORY, Question, Whole
from autohete.errors import InputError
from autohete.quantities import parse_count
from autohete.workload.traced import TracedWorkload

if TYPE_CHECKING:
    from autohete.answer import Answer, Run, Sampling
    from autohete.answer.result import Gain
    from autohete.cli.frameworks import Written
    from autohete.frameworks.advice import Advice
    from autohete.profile import Profile
    from autohete.simulate import Simulation
    from autohete.simulate.largest import GrowingFigure

#: What is searched for where no batch is given.
_CHOSEN = ("batch_size", "micro_batches")
_ANY = RunOptions()
_TOKENS, _ITERATION_TOKENS = "1B", "65536"


def plan(
    *,
    question: Question = BLANK,
    policy: Annotated[str | None, Parameter(group=POLICY)] = None,
    max_: Annotated[Literal["batch", "sequence", "blocks", "all"] | None, Parameter(name="--max")] = None,
    tokens: Annotated[str | None, Parameter(group=TRAINING)] = None,
    iteration_tokens: Annotated[str, Parameter(group=TRAINING)] = _ITERATION_TOKENS,
    draws: Whole = 16,
    seed: Whole = 0,
    price: Annotated[tuple[str, ...], Parameter(group=HARDWARE, negative=(), show_default=False)] = (),
    fast: Annotated[bool, Parameter(negative=())] = False,
    timeout: float | None = None,
    jobs: Whole | None = None,
    running: RunOptions = _ANY,
    schedule: OutputFile = None,
    html: OutputFile = None,
    gantt: OutputFile = None,
    json_: Annotated[
        tuple[str, ...] | None,
        Parameter(name="--json", negative=(), consume_multiple=(0, 1), metavar="[FILE]", group=OUTPUT),
    ] = None,
) -> None:
    """Answer whether a model trains on a hardware: the best plan, how fast it is, and what would make it faster.

    Without --batch-size, the batch and the number of micro-batches that train the most tokens per second are used.

    Parameters
    ----------
    policy:
        NAME[:flag,flag=value]: only show what this policy decides for each block. Without it all policies are judged, with all
        flags that their users can choose.
    max_:
        The largest batch, sequence or number of blocks that fits, or all three. With --policy, that size is planned instead
        of the one given.
    tokens:
        Tokens of the whole training, such as 1B (the default) or 300M.
    iteration_tokens:
        Tokens of an iteration on all GPUs, at most, where the batch is not given.
    draws:
        How often uncertain hardware figures are drawn from their ranges, for an interval of the time; 0: never.
    seed:
        Seed of the draws.
    price:
        ITEM=AMOUNT: price of a purchase, in any currency; the answer has its price for each hour saved. Items: gpu-memory,
        host-memory, pinned-memory, link, dram, cores, gpus, or the name of a place, such as nvme. Repeatable.
    fast:
        Leave out what would make it faster.
    timeout:
        Seconds after which the best answer so far is printed.
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
    from autohete.answer import Sampling
    from autohete.simulate.largest import GrowingFigure

    if max_ is not None and question.profile is not None:
        raise InputError("a measured profile (--profile) has no other sizes: leave out --profile or --max")
    if jobs is not None and jobs < 1:
        raise InputError(f"--jobs is {jobs}: give at least 1, or leave it out for one per core")
    if timeout is not None and not 0 < timeout < math.inf:
        raise InputError(f"--timeout is {timeout:g}: give a number of seconds, such as 30")
    files = {"--schedule": schedule, "--html": html, "--gantt": gantt, "--json": json_[0] if json_ else None}
    outputs = {option: path for option, path in files.items() if path is not None and (option, path) != ("--json", "-")}
    if policy is not None:
        whole = {"--html": html, "--tokens": tokens, "--price": price or None, "--fast": fast or None, "--timeout": timeout}
        for option, value in whole.items():
            if value is not None:
                raise InputError(f"{option} belongs to the whole answer: leave out --policy, or {option}")
    sizes = tuple(GrowingFigure) if max_ == "all" else () if max_ is None else (GrowingFigure[max_.upper()],)
    prices, most_tokens = _prices(price), parse_count(iteration_tokens)
    check_outputs(outputs)
    running.check()
    if policy is not None:
        if running.from_ is not None:
            raise InputError("--from names a policy with its file: leave out --policy, or --from")
        _print_policy(question, policy, sizes, outputs, json_, running)
        return
    read = None
    if running.from_ is not None:
        read, question = read_configuration(running.from_, question)
    whole_profile, run = running.as_it_runs(question).with_system(), Stages(jobs, timeout)
    if isinstance(whole_profile.workload, TracedWorkload):
        sizes = _of_traced(whole_profile.workload, sizes)
    if question.searches_batch:
        whole_profile = _with_best_batch(question, whole_profile, most_tokens, run)
    result = _answer(question, whole_profile, tokens, Sampling(draws, seed), sizes, prices, running.only(), run, fast=fast)
    result = with_options(result)
    written = write_best(result, running, question)
    advice = None if read is None else advise(running.from_ or "", read, result)
    document = _json(result, written, advice)
    _write_outputs(result, outputs, document)
    if json_ is None or "--json" in outputs:
        from autohete.report.answer_text import answer_text
        from autohete.report.tables import console, print_text

        if advice is not None:
            print_text(console(), f"{advice}\n")
        print(answer_text(result, console().width), end="")
        if written is not None:
            print_text(console(), f"\n{written}")
    else:
        print(document)


def _prices(given: Sequence[str]) -> dict[str, float]:
    """Read ITEM=AMOUNT."""
    prices: dict[str, float] = {}
    for each in given:
        item, equals, text = each.partition("=")
        try:
            amount = float(text)
        except ValueError:
            amount = math.nan
        if not equals or not 0 < amount < math.inf:
            raise InputError(f"--price {each!r} is not ITEM=AMOUNT: write it such as gpu-memory=800")
        prices[item] = amount
    return prices


def _with_best_batch(question: Question, whole: Profile, most_tokens: int, run: Run) -> Profile:
    """The profile of the batch that trains the most tokens per second; as it was if none fits."""
    from autohete.answer.best_batch import best_batches
    from autohete.profile import analytic_profile

    hardware = question.on_hardware()
    best = best_batches(whole.workload, hardware, run, most_tokens, micro_batches=question.shape.micro_batches)
    return whole if best is None else analytic_profile(best, whole.hardware)


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
    sampling: Sampling,
    sizes: Sequence[GrowingFigure],
    prices: Mapping[str, float],
    runnable: Sequence[str],
    run: Run,
    *,
    fast: bool,
) -> Answer:
    from autohete.answer import find_answer

    overrides = question.overrides()
    given = {*question.shape.changes()}
    if tokens is not None:
        given.add("tokens")
    if question.system_memory != SYSTEM_MEMORY:
        given.add("system_memory")
    given |= {key.replace(".", "_") for key in overrides}
    if question.hardware != DEFAULT_HARDWARE or question.profile is not None:
        given.add("hardware")
    return find_answer(
        chosen,
        None if question.profile is not None else question.site(),
        system_bytes=question.system_bytes(),
        tokens=parse_count(_TOKENS if tokens is None else tokens),
        sampling=sampling,
        sizes=sizes,
        runnable=runnable,
        given=given,
        chosen=[name for name in _CHOSEN if question.searches_batch and name not in given],
        prices=prices,
        fast=fast,
        run=run,
    )


def with_options(result: Answer) -> Answer:
    """Name levers by the options that pull them."""
    from autohete.answer import AND
    from autohete.answer.levers import LORA, QLORA

    options = {
        "chunked loss": "--chunked-loss",
        "lean kernels": "--kernels lean",
        "sublayers": "--units sublayer",
        "8-bit AdamW": "--optimizer adamw8bit",
        "AdamW with states in bf16": "--optimizer adamw_bf16",
        "AdamW in pure bf16": "--optimizer adamw_pure_bf16",
        "8-bit AdamW in pure bf16": "--optimizer adamw8bit_pure_bf16",
        "products in fp8": "--precision fp8",
        LORA: "--lora 16",
        QLORA: "--lora 16 --qlora",
    }

    def named(gain: Gain) -> Gain:
        workload, parts = gain.change.workload, []
        for name in gain.change.name.split(AND):
            batch = workload is not None and name.endswith("sequences")
            if batch and workload is not None:
                name = f"--batch-size {workload.batch_size} --micro-batches {workload.micro_batches}"
            parts.append(options.get(name, name))
        return replace(gain, change=replace(gain.change, name=" ".join(parts)))

    return replace(result, levers=tuple(map(named, result.levers)))


def _json(result: Answer, written: Written | None, advice: Advice | None) -> str:
    from autohete.answer.answer_document import answer_json

    extras = (None if each is None else asdict(each) for each in (written, advice))
    return json.dumps(answer_json(result, *extras), indent=2, ensure_ascii=True)


def _write_outputs(result: Answer, outputs: dict[str, str], document: str) -> None:
    from autohete.files import write_text

    if "--json" in outputs:
        write_text(outputs["--json"], document + "\n")
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
        from autohete.report.style import save_figure

        save_figure(simulation.gantt(), outputs["--gantt"])


def _print_policy(
    question: Question,
    policy: str,
    sizes: Sequence[GrowingFigure],
    outputs: dict[str, str],
    json_: tuple[str, ...] | None,
    running: RunOptions,
) -> None:
    """Show one policy's decisions, for the workload given or for the largest that fits."""
    from autohete.files import write_text
    from autohete.frameworks import Decided
    from autohete.policies import parse_policy
    from autohete.profile import analytic_profile
    from autohete.report.answer_text import largest_text
    from autohete.simulate.largest import largest
    from autohete.simulate.plan_document import plan_json
    from autohete.simulate.summary import answer

    chosen, asked = running.as_it_runs(question).answerable(), parse_policy(policy)
    if isinstance(chosen.workload, TracedWorkload):
        sizes = _of_traced(chosen.workload, tuple(sizes))
    grown = [largest(chosen.workload, chosen.hardware, asked, figure) for figure in sizes]
    if len(grown) == 1:
        chosen = analytic_profile(grown[0].workload, chosen.hardware)
    summary, simulation = answer(chosen, asked)
    if simulation is not None:
        _write_simulation(simulation, outputs)
    elif "--schedule" in outputs or "--gantt" in outputs:
        raise InputError(f"there is no schedule to write: {summary.explanation}")
    written = None
    if running.write is not None:
        if simulation is None or summary.explanation:
            raise InputError(f"there is nothing to write, since it does not fit: {summary.explanation}")
        decided = Decided(chosen, asked.system, simulation.plan, simulation.iteration_seconds, simulation.gpu.peak_bytes)
        written = write_plan(decided, running, question)
    files = None if written is None else asdict(written)
    text = json.dumps(plan_json(summary, simulation, tuple(grown), files), indent=2, ensure_ascii=True)
    if "--json" in outputs:
        write_text(outputs["--json"], text + "\n")
    if json_ is None or "--json" in outputs:
        from autohete.report.tables import console, print_plan, print_text

        print_plan(summary, simulation)
        for one in grown:
            print_text(console(), largest_text(one))
        if written is not None:
            print_text(console(), str(written))
    else:
        print(text)
