"""Parsing of a schedule's text, the inverse of ``str(schedule)``."""

from __future__ import annotations

from autohete.errors import ScheduleError
from autohete.schedule.ids import parse_buffer_id, parse_task_id
from autohete.schedule.schedule import (
    COUNTS_LANES,
    HEADER,
    PART_OF,
    TO,
    Buffer,
    Discipline,
    Edge,
    Flow,
    Free,
    Lane,
    Memory,
    SavedNames,
    Schedule,
    SharedResource,
    Task,
)


def parse_schedule(text: str) -> Schedule:
    """Inverse of ``str(schedule)``. Blank lines and ``#`` comments are ignored. Does not :func:`validate`.

    Raises:
        ScheduleError: a line is invalid; states its number.
    """
    parts: dict[str, list[object]] = {key: [] for key in ("lane", "memory", "flow", "share", "resident", "saved", "task")}
    lines = [(number, line.split("#", 1)[0].split()) for number, line in enumerate(text.splitlines(), 1)]
    lines = [(number, words) for number, words in lines if words]
    if not lines or " ".join(lines[0][1]) != HEADER:
        raise ScheduleError(f"a schedule's text begins with the line {HEADER!r}")
    for number, words in lines[1:]:
        if words[0] not in parts:
            raise ScheduleError(f"line {number}: {words[0]!r} is not one of {', '.join(parts)}")
        try:
            parts[words[0]].append(_PARSERS[words[0]](words[1:]))
        except (ValueError, IndexError, KeyError) as error:
            raise ScheduleError(f"line {number}: cannot read {' '.join(words)!r} ({error})") from error
        except ScheduleError as error:
            raise ScheduleError(f"line {number}: {error}") from error
    return Schedule(
        lanes=tuple(parts["lane"]),  # type: ignore[arg-type]
        tasks=tuple(parts["task"]),  # type: ignore[arg-type]
        memories=tuple(parts["memory"]),  # type: ignore[arg-type]
        resident=tuple(parts["resident"]),  # type: ignore[arg-type]
        saved=tuple(parts["saved"]),  # type: ignore[arg-type]
        flows=tuple(parts["flow"]),  # type: ignore[arg-type]
        resources=tuple(parts["share"]),  # type: ignore[arg-type]
    )


def _parse_lane(words: list[str]) -> Lane:
    name, discipline, *ends = words
    if len(ends) > 1 or not all(TO in pair for pair in ends):
        raise ValueError(f"{' '.join(ends)!r} is not SOURCE{TO}TARGET")
    return Lane(name, Discipline(discipline), *(ends[0].split(TO, 1) if ends else ()))


def _parse_memory(words: list[str]) -> Memory:
    name, capacity, *parts = words
    if len(parts) > 1 or not all(part.startswith(PART_OF) for part in parts):
        raise ValueError(f"{' '.join(parts)!r} is not {PART_OF}MEMORY")
    return Memory(name, int(capacity), parts[0].removeprefix(PART_OF) if parts else None)


def _parse_flow(words: list[str]) -> Flow:
    lane, demand, weight = words
    return Flow(lane, float(demand), float(weight))


def _parse_share(words: list[str]) -> SharedResource:
    name, capacity, lanes, *counts = words
    if counts not in ([], [COUNTS_LANES]):
        raise ValueError(f"{' '.join(counts)!r} is not {COUNTS_LANES!r}")
    return SharedResource(name, float(capacity), tuple(lanes.split(",")), bool(counts))


def _parse_buffer(text: str) -> Buffer:
    buffer, _, size = text.rpartition(":")
    return Buffer(parse_buffer_id(buffer), int(size))


def _parse_saved(words: list[str]) -> SavedNames:
    unit, part, names = words
    return SavedNames(int(unit), int(part), tuple(names.split(",")))


def _parse_resident(words: list[str]) -> Buffer:
    (text,) = words
    return _parse_buffer(text)


def _back(text: str) -> tuple[str, int]:
    return (text.removesuffix("@-1"), 1) if text.endswith("@-1") else (text, 0)


def _parse_edge(text: str) -> Edge:
    name, back = _back(text)
    return Edge(parse_task_id(name), back)


def _parse_free(text: str) -> Free:
    name, back = _back(text)
    return Free(parse_buffer_id(name), back)


def _parse_task(words: list[str]) -> Task:
    options = dict(word.split("=", 1) for word in words[3:])
    if len(options) < len(words) - 3:
        raise ValueError("an option is given twice")
    if unknown := options.keys() - {"priority", "after", "allocates", "frees"}:
        raise ValueError(f"unknown {', '.join(sorted(unknown))}")

    def items(key: str) -> list[str]:
        return options[key].split(",") if key in options else []

    return Task(
        id=parse_task_id(words[0]),
        lane=words[1],
        duration_ns=int(words[2]),
        after=tuple(_parse_edge(item) for item in items("after")),
        priority=int(options.get("priority", 0)),
        allocates=tuple(_parse_buffer(item) for item in items("allocates")),
        frees=tuple(_parse_free(item) for item in items("frees")),
    )


_PARSERS = {
    "lane": _parse_lane,
    "memory": _parse_memory,
    "flow": _parse_flow,
    "share": _parse_share,
    "resident": _parse_resident,
    "saved": _parse_saved,
    "task": _parse_task,
}
