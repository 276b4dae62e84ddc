"""What a chain of units costs if only activations leave the GPU's memory, by being dropped, and the GPU updates at the end."""

from __future__ import annotations

from autohete.plan import Plan
from autohete.planner.chain import Stage
from autohete.profile import Profile


def iteration_seconds(profile: Profile, plan: Plan) -> float:
    """Iteration time of a plan in which nothing leaves the GPU: it runs all tasks one after another."""
    units = profile.units
    passes = sum(round(unit.forward_seconds * 1e9) for unit in units)
    passes += sum(round(unit.backward_seconds * 1e9) for unit in units[profile.first_trained :])
    for done in plan.recomputations():
        for again in done:
            times = units[again.unit]
            passes += round((times.forward_seconds if again.hands_on else times.recompute_seconds) * 1e9)
    passes += round(profile.loss.seconds * 1e9)
    updates = sum(round(unit.gpu_update_seconds * 1e9) for unit in units if not unit.is_frozen)
    return (profile.workload.micro_batches * passes + updates) * 1e-9


def activation_budget_bytes(profile: Profile) -> int:
    """Bytes of the GPU for what :func:`stages` list. Negative if not even the rest fits."""
    first = profile.first_trained
    return profile.hardware.gpu_capacity_bytes - _there_bytes(profile) - (profile.units[first].input_bytes if first else 0)


def _gradients(profile: Profile) -> list[int]:
    return [unit.trained_parameters * profile.element_bytes for unit in profile.units]


def _there_bytes(profile: Profile) -> int:
    """Bytes that are always allocated. Includes gradients if those of several micro-batches are accumulated, and the copies in
    autocast's cache, which no unit leaves out of its forward. They are gone after the loss, where a plan may thus use less
    than there is.
    """
    states = sum(map(profile.state_bytes, range(len(profile.units))))
    resident = states + sum(map(profile.parameter_bytes, range(len(profile.units))))
    cached = sum(unit.cast_bytes for unit in profile.units[profile.first_trained :])
    return resident + cached + (sum(_gradients(profile)) if profile.workload.micro_batches > 1 else 0)


def stages(profile: Profile) -> list[Stage]:
    """Stages of the units from the first that is trained up to the head, with the loss. Those below have no backward."""
    units, loss, gradients, last = profile.units, profile.loss, _gradients(profile), len(profile.units) - 1
    held_logits = loss.logits_bytes if loss.keeps_logits else 0
    accumulates = profile.workload.micro_batches > 1
    chain = []
    for unit, times in enumerate(units):
        output = loss.logits_bytes if unit == last else units[unit + 1].input_bytes
        made, backward = gradients[unit], times.backward_workspace_bytes
        left = 0 if accumulates else made
        if accumulates:  # to gradients that are there, one parameter after another
            made = times.added_elements * profile.element_bytes
        if profile.workload.tied_embeddings and unit == 0:
            made = left = 0  # exists from the head's backward on
        if unit == last:
            tied = gradients[0] if profile.workload.tied_embeddings else 0
            made, left = made + tied, left + tied + held_logits
            backward = max(
                loss.passed_bytes + held_logits + backward + times.input_bytes + made,
                loss.peak_bytes,
            )
        elif unit > profile.first_trained:
            backward += times.input_bytes + made
        else:
            backward += made
        chain.append(
            Stage(
                forward_ns=round(times.forward_seconds * 1e9),
                recompute_ns=round((times.forward_seconds if unit == last else times.recompute_seconds) * 1e9),
                input_bytes=times.input_bytes if unit else 0,
                output_bytes=output,
                gradient_bytes=0 if unit == last else output,
                kept_bytes=(times.kept_bytes if unit else times.activation_bytes) - times.cast_bytes,
                keeping_bytes=times.forward_workspace_bytes,
                dropping_bytes=times.checkpointed_workspace_bytes - times.cast_bytes,
                backward_bytes=backward,
                left_bytes=left,
                keeps=unit in (0, last),
            )
        )
    return chain[profile.first_trained :]
