"""What an entry is made from, its request, and its description, the manifest.

All parts are known without running anything: the format of entries and launches, the template and values of the unit,
the content of every header that it includes, the target. The toolchain and its flags are the other half
(`toolchain.py`), because several toolchains can serve the same request.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, get_origin, get_type_hints

from quire.errors import CacheError, ValidationError
from quire.jit import cpu, unit
from quire.jit.unit import Spec

#: Version of the entry's format and of the calls of artifacts. Raise it when either changes, and when flags change what
#: the code computes, because hosts without a compiler accept entries with any flags.
SCHEMA = "quire-entry-4"

_SLUG = re.compile(r"[a-z0-9][a-z0-9._-]{0,199}")


@dataclass(frozen=True)
class Request:
    """One variant, as it would be built from the templates as they are now."""

    spec: Spec
    templates: Path
    headers: tuple[unit.Header, ...]
    parts: Mapping[str, str]  #: label -> the part, or its sha256
    digest: str  #: of `parts`: the first half of an entry's name

    @property
    def source(self) -> str:
        """The text of the translation unit, rendered on each access."""
        return unit.render_source(self.templates, self.spec)


def _digest_of(parts: Mapping[str, str]) -> str:
    """sha256 over labelled parts, independent of their order."""
    return hashlib.sha256(json.dumps(dict(parts), sort_keys=True).encode()).hexdigest()


def request_digest(parts: Mapping[str, str]) -> str:
    """The first half of an entry's name."""
    return _digest_of(parts)[:40]


def toolchain_digest(parts: Mapping[str, str]) -> str:
    """The second half of an entry's name."""
    return _digest_of(parts)[:12]


def entry_name(request: Mapping[str, str], toolchain: Mapping[str, str]) -> str:
    """The directory name of the entry of a request and a toolchain."""
    return f"{request_digest(request)}-{toolchain_digest(toolchain)}"


def is_slug(text: str) -> bool:
    """Whether `text` can be the name of a variant and its directory."""
    return _SLUG.fullmatch(text) is not None


def make_request(spec: Spec, templates: Path) -> Request:
    """Hash the spec and the headers under `templates` that it includes. Starts no process."""
    if not is_slug(spec.slug):
        raise ValidationError(f"slug: expected [a-z0-9._-]+ of at most 200 characters, got {spec.slug!r}")
    found = unit.closure(templates / "include", spec.header, device=spec.device)
    parts = {
        "schema": SCHEMA,
        "target": f"native {cpu.fingerprint()}" if spec.target == "native" else spec.target,
        "source": unit.source_digest(templates, spec),
        **{f"header {header.name}": header.digest for header in found},
    }
    return Request(spec, templates, found, parts, request_digest(parts))


MANIFEST = "manifest.json"
LARGEST_MANIFEST = 1 << 20  #: bytes; a manifest usually has a few thousand

_FILE = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}")
_NO_DIGEST = "0" * 64  #: takes the digest's place while the digest is computed


@dataclass(frozen=True)
class Manifest:
    """What an entry contains, which toolchain made it, and how the compile went."""

    schema: str
    slug: str
    target: str
    fields: dict[str, str]  #: the variant as the user spells it, for explaining a miss
    request: dict[str, str]  #: the labelled parts of the first half of the entry's name
    toolchain: dict[str, str]  #: the labelled parts of the second half
    entry: str  #: exported symbol
    warmup: str  #: `quire warmup` arguments that build exactly this variant
    artifact: str  #: file name
    size: int  #: bytes
    sha256: str
    exports: dict[str, int]  #: constants of the kernel: threads, shared memory, ...
    registers: int | None
    spills: int | None  #: bytes of spill stores and loads
    stack: int | None
    smem: int | None
    warnings: list[str]
    seconds: float  #: of the compile
    peak_bytes: int | None  #: resident set of the compiler, where known
    created: float  #: seconds since the epoch

    @classmethod
    def read(cls, data: str | bytes) -> Manifest:
        """Parse JSON; CacheError if it is not a manifest of this schema, or was changed."""
        try:
            text = data if isinstance(data, str) else data.decode()
            found = json.loads(text)
            if found["schema"] != SCHEMA:
                raise CacheError(f"schema is {found['schema']!r}, expected {SCHEMA!r}")
            if found["digest"] != _digest(text.replace(found["digest"], _NO_DIGEST)):
                raise CacheError("manifest has another digest than it says")
            for name, kind in _field_types().items():
                if not isinstance(found[name], kind):
                    raise TypeError(f"{name} is {str(found[name])[:80]!r}")
            manifest = cls(**{name: found[name] for name in _field_types()})
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise CacheError(f"manifest is unreadable ({type(error).__name__}: {error})") from error
        if _FILE.fullmatch(manifest.artifact) is None or not is_slug(manifest.slug):
            raise CacheError(
                f"manifest names no plain file or slug: {manifest.artifact[:80]!r}, {manifest.slug[:80]!r}"
            )
        return manifest

    def describes(self, request: Request) -> bool:
        """Whether the entry is of `request`, and exports the symbol of its spec."""
        spec = request.spec
        return (self.request, self.target, self.entry) == (dict(request.parts), spec.target, spec.entry)

    def write(self) -> str:
        """The manifest as JSON, with a digest of all of it."""
        text = json.dumps({**asdict(self), "digest": _NO_DIGEST}, indent=1, sort_keys=True) + "\n"
        return text.replace(_NO_DIGEST, _digest(text))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


@cache
def _field_types() -> dict[str, Any]:
    """The JSON type of each field of a manifest."""
    return {
        name: get_origin(hint) if get_origin(hint) in (dict, list) else hint
        for name, hint in get_type_hints(Manifest).items()
    }
