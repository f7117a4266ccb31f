"""What is loaded are the bytes that were verified, whatever becomes of their file."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from processes import Child
from scale import DEVICE, HOST
from test_builds import needs_nvcc, scale

from quire import jit
from quire.errors import CacheError
from quire.jit import module


@pytest.fixture
def entry(templates: Path, monkeypatch: pytest.MonkeyPatch) -> jit.Entry:
    """A host library that nobody has loaded."""
    monkeypatch.setattr(module, "_libraries", {})
    return jit.build(HOST, templates=templates)[1]


def truncate(path: Path) -> None:
    os.truncate(path, 0)


def overwrite(path: Path) -> None:
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.write(b"\xff" * size)


@pytest.mark.parametrize("write", [truncate, overwrite, Path.unlink])
def test_a_file_may_be_written_to_while_it_is_in_use(write: Callable[[Path], None], entry: jit.Entry) -> None:
    """In a child: what used to happen was SIGBUS or SIGSEGV."""

    def use() -> list[list[float]]:
        module = jit.load(entry)
        before = scale(module)
        write(entry.artifact)
        return [before, scale(module)]

    assert Child(use).result() == [[3, 6, 9], [3, 6, 9]]


def test_what_was_verified_is_loaded(entry: jit.Entry) -> None:
    overwrite(entry.artifact)
    assert scale(jit.load(entry)) == [3, 6, 9]


def test_a_cache_may_be_copied_over_one_in_use(entry: jit.Entry, templates: Path, cache: Path, tmp_path: Path) -> None:
    shutil.copytree(cache, tmp_path / "gold")

    def use() -> list[float]:
        module = jit.get_module(HOST, templates=templates)
        for file in (path for path in (tmp_path / "gold").rglob("*") if path.is_file()):
            (cache / file.relative_to(tmp_path / "gold")).write_bytes(file.read_bytes())
            assert scale(module) == [3, 6, 9]
        return scale(module)

    assert Child(use).result() == [3, 6, 9]


@needs_nvcc
def test_a_cubin_is_taken_from_the_verified_bytes(templates: Path) -> None:
    entry = jit.build(DEVICE, templates=templates)[1]
    image = entry.artifact.read_bytes()
    overwrite(entry.artifact)
    module = jit.load(entry)
    assert isinstance(module, jit.CudaModule)
    assert module._image == image
    assert module.entry.image == b""


def tripled(entry: jit.Entry, templates: Path) -> jit.Module:
    """A library of another constant."""
    header = templates / "include/quire/core/factor.h"
    header.write_text(header.read_text().replace("kFactor = 2", "kFactor = 3"))
    return jit.load(jit.build(HOST, templates=templates)[1])


def test_libraries_are_told_apart(entry: jit.Entry, templates: Path) -> None:
    """The loader knows a library by its path; both were at the same descriptor."""
    before = len(list(Path("/proc/self/fd").iterdir()))
    first, second = jit.load(entry), tripled(entry, templates)
    assert (scale(first), scale(second), scale(first)) == ([3, 6, 9], [4.5, 9, 13.5], [3, 6, 9])
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_the_same_bytes_are_loaded_once(entry: jit.Entry) -> None:
    modules = [jit.load(entry) for _ in range(3)]
    assert len(module._libraries) == 1
    assert {tuple(scale(module)) for module in modules} == {(3, 6, 9)}


def forbid_memory_files(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> int:
        raise PermissionError("forbidden here")

    monkeypatch.setattr(os, "memfd_create", refused)


def test_a_private_copy_serves_where_memory_files_are_forbidden(
    entry: jit.Entry, templates: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forbid_memory_files(monkeypatch)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = sorted(tmp_path.iterdir())
    first, second = jit.load(entry), tripled(entry, templates)
    assert (scale(first), scale(second)) == ([3, 6, 9], [4.5, 9, 13.5])
    assert sorted(tmp_path.iterdir()) == before


def test_a_private_copy_serves_without_proc(entry: jit.Entry, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.path.exists
    monkeypatch.setattr(os.path, "exists", lambda path: not str(path).startswith("/proc") and real(path))
    assert scale(jit.load(entry)) == [3, 6, 9]


def test_a_symbol_of_another_library_is_not_called(entry: jit.Entry) -> None:
    """The loader would find `system` among the library's dependencies."""
    text = entry.manifest.write().replace(f'"entry": "{HOST.entry}"', '"entry": "system"')
    with pytest.raises(CacheError, match="digest"):
        jit.Manifest.read(text)
    with pytest.raises(CacheError, match="cannot be loaded"):
        jit.load(replace(entry, manifest=replace(entry.manifest, entry="nowhere")))
