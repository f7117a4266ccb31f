"""The examples in the docstrings of the public surface: they run on the CPU as they stand, and show what comes out."""

from __future__ import annotations

import doctest
import inspect

import pytest
import torch

import quire

#: A module that can be called, xqa, counts as its function.
PUBLIC = {name: getattr(getattr(quire, name), name, getattr(quire, name)) for name in quire.__all__}
#: Exceptions and modules need no example.
SHOWN = [
    name
    for name, value in PUBLIC.items()
    if (inspect.isclass(value) and not issubclass(value, BaseException)) or inspect.isfunction(value)
]


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
