"""The unit that a compiler takes: what names it (Spec), the headers that it includes, its text, the request for it.

The parser of includes is strict on purpose. A header may include `"quire/..."` and, in host units, a few system headers
that come with the compiler. Any other include could change an artifact without changing its key, so it is an error.
Sections under `#ifdef __CUDACC__` and its negations are followed only in the kind of unit that compiles them. Other
conditions are not evaluated, so the closure is never too small. A device unit reaches `cuda_runtime.h` as well, which
nvcc includes of its own accord; the toolkit's headers that it includes in turn are part of the compiler.

The templates stay readable as C++ and as ninja. Jinja's default delimiters clash with C++ (`}}`) and with raw PTX
(`"{%3, %4}"`); `@{ name }` and lines that begin with `//%` occur in neither language. Jinja is imported on first use,
because the import takes longer than the rest of a hit.

All parts of a request are known without running anything: the format of entries and launches, the template and values
of the unit, the content of every header that it includes, the target. The toolchain and its flags are the other half
of an entry's name (toolchain.py), because several toolchains can serve the same request.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import re
import struct
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.errors import CacheError, CompileError, ValidationError
from quire.jit import machine

if TYPE_CHECKING:
    import jinja2


@dataclass(frozen=True)
class Struct:
    """The memory layout of a parameter struct, as its ctypes mirror sees it.

    The rendered unit asserts each field, so the build fails if the mirror differs from the C++ header.
    """

    name: str  #: the C++ type, e.g. "AttentionParams"
    size: int  #: sizeof, in bytes
    offsets: tuple[tuple[str, int], ...]  #: (field, offset in bytes), in order


@dataclass(frozen=True)
class Spec:
    """One variant: one translation unit, one entry point, one artifact.

    The unit includes `header`, defines `struct Variant` from `types`, `constants` and `code`, checks `params`,
    `operands` and `asserts`, and instantiates `kernel<Variant>` behind the exported symbol `entry`. The slug, `warmup`,
    `preset` and `fields` are for readers: the unit does not contain them, so they are not part of the key.
    """

    slug: str  #: [a-z0-9._-]+, unique per variant and target; up to the first dot the kernel: "attention_fa2.sm90a...."
    #: "sm80", "sm90a", ... -> a cubin; "x86-64-v3", "x86-64-v4", "aarch64", "native", ... -> a host library
    target: str
    header: str  #: the kernel's header, e.g. "quire/kernels/attention_fa2.cuh"
    kernel: str  #: the class template that the header defines, e.g. "AttentionFa2"
    entry: str  #: exported C symbol, e.g. "quire_attention"
    params: Struct
    types: tuple[tuple[str, str], ...] = ()  #: type aliases in Variant: (("Q", "bf16_t"), ...)
    constants: tuple[tuple[str, int], ...] = ()  #: static constexpr ints in Variant: (("kHeadDimQk", 128), ...)
    asserts: tuple[tuple[str, int], ...] = ()  #: constexpr members of kernel<Variant> that Python relies on
    code: str = ""  #: further members of Variant, in C++
    operands: Struct | None = None  #: Variant::Operands, which follows the parameters; None: `code` has none
    exports: tuple[str, ...] = ()  #: constexpr ints of kernel<Variant> that the builder reads back from the artifact
    warmup: str = ""  #: the `quire warmup` arguments that build exactly this variant, for error messages
    preset: tuple[str, ...] = ()  #: words behind config.json with which a model's preset has it, for error messages
    fields: tuple[tuple[str, str], ...] = ()  #: (name, value) as the user writes them: (("mask", "custom"), ...)

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """Computed once per spec, because each plan() looks its module up by this hash."""
        return hash(tuple(getattr(self, field.name) for field in dataclasses.fields(self)))

    @property
    def device(self) -> bool:
        """Whether the variant is device code (a cubin)."""
        return self.target.startswith("sm")


def read_exports(image: bytes, spec: Spec) -> dict[str, int]:
    """The values of `spec.exports`, which the unit holds as an array of ints in this order.

    CompileError if `image` is not an ELF file that defines the entry point and these values.
    """
    from elftools.elf.elffile import ELFFile  # needed after a compile only

    try:
        return _read_elf(ELFFile(io.BytesIO(image)), spec)
    except CompileError:
        raise
    except Exception as error:  # whatever the parser stumbles over
        raise _unusable(spec, f"it is no whole ELF file ({type(error).__name__}: {error})") from error


def _read_elf(elf: Any, spec: Spec) -> dict[str, int]:
    _symbol(elf, spec, spec.entry)
    if not spec.exports:
        return {}
    symbol = _symbol(elf, spec, f"{spec.entry}_exports")
    section = elf.get_section(symbol["st_shndx"])
    begin = symbol["st_value"] - section["sh_addr"]
    values = struct.unpack_from(f"<{len(spec.exports)}i", section.data(), begin)
    return dict(zip(spec.exports, values, strict=True))


def _symbol(elf: Any, spec: Spec, name: str) -> Any:
    """The symbol `name`, which the file defines."""
    from elftools.elf.sections import SymbolTableSection

    for table in (section for section in elf.iter_sections() if isinstance(section, SymbolTableSection)):
        for symbol in table.get_symbol_by_name(name) or ():
            if symbol["st_shndx"] != "SHN_UNDEF":
                return symbol
    raise _unusable(spec, f"expected it to export {name}, which it does not")


def _unusable(spec: Spec, reason: str) -> CompileError:
    return CompileError(
        f"{spec.slug}: the compiler reported success, but what it made cannot be used: {reason}. "
        "Try another compiler (QUIRE_NVCC, QUIRE_CXX)"
    )


# --- templates and headers -------------------------------------------------------------------------------------------


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


def _read_text(templates: Path, name: str) -> str:
    return (templates / name).read_text(encoding="utf-8")


def render_source(templates: Path, spec: Spec) -> str:
    """The C++ text of `spec`'s translation unit: a pure function of `variant.jinja` and the spec."""
    return _template(_read_text(templates, "variant.jinja")).render(spec=spec)


def source_digest(templates: Path, spec: Spec) -> str:
    """sha256 of everything that determines the text of render_source(), without importing Jinja."""
    unit = {name: value for name, value in asdict(spec).items() if name not in ("slug", "warmup", "preset", "fields")}
    text = json.dumps(unit, sort_keys=True) + "\n" + _read_text(templates, "variant.jinja")
    return hashlib.sha256(text.encode()).hexdigest()


def render_ninja(templates: Path, *, slug: str, command: str, source: str, artifact: str) -> str:
    """The ninja file that builds one artifact; `command` is a shell command line."""
    text = _template(_read_text(templates, "build.ninja.jinja"))
    return text.render(slug=slug, command=command.replace("$", "$$"), source=source, artifact=artifact)


# --- the request for it ----------------------------------------------------------------------------------------------

#: Version of the entry's format and of the calls of artifacts. Raise it when either changes, and when flags change what
#: the code computes, because hosts without a compiler accept entries with any flags.
SCHEMA = "quire-entry-4"

_SLUG = re.compile(r"[a-z0-9][a-z0-9._-]{0,199}")


@dataclass(frozen=True)
class Request:
    """One variant, as it would be built from the templates as they are now."""

    spec: Spec
    templates: Path
    headers: tuple[Header, ...]
    parts: Mapping[str, str]  #: label -> the part, or its sha256
    digest: str  #: of `parts`: the first half of an entry's name

    @property
    def source(self) -> str:
        """The text of the translation unit, rendered on each access."""
        return render_source(self.templates, self.spec)


def _digest_of(parts: Mapping[str, str]) -> str:
    """sha256 over labelled parts, independent of their order."""
    return hashlib.sha256(json.dumps(dict(parts), sort_keys=True).encode()).hexdigest()


def request_digest(parts: Mapping[str, str]) -> str:
    """The first half of an entry's name."""
    return _digest_of(parts)[:40]


def toolchain_digest(parts: Mapping[str, str]) -> str:
    """The second half of an entry's name."""
    return _digest_of(parts)[:12]


def is_slug(text: str) -> bool:
    """Whether `text` can be the name of a variant and its directory."""
    return _SLUG.fullmatch(text) is not None


def make_request(spec: Spec, templates: Path) -> Request:
    """Hash the spec and the headers under `templates` that it includes. Starts no process."""
    if not is_slug(spec.slug):
        raise ValidationError(f"slug: expected [a-z0-9._-]+ of at most 200 characters, got {spec.slug!r}")
    found = closure(templates / "include", spec.header, device=spec.device)
    parts = {
        "schema": SCHEMA,
        "target": f"native {machine.fingerprint()}" if spec.target == "native" else spec.target,
        "source": source_digest(templates, spec),
        **{f"header {header.name}": header.digest for header in found},
    }
    return Request(spec, templates, found, parts, request_digest(parts))
