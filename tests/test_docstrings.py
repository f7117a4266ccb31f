"""The examples in the docstrings of the public surface: they run on the CPU as they stand, and show what comes out."""

from __future__ import annotations

import doctest
import inspect
import re

import pytest
import torch

import quire

#: A module that can be called, xqa, counts as its function.
PUBLIC = {name: getattr(getattr(quire, name), name, getattr(quire, name)) for name in quire.__all__}
#: Exceptions and modules need no example.
SHOWN = [
    name
    for name, value in PUBLIC.items()
    if callable(value) and not (inspect.isclass(value) and issubclass(value, BaseException))
]
#: Functions of tensors, and what their docstrings say.
OF_TENSORS = [
    name
    for name in SHOWN
    if not inspect.isclass(PUBLIC[name])
    and (name.endswith("_return_lse") or "Tensor" in str(inspect.signature(PUBLIC[name])))
]
SHAPES, ERRORS, SOURCE = r"\[[a-z_0-9][a-z_0-9 ,*+/().]*\]", r"\bRaises\b", r"https?://|FlashInfer|TensorRT|vLLM|SGLang"


def examples(name: str) -> list[doctest.DocTest]:
    """Those of a public name and of its methods."""
    found = doctest.DocTestFinder(recurse=True).find(PUBLIC[name], name, globs={"quire": quire, "torch": torch})
    return [test for test in found if test.examples]


@pytest.mark.parametrize("name", SHOWN)
def test_examples(name: str) -> None:
    report: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    for test in examples(name):
        runner.run(test, out=report.append)
    assert not runner.failures, "".join(report)


@pytest.mark.parametrize("name", SHOWN)
def test_every_public_name_has_an_example(name: str) -> None:
    """Its own, or a sentence that names the one that has it."""
    if not examples(name):
        doc = inspect.getdoc(PUBLIC[name]) or ""
        assert any(other in doc and examples(other) for other in SHOWN if other != name), f"{name} shows no example"


def says(name: str, pattern: str, before: tuple[str, ...] = ()) -> bool:
    """Whether the text of a function says it, or that of a function or wrapper to which the text refers."""
    text = (inspect.getdoc(PUBLIC[name]) or "").partition(">>>")[0]
    others = [other for other in SHOWN if other not in (name, *before) and re.search(rf"\b{other}\b", text)]
    if re.search(pattern, text) or any(says(other, pattern, (*before, name)) for other in others):
        return True
    plan = getattr(PUBLIC[name], "plan", None)
    return plan is not None and bool(re.search(pattern, inspect.getdoc(plan) or ""))


@pytest.mark.parametrize("name", OF_TENSORS)
def test_docstrings_say_shapes_errors_and_source(name: str) -> None:
    assert says(name, SHAPES), "no shape"
    assert says(name, ERRORS), "no error"
    assert says(name, SOURCE) or re.search(SOURCE, inspect.getdoc(inspect.getmodule(PUBLIC[name])) or ""), "no source"
