"""An answer as text: one page that fits 80 columns, without colours, the same bytes for the same answer."""

from __future__ import annotations

import textwrap
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from autohete.analysis.bounds import period_bounds
from autohete.answer import NOISE, Answer, Budget, Candidate, Gain, Interval, Need, Offloading
from autohete.frameworks import FRAMEWORKS, kernels_of
from autohete.plan import Activations, UnitPlan
from autohete.plan.policy import Verdict
from autohete.printable import printable
from autohete.quantities import format_bytes, format_count, format_rate, format_ratio, format_seconds
from autohete.schedule import GPU_MEMORY, HOST_MEMORY, PINNED_MEMORY
from autohete.simulate import Simulation
from autohete.simulate.largest import Largest
from autohete.simulate.summary import Summary, UnitTraining, described_blocks, proven_within, training_of
from autohete.workload import Kernels, Units

WIDTH = 80
#: Columns for the name of a policy; longer flags are on a line of their own.
_POLICY = 25
_NAMES = {GPU_MEMORY: "GPU memory", PINNED_MEMORY: "pinned memory", HOST_MEMORY: "host memory"}
#: Figures that define the model rather than its training; they are not listed as assumptions.
_OF_THE_MODEL = (
    "name",
    "hidden_size",
    "transformer_blocks",
    "heads",
    "vocabulary_size",
    "tied_embeddings",
    "blocks",
    "policy",
)
_TIMES = (("year", 365.25 * 86400), ("day", 86400.0), ("hour", 3600.0), ("minute", 60.0))


def answer_text(answer: Answer, columns: int = WIDTH) -> str:
    """Return the page: whether it fits, the plan, the other policies, the effect of purchases, and the assumptions.

    Lines longer than ``columns`` are wrapped; the page is never wider than 80 columns.
    """
    width = min(columns, WIDTH)
    parts = ("\n".join(row for line in lines for row in _wrapped(line, width)) for _, lines in sections(answer))
    return "\n\n".join(parts) + "\n"


def _wrapped(line: str, columns: int) -> list[str]:
    if len(line) <= columns:
        return [line]
    further = " " * (len(line) - len(line.lstrip()) + 2)
    return textwrap.wrap(line, columns, subsequent_indent=further, break_on_hyphens=False)


def sections(answer: Answer) -> list[tuple[str, list[str]]]:
    """Return the parts of the page: a title for each, and its lines, which are as long as they need to be."""
    parts = [
        ("Answer", _verdict(answer)),
        ("Memory", _memory(answer)),
        ("Plan", _plan(answer)),
        ("Policies", _policies(answer)),
        ("What to change", _levers(answer)),
        ("What to buy", _purchases(answer)),
        ("The largest that fits", _largest(answer)),
        ("Assumptions", _assumed(answer)),
    ]
    return [(title, lines) for title, section in parts if (lines := [*map(printable, section)])]


# --- whether it fits ----------------------------------------------------------------------------------------------


def _verdict(answer: Answer) -> Iterator[str]:
    workload, hardware = answer.profile.workload, answer.profile.hardware
    times = f"{workload.micro_batches} x " if workload.micro_batches > 1 else ""
    yield (
        f"{workload.name} ({workload.parameters / 1e9:.2f}B parameters, {times}{workload.batch_size} x "
        f"{workload.sequence_length} tokens) on {hardware.title}, {_clock(answer)}"
    )
    yield ""
    best, simulation = answer.best, answer.simulation
    if best is None or simulation is None:
        only = f" that runs in {' or '.join(answer.runnable)}" if answer.runnable else ""
        yield f"DOES NOT FIT under any policy{only}."
        yield from needs_text(answer)
        return
    rate = format_rate(simulation.tokens_per_second)
    yield f"FITS: {best.name} takes {format_seconds(best.seconds)} per iteration, {rate} tokens/s."
    if answer.training_seconds is not None:
        yield f"  {format_count(answer.tokens)} tokens take {long_time(answer.training_seconds)}."
    if answer.interval is not None:
        yield f"  {interval_text(answer.interval)}"
    yield f"  {offload_text(answer, best)}"


def _clock(answer: Answer) -> str:
    return str(answer.candidates[0].summary.clock)


def offload_text(answer: Answer, best: Candidate) -> str:
    """Return whether to offload, and why."""
    staying, offloading = answer.staying, answer.offloading
    if staying is None:
        return "Offloading is needed: no plan fits that keeps everything on the GPU."
    rate = f"{format_rate(1 / staying.seconds_per_token)} tokens/s, {_slower(staying, best)}"
    alone = f"keeping everything on the GPU ({staying.name}) takes {format_seconds(staying.seconds)} per iteration, {rate}"
    if offloading is Offloading.PAYS:
        return f"Offloading pays: {alone}."
    if offloading is Offloading.UNDECIDED:
        return f"It is not certain that offloading pays: {alone}, which is within the uncertainty. Measure both."
    recomputes = best.plan is not None and best.plan.checkpointed_units
    fastest = min(answer.candidates, key=lambda each: each.seconds_per_token)
    gain = ""
    if fastest.seconds_per_token < best.seconds_per_token:
        gain = (
            f" Offloading ({fastest.name}) would save "
            f"{100 * (1 - fastest.seconds_per_token / best.seconds_per_token):.2f} %, which is less than the "
            f"{100 * NOISE:.0f} % that this page tells apart."
        )
    return f"Do not offload: everything fits on the GPU{' with recomputation' if recomputes else ''}, and that is best.{gain}"


def interval_text(interval: Interval) -> str:
    """Return where the time of an iteration lies, and how sure that is."""
    low, high = format_seconds(interval.low_seconds), format_seconds(interval.high_seconds)
    draws, seed = interval.sampling.draws, interval.sampling.seed
    error = f"the model's mean error of {100 * interval.model_error:.0f} % on new sources"
    text = f"{low} to {high} with a probability of 90 %, from {error}"
    if not interval.figures:
        return f"{text}; all figures of the hardware are given."
    fitting = f"all {draws}" if interval.fitting == draws else f"{interval.fitting}"
    short = ", ".join(f"{memory_name(memory)} is short in {count}" for memory, count in interval.short.items())
    return (
        f"{text} and from {draws} draws of the {interval.figures} uncertain figures of the hardware (seed {seed}); this plan "
        f"fits in {fitting}{f' of them ({short})' if short else ''}."
    )


def needs_text(answer: Answer) -> Iterator[str]:
    """Return the least memory with which something fits."""
    if not answer.needs:
        yield "  No size of GPU and host memory was found with which a policy fits."
    for need in answer.needs:
        yield f"  {need_text(need, answer.budgets)}"


def need_text(need: Need, budgets: Sequence[Budget]) -> str:
    """Return the sizes that a memory would need, and those that ``budgets`` have now."""
    now = {budget.memory: format_bytes(budget.total_bytes) for budget in budgets}
    sizes = {
        GPU_MEMORY: f"a GPU with {format_bytes(need.gpu_bytes)} (now {now.get(GPU_MEMORY)})",
        HOST_MEMORY: f"{format_bytes(need.host_bytes)} of host memory (now {now.get(HOST_MEMORY)})",
        PINNED_MEMORY: f"{format_bytes(need.pinned_bytes or 0)} of pinned memory",
    }
    wanted = " and ".join(sizes[memory] for memory in need.grows)
    speed = f"{format_seconds(need.iteration_seconds)} per iteration, {format_rate(need.tokens_per_second)} tokens/s"
    return f"It would with {wanted}: {need.policy}, {speed}."


# --- memory -------------------------------------------------------------------------------------------------------


def _memory(answer: Answer) -> Iterator[str]:
    yield f"{'memory':<9}{'used':>11}{'available':>12}   of"
    for budget in answer.budgets:
        used = "-" if budget.used_bytes is None else format_bytes(budget.used_bytes)
        yield f"{budget.memory:<9}{used:>11}{format_bytes(budget.available_bytes):>12}   {_kept_back(budget)}"
    reserved = answer.best.summary.gpu_reserved_bytes if answer.best is not None else None
    if reserved is not None:
        more, lengths = _fragmented(answer, reserved), answer.profile.workload.sample_lengths
        after = f", after samples of {min(lengths)} to {max(lengths)} tokens" if lengths else ""
        yield f"PyTorch's allocator reserves {format_bytes(reserved)} of the GPU for what is used{after}{more}"
    if answer.profile.hardware.all_gpus > 1:
        yield "of each GPU; host and pinned memory are its share of the node"
    if answer.best is not None and not answer.purchases:
        return  # nothing was varied, so nothing is known to bind
    names = " and ".join(memory_name(memory) for memory in answer.binds)
    if answer.best is None:
        yield f"binds: {names or 'no memory alone'}"
    elif names:
        yield f"binds: {names}; more of it would save time, see below"
    else:
        yield "binds: no memory; more of any would not save time"


def _fragmented(answer: Answer, reserved_bytes: int) -> str:
    """What to do if the allocator would need more than there is, or all of it."""
    capacity, simulation = answer.profile.hardware.gpu_capacity_bytes, answer.simulation
    if reserved_bytes > capacity:
        why = f", more than its {format_bytes(capacity)}, as free memory is in pieces"
    elif simulation is not None and simulation.gpu.retries:
        why = ", and training waits where it gives back what is in pieces"
    else:
        return ""
    expanded = None if simulation is None else simulation.gpu.expanded_bytes
    if answer.profile.workload.expandable_segments or (expanded is not None and expanded > capacity):
        return why
    then = "" if expanded is None else f", with which it reserves {format_bytes(expanded)}"
    return f"{why}: set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True{then}"


def _kept_back(budget: Budget) -> str:
    kept, total = budget.total_bytes - budget.available_bytes, format_bytes(budget.total_bytes)
    if budget.memory == GPU_MEMORY:
        return f"{total}; {format_bytes(kept)} for CUDA and libraries"
    if budget.memory == HOST_MEMORY:
        return f"{total}; {format_bytes(kept)} left to the system"
    if budget.memory != PINNED_MEMORY:
        return "a place of the hardware"
    return "a limit of its own" if budget.limited else "the host's; no limit of its own"


# --- plan ---------------------------------------------------------------------------------------------------------


def _plan(answer: Answer) -> Iterator[str]:
    simulation, best = answer.simulation, answer.best
    if simulation is None or best is None:
        return
    plan, workload = simulation.plan, answer.profile.workload
    units = "blocks" if workload.units is Units.BLOCK else "units"
    yield f"plan of {best.name}, by {units} (0 is the embedding, {len(plan.units) - 1} the head):"
    for places, words in decisions(simulation):
        yield f"  {places}: {words}"
    yield f"bound by {period_bounds(simulation.schedule, simulation.trace).binds}"
    within = proven_within(simulation)
    if within is not None:
        least = format_seconds(simulation.iteration_seconds / (1 + within))
        yield f"proven: no plan that this policy could choose takes less than {least}"
    if simulation.waits:
        yield f"it fits with {simulation.waits} waits for memory"


def decisions(simulation: Simulation) -> list[tuple[str, str]]:
    """Return the units that are planned alike, such as ``1 to 4, 7``, and how; prefetch distances are left out."""
    places: dict[str, list[int]] = {}
    for number, unit in enumerate(simulation.plan.units):
        places.setdefault(describe(unit, training_of(simulation.profile, number)), []).append(number)
    return [(_runs(numbers), words) for words, numbers in places.items()]


def _runs(numbers: Sequence[int]) -> str:
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ", ".join(" to ".join(map(str, run)) for run in runs)


_KEPT = {
    Activations.KEEP: "keep activations",
    Activations.SELECTIVE: "recompute some activations",
    Activations.RECOMPUTE: "recompute activations",
    Activations.DROP: "recompute activations and input",
}


def memory_name(memory: str) -> str:
    """Return the name of a memory in text."""
    return _NAMES.get(memory, memory)


def _where(home: str) -> str:
    return {GPU_MEMORY: "on the GPU", HOST_MEMORY: "on the host"}.get(home, f"in {home}")


def describe(unit: UnitPlan, training: UnitTraining) -> str:
    """Return a unit's decisions in words, but not those that mean nothing where it is frozen."""
    words = []
    if training is not UnitTraining.FROZEN_BELOW:
        where = [f"kept {_where(unit.kept.home)}"] if unit.kept.leaves else []
        where += [f"{one.name} {'again' if one.recomputed else _where(one.route.home)}" for one in unit.saved]
        words.append(_KEPT[unit.activations] + (f" ({', '.join(where)})" if where else ""))
    words.append(f"parameters {_where(unit.parameters.home)}")
    if training is not UnitTraining.TRAINED:
        return ", ".join([*words, training])
    states = f", states {_where(unit.states.home)}" if unit.states.leaves else ""
    share = f" ({100 * unit.update.share:.0f} % by the GPU)" if unit.update.share else ""
    words.append(f"{unit.update.on.upper()} updates{share}{states}")
    return ", ".join(words)


# --- policies -----------------------------------------------------------------------------------------------------


def _policies(answer: Answer) -> Iterator[str]:
    best, following = answer.best, answer.next_best
    if best is not None:
        if following is None:
            yield "next best: none; no other plan fits"
        else:
            yield f"next best: {following.name}, {_slower(following, best)}"
    fitting = [each for each in answer.candidates if each.fits]
    if fitting and best is not None:
        yield f"{'policy':<26}{'iteration':>9}{'tokens/s':>9}  runs in"
        for each in fitting:
            rate = each.summary.tokens_per_second or 0.0
            note = remark(answer, each)
            name, colon, flags = each.name.partition(":")
            if len(each.name) <= _POLICY:
                name, flags = each.name, ""
            runs = f"{_runs_in(each):<13}"
            yield f"{name:<26}{format_seconds(each.seconds):>9}{format_rate(rate):>9}  {runs}{note}".rstrip()
            if flags:
                yield f"  {colon}{flags}"
    short = [each for each in answer.candidates if not each.fits and each.summary.verdict is not Verdict.INVALID]
    if short:
        yield "does not fit:"
        for each in short:
            yield f"  {each.name}: {remark(answer, each)}"
    refused = [each for each in answer.candidates if each.summary.verdict is Verdict.INVALID]
    if refused:
        yield "cannot plan this:"
        for each in refused:
            reason = remark(answer, each)
            yield f"  {reason}" if reason.startswith(f"{each.name} ") else f"  {each.name}: {reason}"


def remark(answer: Answer, each: Candidate) -> str:
    """Return how a policy compares with the best one, or why it does not train; empty for the best one."""
    if each.summary.verdict is Verdict.INVALID:
        return _fact(each.summary)
    best = answer.best
    if not each.fits or best is None:
        return _shortage(each.summary)
    if each.same_plan_as:
        return f"same plan as {each.same_plan_as}"
    return "" if each is best else _slower(each, best)


def _runs_in(each: Candidate) -> str:
    """The preferred framework that runs it, and how many others do."""
    others = f" +{len(each.runs_in) - 1}" if len(each.runs_in) > 1 else ""
    return f"{each.runs_in[0]}{others}" if each.runs_in else "-"


def _slower(each: Candidate, best: Candidate) -> str:
    share = each.seconds_per_token / best.seconds_per_token - 1
    if abs(share) < NOISE:
        return f"as fast, within {100 * NOISE:.0f} %"
    return format_ratio(each.seconds_per_token, best.seconds_per_token)


def _shortage(summary: Summary) -> str:
    """One line: the memory, the bytes needed and the bytes available."""
    memory = summary.verdict.short
    peaks = {
        GPU_MEMORY: (summary.gpu_peak_bytes, summary.gpu_capacity_bytes),
        HOST_MEMORY: (summary.host_peak_bytes, summary.host_capacity_bytes),
        PINNED_MEMORY: (summary.pinned_peak_bytes, summary.pinned_capacity_bytes),
        **{name: (use.peak_bytes, use.capacity_bytes) for name, use in summary.places.items()},
    }
    used, capacity = peaks.get(memory, (None, None))
    if used is None or not capacity:  # without a capacity, there is no such place, or none that does what the plan wants
        return _fact(summary)
    return f"needs {format_bytes(used)} of {memory_name(memory)}, there are {format_bytes(capacity)}"


def _fact(summary: Summary) -> str:
    """An explanation without its cure, which is meant for a user who chose this policy; JSON has both."""
    return summary.explanation.partition(": ")[0]


# --- what would help ----------------------------------------------------------------------------------------------


def _levers(answer: Answer) -> Iterator[str]:
    groups = {
        "with the same gradients from the same sequences:": [gain for gain in answer.levers if gain.change.exact],
        "with other mathematics:": [gain for gain in answer.levers if not gain.change.exact],
    }
    for title, some in groups.items():
        shown = [gain for gain in some if gain.verdict is not Verdict.INVALID]
        if shown:
            yield title
        for gain in shown:
            yield f"  {gain.change.name}: {gain_text(answer, gain)}{memory_of(gain)}"


def memory_of(gain: Gain) -> str:
    """Return what is used of each memory, after a semicolon; empty if nothing fits."""
    used = [f"{format_bytes(size)} of {memory_name(memory)}" for memory, size in gain.peaks.items() if size]
    return f"; {', '.join(used)}" if used else ""


def _purchases(answer: Answer) -> Iterator[str]:
    if not answer.purchases:
        return
    yield "effect of a purchase, with the best plan for it:"
    for gain in answer.purchases:
        price = "" if gain.price_per_hour is None else f"; {gain.price_per_hour:.3g} for each hour saved"
        yield f"  {gain.change.name}: {gain_text(answer, gain)}{price}"
    if answer.profile.hardware.interconnect is None:
        yield "  one more GPU: not simulated, as it is not known how GPUs are joined here"


def gain_text(answer: Answer, gain: Gain) -> str:
    """Return the effect of a change on tokens/s."""
    best, seconds, change = answer.best, gain.iteration_seconds, gain.change
    if seconds is None or gain.tokens_per_second is None:
        return "would not fit" if best is not None else "still does not fit"
    if gain.saved_seconds is None or gain.saved_share is None:
        return f"FITS, {format_seconds(seconds)} per iteration, {format_rate(gain.tokens_per_second)} tokens/s ({gain.policy})"
    other = "" if best is None or gain.policy == best.name else f", with {gain.policy}: another policy"
    if not gain.helps:
        slower = format_ratio(1 - gain.saved_share, 1) if gain.saved_share <= -NOISE else ""
        if change.workload is not None:
            return slower or "no faster"
        if not slower or change.gpus is not None:  # what is bought may be left unused
            return "no effect"
        return f"no effect, or {slower}: copies and CPU updates take DRAM bandwidth from each other"
    faster = f"{format_rate(gain.tokens_per_second)} tokens/s, {format_ratio(1 - gain.saved_share, 1)}"
    return f"{faster} ({format_seconds(seconds)} per iteration{other})"


def _largest(answer: Answer) -> Iterator[str]:
    for largest in answer.largest:
        yield largest_text(largest)


def largest_text(largest: Largest) -> str:
    """One line: the largest value, and what limits it."""
    name = largest.figure.replace("_", " ")
    if not largest.value:
        return f"not even {name} 1 fits: {largest.limit}"
    return f"largest {name} that fits: {largest.value:,}; one more does not: {largest.limit}"


# --- assumptions --------------------------------------------------------------------------------------------------


def _assumed(answer: Answer) -> Iterator[str]:
    workload, hardware = answer.profile.workload, answer.profile.hardware
    given = set(answer.given)
    figures: Mapping[str, object] = answer.candidates[0].summary.assumptions
    assumed = [
        f"{name.replace('_', ' ')} {_value(value)}"
        for name, value in figures.items()
        if name not in _OF_THE_MODEL and name not in given and name not in answer.chosen
    ]
    if "hardware" not in given:
        assumed.append(f"hardware {hardware.name}")
    totals = {budget.memory: format_bytes(budget.total_bytes) for budget in answer.budgets}
    for name, memory in (("gpu_memory", GPU_MEMORY), ("host_memory", HOST_MEMORY)):
        if name not in given:
            assumed.append(f"{memory_name(memory)} {totals[memory]}")
    if "system_memory" not in given and not hardware.unified:
        assumed.append(f"{format_bytes(answer.system_bytes)} of host memory left to the system")
    if "tokens" not in given:
        assumed.append(f"{format_count(answer.tokens)} tokens")
    if answer.chosen:
        chosen = ", ".join(f"{name.replace('_', ' ')} {_value(figures[name])}" for name in answer.chosen)
        yield f"chosen for the most tokens/s: {chosen}."
    yield f"assumed, not given: {', '.join(assumed)}."
    if answer.left_out:
        yield f"no time for: {', '.join(answer.left_out)}; give a longer --timeout."
    yield f"model: {'; '.join(described_blocks(workload))}; vocabulary {workload.vocabulary_size:,}."
    for note in [*answer.candidates[0].summary.notes, *_other_kernels(answer)]:
        yield f"note: {note}"


def _other_kernels(answer: Answer) -> Iterator[str]:
    """Say which frameworks run the plans shown with other kernels than those of the times."""
    runs = {name for each in answer.candidates if each.fits for name in each.runs_in}
    workload, by_kernels = answer.profile.workload, defaultdict[Kernels, list[str]](list)
    for framework in FRAMEWORKS:
        if framework.name in runs:
            by_kernels[kernels_of(framework, workload)].append(framework.name)
    now = workload.kernels
    for kernels, names in by_kernels.items():
        if kernels is not now:
            run = f"{', '.join(names)} {'run' if len(names) > 1 else 'runs'} {kernels} ones"
            yield f"times are of {now} kernels, but {run}: give --kernels {kernels} for their times"


def _value(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return "none" if value is None else f"{value:,}" if isinstance(value, int) else str(value)


# --- words --------------------------------------------------------------------------------------------------------


def long_time(seconds: float) -> str:
    """Return a time of minutes, hours, days or years."""
    for unit, size in _TIMES:
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}s"
    return format_seconds(seconds)
