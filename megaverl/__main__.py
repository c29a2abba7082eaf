"""`python -m megaverl`: the command `megaverl`."""

import sys

from megaverl.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
