"""Sources of a unit: where templates and headers lie, which headers it includes, and its rendered text.

The parser is strict on purpose. A header may include `"quire/..."` and, in host units, a few system headers that come
with the compiler. Any other include could change an artifact without changing its key, so it is an error. Sections
under `#ifdef __CUDACC__` and its negations are followed only in the kind of unit that compiles them. Other conditions
are not evaluated, so the closure is never too small. A device unit reaches `cuda_runtime.h` as well, which nvcc
includes of its own accord; the toolkit's headers that it includes in turn are part of the compiler.

The templates stay readable as C++ and as ninja. Jinja's default delimiters clash with C++ (`}}`) and with raw PTX
(`"{%3, %4}"`); `@{ name }` and lines that begin with `//%` occur in neither language. Jinja is imported on first use,
because the import takes longer than the rest of a hit.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from quire.errors import CacheError, CompileError
from quire.jit.spec import Spec

if TYPE_CHECKING:
    import jinja2


def root() -> Path:
    """The directory that holds `variant.jinja`, `build.ninja.jinja` and `include/quire/`."""
    here = Path(__file__).absolute()  # of a link itself: the Hugging Face Hub's cache links single files
    candidates = (here.parents[1] / "templates", here.parents[3] / "templates")
    for candidate in candidates:
        if (candidate / "variant.jinja").is_file():
            return candidate
    raise CacheError(
        f"the kernel templates are missing: looked in {' and '.join(map(str, candidates))}; reinstall quire"
    )


#: System headers that a host unit may include: the C library's and intrinsics, none of C++ (-nostdinc++).
SYSTEM_HEADERS = frozenset(
    (
        *("arm_neon.h", "arm_sve.h", "immintrin.h", "omp.h"),
        *("float.h", "limits.h", "math.h", "stddef.h", "stdint.h", "stdlib.h", "string.h"),
    )
)
#: The two that a device unit may include: the platform fixes them, and nvcc includes them in every unit anyway.
DEVICE_SYSTEM_HEADERS = frozenset({"stddef.h", "stdint.h"})

#: The header that nvcc includes in every unit. Ours comes before the toolkit's on the search path.
_BEFORE_DEVICE_UNITS = "cuda_runtime.h"

_TOKEN = re.compile(
    r'R"(?P<mark>[^()\\\s]{0,16})\(.*?\)(?P=mark)"'  # raw string
    r'|"(?:\\.|[^"\\\n])*"'
    r"|'(?:\\.|[^'\\\n])*'"
    r"|//[^\n]*"
    r"|/\*.*?\*/",
    re.DOTALL,
)
_DIRECTIVE = re.compile(
    r"^[ \t]*#[ \t]*(include|include_next|import|embed|if|ifdef|ifndef|elif|else|endif)\b[ \t]*(.*)$", re.M
)
_ONLY_DEVICE = re.compile(r"(?:__CUDACC__|defined\s*\(?\s*__CUDACC__\s*\)?)")
_ONLY_HOST = re.compile(r"!\s*defined\s*\(?\s*__CUDACC__\s*\)?")


@dataclass(frozen=True)
class Header:
    """One header of the closure."""

    name: str  #: as included: "quire/core/mask.h"
    text: bytes
    digest: str  #: sha256 of `text`


def _without_comments(text: str) -> str:
    def blank(match: re.Match[str]) -> str:
        token = match.group()
        if token.startswith("/"):
            return " "
        return '""' if token.startswith("R") else token

    return _TOKEN.sub(blank, text.replace("\\\r\n", "").replace("\\\n", ""))


def _kind_of_branch(word: str, condition: str) -> str:
    """Which units a branch belongs to: "device", "host" or "both"."""
    condition = condition.strip()
    if word == "ifdef" and condition == "__CUDACC__":
        return "device"
    if word == "ifndef" and condition == "__CUDACC__":
        return "host"
    if word == "if" and _ONLY_DEVICE.fullmatch(condition):
        return "device"
    if word == "if" and _ONLY_HOST.fullmatch(condition):
        return "host"
    return "both"


@lru_cache(maxsize=1024)
def _includes(text: str, device: bool) -> tuple[str, ...]:
    """The include operands of `text` as written, with quotes, that a unit of this kind may reach."""
    kind = "device" if device else "host"
    opposite = {"device": "host", "host": "device", "both": "both"}
    branches: list[str] = []
    found: list[str] = []
    for word, operand in _DIRECTIVE.findall(_without_comments(text)):
        if word in ("if", "ifdef", "ifndef"):
            branches.append(_kind_of_branch(word, operand))
        elif word == "elif" and branches:
            branches[-1] = "both"
        elif word == "else" and branches:
            branches[-1] = opposite[branches[-1]]
        elif word == "endif" and branches:
            branches.pop()
        elif word in ("include", "include_next", "import", "embed") and all(b in (kind, "both") for b in branches):
            found.append(operand.strip() if word == "include" else f"#{word} {operand.strip()}")
    return tuple(found)


def _own(operand: str, device: bool, origin: str) -> str | None:
    """The name of our own header that `operand` asks for, or None for a permitted system header."""
    own = re.fullmatch(r'"(quire/[A-Za-z0-9_./-]+)"', operand)
    if own is not None and ".." not in own.group(1):
        return own.group(1)
    system = re.fullmatch(r"<([^<>]+)>", operand)
    permitted = DEVICE_SYSTEM_HEADERS if device else SYSTEM_HEADERS
    if system is not None and system.group(1) in permitted:
        return None
    allowed = f", <{'>, <'.join(sorted(permitted))}>"
    kind = "device" if device else "host"
    raise CompileError(
        f"{origin}: include {operand} cannot be part of a variant's key: "
        f'a {kind} unit may include "quire/..."{allowed}'
    )


def _header(name: str, text: bytes) -> Header:
    return Header(name, text, hashlib.sha256(text).hexdigest())


def closure(root: Path, header: str, *, device: bool) -> tuple[Header, ...]:
    """`header` and every header under `root` that it includes, directly or not, sorted by name.

    Raises CompileError for a header that does not exist and for an include that a key cannot account for.
    """
    found: dict[str, Header] = {}
    if device and (before := root / _BEFORE_DEVICE_UNITS).is_file():
        found[before.name] = _header(before.name, before.read_bytes())
    pending = [(header, "the variant")]
    while pending:
        name, origin = pending.pop()
        if name in found:
            continue
        path = root / name
        if not path.is_file():
            raise CompileError(f'{origin}: missing header: "{name}" is not under {root}')
        text = path.read_bytes()
        found[name] = _header(name, text)
        for operand in _includes(text.decode(errors="replace"), device):
            own = _own(operand, device, name)
            if own is not None:
                pending.append((own, name))
    return tuple(found[name] for name in sorted(found))


@lru_cache(maxsize=64)
def _template(text: str) -> jinja2.Template:
    import jinja2

    environment = jinja2.Environment(
        variable_start_string="@{",
        variable_end_string="}",
        line_statement_prefix="//%",
        block_start_string="@<%",
        block_end_string="%>@",
        comment_start_string="@<#",
        comment_end_string="#>@",
        undefined=jinja2.StrictUndefined,
        autoescape=False,
        keep_trailing_newline=True,
    )
    return environment.from_string(text)


def _read(templates: Path, name: str) -> str:
    return (templates / name).read_text(encoding="utf-8")


def render_source(templates: Path, spec: Spec) -> str:
    """The C++ text of `spec`'s translation unit: a pure function of `variant.jinja` and the spec."""
    return _template(_read(templates, "variant.jinja")).render(spec=spec)


def source_digest(templates: Path, spec: Spec) -> str:
    """sha256 of everything that determines the text of render_source(), without importing Jinja."""
    unit = {name: value for name, value in asdict(spec).items() if name not in ("slug", "warmup", "fields")}
    text = json.dumps(unit, sort_keys=True) + "\n" + _read(templates, "variant.jinja")
    return hashlib.sha256(text.encode()).hexdigest()


def render_ninja(templates: Path, *, slug: str, command: str, source: str, artifact: str) -> str:
    """The ninja file that builds one artifact; `command` is a shell command line."""
    text = _template(_read(templates, "build.ninja.jinja"))
    return text.render(slug=slug, command=command.replace("$", "$$"), source=source, artifact=artifact)
