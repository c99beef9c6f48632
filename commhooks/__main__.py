"""``python -m commhooks`` is the ``commhooks`` command."""

import sys

from commhooks.cli import main

if __name__ == "__main__":
    sys.exit(main())
