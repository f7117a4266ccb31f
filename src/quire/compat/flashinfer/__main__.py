"""python -m quire.compat.flashinfer [-m MODULE | SCRIPT] [ARGUMENTS]: run a program with Quire as its FlashInfer."""

from __future__ import annotations

import runpy
import sys

from quire.compat.flashinfer import activate


def main() -> None:
    """Run the program that the command line names; its own arguments are left to it."""
    arguments = sys.argv[1:]
    if not arguments or arguments in (["-m"], ["-h"], ["--help"]):
        sys.exit(__doc__)
    activate()
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        runpy.run_path(arguments[0], run_name="__main__")


main()
