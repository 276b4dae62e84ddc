"""Other ways to train the same model on the same hardware, alone and combined.

Some compute the same gradients from the same sequences: these are *exact*. Others change what an optimizer step does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import StrEnum

from autohete.answer.result import AND, Change, Gain
from autohete.errors import InputError
from autohete.workload import Kernels, Precision, Units, Workload
from autohete.workload.optimizers import Optimizer
from autohete.workload.training import Lora

#: Rank of the adapters that are tried.
_RANK = 16
#: Names of the levers that train adapters.
LORA = f"LoRA of rank {_RANK}"
QLORA = f"QLoRA of rank {_RANK}"
#: By how much an iteration grows.
_MORE_SEQUENCES = 4
#: How many combinations are tried.
_COMBINED = 6


class Group(StrEnum):
    """What a lever changes. Of one group, one lever is pulled at a time."""

    LOSS = "loss"
    KERNELS = "kernels"
    UNITS = "units"
    BATCH = "batch"
    OPTIMIZER = "optimizer"
    PRECISION = "precision"
    ADAPTERS = "adapters"


@dataclass(frozen=True, slots=True)
class Lever:
    """One change of a workload.

    Args:
        name: in words, the same for every workload.
        group: see :class:`Group`.
        exact: whether it computes the same gradients.
        figures: fields of the workload that change.
        training: fields of its training that change.
    """

    name: str
    group: Group
    exact: bool
    figures: dict[str, object]
    training: dict[str, object]

    def pulled(self, workload: Workload) -> Workload:
        """Return the changed workload.

        Raises:
            InputError: the workload has no such form.
        """
        training = replace(workload.training, **self.training) if self.training else workload.training  # type: ignore[arg-type]
        return replace(workload, **{"training": training, **self.figures})  # type: ignore[arg-type]


def levers(workload: Workload) -> list[Lever]:
    """The levers that change ``workload``, exact ones first."""
    found = []
    for lever in _all(workload):
        with suppress(InputError):  # such as an optimizer that does not go with adapters
            if lever.pulled(workload) != workload:
                found.append(lever)
    return found


def _all(workload: Workload) -> Iterator[Lever]:
    batch, times = workload.batch_size, workload.micro_batches
    if _chunked(workload):
        instead: dict[str, object] = {"chunked_loss": True, **({} if workload.loss is None else {"loss": None})}
        yield Lever("chunked loss", Group.LOSS, True, instead, {})
    if workload.kernels is Kernels.FUSED:
        yield Lever("lean kernels", Group.KERNELS, True, {"kernels": Kernels.LEAN}, {})
    if workload.units is Units.BLOCK:
        yield Lever("sublayers", Group.UNITS, True, {"units": Units.SUBLAYER}, {})
    if batch % 2 == 0:
        yield Lever(
            f"{2 * times} x {batch // 2} sequences",
            Group.BATCH,
            True,
            {"batch_size": batch // 2, "micro_batches": 2 * times},
            {},
        )
    if times % 2 == 0:
        yield Lever(
            f"{times // 2} x {2 * batch} sequences",
            Group.BATCH,
            True,
            {"batch_size": 2 * batch, "micro_batches": times // 2},
            {},
        )
    yield Lever(
        f"{_MORE_SEQUENCES * times} x {batch} sequences",
        Group.BATCH,
        False,
        {"micro_batches": _MORE_SEQUENCES * times},
        {},
    )
    if workload.training.optimizer is Optimizer.ADAMW:
        yield Lever("8-bit AdamW", Group.OPTIMIZER, False, {}, {"optimizer": Optimizer.ADAMW8BIT})
        if workload.precision is Precision.BF16:
            yield Lever("AdamW with states in bf16", Group.OPTIMIZER, False, {}, {"optimizer": Optimizer.ADAMW_BF16})
            yield Lever("AdamW in pure bf16", Group.OPTIMIZER, False, {}, {"optimizer": Optimizer.ADAMW_PURE_BF16})
            yield Lever("8-bit AdamW in pure bf16", Group.OPTIMIZER, False, {}, {"optimizer": Optimizer.ADAMW8BIT_PURE_BF16})
    if workload.precision is Precision.BF16 and not workload.training.fp8:
        yield Lever("products in fp8", Group.PRECISION, False, {}, {"fp8": True})
    if workload.training.lora is None and workload.training.last_blocks is None:
        yield Lever(LORA, Group.ADAPTERS, False, {}, {"lora": Lora(_RANK)})
        yield Lever(QLORA, Group.ADAPTERS, False, {}, {"lora": Lora(_RANK, quantised=True)})


def _chunked(workload: Workload) -> bool:
    """Whether chunks would make the logits smaller."""
    with suppress(InputError):  # a traced model has a loss of its own
        return replace(workload, chunked_loss=True, loss=None).loss_tokens < workload.loss_tokens
    return False


def pull(workload: Workload, pulled: Sequence[Lever]) -> Change | None:
    """Several levers as one change; None if they do not go together."""
    after = workload
    try:
        for lever in pulled:
            after = lever.pulled(after)
    except InputError:
        return None
    name, exact = AND.join(lever.name for lever in pulled), all(lever.exact for lever in pulled)
    return Change(name, {}, workload=after, exact=exact)


def combinations(workload: Workload, alone: Sequence[Lever], gains: Sequence[Gain]) -> list[Change]:
    """The combinations that are worth a try, given what each lever brings alone.

    All exact levers that help go together, then these with the best of each other group, then all of them. If nothing fits
    alone, all exact levers are pulled.

    Args:
        workload: before any change.
        alone, gains: the levers, and the gain of each.
    """
    ranked = sorted(zip(alone, gains, strict=True), key=lambda pair: pair[1].seconds_per_token)
    fits = any(gain.fits for gain in gains)
    best: dict[Group, Lever] = {}
    for lever, gain in ranked:
        if gain.helps or not fits:
            best.setdefault(lever.group, lever)
    exact = [lever for lever in best.values() if lever.exact]
    others = [lever for lever in best.values() if not lever.exact]
    wanted = [exact, *([*exact, lever] for lever in others), [*exact, *others]]
    changes = (pull(workload, some) for some in wanted if len(some) > 1)
    return list({change.name: change for change in changes if change is not None}.values())[:_COMBINED]
