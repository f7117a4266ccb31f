"""From a spec to everything that decides its artifact, each part under its own label.

The digest of a request covers the parts that this machine can know without running anything: the format of entries and
launches, what the source is rendered from, the content of every header it reaches, the flags, the target. Who the
compiler is forms the second half of an entry's name (`Request.entry_name`), because a host without compilers must still
find entries.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from quire.errors import ValidationError
from quire.jit import headers, render
from quire.jit.spec import Spec
from quire.jit.toolchain import Memory, Toolchain, for_target

__all__ = ["SCHEMA", "Request", "compiler_digest", "make_request", "parts_digest"]

#: Version of the entry's format and of how artifacts are called. Raise it when either changes.
SCHEMA = "quire-entry-2"

_SLUG = re.compile(r"[a-z0-9][a-z0-9._-]{0,199}")


@dataclass(frozen=True)
class Request:
    """One variant, as it would be built here and now."""

    spec: Spec
    toolchain: Toolchain
    templates: Path
    headers: tuple[headers.Header, ...]
    flags: tuple[str, ...]
    parts: Mapping[str, str]  #: label -> the part itself or its sha256
    digest: str  #: over `parts`

    @property
    def source(self) -> str:
        """The text of the translation unit, rendered now."""
        return render.render_source(self.templates, self.spec)

    def entry_name(self, compiler: str) -> str:
        """The directory name of the entry that the compiler of identity `compiler` makes of this request."""
        return f"{self.digest[:40]}-{compiler_digest(compiler)}"


def compiler_digest(identity: str) -> str:
    """The second half of an entry's name."""
    return hashlib.sha256(identity.encode()).hexdigest()[:12]


def parts_digest(parts: Mapping[str, str]) -> str:
    """sha256 over labelled parts, independent of their order."""
    return hashlib.sha256(json.dumps(dict(parts), sort_keys=True).encode()).hexdigest()


def make_request(spec: Spec, templates: Path, memory: Memory, *, ask: bool) -> Request:
    """Hash. Starts a process only for the target "native", and only with `ask`."""
    if _SLUG.fullmatch(spec.slug) is None:
        raise ValidationError(f"slug: expected [a-z0-9._-]+ of at most 200 characters, got {spec.slug!r}")
    toolchain = for_target(spec.target)
    found = headers.closure(templates / "include", spec.header, device=spec.device)
    flags = toolchain.flags(spec.target, memory, ask=ask)
    parts = {
        "schema": SCHEMA,
        "target": spec.target,
        "flags": " ".join(flags),
        "source": render.source_digest(templates, spec),
        **{f"header {header.name}": header.digest for header in found},
    }
    return Request(spec, toolchain, templates, found, flags, parts, parts_digest(parts))
