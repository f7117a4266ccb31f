"""The examples in the docstrings of the public surface: they run on the CPU as they stand, and show what comes out."""

from __future__ import annotations

import doctest
import importlib
import inspect
import re

import pytest
import torch

import quire
from quire import jit

#: A module that can be called, xqa, counts as its function.
PUBLIC = {name: getattr(getattr(quire, name), name, getattr(quire, name)) for name in quire.__all__}
#: Exceptions and modules need no example.
SHOWN = [
    name
    for name, value in PUBLIC.items()
    if callable(value) and not (inspect.isclass(value) and issubclass(value, BaseException))
]
#: Methods whose tensors the caller gives.
CALLS = ("__init__", "plan", "run", "begin_forward", "forward")
#: Functions of tensors and wrappers, and what their docstrings say.
OF_TENSORS = [
    name for name in SHOWN if name.endswith("_return_lse") or "Tensor" in str(inspect.signature(PUBLIC[name]))
]
SHAPES, ERRORS, SOURCE = (
    r"\[[a-z_0-9][a-z_0-9 ,*+/().]*\]",
    r"\b[Rr]aises\b",
    r"https?://|FlashInfer|TensorRT|vLLM|SGLang",
)


def examples(name: str) -> list[doctest.DocTest]:
    """Those of a public name and of its methods."""
    found = doctest.DocTestFinder(recurse=True).find(PUBLIC[name], name, globs={"quire": quire, "torch": torch})
    return [test for test in found if test.examples]


@pytest.mark.parametrize("name", SHOWN)
def test_examples(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jit, "_sealed", False)  # the example of seal() ends with the test
    report: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    for test in examples(name):
        runner.run(test, out=report.append)
    assert runner.tries, "no example"
    assert not runner.failures, "".join(report)


def text_of(name: str) -> str:
    """What the reference shows of a function, or of a class and its methods of calls, without the examples."""
    value = PUBLIC[name]
    methods = [vars(value)[method] for method in CALLS if method in vars(value)] if inspect.isclass(value) else []
    return "\n".join((inspect.getdoc(part) or "").partition(">>>")[0] for part in (value, *methods))


@pytest.mark.parametrize("name", OF_TENSORS)
def test_docstrings_say_shapes_errors_and_source(name: str) -> None:
    text = text_of(name)
    assert re.search(SHAPES, text), "no shape"
    assert re.search(ERRORS, text), "no error"
    source = rf"{SOURCE}|(?<![a-z_.])({'|'.join(SHOWN)})\b"  # or the function that it varies, which says its own
    module = inspect.getdoc(inspect.getmodule(PUBLIC[name])) or ""
    assert re.search(source, text) or re.search(SOURCE, module), "no source"


#: Of modules in other libraries' words and of several ranks, which say what their functions have in common.
OTHERS = ("compat.flash_attn", "compat.flash_attn_interface", "compat.flash_mla", "compat.deep_gemm", "distributed")
#: Whose examples are those of another function.
WITHOUT = {"flash_attn_unpadded_func", "flash_attn_varlen_kvpacked_func", "FlashMLASchedMeta", "get_mla_metadata"}


@pytest.mark.parametrize("module", OTHERS)
def test_other_modules_say_shapes_errors_source_and_examples(module: str) -> None:
    """Their examples run in the tests of each module."""
    found = importlib.import_module(f"quire.{module}")
    common = inspect.getdoc(found) or ""
    for name in found.__all__:
        value = getattr(found, name)
        if callable(value):
            parts = [value, *(vars(value).get(call) for call in CALLS)] if inspect.isclass(value) else [value]
            text = "\n".join((common, *(inspect.getdoc(part) or "" for part in parts if part is not None)))
            assert re.search(SHAPES, text), f"{name}: no shape"
            assert re.search(ERRORS, text), f"{name}: no error"
            assert re.search(rf"{SOURCE}|torch\.distributed|DeepGEMM", text), f"{name}: no source"
            assert name in WITHOUT or ">>>" in (text.removeprefix(common)), f"{name}: no example"
