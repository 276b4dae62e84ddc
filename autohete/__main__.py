"""``python -m autohete``."""

from autohete.cli import main

main()
