"""`python -m lamina.mesh doctor`."""

import sys

from lamina.mesh.launching.doctor import main

if __name__ == "__main__":
    sys.exit(main())
