"""The command line: `quire warmup` fills the cache, `quire cache` manages it, `quire doctor` finds faults.

Exit status, of every command:

    0    success
    1    something failed or is wrong: a compile, an entry, this machine
    2    refused before anything was done: a wrong command line, or a variant that no kernel supports
    130  stopped by Ctrl-C; variants that were already built are kept
    141  the reader of the output closed the pipe

`quire completion bash|zsh|fish` prints what a shell needs to complete command lines of quire. The shell asks
`quire __complete WORD...` for completions of the last word, so that it always knows the commands, options and variants
of the installed Quire.

Nothing here imports torch.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import quire
from quire.cli import bench, cache, catalogue, provenance
from quire.cli.aot import PRESETS
from quire.cli.parser import USAGE, Parser
from quire.errors import QuireError, UnsupportedError, ValidationError
from quire.jit.stores import prebuilt_stores, user_store
from quire.kernels import KERNELS
from quire.kernels.features import DTYPES, KV_DTYPES

__all__ = ["INTERRUPTED", "main", "new_parser", "run"]

INTERRUPTED, CLOSED_PIPE = 130, 141


def new_parser() -> Parser:
    """The parser of all commands."""
    summary = (__doc__ or "").partition("\n")[0]
    parser = Parser(prog="quire", description=summary, epilog="Exit status: 0 done, 1 failed, 2 refused, 130 stopped.")
    parser.add_argument("--version", action="version", version=f"quire {quire.__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")
    cache.add_commands(commands)
    catalogue.add_commands(commands)
    bench.add_commands(commands)
    provenance.add_commands(commands)
    _add_completion(commands)
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


# --- completion ------------------------------------------------------------------------------------------------------


_SCRIPTS = {
    "bash": """\
_quire() {
  local IFS=$'\\n'
  COMPREPLY=($(quire __complete "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null))
}
complete -o default -F _quire quire
""",
    "zsh": """\
#compdef quire
_quire() {
  local -a found
  found=("${(@f)$(quire __complete "${(@)words[2,CURRENT]}" 2>/dev/null)}")
  [[ -n $found ]] && compadd -- $found || _files
}
compdef _quire quire
""",
    "fish": """\
complete -c quire -a '(quire __complete (commandline -opc)[2..] (commandline -ct) 2>/dev/null)'
""",
}


def _add_completion(commands: Any) -> None:
    """Add `completion`, and `__complete`, which --help does not list."""
    shell = commands.add_parser(
        "completion",
        help="print the completion script of a shell",
        description='Print a completion script: eval "$(quire completion bash)"; fish: quire completion fish | source.',
    )
    shell.add_argument("shell", choices=sorted(_SCRIPTS))
    shell.set_defaults(run=_print_script)
    hidden = commands.add_parser("__complete", prefix_chars="\0", add_help=False)
    hidden.add_argument("words", nargs="*")
    hidden.set_defaults(run=_complete)


def _print_script(options: argparse.Namespace) -> int:
    print(_SCRIPTS[options.shell], end="")
    return 0


def _complete(options: argparse.Namespace) -> int:
    *before, last = options.words or [""]
    for candidate in candidates(new_parser(), before):
        if candidate.startswith(last):
            print(candidate)
    return 0


def candidates(parser: argparse.ArgumentParser, before: list[str]) -> list[str]:
    """What may follow the words `before`."""
    previous = ""
    for word in before:
        inner = _subcommands(parser).get(word)
        parser, previous = (inner, "") if inner is not None else (parser, word)
    option = parser._option_string_actions.get(previous)
    if option is not None and option.nargs != 0:
        return _values(option)
    positional = [value for action in parser._get_positional_actions() for value in _values(action)]
    return [*positional, *(name for name in parser._option_string_actions if name.startswith("--"))]


def _subcommands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    found = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    return next(({n: p for n, p in a.choices.items() if not n.startswith("_")} for a in found), {})


def _values(action: argparse.Action) -> list[str]:
    """The values that an argument takes, if they can be listed."""
    if action.choices is not None:
        return [str(choice) for choice in action.choices if not str(choice).startswith("_")]
    listed: dict[str, Callable[[], list[str]]] = {
        "slug": _slugs, "slugs": _slugs, "backends": lambda: [kernel.backend for kernel in KERNELS],
        "preset": lambda: list(PRESETS), "dtypes": lambda: [d.slug for d in DTYPES],
        "kv_dtypes": lambda: [d.slug for d in KV_DTYPES],
    }  # fmt: skip
    return listed[action.dest]() if action.dest in listed else []


def _slugs() -> list[str]:
    stores = (*prebuilt_stores(), user_store())
    return sorted({path.parent.name for store in stores for path in store.paths()})
