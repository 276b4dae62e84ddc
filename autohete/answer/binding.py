"""Whether processes are bound to the cores and the memory beside their GPU: the other state, as a lever.

Ranks that are bound update at ``cpu.ranks_update_bandwidth`` together. Unbound ones were measured to update together as slowly
as one process (raw logs of Deep Optimizer States, see docs/explanation/model.md), so that is the least they reach.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

from autohete.answer.purchases import rate_text
from autohete.answer.result import Change
from autohete.answer.site import Site
from autohete.errors import InputError
from autohete.hardware import load_hardware
from autohete.plan import Processor
from autohete.schedule import D2H, H2D
from autohete.simulate import Simulation

_RANKS = "cpu.ranks_update_bandwidth"
#: Options that bind ranks to cores of their own.
_OPTIONS = "deepspeed --bind_cores_to_rank, or torchrun --numa-binding=exclusive with OMP_NUM_THREADS"
BOUND = f"ranks bound to cores ({_OPTIONS})"
UNBOUND = f"ranks not bound to cores (without {_OPTIONS}), at worst"
NEAR = "host memory beside the GPU (numactl --cpunodebind --membind)"
FAR = "host memory beside another CPU (without numactl --cpunodebind --membind), at worst"


def bindings(site: Site, simulation: Simulation) -> Iterator[Change]:
    """The other state of each binding whose effect the hardware's figures have.

    Args:
        site: where training runs.
        simulation: of the recommended plan. What is slower is left out if the plan does not use it.
    """
    now, workload = site.whole(), simulation.profile.workload
    updates = any(unit.update.on is Processor.CPU for unit in simulation.plan.units)
    unbound, bound = now.cpu.update_bandwidth, load_hardware(site.source).cpu.ranks_update_bandwidth
    if simulation.profile.hardware.all_gpus_of_node > 1 and bound is not None and bound > unbound:
        if (now.cpu.ranks_update_bandwidth or unbound) > unbound:
            if updates:
                yield Change(UNBOUND, {_RANKS: rate_text(unbound)}, workload=workload)
        else:
            yield Change(BOUND, {_RANKS: rate_text(bound)}, workload=workload)
    if now.h2d.far:
        yield Change(NEAR, {"host.numa": "near"}, workload=workload)
    elif any(task.lane in (H2D, D2H) for task in simulation.schedule.tasks):
        with suppress(InputError):  # no rate to another domain is known
            load_hardware(site.source, {**site.given, "host.numa": "far"})
            yield Change(FAR, {"host.numa": "far"}, workload=workload)
