"""The `plait` command, and `python -m plait` where its script is not on the path."""

import signal
from typing import Any


def main() -> Any:
    """Run the command. Ctrl-C while it is still being loaded ends it at once, and not with a traceback of imports."""
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.default_int_handler:  # and not ignored, as `nohup` and shells do for what runs behind
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from plait.cli import main as run

    signal.signal(signal.SIGINT, handler)
    return run()


if __name__ == "__main__":
    main()
