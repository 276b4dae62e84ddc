"""Which models are in use: a trainer changes their parameters and forwards, and two must not do that at the same time."""

from __future__ import annotations

from torch import nn

from autohete.errors import InputError


class Claim:
    """That ``model`` is taken, until :meth:`release`.

    Args:
        model: it, its parts, and all that it shares with other models.
        use: what is done with it, for the message to others: ``trained``, ``measured``.

    Raises:
        InputError: it, or a part of it, is taken already.
    """

    def __init__(self, model: nn.Module, use: str) -> None:
        self._use = use
        # The model is kept: ids belong to what lives.
        self._model: nn.Module | None = model
        # Modules without parameters, such as an activation, may be shared.
        self._parts = {id(tensor): name for name, tensor in (*model.named_parameters(), *model.named_buffers())}
        _claims.append(
            self
        )  # first, so that of two threads one at least sees the other; no lock, which a fork might find taken
        for other in list(_claims):
            if other is self:
                return
            shared = [name for part, name in self._parts.items() if part in other._parts]
            if shared:
                self.release()
                raise InputError(
                    f"{type(model).__name__} is being {other._use} already, or shares {shared[0]} with a model that is: close "
                    "that trainer first (or wait for it); a parameter has one at a time"
                )

    def release(self) -> None:
        """Let others have the model. Again: nothing."""
        if self._model is not None:
            self._model = None
            _claims.remove(self)


#: In the order in which they were made.
_claims: list[Claim] = []
