"""Tasks that fail, and what a training then leaves."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import NoReturn
from unittest.mock import patch

import torch
from torch import Tensor, nn

from autohete.runtime.actions import Actions
from autohete.runtime.async_device import AsyncDevice
from autohete.runtime.partition import partition
from autohete.schedule import Schedule, Task
from autohete.train.gpt import BLOCKS


class PlantedError(Exception):
    """What a test makes fail."""


@dataclass(slots=True)
class Fault:
    """An instance of a task that fails.

    Args:
        instance: such as ``F2@1``.
        way: how it fails; ``before`` or ``after`` its work; on a device that runs ahead also when it is ``done``, or in an
            ``operation`` of the device.
        at: when it has failed (s); 0: it has not.
    """

    instance: str
    way: str
    at: float = field(default=0.0)

    def fail(self) -> NoReturn:
        self.at = time.perf_counter()
        raise PlantedError("no such luck")

    def planted(self, device: AsyncDevice | None) -> AbstractContextManager[object]:
        """Let the task fail during the context."""
        act, fault = Actions.act, self

        def acting(actions: Actions, task: Task, iteration: int) -> Callable[[], None] | None:
            if task.id.at(iteration) != fault.instance:
                return act(actions, task, iteration)
            if fault.way == "before":
                fault.fail()
            finish = act(actions, task, iteration)
            if fault.way == "done":

                def fail_then() -> NoReturn:
                    assert finish is not None
                    finish()
                    fault.fail()

                return fail_then
            if fault.way == "operation" and device is not None and device.current is not None:
                device.current.put(fault.fail)
                return finish
            fault.fail()

        return patch.object(Actions, "act", acting)


#: Values and optimizer states of each parameter of each block, embedding first.
State = list[list[tuple[Tensor, dict[str, Tensor]]]]


@dataclass(frozen=True, slots=True)
class Undisturbed:
    """A training without a fault.

    Args:
        schedule: its tasks.
        losses: of each step.
        states: after so many steps, from 0.
    """

    schedule: Schedule
    losses: list[float]
    states: list[State]


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> State:
    """What a model and an optimizer have now."""
    return [
        [(p.detach().clone(), {name: value.clone() for name, value in optimizer.state[p].items()}) for p in owned]
        for owned in partition(model, BLOCKS).owned
    ]


def same_block(block: list[tuple[Tensor, dict[str, Tensor]]], other: list[tuple[Tensor, dict[str, Tensor]]]) -> bool:
    """Whether two blocks have the same values and states, bit for bit."""
    return all(
        torch.equal(values, others) and states.keys() == more.keys() and all(torch.equal(states[k], more[k]) for k in states)
        for (values, states), (others, more) in zip(block, other, strict=True)
    )
