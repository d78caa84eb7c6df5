"""`python -m rlloss`, the same as the command `rlloss`."""

import sys

from rlloss.cli import main

if __name__ == "__main__":
    sys.exit(main())
