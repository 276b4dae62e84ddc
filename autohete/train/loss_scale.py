"""Dynamic loss scaling, by the caller's ``torch.amp.GradScaler``: its arithmetic, with a Trainer's gradients."""

from __future__ import annotations

import math

import torch

from autohete.errors import InputError


class LossScale:
    """The scale of the loss, which a step with gradients that are not finite lowers, and many others in turn raise.

    Args:
        scaler: the caller's; None: the loss is not scaled.

    Raises:
        InputError: it is something else.
    """

    def __init__(self, scaler: object) -> None:
        if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
            raise InputError(
                f"grad_scaler is of type {type(scaler).__name__}: give a torch.amp.GradScaler('cpu'), or leave it out"
            )
        self._scaler = scaler if scaler is not None and scaler.is_enabled() else None

    @property
    def is_on(self) -> bool:
        """Whether there is one."""
        return self._scaler is not None

    def now(self) -> float:
        """The scale of the next step.

        Raises:
            InputError: it is no power of two, so that scaling would change the gradients' last bits.
        """
        if self._scaler is None:
            return 1.0
        scale = self._scaler.get_scale()
        if not 0 < scale < math.inf or math.frexp(scale)[0] != 0.5:
            raise InputError(
                f"the GradScaler's scale is {scale}: let init_scale, growth_factor and backoff_factor be powers of two, as by "
                "default"
            )
        return scale

    def note(self, *, finite: bool) -> None:
        """Tell the scaler whether all gradients of the step were finite."""
        if self._scaler is None:
            return
        # The scaler's own methods find out from gradients, and those of the model are elsewhere: let it look at one like them.
        standing_in = torch.zeros(1, requires_grad=True)
        self._scaler.scale(standing_in.detach())  # makes its tensors the first time
        standing_in.grad = torch.full((1,), 0.0 if finite else math.inf)
        self._scaler.unscale_(torch.optim.SGD([standing_in], lr=0.0))
        self._scaler.update()
