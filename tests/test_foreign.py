"""Arguments that a function does not use are declared with @foreign, and what is declared holds."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import quire
import surface
from quire.engine.options import Policy, foreign

ROOT = Path(quire.__file__).parent
#: Files in which the linter does not look for unused arguments.
FILES = [path for path in sorted(ROOT.rglob("*.py")) if "# ruff: noqa: ARG00" in path.read_text(encoding="utf-8")]
POLICIES = dict(surface.policies())


def unused(path: Path) -> Iterator[tuple[str, set[str], set[str]]]:
    """The functions of a file, the arguments that they do not use, and the words of their decorators."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.FunctionDef) or any(
            isinstance(name, ast.Name) and name.id == "overload" for name in node.decorator_list
        ):
            continue
        inside = [part for statement in node.body for part in ast.walk(statement)]
        loaded = {part.id for part in inside if isinstance(part, ast.Name)}
        given = {arg.arg for arg in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)} - {"self", "cls"}
        constants = [part.value for d in node.decorator_list for part in ast.walk(d) if isinstance(part, ast.Constant)]
        words = {word for text in constants if isinstance(text, str) for word in text.split()}
        is_stub = all(isinstance(part, (ast.Expr, ast.Raise)) for part in node.body)
        if not is_stub and "locals" not in loaded:
            yield node.name, {name for name in given - loaded if not name.startswith("_")}, words


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_an_argument_is_used_or_declared(path: Path) -> None:
    for name, arguments, declared in unused(path):
        assert arguments <= declared, f"{name}: {sorted(arguments - declared)}"


@foreign("scale", "non_blocking cute_dsl_impl uniform_q_len", {"older": "x"}, added="first last")
def function(
    x: int, first: object = None, mask: object = None, packed: object = None, causal: bool = False, last: object = None,
    scale: float = 1.0, non_blocking: bool = True, *, cute_dsl_impl: str = "auto", uniform_q_len: int | None = None,
) -> tuple[object, ...]:  # fmt: skip
    """A function with foreign arguments."""
    return x, first, mask, packed, causal, last


def test_the_signature_and_the_name_stay() -> None:
    assert function.__name__ == "function" and function.__doc__ == "A function with foreign arguments."
    assert [*inspect.signature(function).parameters][:2] == ["x", "first"]


def test_defaults_and_permissions_are_taken() -> None:
    for keywords in ({}, {"scale": 1.0}, {"scale": None}, {"scale": False}, {"non_blocking": False}):
        assert function(1, **keywords) == (1, None, None, None, False, None)
    assert function(1, 2, 3, 4, True, 5, 1.0, False) == (1, 2, 3, 4, True, 5)


@pytest.mark.parametrize(
    ("args", "keywords", "message"),
    [
        ((), {"scale": 2.0}, r"scale: not supported by this call; expected 1.0, got 2.0\."),
        ((2, 3, 4, True, 5, 2.0), {}, r"scale: not supported by this call"),
        ((), {"scale": torch.ones(3)}, r"scale: .*got a tensor of shape \[3\]"),
        ((), {"non_blocking": 1}, r"non_blocking: expected a bool, got 1\."),
        ((), {"cute_dsl_impl": "x"}, r"cute_dsl_impl: expected one of 'auto', .*, got 'x'\."),
        ((), {"uniform_q_len": 0}, r"uniform_q_len: expected a positive integer"),
        ((), {"older": 1}, r"older: expected it or x, got both\."),
    ],
)
def test_others_are_refused(args, keywords, message) -> None:
    if "older" in keywords:
        keywords = {**keywords, "x": 1}
    with pytest.raises(quire.ValidationError, match=message):
        function(*(() if "x" in keywords else (1,)), *args, **keywords)


def test_older_names_and_the_older_order() -> None:
    mask = torch.zeros(2)
    assert function(older=3)[0] == 3
    assert function(1, mask, 4, True)[1:5] == (None, mask, 4, True)
    assert function(1, None, None, True)[1:5] == (None, None, None, True)


@pytest.mark.parametrize("name", POLICIES)
def test_what_is_declared_is_in_the_signature(name: str) -> None:
    function, policy = POLICIES[name]
    assert isinstance(policy, Policy)
    parameters = set(inspect.signature(function).parameters)
    assert {*policy.refused, *policy.permissions, *policy.older_names.values()} <= parameters
    assert not parameters & set(policy.older_names)
