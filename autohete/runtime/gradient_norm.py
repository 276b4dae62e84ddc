"""Clipping by global norm, bit-identical to ``torch.nn.utils.clip_grad_norm_`` over fp32 gradients of the same parameters.

The global norm is the norm of the parameters' norms, in the order of the model's parameters; parameters without a gradient are
left out. 16-bit gradients are clipped as the optimizer reads them: cast to fp32, as gradients of the master weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from autohete.errors import InputError, ScheduleError
from autohete.runtime.device import Device
from autohete.schedule import Kind, Schedule
from autohete.workload import check_clip_norm

#: A norm to clip to that clips nothing: updates wait until all gradients are known, and that is all.
NO_CLIPPING = torch.finfo(torch.float32).max


class Clipping:
    """Norms of gradients, and the factor by which each iteration scales them.

    Args:
        clip_norm: the maximum global norm; None: no clipping.
        schedule: a schedule with or without tasks that clip.
        order: block and place of each trained parameter, in the model's order.
        wide: compute norms in fp32, as of gradients of master weights; otherwise in the gradients' type.

    Attributes:
        total: the global norm of the latest iteration whose gradients are complete, before they are scaled; None: none yet.

    Raises:
        InputError: the schedule clips and there is no norm, or vice versa; or the norm is not positive and finite.
    """

    def __init__(
        self, clip_norm: float | None, schedule: Schedule, order: Iterable[tuple[int, int]], *, wide: bool = True
    ) -> None:
        check_clip_norm(clip_norm)
        scheduled = any(task.id.kind is Kind.CLIP for task in schedule.tasks)
        if scheduled != (clip_norm is not None):
            does, cure = ("clips", "give clip_norm") if scheduled else ("does not clip", "leave clip_norm out")
            raise InputError(
                f"clip_norm is {clip_norm}, but the schedule {does} gradients: {cure}, or make the schedule for a workload "
                "with the same clip_norm"
            )
        self.clip_norm, self._order = clip_norm, list(order)
        self._dtype = torch.float32 if wide else None
        #: By iteration and block: the norms of the parameters that have a gradient, by their places.
        self._norms: dict[tuple[int, int], dict[int, Tensor]] = {}
        self._coefficients: dict[int, Tensor] = {}
        self.total: float | None = None

    def continue_from(self, before: Clipping) -> None:
        """Take over what is known of the iterations so far."""
        self.total, self._coefficients = before.total, before._coefficients

    def measure(
        self, iteration: int, unit: int, gradients: Sequence[Tensor | None], factor: float, accelerator: Device
    ) -> None:
        """Compute the norm of each of the block's gradients, which must be complete, times ``factor``.

        The host can read them once the work of the current task is done.
        """
        places = [place for place, gradient in enumerate(gradients) if gradient is not None]
        there = [gradient for gradient in gradients if gradient is not None]
        # A few bytes, copied right away: no task waits only for them.
        norms: Iterable[Tensor] = accelerator.read_later(self.norms(there, factor)) if there else []
        self._norms[iteration, unit] = dict(zip(places, norms, strict=True))

    def norms(self, gradients: Sequence[Tensor], factor: float) -> Tensor:
        """The norm of each of ``gradients``, at least one, times ``factor``."""
        norms = torch.stack(torch._foreach_norm(list(gradients), 2.0, dtype=self._dtype))
        return norms if factor == 1.0 else norms * factor

    def known(self, iteration: int, unit: int) -> dict[int, Tensor]:
        """The norms of a block's parameters that are known, by their places."""
        return self._norms.get((iteration, unit), {})

    def note(self, iteration: int, unit: int, norms: dict[int, float], dtype: torch.dtype) -> None:
        """Note norms that another rank has computed, or of gradients of several ranks."""
        made = {place: torch.tensor(norm, dtype=self._dtype or dtype) for place, norm in norms.items()}
        self._norms[iteration, unit] = self.known(iteration, unit) | made

    def combine(self, iteration: int) -> None:
        """Compute the scale of the gradients of ``iteration``.

        Raises:
            ScheduleError: a norm is missing.
        """
        assert self.clip_norm is not None, "a schedule that clips has a norm"
        units = sorted({unit for unit, _ in self._order})
        missing = [unit for unit in units if (iteration, unit) not in self._norms]
        if missing:
            raise ScheduleError(f"the schedule clips before the norms of blocks {', '.join(map(str, missing))} are known")
        of_block = {unit: self._norms.pop((iteration, unit)) for unit in units}
        norms = [of_block[unit][place] for unit, place in self._order if place in of_block[unit]]
        total = torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())
        self.total = float(total)
        self._coefficients.pop(iteration - 2, None)  # a delayed update uses that of the iteration before
        clipped = torch.clamp(self.clip_norm / (total + 1e-6), max=1.0)
        self._coefficients[iteration] = torch.ones(()) if self.clip_norm == NO_CLIPPING else clipped

    def coefficient(self, iteration: int) -> Tensor | None:
        """Return the scale of the gradients of ``iteration``, a tensor on the host; None: no clipping.

        Raises:
            ScheduleError: the scale is not known yet.
        """
        if self.clip_norm is None:
            return None
        if iteration not in self._coefficients:
            raise ScheduleError(f"the schedule updates with gradients of iteration {iteration} before it clips them")
        return self._coefficients[iteration]
