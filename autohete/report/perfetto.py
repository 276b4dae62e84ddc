"""Traces for https://ui.perfetto.dev, in the Chrome trace event format (JSON).

One thread for each lane, one complete slice for each task instance, one counter for each memory, and an arrow for each
dependency between lanes. The format counts in microseconds; the trace in whole nanoseconds. They are written as decimal
text with three digits, so that no rounding makes two slices of a lane overlap: Perfetto drops those that do.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from decimal import Decimal
from itertools import pairwise
from pathlib import Path

from autohete.memory import Occupancy
from autohete.report.write import atomic_write
from autohete.schedule import KIND_MEANING
from autohete.trace import Trace

_PROCESS = 1


def perfetto_json(trace: Trace, occupancies: Sequence[Occupancy]) -> str:
    """``trace`` and the ``occupancies`` of its memories as a JSON document, one event a line; same input, same text."""
    timed = [*_slices(trace), *_flows(trace), *_counters(occupancies)]
    timed.sort(key=lambda event: event[0])  # stable: a slice stays before the arrows that are tied to it
    events = [*_names(trace), *(text for _, text in timed)]
    return '{"displayTimeUnit":"ms","traceEvents":[\n' + ",\n".join(events) + "\n]}\n"


def write_perfetto(path: str | Path, trace: Trace, occupancies: Sequence[Occupancy]) -> None:
    """Write :func:`perfetto_json` to ``path``.

    Raises:
        InputError: ``path`` cannot be written.
    """
    text = perfetto_json(trace, occupancies)
    atomic_write(path, lambda stream: stream.write(text.encode()))


#: Nanoseconds to sort by, and the event's text.
_Timed = tuple[int, str]


def _microseconds(ns: int) -> str:
    return f"{ns // 1000}.{ns % 1000:03d}"


def _event(phase: str, fields: dict[str, object], **times_ns: int) -> str:
    """One event; ``times_ns`` are written exactly, which a float of microseconds would not be."""
    times = "".join(f',"{key}":{_microseconds(ns)}' for key, ns in times_ns.items())
    rest = json.dumps({"pid": _PROCESS, **fields}, separators=(",", ":"), ensure_ascii=False)
    return f'{{"ph":"{phase}"{times},{rest[1:]}'


def _threads(trace: Trace) -> dict[str, int]:
    """Lane -> thread id, from 1: Perfetto keeps 0 for the idle thread."""
    return {lane.name: number for number, lane in enumerate(trace.schedule.lanes, 1)}


def _names(trace: Trace) -> Iterator[str]:
    yield _event("M", {"name": "process_name", "args": {"name": f"AutoHete ({trace.clock})"}})
    for lane, thread in _threads(trace).items():
        yield _event("M", {"tid": thread, "name": "thread_name", "args": {"name": lane}})
        yield _event("M", {"tid": thread, "name": "thread_sort_index", "args": {"sort_index": thread}})


def _slices(trace: Trace) -> Iterator[_Timed]:
    threads = _threads(trace)
    # A task without duration comes before the one that starts in the same instant.
    for span in sorted(trace.spans(), key=lambda span: (span.start_ns, span.end_ns)):
        fields: dict[str, object] = {
            "tid": threads[span.lane],
            "name": span.task.at(span.iteration),
            "cat": KIND_MEANING[span.task.kind],
            "args": {
                "kind": span.task.kind,
                "block": span.task.block,
                "iteration": span.iteration,
                "ready wait (us)": (span.start_ns - span.ready_ns) / 1000,
            },
        }
        yield span.start_ns, _event("X", fields, ts=span.start_ns, dur=span.end_ns - span.start_ns)


def _flows(trace: Trace) -> Iterator[_Timed]:
    tasks, threads = trace.schedule.tasks, _threads(trace)
    index = {task.id: i for i, task in enumerate(tasks)}
    number = 0
    for iteration in range(trace.iterations):
        for i, task in enumerate(tasks):
            for edge in task.after:
                origin = index[edge.task]
                if tasks[origin].lane == task.lane or iteration < edge.back:
                    continue
                number += 1
                fields: dict[str, object] = {"name": "dependency", "cat": "dependency", "id": number}
                begin, end = (int(a[iteration - edge.back, origin]) for a in (trace.start_ns, trace.end_ns))
                leaves = max(begin, end - 1)  # at its end the slice is over, and the arrow would leave from the next one
                arrives = int(trace.start_ns[iteration, i])
                yield leaves, _event("s", {"tid": threads[tasks[origin].lane], **fields}, ts=leaves)
                yield arrives, _event("f", {"tid": threads[task.lane], "bp": "e", **fields}, ts=arrives)


def _counters(occupancies: Sequence[Occupancy]) -> Iterator[_Timed]:
    for occupancy in occupancies:
        for ns, used in zip(occupancy.times_ns.tolist(), occupancy.bytes_used.tolist(), strict=True):
            yield ns, _event("C", {"name": f"{occupancy.memory} memory", "args": {"bytes": used}}, ts=ns)


def check_perfetto(text: str) -> list[str]:
    """Faults of a trace document, in words, as Perfetto would punish them silently; an empty list is a good one."""
    events = json.loads(text, parse_float=Decimal)["traceEvents"]
    faults = [f"{event['name']}: thread id 0" for event in events if event.get("tid") == 0]
    faults += [f"{e['name']} at {e['ts']}: below zero" for e in events if e["ph"] == "C" and min(e["args"].values()) < 0]

    def ns(event: dict[str, Decimal], key: str) -> int:
        exact = event[key] * 1000
        if exact != int(exact):
            faults.append(f"{event['name']}: {key} {event[key]} is not in whole nanoseconds")
        return int(exact)

    slices: dict[int, list[tuple[int, int, str]]] = {}
    for event in events:
        if event["ph"] == "X":
            start = ns(event, "ts")
            slices.setdefault(event["tid"], []).append((start, start + ns(event, "dur"), event["name"]))
    for members in slices.values():
        members.sort()
        for (_, end, before), (start, _, after) in pairwise(members):
            if start < end:
                faults.append(f"{after} overlaps {before}")
    ends: dict[tuple[str, str, int], list[str]] = {}
    for event in events:
        if event["ph"] in "sf":
            ends.setdefault((event["cat"], event["name"], event["id"]), []).append(event["ph"])
            at = ns(event, "ts")
            if not any(start <= at < max(end, start + 1) for start, end, _ in slices.get(event["tid"], [])):
                faults.append(f"flow {event['id']} {event['ph']} at {event['ts']}: in no slice")
            if event["ph"] == "f" and event.get("bp") != "e":
                faults.append(f"flow {event['id']}: its finish is not bound to the slice around it")
    return faults + [f"flow {key[2]} has the ends {phases}" for key, phases in ends.items() if sorted(phases) != ["f", "s"]]
