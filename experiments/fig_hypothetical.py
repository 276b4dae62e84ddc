"""On hardware that nobody has built: which system is the fastest, by how much, and what limits it?

Command: ``python experiments/fig_hypothetical.py [--out DIR] [--jobs N]``. Machine: any; everything is simulated.

The link between host and GPU, and the CPU's update of parameters, are made slower and faster than on the node of the published
comparison: 16-fold and more around its own figures. All rates of a link, or of the CPU, change by the same factor. The
host's DRAM is fast enough for everything, so that only these two figures decide.

``--model``, ``--hardware`` and ``--set`` ask for others.

Writes ``fig_hypothetical.{png,pdf,csv}``.

What would refute it: a node with such figures on which another of these systems is the fastest by more than the errors of the
model.
"""

from __future__ import annotations

if __name__ == "__main__" and not __package__:
    import _start  # type: ignore[import-not-found]  # noqa: F401

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cyclopts import App
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from autohete.cli.app import run_app
from autohete.files import make_folder
from autohete.hardware import load_hardware
from autohete.report.style import luminance, style
from autohete.report.tables import table
from autohete.simulate.summary import Summary
from experiments.looks import look
from experiments.setting import PUBLISHED_NODE, Moved, Where, batch_of, model_of, size_of
from experiments.shared import FOLDER, Cell, Grid, Summaries, grid_lines, print_table, run_all, save

POLICIES = (
    "zero_offload",
    "patrickstar",
    "stronghold",
    "fsdp2_offload",
    "twin_flow",
    "deep_optimizer_states",
    "streamed_states:weights",
    "autohete",
)
NAMES = ("link_gb_per_s", "cpu_gb_per_s")
#: Faster than anything that uses it.
_DRAM = "20TB/s"


def moved(link: int, cpu: int, where: Where = PUBLISHED_NODE) -> Moved:
    """The hardware figures for a link of ``link`` GB/s and an Adam kernel of ``cpu`` GB/s on the host."""
    node = load_hardware(where.hardware, dict(where.moved))
    links = {"h2d": node.h2d, "d2h": node.d2h}
    faster, figures = link * 1e9 / node.h2d.bandwidth, dict(where.moved) | {"host.memory_bandwidth": _DRAM}
    for name, one in links.items():
        figures[f"links.{name}.bandwidth"] = _rate(one.bandwidth * faster)
        figures[f"links.{name}.duplex_bandwidth"] = _rate(one.duplex_bandwidth * faster)
        if one.pageable_bandwidth is not None:
            figures[f"links.{name}.pageable_bandwidth"] = _rate(one.pageable_bandwidth * faster)
    quicker = cpu * 1e9 / node.cpu.update_bandwidth
    figures["cpu.update_bandwidth"] = _rate(cpu * 1e9)
    if node.cpu.elementwise_bandwidth is not None:
        figures["cpu.elementwise_bandwidth"] = _rate(node.cpu.elementwise_bandwidth * quicker)
    return tuple(figures.items())


def _rate(bytes_per_second: float) -> str:
    return f"{bytes_per_second / 1e9:.6g}GB/s"


def grid(model: str, links: Sequence[int], cpus: Sequence[int], where: Where = PUBLISHED_NODE) -> Grid:
    """Every pair of rates and policy."""
    return {
        (link, cpu, policy): Cell(model_of(model), policy, where.hardware, moved(link, cpu, where))
        for link in links
        for cpu in cpus
        for policy in POLICIES
    }


@dataclass(frozen=True, slots=True)
class Best:
    """The fastest system at a point: its gain over the second, and what it is bound by."""

    policy: str
    gain: float
    limit: str


def best_of(cells: Grid, summaries: Summaries) -> dict[tuple[object, ...], Best]:
    """The fastest system at each point."""
    winners = {}
    for point in dict.fromkeys(key[:-1] for key in cells):
        all_ = [(summaries[cells[*point, p]].tokens_per_second or 0.0, p) for p in POLICIES]
        (first, policy), (second, _) = sorted(all_, reverse=True)[:2]
        winners[point] = Best(policy, first / second - 1 if second else 0.0, limit_of(summaries[cells[*point, policy]]))
    return winners


def limit_of(s: Summary) -> str:
    """The GPU if it is busy nearly all the time, or else what it waits for most."""
    assert s.iteration_seconds is not None, "a system that is the fastest trains"
    if s.lanes["gpu"] > 0.97:
        return "GPU"
    return str(max(s.idle_seconds, key=s.idle_seconds.__getitem__))


def draw(
    model: str, links: Sequence[int], cpus: Sequence[int], winners: Mapping[tuple[object, ...], Best], where: Where
) -> Figure:
    """Draw a map: the colour is the fastest system, the text its gain over the second and what limits it."""
    with style():
        figure = Figure(figsize=(6.0, 3.6), layout="constrained")
        axes = figure.subplots()
        for x, link in enumerate(links):
            for y, cpu in enumerate(cpus):
                _draw_point(axes, x, y, winners[link, cpu])
        axes.set_xlim(-0.5, len(links) - 0.5)
        axes.set_ylim(-0.5, len(cpus) - 0.5)
        axes.set_xticks(range(len(links)), map(str, links))
        axes.set_yticks(range(len(cpus)), map(str, cpus))
        node = load_hardware(where.hardware, dict(where.moved))
        axes.set_xlabel(f"host-to-GPU bandwidth (GB/s; {where.hardware}: {node.h2d.bandwidth / 1e9:.0f})")
        axes.set_ylabel(f"DRAM traffic of Adam on the CPU (GB/s; the node: {node.cpu.update_bandwidth / 1e9:.0f})")
        setting = f"{size_of(model)}, {batch_of(model_of(model))}, simulated"
        axes.set_title(f"fastest system, gain over the second, and limit\n{setting}")
        wins = dict.fromkeys(best.policy for best in winners.values())
        handles = [Patch(facecolor=look(policy).colour, label=look(policy).label) for policy in POLICIES if policy in wins]
        figure.legend(handles=handles, loc="outside lower center", ncols=4)
    return figure


def _draw_point(axes: Axes, x: int, y: int, best: Best) -> None:
    colour = look(best.policy).colour
    axes.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, facecolor=colour, edgecolor="white", linewidth=1))
    ink = "white" if luminance(colour) < 0.45 else "black"
    axes.text(x, y, f"+{100 * best.gain:.0f} %\n{best.limit}", ha="center", va="center", fontsize=7, color=ink)


def print_best(winners: Mapping[tuple[object, ...], Best]) -> None:
    """Print the fastest system at each point."""
    shown = table("fastest system, simulated", ["link", "CPU", "system", "over the second", "limit"], left=3)
    for (link, cpu), best in winners.items():
        shown.add_row(f"{link} GB/s", f"{cpu} GB/s", best.policy, f"+{100 * best.gain:.1f} %", best.limit)
    print_table(shown)


def main(
    *,
    out: Path = FOLDER,
    jobs: int | None = None,
    model: str = "gpt-10b",
    links: tuple[int, ...] = (6, 12, 25, 50, 100, 200, 400),
    cpus: tuple[int, ...] = (17, 35, 69, 140, 280, 560),
    where: Where = PUBLISHED_NODE,
) -> None:
    """Simulate, print and draw.

    Parameters
    ----------
    out:
        Folder for the files.
    jobs:
        Number of processes. By default one per core.
    model:
        Model of the published comparison, or another one.
    links:
        Bandwidths from host to GPU, GB/s.
    cpus:
        DRAM traffic of Adam on the CPU, GB/s.
    where:
        The hardware.
    """
    make_folder(out)
    cells = grid(model, links, cpus, where)
    summaries = run_all(Cell.run, cells.values(), jobs)
    winners = best_of(cells, summaries)
    print_best(winners)
    save(out, "fig_hypothetical", draw(model, links, cpus, winners, where), grid_lines(NAMES, cells, summaries))


if __name__ == "__main__":
    run_app(App(name="fig_hypothetical", default_command=main, help=__doc__))
