"""The only use of Jinja: it renders the unit's source and the ninja file.

The templates stay readable as C++ and as ninja. Jinja's default delimiters clash with C++ (`}}`) and with raw PTX
(`"{%3, %4}"`); `@{ name }` and lines that begin with `//%` occur in neither language. Jinja is imported on first use,
because the import takes longer than the rest of a hit.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from quire.jit.spec import Spec

if TYPE_CHECKING:
    import jinja2


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
