"""``autohete sweep``."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import islice
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from autohete.cli.axes import Setting, all_axes, diagonal, parse_over, read_grid, settings
from autohete.cli.interrupt import children_uninterrupted
from autohete.cli.outputs import check_outputs
from autohete.cli.question import BLANK, Question
from autohete.errors import AutoHeteError, InputError

if TYPE_CHECKING:
    from autohete.profile import Profile
    from autohete.report.rows import Row

#: How many settings are tried to find one that is valid before anything is written.
_TRIED = 100


def sweep(
    *,
    out: str,
    question: Question = BLANK,
    policy: Annotated[tuple[str, ...], Parameter(negative=(), show_default=False)] = (),
    over: Annotated[tuple[str, ...], Parameter(negative=(), show_default=False)] = (),
    grid: str | None = None,
    jobs: int | None = None,
    resume: Annotated[bool, Parameter(negative=())] = False,
) -> None:
    """Simulate many settings, in parallel: every combination of some values.

    Parameters
    ----------
    out:
        CSV file: one row per setting, as soon as it is answered. Columns: options, keys, and the numbers of
        `autohete simulate --json`; what is invalid or does not fit says why.
    policy:
        NAME[:flag,flag=value]; repeat for several. Default: autohete.
    over:
        KEY=V1,V2,... or KEY=START..STOP:STEP, such as batch-size=1,2,4 or links.h2d.bandwidth=10GB/s..100GB/s:10GB/s. KEY is an
        option above without dashes, a hardware figure as in --set, or policy. Repeatable.
    grid:
        TOML file with a table [over]: lists of values for each KEY.
    jobs:
        Processes; default: one per core.
    resume:
        Continue the file: keep its rows, and answer only what is not there.
    """
    from autohete.report.rows import Tally, header_of, print_tally, read_rows, row_writer

    if jobs is not None and jobs < 1:
        raise InputError(f"--jobs is {jobs}: give at least 1, or leave it out for one per core")
    asked = [*(read_grid(grid) if grid is not None else []), *map(parse_over, over)]
    axes = all_axes(question, policy, asked)
    check_outputs({"--out": out})
    keys = [axis.key for axis in axes]
    header = header_of(keys)
    there, kept = read_rows(out, header) if resume else ([], 0)
    if not resume and os.path.isfile(out) and os.path.getsize(out):
        raise InputError(f"{out!r} exists: continue it with --resume, remove it, or give another --out")
    _check_valid(islice(diagonal(axes), _TRIED))
    done = {tuple(row[key] for key in keys) for row in there}
    tally = Tally()
    for row in there:
        tally.add(row)
    missing = [setting for setting in settings(axes) if setting.texts not in done]
    begin = time.perf_counter()
    with row_writer(out, header, kept) as write:
        for row in _with_progress(_rows(missing, keys, jobs), len(missing)):
            write(row)
            tally.add(row)
    varied = [axis.key for axis in axes if len(axis.values) > 1]
    print_tally(tally, varied, len(missing), time.perf_counter() - begin, out)


def _check_valid(some: Iterable[Setting]) -> None:
    """Raise the error of the first setting if all are invalid: then the command is, too."""
    first: InputError | None = None
    for setting in some:
        try:
            _profile(setting.question)
        except InputError as error:
            first = first or error
        else:
            return
    if first is not None:
        raise first


@lru_cache(maxsize=16)
def _profile(question: Question) -> Profile:
    return question.answerable()


def _row(setting: Setting, keys: Sequence[str]) -> Row:
    """Answer one setting."""
    from autohete.policies import parse_policy
    from autohete.report.rows import answered, refused
    from autohete.report.summary import answer

    key = dict(zip(keys, setting.texts, strict=True))
    try:
        summary, _ = answer(_profile(setting.question), parse_policy(setting.policy))
    except AutoHeteError as error:
        return refused(key, str(error))
    return answered(key, summary)


def _rows(missing: Sequence[Setting], keys: Sequence[str], jobs: int | None) -> Iterator[Row]:
    """Answer settings, in any order."""
    import joblib

    jobs = min(jobs or joblib.cpu_count(), len(missing))
    if jobs <= 1:
        return (_row(setting, keys) for setting in missing)
    # Batches of one: a policy that searches takes ten times as long as one that does not.
    parallel = joblib.Parallel(n_jobs=jobs, return_as="generator_unordered", batch_size=1)
    with children_uninterrupted():
        found: Iterator[Row] = parallel(joblib.delayed(_row)(setting, keys) for setting in missing)
    return found


def _with_progress(rows: Iterator[Row], total: int) -> Iterator[Row]:
    """Pass rows on, with a progress bar on a terminal."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    from autohete.report.tables import console

    columns = [TextColumn("simulating"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn()]
    with Progress(*columns, console=console(stderr=True), disable=not sys.stderr.isatty(), transient=True) as progress:
        bar = progress.add_task("", total=total)
        for row in rows:
            yield row
            progress.advance(bar)
