"""Keeps options of command lines whole for `make docs`: browsers break lines behind hyphens."""

from __future__ import annotations

import re
from typing import Any

_CODE = re.compile(r"(?<!<pre>)<code>([^<\n]*)</code>")
_WIDTH = 36  #: letters that fit on a phone
_FLAG = re.compile(r"(?<![\w-])--?[a-z][\w-]*")


def on_page_content(html: str, **_: Any) -> str:
    """The page, whose style sheet breaks no line within these spans."""
    return _CODE.sub(lambda code: f"<code>{_FLAG.sub(_span, code[1])}</code>", html)


def _span(flag: re.Match[str]) -> str:
    whole = flag[0] if len(flag[0]) <= _WIDTH else flag[0][: flag[0].index("-", 2)]  # the first word of a long one
    return f'<span class="flag">{whole}</span>{flag[0].removeprefix(whole)}'
