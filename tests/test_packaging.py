"""The two packages: names and versions that agree, and whole metadata."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import quire

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
NAMES = {"": "quire-attention", "jit_cache": "quire-attention-jit-cache"}


def project(folder: str) -> dict[str, Any]:
    return tomllib.loads((ROOT / folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]


@pytest.mark.parametrize("folder", NAMES, ids=["quire", "jit_cache"])
def test_metadata(folder: str) -> None:
    found = project(folder)
    assert (found["name"], found["version"]) == (NAMES[folder], quire.__version__)
    assert found["license"] and found["readme"] and found["keywords"]
    assert "urls" not in found  # neither package has a page yet
    minors = {c.rpartition(" ")[2] for c in found["classifiers"] if re.search(r":: 3\.\d+$", c)}
    assert found["requires-python"].removeprefix(">=") in minors


def test_prebuilt_variants_belong_to_one_version() -> None:
    assert project("jit_cache")["dependencies"] == [f"{NAMES['']}=={quire.__version__}"]


def test_the_program_is_the_command_line() -> None:
    module, _, function = project("")["scripts"]["quire"].partition(":")
    assert callable(getattr(__import__(module, fromlist=[function]), function))


def test_readme_names_the_packages_as_they_are() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert all(f"`{name}`" in text for name in NAMES.values())
    assert not re.search(r"pip install (quire|quire-jit-cache)\b(?!-attention)", text)
