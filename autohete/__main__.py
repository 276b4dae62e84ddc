"""The program ``autohete``, also as ``python -m autohete``."""

# What ``signal`` is made of: built in, so that interrupts are caught before anything is imported.
import _signal  # type: ignore[import-not-found]
import os
import sys
from types import FrameType

# `python -m` looks for modules in the current folder first. A policy or a file with settings could then name code that happens
# to lie there; PYTHONPATH=. permits it.
if __name__ == "__main__" and not sys.flags.safe_path and sys.path[0] not in ("", os.path.dirname(os.path.dirname(__file__))):
    del sys.path[0]


def _end(number: int, frame: FrameType | None) -> None:
    os.write(2, b"autohete: interrupted\n")
    os._exit(128 + number)


if _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler:
    _signal.signal(_signal.SIGINT, _end)

from autohete.cli.interrupt import catch_interrupts  # noqa: E402


def main() -> None:
    """Run the command line; interrupts are caught before the slow imports."""
    catch_interrupts("autohete", instead_of=_end)
    from autohete.cli.app import main as run

    run()


if __name__ == "__main__":
    main()
