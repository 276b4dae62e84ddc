"""``autohete compare``."""

from __future__ import annotations

import json
import os
from dataclasses import asdict

from autohete.cli.groups import JsonSwitch, OutputFile
from autohete.cli.outputs import check_outputs


def compare(
    a: str,
    b: str,
    /,
    *,
    json_: JsonSwitch = False,
    gantt: OutputFile = None,
) -> None:
    """Explain where two runs of one schedule differ, such as a simulated and a measured one.

    Parameters
    ----------
    a:
        A timeline written by --trace; differences are in percent of it.
    b:
        Another timeline of the same schedule; durations may differ.
    json_:
        Print JSON: one object.
    gantt:
        Draw one iteration of A above one of B, to this .png, .pdf or .svg file.
    """
    from autohete.analysis.comparison import compare as compare_traces
    from autohete.report.perfetto import read_trace

    outputs = {"--gantt": gantt} if gantt is not None else {}
    check_outputs(outputs)
    traces = read_trace(a), read_trace(b)
    comparison = compare_traces(*traces, names=(a, b))
    if gantt is not None:
        from autohete.report.gantt import two_row_figure
        from autohete.report.style import save_figure

        # An iteration in which both are steady; not the last one, which has no successor to compete with.
        settled = max(side.steady.first for side in (comparison.a, comparison.b))
        last = min(trace.iterations for trace in traces) - 1
        title = f"{os.path.basename(a)} above, {os.path.basename(b)} below"
        save_figure(two_row_figure(*traces, min(settled, max(0, last - 1)), title), gantt)
    if json_:
        print(json.dumps(asdict(comparison), indent=2, ensure_ascii=True))
    else:
        from autohete.report.comparison_tables import print_comparison

        print_comparison(comparison)
