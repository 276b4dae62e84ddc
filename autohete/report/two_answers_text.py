"""Two answers side by side in the terminal, and the words that the page of them has, too."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from autohete.answer import Budget
from autohete.answer.saved_answer import SavedAnswer, SavedGain, SavedPolicy
from autohete.answer.two_answers import Joined, Ratio, TwoAnswers
from autohete.hardware import node_text
from autohete.plan.policy import Verdict
from autohete.quantities import format_bytes, format_count, format_rate, format_ratio, format_seconds
from autohete.report.answer_text import long_time, memory_name, need_text
from autohete.report.tables import IN_JSON, console, print_text, table

#: Beginnings of the names of figures that are counted, not listed, where they are the same.
_COUNTED = "hardware."
#: Figures that follow from the model's name.
_OF_THE_MODEL = ("hidden size", "transformer blocks", "heads", "vocabulary size", "tied embeddings", "blocks")
#: How the name of a figure ends -> size and name of the unit in which it is shown.
_UNITS = {"bandwidth": (1e9, "GB/s"), "_flops": (1e12, "TFLOP/s")}
#: What is more probable is not told apart.
_SURE = 0.99
_COLUMNS = ("iteration A", "tokens/s A", "iteration B", "tokens/s B", "B against A", "certainty")


def print_two_answers(two: TwoAnswers, names: tuple[str, str]) -> None:
    """Print what is asked, the verdicts, memories, policies and changes of two answers; ``names`` are those of the files."""
    out = console()
    for letter, name, answer in zip("AB", names, (two.a, two.b), strict=True):
        print_text(out, f"{letter}: {name}: {asked_text(answer)}")
    print_text(out, "")
    if two.differences:
        differing = table("what differs in the question", ["figure", "A", "B"], left=3)
        for each in two.differences:
            differing.add_row(figure_name(each.figure), figure_text(each.figure, each.a), figure_text(each.figure, each.b))
        out.print(differing)
    print_text(out, f"{same_text(two)}\n")
    for letter, answer in zip("AB", (two.a, two.b), strict=True):
        for line in _verdict(letter, answer):
            print_text(out, line)
    for line in [verdict_text(two), *two.remarks]:
        print_text(out, line)
    print_text(out, "")
    memories = table("memory of the best plans", ["memory", "A used", "A available", "B used", "B available"])
    for memory, pair in budgets_of(two).items():
        memories.add_row(memory_name(memory), *(cell for budget in pair for cell in _budget(budget)))
    out.print(memories)
    _print_policies(two.policies)
    for title, rows in (("what to change", two.levers), ("what to buy", two.purchases)):
        _print_changes(title, rows)


def _print_policies(rows: Sequence[Joined]) -> None:
    columns = ["policy", *_COLUMNS, "flags"]
    policies = table("policies", columns, remark=True, give_way=["flags", "tokens/s", "certainty"], elsewhere=IN_JSON)
    for row in rows:
        if row.fits:
            policies.add_row(row.name, *_cells(row), flags_text(row))
    if policies.rows:
        console().print(policies)
    if neither := neither_text(rows):
        print_text(console(), f"{neither}\n")


def _print_changes(title: str, rows: Sequence[Joined]) -> None:
    """Print the changes that both answers have tried; the number of the others."""
    changes = table(title, ["", *_COLUMNS], give_way=["tokens/s", "certainty"], elsewhere=IN_JSON)
    both = [row for row in rows if row.a is not None and row.b is not None]
    for row in both:
        if row.fits:
            changes.add_row(row.name, *_cells(row))
    if changes.rows:
        console().print(changes)
    if more := len(rows) - len(both):
        print_text(console(), f"{title}: {more} more in one answer only; {IN_JSON}\n")


def _cells(row: Joined) -> list[str]:
    sides = [cell for side in (row.a, row.b) for cell in (time_text(side), rate_text(side))]
    return [*sides, ratio_text(row.ratio), certainty_text(row.ratio)]


# --- words --------------------------------------------------------------------------------------------------------


def asked_text(answer: SavedAnswer) -> str:
    """Return which model is trained on which hardware."""
    gpus = answer.hardware.get("gpus")
    return (
        f"{answer.workload.get('name')} on {node_text(str(answer.hardware.get('name')), gpus if isinstance(gpus, int) else 1)}"
    )


def figure_name(name: str) -> str:
    """Return a figure's name without its unit; those of the hardware are named as in its file."""
    for unit in ("_bytes", "_seconds"):
        name = name.removesuffix(unit)
    return name.removeprefix(_COUNTED) if name.startswith(_COUNTED) else name.replace("_", " ").replace(".", " ")


def figure_text(name: str, value: object) -> str:
    """Return the value of a figure with its unit."""
    if value is None or isinstance(value, bool):
        return {None: "none", True: "on", False: "off"}[value]
    if not isinstance(value, int | float):
        return str(value)
    if name.endswith("_bytes"):
        return format_bytes(value)
    if name.endswith("_seconds"):
        return format_seconds(value)
    if name == "tokens":
        return format_count(round(value))
    for end, (size, unit) in _UNITS.items():
        if name.endswith(end):
            return f"{value / size:.4g} {unit}"
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def neither_text(rows: Sequence[Joined]) -> str:
    """Return the policies that fit in neither answer; empty if there are none."""
    names = ", ".join(row.name for row in rows if not row.fits)
    return f"Fit in neither: {names}." if names else ""


def same_text(two: TwoAnswers) -> str:
    """Return the figures of the question that are the same, once; those of the hardware and of the model are counted."""
    said = [f"{figure_name(name)} {figure_text(name, value)}" for name, value in two.same.items() if _is_said(name, value)]
    counted = sum(name.startswith(_COUNTED) for name in two.same)
    if counted:
        said.append(f"{counted} figures of the hardware")
    return f"The same in both: {', '.join(said) or 'nothing'}."


def _is_said(name: str, value: object) -> bool:
    return not (value is None or value is False or name.startswith(_COUNTED) or name.replace("_", " ") in _OF_THE_MODEL)


def verdict_text(two: TwoAnswers) -> str:
    """Return which of the best plans trains faster, and how certain that is."""
    ratio = two.ratio
    if two.a.best is None or two.b.best is None:
        fitting = [letter for letter, answer in zip("AB", (two.a, two.b), strict=True) if answer.best is not None]
        return f"Only {fitting[0]} fits." if fitting else "Neither fits."
    if ratio is None:
        return "It is not known which is faster."
    if ratio.tie:
        return f"B is {ratio_text(ratio)}."
    text = f"B is {ratio_text(ratio)} than A for each token"
    if ratio.certainty is None:
        return f"{text}."
    if ratio.sure:
        return f"{text}, with a probability of {certainty_text(ratio)}."
    return f"{text}, but with a probability of {certainty_text(ratio)} only, which is within the uncertainty. Measure both."


def ratio_text(ratio: Ratio | None) -> str:
    """Return how much faster or slower B is."""
    if ratio is None:
        return "-"
    return "as fast, within 1 %" if ratio.tie else format_ratio(ratio.time, 1)


def certainty_text(ratio: Ratio | None) -> str:
    """Return the probability that what is shown as faster is."""
    if ratio is None or ratio.certainty is None or ratio.tie:
        return "-"
    return f"over {100 * _SURE:.0f} %" if ratio.certainty > _SURE else f"{100 * ratio.certainty:.0f} %"


def time_text(result: SavedPolicy | SavedGain | None) -> str:
    """Return the time of an iteration, or in a few words why there is none."""
    if result is None:
        return "not tried"
    if result.iteration_seconds is not None:
        return format_seconds(result.iteration_seconds)
    if result.verdict is Verdict.INVALID:
        return "cannot"
    short = memory_name(result.verdict.short).removesuffix(" memory")
    return f"{short} short" if short else "-"


def rate_text(result: SavedPolicy | SavedGain | None) -> str:
    """Return the tokens of a second."""
    rate = None if result is None else result.tokens_per_second
    return "-" if rate is None else format_rate(rate)


def flags_text(row: Joined) -> str:
    """Return the flags of a policy that is joined without them."""
    flags = {
        letter: each.policy.partition(":")[2]
        for letter, each in (("A", row.a), ("B", row.b))
        if isinstance(each, SavedPolicy) and ":" not in row.name
    }
    if len(set(flags.values())) == 1 and len(flags) == 2:
        return flags["A"]
    return "; ".join(f"{letter}: {text}" for letter, text in flags.items() if text)


def budgets_of(two: TwoAnswers) -> dict[str, tuple[Budget | None, Budget | None]]:
    """Return each memory of both answers, with what the best plans use of it."""
    a, b = ({each.memory: each for each in answer.budgets} for answer in (two.a, two.b))
    return {memory: (a.get(memory), b.get(memory)) for memory in dict.fromkeys([*a, *b])}


def ways_out(answer: SavedAnswer) -> list[str]:
    """Return the least memory with which something fits, if nothing does."""
    return [need_text(need, answer.budgets) for need in answer.needs]


def _budget(budget: Budget | None) -> tuple[str, str]:
    if budget is None:
        return "-", "-"
    return "-" if budget.used_bytes is None else format_bytes(budget.used_bytes), format_bytes(budget.available_bytes)


def _verdict(letter: str, answer: SavedAnswer) -> Iterator[str]:
    best, interval = answer.best, answer.interval
    if best is None:
        yield f"{letter} DOES NOT FIT under any policy."
        yield from (f"  {way}" for way in ways_out(answer))
        return
    yield f"{letter} FITS: {best.policy} takes {time_text(best)} per iteration, {rate_text(best)} tokens/s."
    if interval is not None:
        low, high = format_seconds(interval.low_seconds), format_seconds(interval.high_seconds)
        yield f"  {low} to {high} with a probability of 90 %."
    if answer.training_seconds is not None:
        yield f"  {format_count(answer.tokens)} tokens take {long_time(answer.training_seconds)}."
