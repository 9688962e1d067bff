"""`python -m lamina.models.plan`; see `command`."""

import sys

from lamina.models.plan.command import main

if __name__ == "__main__":
    sys.exit(main())
