"""Tied embeddings of pipelines: if embedding and head are on two ranks, each has a copy of the matrix that they share.

The ranks sum up the gradients of their copies before both update (github NVIDIA/Megatron-LM at d98e8a64,
``megatron/core/distributed/finalize_model_grads.py``: ``_allreduce_word_embedding_grads``). Of stages that are dealt each has a
copy as well; the CPU, which has both gradients, adds them as it updates.
"""

from __future__ import annotations

from dataclasses import replace

from autohete.plan import Plan
from autohete.profile import Profile, UnitProfile


def on_one_rank(profile: Profile, plan: Plan) -> bool:
    """Whether the head uses the embedding's own matrix."""
    return profile.workload.tied_embeddings and not _has_copy(profile, plan)


def copied_parameters(profile: Profile, plan: Plan) -> int:
    """Elements of a matrix that two ranks train, each its copy; 0 if there is none, or if stages are dealt."""
    copied = _has_copy(profile, plan) and plan.dealt is None
    return _matrix(profile) if copied and not profile.units[0].is_frozen else 0


def with_copy(profile: Profile, plan: Plan) -> Profile:
    """Return ``profile`` with a head that has the matrix of the embedding as well, if they are on two ranks."""
    if not _has_copy(profile, plan):
        return profile
    return replace(profile, units=(*profile.units[:-1], _with_matrix(profile)))


def _has_copy(profile: Profile, plan: Plan) -> bool:
    apart = plan.units[0].rank != plan.units[-1].rank or plan.dealt is not None
    return profile.workload.tied_embeddings and apart


def _matrix(profile: Profile) -> int:
    """Elements of the matrix. Besides it, an embedding may have learned positions."""
    return min(profile.workload.vocabulary_size * profile.workload.hidden_size, profile.units[0].parameters)


def _with_matrix(profile: Profile) -> UnitProfile:
    """The head with the embedding's matrix, and with that part of the embedding's update."""
    (first, *_, head), last, count = profile.units, len(profile.units) - 1, _matrix(profile)
    part, whole = (0, first.parameters) if first.is_frozen else (count, first.trained_parameters)
    cpu = None if first.cpu_update_seconds is None else first.cpu_update_seconds * part / whole
    states = None
    if (first.state_bytes, head.state_bytes) != (None, None):
        states = profile.state_bytes(0, part) + profile.state_bytes(last)
    frozen = round(profile.frozen_bytes(0) * (count - part) / whole) + profile.frozen_bytes(last)
    return replace(
        head,
        parameters=head.parameters + count,
        frozen_parameters=head.frozen_parameters + count - part,
        frozen_bytes=None if (first.frozen_bytes, head.frozen_bytes) == (None, None) else frozen,
        gpu_update_seconds=head.gpu_update_seconds + first.gpu_update_seconds * part / whole,
        cpu_update_seconds=cpu if head.cpu_update_seconds is None else head.cpu_update_seconds + (cpu or 0.0),
        state_bytes=states,
        largest_parameter=max(head.largest_parameter or head.trained_parameters, part),
        tensors=head.tensors + 1,
    )
