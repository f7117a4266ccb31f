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

Nothing here imports torch. Behind the program are the types of arguments, the tables and the JSON of all commands.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from typing import Any, NoReturn, TypeVar

import quire
from quire.errors import QuireError, UnsupportedError, ValidationError
from quire.jit import config
from quire.jit.machine import CUDA_TARGETS
from quire.jit.stores import prebuilt_stores, user_store
from quire.kernels import BACKENDS
from quire.kernels.features import DTYPES, KV_DTYPES, MASK_FEATURES, DType, dtype_of, kv_dtype_of, read_mask

__all__ = ["INTERRUPTED", "main", "new_parser", "run"]

INTERRUPTED, CLOSED_PIPE = 130, 141


def new_parser() -> Parser:
    """The parser of all commands."""
    from quire.cli import bench, cache, catalogue, provenance  # which import this module

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
    from quire.cli.aot import PRESETS

    listed: dict[str, Callable[[], list[str]]] = {
        "slug": _slugs, "slugs": _slugs, "backends": lambda: [*BACKENDS],
        "preset": lambda: list(PRESETS), "dtypes": lambda: [d.slug for d in DTYPES],
        "kv_dtypes": lambda: [d.slug for d in KV_DTYPES],
    }  # fmt: skip
    return listed[action.dest]() if action.dest in listed else []


def _slugs() -> list[str]:
    stores = (*prebuilt_stores(), user_store())
    return sorted({path.parent.name for store in stores for path in store.paths()})


# --- types of arguments, tables, JSON --------------------------------------------------------------------------------


_T = TypeVar("_T")

#: Exit status of a wrong command line, or one that asks for a variant that no kernel supports: nothing was done.
USAGE = 2


def meant(word: str, known: Iterable[str]) -> str:
    """ "; did you mean 'causal'?" if `word` is close to one of `known`, else nothing."""
    close = get_close_matches(word.lower(), list(known), n=1, cutoff=0.6)
    return f"; did you mean {close[0]!r}?" if close else ""


class Parser(argparse.ArgumentParser):
    """Reports an error in one line with a suggestion, without the usage before it."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"allow_abbrev": False, **options})

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Refuses unknown arguments here, because this parser knows the options of its command."""
        namespace, left = super().parse_known_args(args, namespace)
        for word in left:
            name = word.partition("=")[0]
            known = [option for option in self._option_string_actions if option.startswith("--")]
            kind = "option" if word.startswith("-") else "argument"
            self.error(f"there is no {kind} {name!r}{meant(name, known) if kind == 'option' else ''}")
        return namespace, left

    def error(self, message: str) -> NoReturn:
        """Ends the program with status 2."""
        choice = re.search(r"invalid choice: '?(.*?)'? \(choose from (.*)\)", message)
        if choice is not None:
            word, known = choice.group(1), re.findall(r"(?<![\w-])[a-z][\w-]*", choice.group(2))
            message = f"expected one of {', '.join(known)}, got {word!r}{meant(word, known)}"
        self.exit(USAGE, f"{self.prog}: {message}\n{self.prog} --help says what it takes.\n")


def checked(read: Callable[[str], _T]) -> Callable[[str], _T]:
    """`read`, with errors of which argparse prints the text unchanged."""

    def value(text: str) -> _T:
        try:
            return read(text)
        except QuireError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return value


def split(text: str) -> tuple[str, ...]:
    """ "a,b c" -> ("a", "b", "c")."""
    return tuple(word for word in text.replace(",", " ").split() if word)


def words(known: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    """A function that parses a list of words, each one of `known`."""

    def read(text: str) -> tuple[str, ...]:
        for word in split(text):
            if word not in known:
                raise argparse.ArgumentTypeError(
                    f"expected some of {', '.join(known)}, got {word!r}{meant(word, known)}"
                )
        return split(text)

    return read


def dtypes(text: str, of: Callable[[str, str], DType] = dtype_of) -> tuple[str, ...]:
    """Number types by their names in slugs; torch's and engines' names are accepted, too."""

    def slug(word: str) -> str:
        try:
            return of(word, "dtype").slug
        except QuireError as error:
            known = DTYPES if of is dtype_of else KV_DTYPES
            names = [d.slug for d in known]
            close = meant(word, [*names, *(d.torch_name for d in known)])
            text = f"expected some of {', '.join(names)} (fp8 is e4m3), got {word!r}{close}"
            raise argparse.ArgumentTypeError(text) from error

    return tuple(map(slug, split(text)))


def kv_dtypes(text: str) -> tuple[str, ...]:
    """Number types of keys and values."""
    return dtypes(text, kv_dtype_of)


def masks(text: str) -> tuple[str, ...]:
    """Masks of the command line, such as "causal+window"."""
    known = [word for row in MASK_FEATURES for word in row.words if word]
    for word in split(text):
        try:
            read_mask(word)
        except QuireError as error:
            strange = next((part for part in word.lower().split("+") if part not in known), word)
            raise argparse.ArgumentTypeError(
                str(error).partition(": ")[2].removesuffix(".") + meant(strange, known)
            ) from error
    return split(text)


def head_dims(text: str) -> tuple[tuple[int, int], ...]:
    """ "128,192x128" -> ((128, 128), (192, 128))."""
    pairs = [word.lower().split("x") for word in split(text)]
    if not pairs or any(len(pair) > 2 or not all(p.isascii() and p.isdigit() for p in pair) for pair in pairs):
        raise argparse.ArgumentTypeError(f"expected head dims such as 128 or 192x128, got {text!r}")
    return tuple((int(pair[0]), int(pair[-1])) for pair in pairs)


def page_sizes(text: str) -> tuple[int, ...]:
    """ "16,ragged" -> (16, 0)."""
    if not split(text) or not all(w == "ragged" or (w.isascii() and w.isdigit() and int(w)) for w in split(text)):
        raise argparse.ArgumentTypeError(f"expected page sizes such as 16, or ragged, got {text!r}")
    return tuple(0 if word == "ragged" else int(word) for word in split(text))


def targets(text: str) -> tuple[str, ...]:
    """GPU architectures in any spelling that PyTorch or nvcc knows -> targets."""
    try:
        found = config.parse_arch_list(text)
    except QuireError as error:
        families = ("ampere", "ada", "hopper", "blackwell")
        reason = str(error).partition(": ")[2]
        raise argparse.ArgumentTypeError(f"{reason}{meant(text, families)}") from error
    for target in found:
        if target not in CUDA_TARGETS:
            raise argparse.ArgumentTypeError(
                f"{target} is no target of nvcc; expected some of {', '.join(CUDA_TARGETS)}"
            )
    return found


def count(text: str) -> int:
    """A whole number of at least 1."""
    if not (text.isascii() and text.isdigit() and int(text)):
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")
    return int(text)


_SIZES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}
_TIMES = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}


def size(text: str) -> int:
    """ "200MB", "2GiB" -> bytes."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmg]?i?)b?", text.strip().lower())
    if match is None or match.group(2) not in _SIZES:
        raise argparse.ArgumentTypeError(f"expected a size such as 500MB or 2GiB, got {text!r}")
    return int(float(match.group(1)) * _SIZES[match.group(2)])


def age(text: str) -> float:
    """ "30d", "12h" -> seconds."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smhdw])", text.strip().lower())
    if match is None:
        raise argparse.ArgumentTypeError(f"expected a time such as 30d or 12h, got {text!r}")
    return float(match.group(1)) * _TIMES[match.group(2)]


def add_command(
    commands: Any, name: str, run: Callable[[argparse.Namespace], int], text: str, description: str = ""
) -> argparse.ArgumentParser:
    """A command whose answer tell() prints; `text` is its line of help."""
    command: argparse.ArgumentParser = commands.add_parser(
        name, help=text, description=description or f"{text.capitalize()}."
    )
    command.set_defaults(run=run)
    command.add_argument("--json", action="store_true", help="print one JSON object")
    return command


def tell(options: argparse.Namespace, show: str | Callable[[], None], **answer: Any) -> int:
    """Print `answer` as JSON if the command line asks for it, else the text that `show` is or prints; returns the exit
    status of success.
    """
    if options.json:
        print(json.dumps(answer, indent=1))
    elif isinstance(show, str):
        print(show)
    else:
        show()
    return 0


def print_table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Columns under `head`, padded with blanks; the first column suits `grep` and `cut`."""
    lines = [list(head), *(["" if cell is None else str(cell) for cell in row] for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def spell_bytes(count: float) -> str:
    """1536000 -> "1.5 MB"."""
    for unit in ("B", "KB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" or count >= 100 else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"


def spell_seconds(seconds: float) -> str:
    """90061 -> "1 d"."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"
