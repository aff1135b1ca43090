"""The command line: `python -m guarded_nvfuser COMMAND`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from guarded_nvfuser import __version__, demo, explain

# Each module adds its own subcommand: `add_parser(commands)` sets the default `run`, a function of the parsed options
# that returns the exit status.
_COMMANDS = (demo, explain)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand.

    Args:
        argv: the arguments after the program's name; None: those of the process.

    Returns:
        The exit status of the subcommand.

    Raises:
        SystemExit: with status 2 for arguments that are not understood, 0 after `--help` or `--version`.
    """
    parser = argparse.ArgumentParser(
        prog="python -m guarded_nvfuser", description=sys.modules["guarded_nvfuser"].__doc__
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--version", action="version", version=f"guarded_nvfuser {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for module in _COMMANDS:
        module.add_parser(commands)
    options = parser.parse_args(argv)
    return options.run(options)


if __name__ == "__main__":
    sys.exit(main())
