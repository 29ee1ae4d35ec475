"""What asks for help, the same in every command. Knows nothing else."""

from __future__ import annotations

# On each command and not on the group alone: click keeps the help option of a command from its first use.
HELP = {"help_option_names": ["-h", "--help"]}
