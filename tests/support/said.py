"""What an error says about the parameters."""

from __future__ import annotations

import re


def numbers(listed: str) -> list[int]:
    """The blocks that ``0, 2 to 4`` means."""
    ends = [[int(end) for end in run.split(" to ")] for run in listed.split(", ")]
    return [block for run in ends for block in range(run[0], run[-1] + 1)]


def said(message: str, blocks: int) -> dict[int, int]:
    """How many steps each block has been updated by, as an error says it; without those that are updated in part."""
    if "No parameter has been changed" in message:
        return dict.fromkeys(range(blocks), 0)
    if found := re.search(r"All parameters are from step (\d+), the last complete one", message):
        return dict.fromkeys(range(blocks), int(found[1]) + 1)
    assert message.endswith("): load a saved state to continue from a complete step")
    of_step = {
        block: int(n) + 1
        for n, listed in re.findall(r"[(;] ?step (\d+): blocks? ([^;)]*)", message)
        for block in numbers(listed)
    }
    return of_step | {
        block: 0 for listed in re.findall(r"before the first step: blocks? ([^;)]*)", message) for block in numbers(listed)
    }
