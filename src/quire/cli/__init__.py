"""The command line: `quire warmup` fills the cache, `quire cache` manages it, `quire doctor` finds faults.

Exit status, of every command:

    0    success
    1    something failed or is wrong: a compile, an entry, this machine
    2    refused before anything was done: a wrong command line, or a variant that no kernel supports
    130  stopped by Ctrl-C; variants that were already built are kept
    141  the reader of the output closed the pipe

Nothing here imports torch.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import quire
from quire.cli import cache, catalogue, completion, warmup
from quire.cli.parser import USAGE, Parser
from quire.errors import QuireError, UnsupportedError, ValidationError

__all__ = ["INTERRUPTED", "main", "new_parser", "run"]

INTERRUPTED, CLOSED_PIPE = 130, 141


def new_parser() -> Parser:
    """The parser of all commands."""
    summary = (__doc__ or "").partition("\n")[0]
    parser = Parser(prog="quire", description=summary, epilog="Exit status: 0 done, 1 failed, 2 refused, 130 stopped.")
    parser.add_argument("--version", action="version", version=f"quire {quire.__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")
    for part in (warmup, cache, catalogue, completion):
        part.add_commands(commands)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status, or raises SystemExit if arguments are wrong."""
    try:
        options = new_parser().parse_args(arguments)
        status = int(options.run(options))
        sys.stdout.flush()
        return status
    except QuireError as error:
        print(f"quire: {error}", file=sys.stderr)
        return USAGE if isinstance(error, (ValidationError, UnsupportedError)) else 1
    except KeyboardInterrupt:
        print("quire: stopped", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # discards buffered output
        return CLOSED_PIPE


def run() -> None:
    """The program `quire`. After Ctrl-C it ends at once, without joining threads that wait for other builders."""
    status = main()
    if status == INTERRUPTED:
        sys.stdout.flush()
        os._exit(status)
    sys.exit(status)
