"""`python -m caffepy` is the command `caffepy`."""

import os
import signal


def main() -> None:
    """Run the command line; Ctrl-C during imports ends the process silently."""
    signal.signal(signal.SIGINT, lambda number, frame: os._exit(130))
    from caffepy.cli.main import main as command

    command()


if __name__ == "__main__":
    main()
