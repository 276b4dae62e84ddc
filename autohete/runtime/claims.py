"""Exclusive use of models: a trainer changes their parameters and forwards, so only one may use a model at a time."""

from __future__ import annotations

from torch import nn

from autohete.errors import InputError


class Claim:
    """Exclusive use of ``model`` until :meth:`release`.

    Args:
        model: the model, including its parts and all tensors that it shares with other models.
        use: ``trained`` or ``measured``, for the error message to others.

    Raises:
        InputError: the model, or a part of it, is already in use.
    """

    def __init__(self, model: nn.Module, use: str) -> None:
        self._use = use
        # Keep the model alive: ids are only unique among live objects.
        self._model: nn.Module | None = model
        # Modules without parameters, such as an activation, may be shared.
        self._parts = {id(tensor): name for name, tensor in (*model.named_parameters(), *model.named_buffers())}
        # First, so that of two threads at least one sees the other. No lock, since a fork might inherit it locked.
        _claims.append(self)
        for other in list(_claims):
            if other is self:
                return
            shared = [name for part, name in self._parts.items() if part in other._parts]
            if shared:
                self.release()
                raise InputError(
                    f"{type(model).__name__} is already being {other._use}, or shares {shared[0]} with a model that is: close "
                    "that trainer first, or wait for it"
                )

    def release(self) -> None:
        """Release the model. Later calls do nothing."""
        if self._model is not None:
            self._model = None
            _claims.remove(self)


#: Open claims, in the order of creation.
_claims: list[Claim] = []
