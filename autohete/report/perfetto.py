"""Traces for https://ui.perfetto.dev, in the Chrome trace event format (JSON).

One thread per lane, one complete slice per task instance, one counter per memory, and an arrow for each dependency between
lanes. The format counts in microseconds, the trace in whole nanoseconds. Times are written as decimal text with three
digits, so that rounding never makes two slices of a lane overlap: Perfetto drops slices that do.

A document also contains the executed schedule (under ``autohete``, which Perfetto ignores), so that :func:`read_trace`
restores the trace, exact to the nanosecond.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np

from autohete.analysis.occupancy import Occupancy
from autohete.documents import Stated, as_json
from autohete.errors import InputError, ScheduleError
from autohete.execution.trace import Clock, Trace
from autohete.files import atomic_write, read_bytes
from autohete.schedule import KIND_MEANING, parse_schedule, validate

_PROCESS = 1
_FORMAT: Literal["autohete-trace 1"] = "autohete-trace 1"

#: An event: the name of a process or a lane, a slice, an end of an arrow, or a counter. Times are microseconds.
_EVENT = """{
  "type": "object",
  "required": ["ph", "pid", "name"],
  "properties": {
    "ph": {"enum": ["M", "X", "s", "f", "C"]}, "pid": {"const": 1}, "tid": {"type": "integer", "minimum": 1},
    "name": {"type": "string"}, "cat": {"type": "string"}, "ts": {"type": "number", "minimum": 0},
    "dur": {"type": "number", "minimum": 0}, "id": {"type": "integer"}, "bp": {"const": "e"}, "args": {"type": "object"}
  },
  "allOf": [
    {"if": {"properties": {"ph": {"const": "X"}}}, "then": {
      "required": ["ts", "dur", "tid", "cat", "args"],
      "properties": {"args": {"required": ["kind", "block", "iteration", "ready_ns"]}}}},
    {"if": {"properties": {"ph": {"enum": ["s", "f"]}}}, "then": {"required": ["ts", "tid", "id"]}},
    {"if": {"properties": {"ph": {"const": "C"}}}, "then": {"required": ["ts", "args"]}},
    {"if": {"properties": {"ph": {"const": "M"}}}, "then": {"required": ["args"]}}
  ],
  "additionalProperties": false
}"""


@dataclass(frozen=True, slots=True)
class ExecutedSchedule:
    """What executed the trace, which Perfetto ignores.

    Args:
        format: the form of this document.
        clock: clock of the times.
        iterations: number of iterations.
        schedule: its text, line by line.
    """

    format: Literal["autohete-trace 1"]
    clock: Clock
    iterations: int
    schedule: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TraceDocument:
    """A trace in the Chrome trace event format.

    Args:
        displayTimeUnit: the unit in which viewers show times.
        traceEvents: the events, by time.
        autohete: the executed schedule.
    """

    displayTimeUnit: Literal["ms"]
    traceEvents: Annotated[tuple[object, ...], Stated("Events", f'{{"type": "array", "items": {_EVENT}}}')]
    autohete: ExecutedSchedule


def perfetto_json(trace: Trace, occupancies: Sequence[Occupancy]) -> str:
    """Format ``trace`` and the ``occupancies`` of its memories as JSON, one event per line; same input, same text."""
    timed = [*_slices(trace), *_flows(trace), *_counters(occupancies)]
    timed.sort(key=lambda event: event[0])  # stable: a slice stays before its arrows
    events = [*_names(trace), *(text for _, text in timed)]
    about = as_json(ExecutedSchedule(_FORMAT, trace.clock, trace.iterations, tuple(str(trace.schedule).splitlines())))
    # Last, because Perfetto stops reading at an unknown key.
    tail = f'"autohete":{json.dumps(about, indent=0, ensure_ascii=False)}'
    return '{"displayTimeUnit":"ms","traceEvents":[\n' + ",\n".join(events) + f"\n],\n{tail}}}\n"


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
    """Format one event; ``times_ns`` are written exactly, unlike a float of microseconds."""
    times = "".join(f',"{key}":{_microseconds(ns)}' for key, ns in times_ns.items())
    rest = json.dumps({"pid": _PROCESS, **fields}, separators=(",", ":"), ensure_ascii=False)
    return f'{{"ph":"{phase}"{times},{rest[1:]}'


def _threads(trace: Trace) -> dict[str, int]:
    """Return the thread id of each lane, from 1: Perfetto reserves 0 for the idle thread."""
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
                "block": span.task.unit,
                "iteration": span.iteration,
                "ready wait (us)": (span.start_ns - span.ready_ns) / 1000,
                "ready_ns": span.ready_ns,  # exact, for reading the trace back
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
                leaves = max(begin, end - 1)  # at its end the slice is over, and the arrow would start at the next one
                arrives = int(trace.start_ns[iteration, i])
                yield leaves, _event("s", {"tid": threads[tasks[origin].lane], **fields}, ts=leaves)
                yield arrives, _event("f", {"tid": threads[task.lane], "bp": "e", **fields}, ts=arrives)


def _counters(occupancies: Sequence[Occupancy]) -> Iterator[_Timed]:
    for occupancy in occupancies:
        for ns, used in zip(occupancy.times_ns.tolist(), occupancy.bytes_used.tolist(), strict=True):
            yield ns, _event("C", {"name": f"{occupancy.memory} memory", "args": {"bytes": used}}, ts=ns)


# --- reading ------------------------------------------------------------------------------------------------------

_WANTED = "give a trace that autohete wrote"
#: Bytes; those of a run of twenty thousand tasks are some ten million.
_LARGEST = 200_000_000


def read_trace(path: str | Path) -> Trace:
    """Read the trace that :func:`write_perfetto` wrote to ``path``, with its schedule; memory counters are ignored.

    Raises:
        InputError: ``path`` cannot be read, is not a trace written by autohete, or is damaged.
    """
    try:
        document = json.loads(read_bytes(path, "trace", _WANTED, _LARGEST), parse_float=Decimal)
    except (ValueError, ArithmeticError, RecursionError) as error:  # ArithmeticError: a number too large for Decimal
        raise InputError(f"{str(path)!r} is not a trace: it is not JSON ({error}); {_WANTED}") from error
    about = document.get("autohete") if isinstance(document, dict) else None
    if not isinstance(about, dict) or about.get("format") != _FORMAT:
        raise InputError(f"{str(path)!r} does not contain the executed schedule ({_FORMAT!r} is missing): {_WANTED}")
    try:
        return _trace(about, document["traceEvents"])
    except (ScheduleError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
        # The first two have readable messages; the others come from JSON of another structure.
        fault = str(error) if isinstance(error, ScheduleError | ValueError) else f"{type(error).__name__}: {error}"
        raise InputError(f"trace {str(path)!r} is damaged ({fault}): write it again, or {_WANTED}") from error


def _trace(about: dict[str, Any], events: list[dict[str, Any]]) -> Trace:
    schedule = validate(parse_schedule("\n".join(about["schedule"])))
    slices: dict[str, dict[str, Any]] = {}
    for event in events:
        if event["ph"] == "X":
            if event["name"] in slices:
                raise ValueError(f"{event['name']} appears twice")
            slices[event["name"]] = event
    times: list[tuple[int, int, int]] = []
    for task, iteration in ((task, k) for task in schedule.tasks for k in range(about["iterations"])):
        name = task.id.at(iteration)
        if name not in slices:
            raise ValueError(f"{name} is missing")
        event = slices.pop(name)
        start_ns = _nanoseconds(event["ts"], 1000)
        times.append((_nanoseconds(event["args"]["ready_ns"], 1), start_ns, start_ns + _nanoseconds(event["dur"], 1000)))
    if slices:
        raise ValueError(f"{next(iter(slices))} is not in its schedule")
    shape = (len(schedule.tasks), about["iterations"], 3)
    ready, start, end = np.array(times, np.int64).reshape(shape).transpose(2, 1, 0).copy()
    return Trace(schedule, Clock(about["clock"]), ready, start, end)


def _nanoseconds(time: object, unit: int) -> int:
    """Convert a ``time`` of the document, in units of ``unit`` ns, to nanoseconds."""
    # Compare before converting: 1e999999 is a valid number, but too long to expand.
    if not isinstance(time, int | Decimal) or not 0 <= time <= np.iinfo(np.int64).max or time * unit % 1:
        raise ValueError(f"{time} is not a valid time: times are whole nanoseconds of at least 0")
    return int(time * unit)


def check_perfetto(text: str) -> list[str]:
    """Return the faults of a trace document that Perfetto would silently mishandle; an empty list means a good document."""
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
