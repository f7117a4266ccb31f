"""Makes Markdown of Quire's docstrings for `make docs`: arguments become a list, examples become code."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from griffe import Extension, Object

_ARGUMENT = re.compile(r"^((?:\w+(?:\[[^\]]*\])?, )*\w+): (?=\S)")  #: "q, k: what they are"


def markdown(text: str) -> str:
    """The docstring `text` as Markdown."""
    return "\n".join(_lines(text.splitlines()))


def _lines(lines: list[str]) -> Iterator[str]:
    is_code = is_list = False
    for line in lines:
        if not is_code and line.startswith(">>>"):
            is_code = True
            yield from ("", "```pycon")
        if is_code and not line.strip():
            is_code = False
            yield "```"
        if is_code:
            yield line
            continue
        line = line.replace("[", r"\[").replace("*", r"\*").replace("<", "&lt;").replace("`", "")
        argument = _ARGUMENT.match(line)
        if argument and argument.group(1)[0].islower():
            names = ", ".join(f"`{name}`" for name in argument.group(1).split(", "))
            yield from ([] if is_list else [""])
            yield f"- {names}: {line[argument.end() :]}"
            is_list = True
        else:
            if is_list and not line.startswith(" "):
                is_list = False
                yield ""
            yield line
    if is_code:
        yield "```"


class Docstrings(Extension):
    """Called by griffe for each object that it has read."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Replace the docstring."""
        if obj.docstring is not None:
            obj.docstring.value = markdown(obj.docstring.value)
