"""The operator's command line and the composition root.

It may import everything in `assigner` and `schema`; only `main.py` imports `bots`. Read first: main.py and
operator.py.
"""

import sys


def start() -> None:
    """The console script: also Ctrl-C while its modules are imported ends it without a word, with 130."""
    try:
        from assigner.cli.main import main

        main()
    except KeyboardInterrupt:
        sys.exit(130)
