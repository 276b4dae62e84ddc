"""The program ``autohete``, also as ``python -m autohete``."""

from autohete.cli.interrupt import catch_interrupts


def main() -> None:
    """Run the command line; interrupts are caught before the slow imports."""
    catch_interrupts("autohete")
    from autohete.cli.app import main as run

    run()


if __name__ == "__main__":
    main()
