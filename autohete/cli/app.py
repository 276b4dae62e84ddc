"""The program's commands. Exit code 0: an answer, including "does not fit"; 1: a verification found a difference;
2: invalid input; 130: interrupted; 143: terminated.

Heavy imports (SciPy, SimPy, matplotlib) are deferred until a command needs them, so that ``--help`` is quick.
"""

from __future__ import annotations

import io
import os
import sys
from typing import NoReturn, TextIO

from cyclopts import App, CycloptsError

from autohete.cli.calibrate import calibrate
from autohete.cli.compare import compare
from autohete.cli.examples import EXAMPLES
from autohete.cli.family import largest
from autohete.cli.groups import OTHERS
from autohete.cli.hardware import hardware
from autohete.cli.interrupt import interruptible
from autohete.cli.plan import plan
from autohete.cli.presets import presets
from autohete.cli.profile import profile
from autohete.cli.schemas import schema
from autohete.cli.simulate import simulate
from autohete.cli.sweep import sweep
from autohete.cli.trace_module import trace
from autohete.cli.train import train
from autohete.errors import AutoHeteError
from autohete.files import guarded_inputs
from autohete.printable import printable

#: Characters of an error that are printed.
_LONGEST_MESSAGE = 8000

app = App(
    name="autohete",
    help="Simulate transformer training that does not fit on the GPU: what to keep, what to move, how fast, and why.",
    help_format="markdown",
    group_parameters=OTHERS,
)
for _command in (simulate, sweep, compare, train, profile, calibrate, trace, plan, largest, presets, hardware, schema):
    _name = _command.name[0] if isinstance(_command, App) else _command.__name__
    _epilogue = "Examples:\n\n" + "\n\n".join(f"`autohete {_name} {example}`" for example in EXAMPLES[_name])
    if isinstance(_command, App):
        _command.help_epilogue = _epilogue
        app.command(_command)
    else:
        app.command(_command, help_epilogue=_epilogue)
app.register_install_completion_command(help="Let the shell complete commands and options.")


def _refuse(app: App, message: str) -> NoReturn:
    try:
        text = printable(" ".join(message.split()))
        rest = f"… ({len(text):,} characters)" if len(text) > _LONGEST_MESSAGE else ""
        print(f"{app.name[0]}: {text[:_LONGEST_MESSAGE]}{rest}", file=sys.stderr, flush=True)
    except OSError:
        _silence(sys.stderr)
    sys.exit(2)


def run_app(app: App) -> None:
    """Run a command line: one line and exit code 2 for every error that the user can fix, 130 or 143 for a signal."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # escape what the terminal's encoding cannot show
    try:
        with interruptible(app.name[0]), guarded_inputs():
            app(exit_on_error=False, print_error=False, result_action="return_value")
            print(end="", flush=True)
    except AutoHeteError as error:
        _refuse(app, str(error))
    except CycloptsError as error:
        _refuse(app, f"{str(error).rstrip('.')}: see --help for what is allowed")
    except BrokenPipeError:
        _silence(sys.stdout)  # the reader has closed the pipe (``| head``)
    except SystemExit as ending:
        if not isinstance(ending.__context__, BrokenPipeError):  # rich exits by itself, with code 1
            raise
        _silence(sys.stdout)
    except OSError as error:
        _silence(sys.stdout)
        _refuse(app, f"the output cannot be written: {error.strerror or error}; send it elsewhere")


def _silence(stream: TextIO) -> None:
    """Discard what the interpreter still flushes to ``stream`` at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def main() -> None:
    """Run the command line; :mod:`autohete.__main__` is the program's entry point."""
    run_app(app)
