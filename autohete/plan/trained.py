"""What a Trainer refuses of a plan by the plan alone, so that it is known before anything runs."""

from __future__ import annotations

from autohete.errors import InputError
from autohete.plan import Plan


def check_trained(plan: Plan, *, scaled_by: str | None, micro_batches: int) -> None:
    """Check that a Trainer can update as the plan says.

    Args:
        plan: to be trained.
        scaled_by: what scales gradients before updates, such as ``clip_norm``; None: nothing.
        micro_batches: of a step.

    Raises:
        InputError: it cannot; says why.
    """
    if plan.delayed and scaled_by is not None:
        raise InputError(
            f"there is a {scaled_by}, but {plan.policy} delays updates, and a saved state does not record the scale of waiting "
            f"gradients: leave {scaled_by} out, or choose a policy that does not delay updates"
        )
    if plan.delayed and micro_batches > 1:
        raise InputError(
            f"{plan.policy} delays updates, for which a Trainer has one copy of the gradients: use one micro-batch, or "
            "choose a policy that does not delay updates"
        )
    if plan.gradient_bytes:
        raise InputError(
            f"{plan.policy} does more with gradients than update with all of them, as a Trainer does: choose another "
            "policy, such as zero_offload"
        )
