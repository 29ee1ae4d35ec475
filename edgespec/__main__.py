"""`python -m edgespec`, and where the command `edgespec` begins."""

import sys

try:
    from edgespec.cli import main
except KeyboardInterrupt:  # most of the time that a short command takes
    sys.exit(130)

if __name__ == "__main__":
    main()
