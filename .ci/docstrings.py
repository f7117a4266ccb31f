"""Makes Markdown of Quire's docstrings for `make docs`: arguments become a list, examples become code."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from griffe import Extension, Object

_NAME = r"[a-z]\w*(?: \[[^\]]*\])?"  #: "q", "k [nnz_kv]"
_ARGUMENT = re.compile(rf"^({_NAME}(?:, {_NAME})*): (?=\S)")  #: "q, k [nnz_kv]: what they are"


def markdown(text: str) -> str:
    """The docstring `text` as Markdown."""
    return "\n".join(_lines(text.splitlines()))


def _lines(lines: list[str]) -> Iterator[str]:
    is_code = is_list = False
    for before, line in zip(["", *lines], lines, strict=False):
        if not is_code and line.startswith(">>>"):
            is_code = True
            yield from ("", "```pycon")
        if is_code and not line.strip():
            is_code = False
            yield "```"
        if is_code:
            yield line
            continue
        argument = None if before and before[-1] not in ".])" else _ARGUMENT.match(line)
        line = _escaped(line[argument.end() :] if argument else line)
        if argument:
            yield from ([] if is_list else [""])
            yield f"- `{argument.group(1)}`: {line}"
            is_list = True
        else:
            is_list = is_list and bool(line.strip())
            yield line
    if is_code:
        yield "```"


def _escaped(text: str) -> str:
    return text.replace("[", r"\[").replace("*", r"\*").replace("<", "&lt;").replace("`", "")


class Docstrings(Extension):
    """Called by griffe for each object that it has read."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Replace the docstring."""
        if obj.docstring is not None:
            obj.docstring.value = markdown(obj.docstring.value)
