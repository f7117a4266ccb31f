"""A tiny kernel in a tree of its own, a cache of its own, and a process that starts afresh."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from scale import FACTOR, KERNEL, FakeCompiler

from quire import jit
from quire.jit import events, stores, unit


@pytest.fixture
def templates(tmp_path: Path) -> Path:
    """A template root with the real templates and one test kernel."""
    root = tmp_path / "templates"
    (root / "include/quire/kernels").mkdir(parents=True)
    (root / "include/quire/core").mkdir()
    for name in ("variant.jinja", "build.ninja.jinja"):
        shutil.copy(unit.root() / name, root / name)
    (root / "include/quire/kernels/scale.h").write_text(KERNEL)
    (root / "include/quire/core/factor.h").write_text(FACTOR)
    return root


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache, a clean environment, and a JIT that remembers nothing of other tests."""
    root = tmp_path / "cache"
    for name in [name for name in os.environ if name.startswith("QUIRE_") or name == "LOCAL_RANK"]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(root))
    reset(monkeypatch)
    yield root
    reset(monkeypatch)


def reset(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put this process where a new one starts."""
    monkeypatch.setattr(jit, "_modules", {})
    monkeypatch.setattr(stores, "_stores", {})
    monkeypatch.setattr(jit, "recorded", set())
    monkeypatch.setattr(jit, "_sealed", False)
    monkeypatch.setattr(stores, "_private_store", None)
    monkeypatch.setattr(jit, "_record_to", None)
    monkeypatch.setattr(events, "_warned", set())


@pytest.fixture
def restart(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Forget what this process knows, as a new process would."""
    return lambda: reset(monkeypatch)


@pytest.fixture(scope="session", autouse=True)
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small host library whose functions do nothing: what fake compilers make."""
    path = tmp_path_factory.mktemp("library") / "nothing.so"
    source = "int quire_scale(void* p) { return p == 0; } int quire_other(void* p) { return p == 0; }"
    small = ["-nostdlib", "-s", "-Wl,-z,noseparate-code,-z,norelro,--build-id=none", "-fno-asynchronous-unwind-tables"]
    command = ["g++", "-x", "c", "-shared", "-fPIC", *small, "-o", str(path), "-"]
    subprocess.run(command, input=source, text=True, check=True)
    FakeCompiler.library = path
    return path


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeCompiler:
    """A fake g++ named by QUIRE_CXX. It takes a few milliseconds."""
    compiler = FakeCompiler(tmp_path / "fake-g++", tmp_path / "compiles.log").write()
    monkeypatch.setenv("QUIRE_CXX", str(compiler.path))
    return compiler


@pytest.fixture
def no_processes(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Call it, and from then on starting a process fails the test."""

    def refuse(*arguments: object, **_: object) -> None:
        raise AssertionError(f"a process was started: {arguments[0] if arguments else ''}")

    return lambda: monkeypatch.setattr(subprocess, "Popen", refuse)
