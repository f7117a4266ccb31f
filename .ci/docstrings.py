"""Makes Markdown of Quire's docstrings for `make docs`: arguments become a table, examples become code that fits."""

from __future__ import annotations

import doctest
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from griffe import Extension, Object

_NAME = r"[a-z]\w*(?: \[[^\]]*\])?"  #: "q", "k [nnz_kv]"
_ARGUMENT = re.compile(rf"^({_NAME}(?:, {_NAME})*): (?=\S)")  #: "q, k [nnz_kv]: what they are"
_WIDTH = 92  #: columns of code that a page of 1280 pixels shows


class Parameter(NamedTuple):
    """What a signature says of an argument."""

    type: str
    default: str


Parameters = Mapping[str, Parameter]


def markdown(text: str, parameters: Parameters | None = None) -> str:
    """The docstring `text` as Markdown."""
    return "\n".join(_lines(_divided(text, parameters or {}).splitlines(), parameters or {}))


def _divided(text: str, parameters: Parameters) -> str:
    """The text with a line for each argument, also for those behind others, and for what is said of all."""
    prose, mark, examples = text.partition("\n>>>")
    if parameters and (first := re.search(_ARGUMENT.pattern, prose, re.MULTILINE)):
        names = rf"(?:{'|'.join(parameters)})(?: \[[^\]]*\])?"
        before, prose = prose[: first.start()], prose[first.start() :]
        prose = re.sub(rf"[.;]\s+(?=(?:{names})(?:,\s{names})*: )", ".\n", prose)
        prose = re.sub(r"\.\s+(?=(?:Other arguments|Returns|Raises)\b)", ".\n\n", prose)
        prose = before + re.sub(rf"^({names}),\n({names}: )", r"\1, \2", prose, flags=re.MULTILINE)
    return prose + mark + examples


def _lines(lines: list[str], parameters: Parameters) -> Iterator[str]:
    code: list[str] = []
    rows: list[tuple[str, list[str]]] = []
    for before, line in zip(["", *lines], lines, strict=False):
        if code or line.startswith(">>>"):
            if line.strip():
                code.append(line)
                continue
            yield from _code(code)
            code = []
        argument = None if before and before[-1] not in ".])" else _ARGUMENT.match(line)
        if argument:
            rows.append((argument.group(1), [line[argument.end() :]]))
        elif rows and line.strip() and (line.startswith(" ") or before[-1:] not in (".", ")")):
            rows[-1][1].append(line.strip())
        else:
            yield from _table(rows, parameters)
            rows = []
            yield _escaped(line)
    yield from _table(rows, parameters)
    yield from _code(code)


def _table(rows: list[tuple[str, list[str]]], parameters: Parameters) -> Iterator[str]:
    if not rows:
        return
    yield from ("", "| argument | type | default | |", "| --- | --- | --- | --- |")
    for names, texts in rows:
        known = [parameters.get(name.partition(" ")[0]) for name in re.findall(_NAME, names)]
        types, defaults = ([_cell(getattr(one, part) if one else "") for one in known] for part in ("type", "default"))
        text = _escaped(" ".join(texts)).replace("|", r"\|")
        of_each = [_cell(name) for name in re.findall(_NAME, names)]
        yield "| " + " | ".join("<br>".join(cells) for cells in (of_each, types, defaults)) + f" | {text} |"
    yield ""


def _cell(text: str) -> str:
    return f"`{text}`" if text else "&nbsp;"


def _code(lines: list[str]) -> Iterator[str]:
    if lines:
        yield from ("", "```pycon", *(lines if max(map(len, lines)) <= _WIDTH + 4 else _narrow(lines)), "```")


def _narrow(lines: list[str]) -> Iterator[str]:
    """The examples, formatted for less width; comments stand above lines that they would make too long."""
    for example in doctest.DocTestParser().get_examples("\n".join(lines) + "\n"):
        source = []
        for line in example.source.splitlines():
            code, mark, comment = line.partition("  # ")
            is_long = mark and len(line) > _WIDTH
            source += [f"{' ' * (len(code) - len(code.lstrip()))}# {comment}", code] if is_long else [line]
        first, *others = _filled(_formatted("\n".join(source)).splitlines())
        yield f">>> {first}"
        yield from (f"... {line}".rstrip() for line in others)
        yield from example.want.splitlines()


def _formatted(source: str) -> str:
    command = [sys.executable, "-m", "ruff", "format", "--isolated", f"--line-length={_WIDTH}", "-"]
    return subprocess.run(command, input=source, capture_output=True, text=True, check=True).stdout


def _filled(lines: list[str]) -> list[str]:
    """Arguments that stand alone, several on a line."""
    filled: list[str] = []
    is_open = False
    for line in lines:
        indent, item = len(line) - len(line.lstrip()), line.strip()
        is_item = item.endswith(",") and "#" not in item and all(item.count(a) == item.count(b) for a, b in _PAIRS)
        before = filled[-1] if filled else ""
        if is_item and is_open and len(before) - len(before.lstrip()) == indent and len(before) + len(item) < _WIDTH:
            filled[-1] += f" {item}"
        else:
            filled.append(line)
        is_open = is_item
    return filled


_PAIRS = ("()", "[]", "{}")


def _escaped(text: str) -> str:
    return text.replace("[", r"\[").replace("*", r"\*").replace("<", "&lt;").replace("`", "")


def _parameters(obj: Object) -> Parameters:
    """Of a function, or of the class's constructor."""
    function = obj.members.get("__init__", obj) if obj.is_class else obj
    return {
        parameter.name: Parameter(str(parameter.annotation or ""), str(parameter.default or ""))
        for parameter in getattr(function, "parameters", ())
    }


class Docstrings(Extension):
    """Called by griffe for each object that it has read."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Replace the docstring."""
        if obj.docstring is not None:
            obj.docstring.value = markdown(obj.docstring.value, _parameters(obj))
