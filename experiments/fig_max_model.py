"""How large a model does each system train, by the memory of the GPU and of the host?

Command: ``python experiments/fig_max_model.py [--out DIR] [--jobs N]``. Machine: any; everything is simulated.

Blocks of one width (that of the published 15B and 18B models) are added until training does not fit. On the left the GPU's
memory changes, with the host of the published node; on the right the host's, with its GPU.

``--model``, ``--hardware`` and ``--set`` ask for others.

Writes ``fig_max_model.{png,pdf,csv}``.

What would refute it: a system that trains a larger model with less memory, or a model beyond these limits that the published
comparison trained with that system.
"""

from __future__ import annotations

if __name__ == "__main__" and not __package__:
    import _start  # type: ignore[import-not-found]  # noqa: F401

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cyclopts import App
from matplotlib.figure import Figure

from autohete.cli.app import run_app
from autohete.execution.trace import Clock
from autohete.files import make_folder
from autohete.hardware import load_hardware
from autohete.policies import parse_policy
from autohete.report.tables import table
from autohete.simulate.largest import GrowingFigure as Grows
from autohete.simulate.largest import largest
from experiments.looks import look
from experiments.setting import PUBLISHED_NODE, Where, batch_of, model_of
from experiments.shared import FOLDER, Panel, draw_panels, print_table, run_all, save, ticks

POLICIES = ("resident", "zero_offload", "patrickstar", "stronghold", "streamed_states:weights", "autohete")
#: The model whose blocks are counted.
MODEL = "gpt-15b"


@dataclass(frozen=True, slots=True)
class Limit:
    """A search for the largest model: of a policy, with ``gib`` of memory of the GPU or of the host."""

    policy: str
    memory: str
    gib: int
    model: str = MODEL
    where: Where = PUBLISHED_NODE

    def run(self) -> Largest:
        """Search; takes up to half a minute."""
        hardware = load_hardware(self.where.hardware, dict(self.where.moved) | {f"{self.memory}.memory": f"{self.gib}GiB"})
        grown = largest(model_of(self.model), hardware, parse_policy(self.policy), Grows.BLOCKS)
        return Largest(grown.value, grown.workload.parameters if grown.value else 0, grown.limit)


@dataclass(frozen=True, slots=True)
class Largest:
    """Blocks and parameters of the largest model (0 if not even one block fits), and why one more block is too many."""

    blocks: int
    parameters: int
    limit: str


Limits = Mapping[Limit, Largest]


def lines(limits: Limits) -> list[list[object]]:
    """One row per search."""
    rows: list[list[object]] = [["memory", "gib", "policy", "blocks", "parameters", "limit", "clock"]]
    return rows + [[s.memory, s.gib, s.policy, f.blocks, f.parameters, f.limit, Clock.SIMULATED] for s, f in limits.items()]


def print_limits(limits: Limits) -> None:
    """Print billions of parameters: a row per memory, a column per policy."""
    shown = table("largest model, billions of parameters", ["", *(look(policy).label for policy in POLICIES)], left=1)
    for memory, gib in dict.fromkeys((search.memory, search.gib) for search in limits):
        found = {s.policy: f for s, f in limits.items() if (s.memory, s.gib) == (memory, gib)}
        sizes = (found[policy].parameters / 1e9 for policy in POLICIES)
        shown.add_row(f"{memory}, {gib} GiB", *(f"{size:.1f}" if size else "-" for size in sizes))
    print_table(shown)


def draw(limits: Limits, gpu: Sequence[int], host: Sequence[int], model: str, where: Where) -> Figure:
    """Draw the largest model by the GPU's memory and by the host's."""
    panels = []
    for memory, sizes, title in (("gpu", gpu, "with the host of the node"), ("host", host, "with the GPU of the node")):
        lines = {
            policy: [
                (float(s.gib), f.parameters / 1e9 or None)
                for s, f in limits.items()
                if (s.memory, s.policy) == (memory, policy)
            ]
            for policy in POLICIES
        }
        label = f"{'GPU' if memory == 'gpu' else memory} memory (GiB)"
        panels.append(Panel(title, label, "largest model (billions of parameters)", ticks(sizes), lines))
    one = model_of(model)
    return draw_panels(panels, f"{where.text}: blocks of {one.hidden_size}, {batch_of(one)}, simulated")


def main(
    *,
    out: Path = FOLDER,
    jobs: int | None = None,
    gpu: tuple[int, ...] = (8, 12, 16, 24, 40, 80),
    host: tuple[int, ...] = (32, 64, 128, 256, 512),
    model: str = MODEL,
    where: Where = PUBLISHED_NODE,
) -> None:
    """Search, print and draw.

    Parameters
    ----------
    out:
        Folder for the files.
    jobs:
        Number of processes. By default one per core.
    gpu:
        Memories of the GPU in GiB.
    host:
        Memories of the host in GiB.
    model:
        The model whose blocks are counted: one of the published comparison, or another one.
    where:
        The hardware.
    """
    make_folder(out)
    searches = [
        Limit(p, memory, gib, model, where)
        for memory, sizes in (("gpu", gpu), ("host", host))
        for gib in sizes
        for p in POLICIES
    ]
    limits = run_all(Limit.run, searches, jobs)
    print_limits(limits)
    save(out, "fig_max_model", draw(limits, gpu, host, model, where), lines(limits))


if __name__ == "__main__":
    run_app(App(name="fig_max_model", default_command=main, help=__doc__))
