"""An answer as one HTML page: the verdict, memory, policies, levers and purchases as bars and tables, and a timeline."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from html import escape

from autohete.answer import Answer, Budget, Candidate, Gain
from autohete.plan.policy import Verdict
from autohete.quantities import format_bytes, format_rate, format_seconds
from autohete.report.answer_text import (
    gain_text,
    interval_text,
    memory_name,
    memory_of,
    needs_text,
    offload_text,
    remark,
    sections,
)
from autohete.report.answer_timeline import Timeline
from autohete.report.html_page import (
    bar_html,
    bar_list,
    card,
    folded,
    html_page,
    number_cell,
    row_head,
    shown_html,
    speed_facts,
    text_html,
    wide_table,
)
from autohete.schedule import GPU_MEMORY, HOST_MEMORY, PINNED_MEMORY
from autohete.simulate.summary import Summary

#: Sections that are shown as text; of the others, which are drawn, the text is folded away.
_AS_TEXT = ("Plan", "The largest that fits", "Assumptions")


def answer_page(answer: Answer) -> str:
    """Return the page as HTML; the same answer gives the same text."""
    hardware = answer.profile.hardware
    title = f"{answer.profile.workload.name} on {hardware.title}"
    text = dict(sections(answer))
    below_the_table = [line[0].upper() + line[1:] for line in text["Memory"][1 + len(answer.budgets) :]]
    timeline = None if answer.simulation is None else Timeline.of(answer.simulation)
    drawn = {name: "\n".join(lines) for name, lines in text.items() if name not in _AS_TEXT}
    parts = {
        "Memory": "".join([_memory(answer), *(f"<p>{escape(line)}.</p>" for line in below_the_table)]),
        "Policies": _policies(answer),
        "What to change": _levers(answer),
        "What to buy": bar_list(_gains(answer, answer.purchases)) if answer.purchases else "",
        "One iteration": "" if timeline is None else timeline.html(),
        **{name: text_html("\n".join(text[name])) for name in _AS_TEXT if name in text},
        "As text": folded("What is drawn above, in words", "".join(map(text_html, drawn.values()))),
    }
    return html_page(title, _verdict(answer), parts, {} if timeline is None else timeline.data())


# --- the verdict --------------------------------------------------------------------------------------------------


def _verdict(answer: Answer) -> str:
    best, simulation = answer.best, answer.simulation
    if best is None or simulation is None:
        ways = [line.strip() for line in needs_text(answer)]
        for gains in (answer.levers, answer.purchases):
            ways += [f"Or with {gain.change.name}: {gain_text(answer, gain)}." for gain in gains if gain.fits][:1]
        return card("Does not fit under any policy", {}, ways, fits=False)
    facts = speed_facts(
        best.name,
        simulation.tokens_per_second,
        best.seconds,
        answer.interval,
        answer.tokens,
        answer.training_seconds,
        answer.offloading,
    )
    reasons = [offload_text(answer, best), *([] if answer.interval is None else [interval_text(answer.interval)])]
    return card("Fits", facts, reasons, fits=True)


# --- memory -------------------------------------------------------------------------------------------------------


def _memory(answer: Answer) -> str:
    if answer.best is not None:
        return f"{bar_list(map(_budget, answer.budgets))}<p>The mark is what is available, the full width is the total.</p>"
    planned = [each for each in answer.candidates if each.summary.verdict is not Verdict.INVALID]
    short = dict.fromkeys(each.summary.verdict.short for each in planned)
    return "\n".join(_needed(memory, planned) for memory in dict.fromkeys((GPU_MEMORY, HOST_MEMORY, *short)))


def _budget(budget: Budget) -> tuple[str, str, str]:
    used, available, total = budget.used_bytes or 0, budget.available_bytes, budget.total_bytes
    of = f" ({format_bytes(total)} in total)" if total > available else ""
    text = f"{format_bytes(used)} used of {format_bytes(available)} available{of}"
    name = memory_name(budget.memory) + ("" if budget.limited else " (part of the host's)")
    return name, text, bar_html(used / total, available=available / total)


def _needed(memory: str, planned: Iterable[Candidate]) -> str:
    """Return what each policy needs of a memory, the least first, against what is available."""
    peaks = sorted((peak, each.name) for each in planned if (peak := _peak(each.summary, memory)) is not None)
    capacity = next((size for each in planned if (size := _capacity(each.summary, memory)) is not None), None)
    if not peaks or capacity is None:
        return ""
    most = max(capacity, peaks[-1][0], 1)
    rows = (
        (name, f"{format_bytes(peak)} needed", bar_html(peak / most, "over" if peak > capacity else "", capacity / most))
        for peak, name in peaks
    )
    title = f"{memory_name(memory)}: {format_bytes(capacity)} available (the mark)"
    return f"<h3>{shown_html(title[0].upper() + title[1:])}</h3>{bar_list(rows, 'bars brief')}"


def _peak(summary: Summary, memory: str) -> int | None:
    if memory in summary.places:
        return summary.places[memory].peak_bytes
    known = {GPU_MEMORY: summary.gpu_peak_bytes, HOST_MEMORY: summary.host_peak_bytes, PINNED_MEMORY: summary.pinned_peak_bytes}
    return known.get(memory)


def _capacity(summary: Summary, memory: str) -> int | None:
    if memory in summary.places:
        return summary.places[memory].capacity_bytes
    known = {
        GPU_MEMORY: summary.gpu_capacity_bytes,
        HOST_MEMORY: summary.host_capacity_bytes,
        PINNED_MEMORY: summary.pinned_capacity_bytes,
    }
    return known.get(memory)


# --- levers and purchases -----------------------------------------------------------------------------------------


def _levers(answer: Answer) -> str:
    shown = [gain for gain in answer.levers if gain.verdict is not Verdict.INVALID]
    groups = {
        "The same mathematics: the same gradients from the same sequences": [gain for gain in shown if gain.change.exact],
        "Other mathematics: other gradients or sequences": [gain for gain in shown if not gain.change.exact],
    }
    return "\n".join(f"<h3>{title}</h3>{bar_list(_gains(answer, some))}" for title, some in groups.items() if some)


def _gains(answer: Answer, gains: Iterable[Gain]) -> Iterator[tuple[str, str, str]]:
    """The rows of changes: tokens/s now, if anything fits, and with each; the most of all levers and purchases is full."""
    now = 0.0 if answer.simulation is None else answer.simulation.tokens_per_second
    most = max([now, *(gain.tokens_per_second or 0.0 for gain in (*answer.levers, *answer.purchases))]) or 1.0
    if now:
        yield "as it is", f"{now:,.0f} tokens/s", bar_html(now / most, "now")
    for gain in gains:
        rate = gain.tokens_per_second or 0.0
        said = gain_text(answer, gain)
        told = said if not gain.fits or "tokens/s" in said else f"{rate:,.0f} tokens/s, {said}"
        price = "" if gain.price_per_hour is None else f"; {gain.price_per_hour:.3g} for each hour saved"
        memory = "" if gain.change.workload is None else memory_of(gain)  # of levers
        bar = bar_html(rate / most, "better" if gain.helps else "") if gain.fits else ""
        yield gain.change.name, f"{told}{memory}{price}", bar


# --- policies -----------------------------------------------------------------------------------------------------


def _policies(answer: Answer) -> str:
    figures: dict[str, list[tuple[float | None, str]]] = {}
    for each in (candidate.summary for candidate in answer.candidates):
        for name, value, shown in (
            ("iteration", each.iteration_seconds, format_seconds),
            ("tokens/s", each.tokens_per_second, format_rate),
            ("GPU memory", each.gpu_peak_bytes, format_bytes),
            ("GPU reserved", each.gpu_reserved_bytes, format_bytes),
            ("host memory", each.host_peak_bytes, format_bytes),
        ):
            figures.setdefault(name, []).append((value, "-" if value is None else shown(value)))
    figures = {name: cells for name, cells in figures.items() if any(value is not None for value, _ in cells)}
    rows = (_row(answer, each, cells) for each, *cells in zip(answer.candidates, *figures.values(), strict=True))
    return wide_table("Policies", ("policy", *figures, "runs in", "remark"), rows)


def _row(answer: Answer, each: Candidate, figures: Iterable[tuple[float | None, str]]) -> str:
    words = (", ".join(each.runs_in) or "-", remark(answer, each) or "best")
    cells = [
        row_head(each.name),
        *(number_cell(*cell) for cell in figures),
        *(f"<td>{shown_html(word)}</td>" for word in words),
    ]
    return f"<tr{' class=best' if each is answer.best else ''}>{''.join(cells)}</tr>"
