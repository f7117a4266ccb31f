"""The request half of an entry's name: everything that decides what an artifact computes, each part under its label.

All parts are known without running anything: the format of entries and launches, the template and values of the unit,
the content of every header that it includes, the target. The toolchain and its flags are the other half
(`toolchain.py`), because several toolchains can serve the same request.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from quire.errors import ValidationError
from quire.jit import cpu, headers, render
from quire.jit.spec import Spec

#: Version of the entry's format and of the calls of artifacts. Raise it when either changes, and when flags change what
#: the code computes, because hosts without a compiler accept entries with any flags.
SCHEMA = "quire-entry-4"

_SLUG = re.compile(r"[a-z0-9][a-z0-9._-]{0,199}")


@dataclass(frozen=True)
class Request:
    """One variant, as it would be built from the templates as they are now."""

    spec: Spec
    templates: Path
    headers: tuple[headers.Header, ...]
    parts: Mapping[str, str]  #: label -> the part, or its sha256
    digest: str  #: of `parts`: the first half of an entry's name

    @property
    def source(self) -> str:
        """The text of the translation unit, rendered on each access."""
        return render.render_source(self.templates, self.spec)


def _digest(parts: Mapping[str, str]) -> str:
    """sha256 over labelled parts, independent of their order."""
    return hashlib.sha256(json.dumps(dict(parts), sort_keys=True).encode()).hexdigest()


def request_digest(parts: Mapping[str, str]) -> str:
    """The first half of an entry's name."""
    return _digest(parts)[:40]


def toolchain_digest(parts: Mapping[str, str]) -> str:
    """The second half of an entry's name."""
    return _digest(parts)[:12]


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
    found = headers.closure(templates / "include", spec.header, device=spec.device)
    parts = {
        "schema": SCHEMA,
        "target": f"native {cpu.fingerprint()}" if spec.target == "native" else spec.target,
        "source": render.source_digest(templates, spec),
        **{f"header {header.name}": header.digest for header in found},
    }
    return Request(spec, templates, found, parts, request_digest(parts))
