"""How several GPUs compute a batch together."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from autohete.errors import InputError, check_fields, check_whole


class ContextExchange(StrEnum):
    """How GPUs that divide a sequence compute attention, by Megatron's names: keys and values are passed on in a ring (Liu et
    al. 2023, arXiv 2310.01889), or all exchange heads for tokens (DeepSpeed Ulysses, arXiv 2309.14509).
    """

    RING = "p2p"
    ALL_TO_ALL = "a2a"


@dataclass(frozen=True, slots=True)
class Parallelism:
    """How GPUs divide each batch, as Megatron Core does it (github NVIDIA/Megatron-LM, ``megatron/core/parallel_state.py``).
    What that costs is in ``profile/divided.py``.

    Args:
        tensor: GPUs that divide the matrices of each block (Shoeybi et al. 2019, arXiv 1909.08053): heads, the width of the MLP
            and the rows of the vocabulary. They have a part of the parameters each.
        sequence: what lies between these products is divided along the sequence (Korthikanti et al. 2022, arXiv 2205.05198).
        context: GPUs that divide each sequence. They have all parameters each, and sum gradients as GPUs with batches of their
            own do.
        exchange: how their attention sees the whole sequence.
        pipeline: GPUs that share a batch by stages, which a policy for pipelines assigns.
        expert: GPUs that divide the experts of each block, and send each token to those that it goes to. They have batches of
            their own, or parts of a sequence.
    """

    tensor: int = 1
    sequence: bool = True
    context: int = 1
    exchange: ContextExchange = ContextExchange.RING
    expert: int = 1
    pipeline: int = 1

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("tensor", "context", "expert", "pipeline"):
            check_whole(name, getattr(self, name), 1)

    def __str__(self) -> str:
        counts = (
            (self.tensor, "tp", "" if self.sequence else ",sp=off"),
            (self.context, "cp", "" if self.exchange is ContextExchange.RING else f",comm={self.exchange}"),
            (self.expert, "ep", ""),
            (self.pipeline, "pp", ""),
        )
        return ",".join(f"{key}={count}{how}" for count, key, how in counts if count > 1)

    @property
    def divides(self) -> bool:
        """Whether the work of a unit is divided. A pipeline does not: each of its GPUs computes whole units."""
        return max(self.tensor, self.context, self.expert) > 1

    @property
    def neighbours(self) -> int:
        """The smallest number of ranks that compute the same units: a sequence and the experts are divided among them."""
        return math.lcm(self.context, self.expert)

    @property
    def gpus(self) -> int:
        """The smallest number of GPUs that it divides something among; others are a multiple of it."""
        return self.tensor * self.pipeline * self.neighbours

    @property
    def along_sequence(self) -> int:
        """The number of parts of what a block keeps between its products."""
        return self.tensor if self.sequence else 1

    def ranks(self, gpus: int) -> int:
        """The number of ranks that hold all parameters together with the GPUs that share their tensors.

        Raises:
            InputError: the GPUs cannot be divided so.
        """
        sizes = self.tensor, self.context, self.pipeline
        if gpus % math.prod(sizes):
            raise InputError(
                f"{gpus} GPUs cannot be divided into groups of {' x '.join(map(str, sizes))} that train a batch together: "
                "give a multiple"
            )
        ranks = gpus // self.tensor
        if ranks // self.pipeline % self.expert:
            raise InputError(f"{ranks} GPUs with tokens of their own cannot form groups of {self.expert}: give a multiple")
        return ranks


#: A GPU computes its batch by itself.
ALONE = Parallelism()
#: More GPUs are refused.
_DIGITS = 7
#: How it is written.
_FORM = "write it such as tp=4,cp=2,dp=2; keys are tp, sp (on or off), cp, comm (p2p or a2a), ep, pp and dp"


def parse_parallel(text: str | None, gpus: int | None) -> tuple[int, Parallelism]:
    """Return the number of GPUs, and how they divide each batch.

    Args:
        text: such as ``tp=4,sp=off,dp=2``; None: each GPU has its own batch.
        gpus: their number, if it is given.

    Raises:
        InputError: says what to give.
    """
    given: dict[str, str] = {}
    for item in () if text is None else text.split(","):
        key, equals, value = (part.strip() for part in item.partition("="))
        if not equals or key not in ("tp", "sp", "cp", "comm", "ep", "pp", "dp"):
            raise InputError(f"parallel {item.strip()[:40]!r} is not understood: {_FORM}")
        if key in given:
            raise InputError(f"parallel gives {key} twice: {_FORM}")
        given[key] = value
    divided = {key: _count(key, given[key]) if key in given else 1 for key in ("tp", "cp", "ep", "pp", "dp")}
    if given.get("sp", "on") not in ("on", "off"):
        raise InputError(f"parallel sp={given['sp'][:40]} is neither on nor off: {_FORM}")
    if given.get("comm", "p2p") not in ("p2p", "a2a"):
        raise InputError(f"parallel comm={given['comm'][:40]} is neither p2p nor a2a: {_FORM}")
    for how, of in (("sp", "tp"), ("comm", "cp")):
        if how in given and of not in given:
            raise InputError(
                f"parallel {how}={given[how]} describes {of}, but there is no {of}: give {of}=N as well, or leave it out"
            )
    exchange = ContextExchange(given.get("comm", "p2p"))
    parallelism = Parallelism(
        divided["tp"], given.get("sp", "on") == "on", divided["cp"], exchange, divided["ep"], divided["pp"]
    )
    least = math.prod(divided[key] for key in ("tp", "cp", "pp", "dp")) if "dp" in given else parallelism.gpus
    if gpus is None:
        return least, parallelism
    if ("dp" in given and gpus != least) or gpus % least:
        needed = f"{least}" if "dp" in given else f"a multiple of {least}"
        raise InputError(f"parallel {text} divides {needed} GPUs, but gpus is {gpus}: leave one of them out, or let them agree")
    return gpus, parallelism


def _count(key: str, text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= _DIGITS and int(text) >= 1):
        raise InputError(f"parallel {key}={text[:40]} is not a whole number from 1 on, of up to {_DIGITS} digits: {_FORM}")
    return int(text)
