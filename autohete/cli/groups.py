"""Groups of options in ``--help``, in their order, and the options that several commands have."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Group, Parameter

MODEL = Group("Model", sort_key=1)
TRAINING = Group("Training", sort_key=2)
HARDWARE = Group("Hardware", sort_key=3)
POLICY = Group("Policy", sort_key=4)
OUTPUT = Group("Output", sort_key=5)
OTHERS = Group("Others", sort_key=6)

#: A file to write.
OutputFile = Annotated[str | None, Parameter(group=OUTPUT)]
#: Print JSON instead of text.
JsonSwitch = Annotated[bool, Parameter(name="--json", negative=(), group=OUTPUT)]
#: Policies with their flags.
Policies = Annotated[list[str] | None, Parameter(negative=(), group=POLICY)]
