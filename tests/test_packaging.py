"""The two packages: names and versions that agree, whole metadata, wheels that are equal whenever they are built."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
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


def _build(source: Path, out: Path) -> str:
    """The digest of a wheel that is built as another user would, at another time."""
    command = [sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", str(out), str(source)]
    subprocess.run(command, check=True, capture_output=True, env={**os.environ, "SOURCE_DATE_EPOCH": "1700000000"})
    (wheel,) = out.glob("*.whl")
    return hashlib.sha256(wheel.read_bytes()).hexdigest()


@pytest.mark.slow
def test_wheels_are_reproducible(tmp_path: Path) -> None:
    digests = []
    for copy in ("one", "two"):
        for part in ("src", "templates"):
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / part, tmp_path / copy / part, copy_function=shutil.copy, ignore=ignored)
        for name in ("pyproject.toml", "README.md", "LICENSE"):
            shutil.copy(ROOT / name, tmp_path / copy / name)
        digests.append(_build(tmp_path / copy, tmp_path / f"{copy}-out"))
        for file in (tmp_path / "one").rglob("*"):
            os.utime(file, (1, 1))
    assert digests[0] == digests[1]
