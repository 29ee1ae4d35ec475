"""`python -m edgespec`."""

import sys

try:
    from edgespec.cli import main
except KeyboardInterrupt:
    sys.exit(130)
main()
