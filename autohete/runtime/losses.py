"""Losses of a language model, and checks of a user's own."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from autohete.errors import InputError
from autohete.runtime.forward_pass import leaves


def next_token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy of ``logits`` (batch, sequence, vocabulary) against ``targets`` (batch, sequence)."""
    return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def mean_token_loss(logits: Tensor, targets: Tensor, num_items_in_batch: int) -> Tensor:
    """Return the cross-entropy of a micro-batch, summed over its tokens and divided by the number of those of the whole batch.

    The loss of a batch is then the mean over all of its tokens, however they are spread over micro-batches.
    """
    total = functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum")
    return total / num_items_in_batch


def check_loss(loss: object, logits: Tensor, model: nn.Module) -> None:
    """Check that ``loss`` can be differentiated and depends on ``logits`` only.

    Raises:
        InputError: states what the loss function returned, and which parameters it uses.
    """
    if not isinstance(loss, Tensor):
        raise InputError(f"the loss function returns {type(loss).__name__}: return one tensor, without .item() or a tuple")
    if loss.numel() != 1 or not loss.is_floating_point():
        raise InputError(
            f"the loss function returns {tuple(loss.shape)} of {loss.dtype}: return one real number, such as loss.mean()"
        )
    found = list(leaves(loss))
    others = [leaf for leaf in found if leaf is not logits]
    if others:
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        used = sorted({names[id(leaf)] for leaf in others if id(leaf) in names})
        named = ", ".join(used[:4] or [f"a tensor {tuple(others[0].shape)}"])
        raise InputError(
            f"the loss uses more than the logits ({named}), which would get no gradient from it: let a block add the gradient "
            "of an auxiliary loss itself (a torch.autograd.Function that passes its input through), use the optimizer's "
            "weight_decay for weight penalties, move what the loss trains into the model behind its blocks, or detach() it"
        )
    if not found:
        raise InputError("the loss does not depend on the logits: compute it from them, without detach(), .data or no_grad()")
