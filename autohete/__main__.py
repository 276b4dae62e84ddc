"""The program ``autohete``, also as ``python -m autohete``."""

from autohete.cli.interrupt import catch_interrupts


def main() -> None:
    """Entry point; catches interrupts before it imports what takes time."""
    catch_interrupts("autohete")
    from autohete.cli.app import main as run

    run()


if __name__ == "__main__":
    main()
