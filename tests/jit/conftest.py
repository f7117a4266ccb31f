"""A tiny kernel in a tree of its own, a cache of its own, and compilers that are scripts."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from quire import _templates, jit
from quire.jit import Spec, Struct, progress

KERNEL = """#pragma once
#include "quire/core/factor.h"
#ifdef __CUDACC__
#define QUIRE_TEST_FN __device__ static
#else
#include <cmath>
#define QUIRE_TEST_FN static
#endif

namespace quire {

struct ScaleParams {
  float* x;
  int n;
  float factor;
};

template <class V>
struct Scale {
  static constexpr int kThreads = V::kThreads;
  static constexpr int kMinCtas = 1;
#ifdef __CUDACC__
  QUIRE_TEST_FN void run(const ScaleParams& p, unsigned char*) {
    int i = blockIdx.x * kThreads + threadIdx.x;
    if (i < p.n) p.x[i] *= p.factor * kFactor;
  }
#else
  QUIRE_TEST_FN int run(ScaleParams& p) {
    for (int i = 0; i < p.n; ++i) p.x[i] *= p.factor * kFactor;
    return 0;
  }
#endif
};

}  // namespace quire
"""

FACTOR = "#pragma once\nnamespace quire {\nconstexpr int kFactor = 2;\n}\n"

#: A compiler that answers questions, writes a line into a log for each run, and makes an artifact out of its source.
FAKE = """#!/bin/sh
# {note}
case " $* " in *" --version "*) echo "g++ (Fake) {version}"; exit 0;; esac
case " $* " in *" -dumpmachine "*) echo fake-linux; exit 0;; *" -print-prog-name=cc1plus "*) echo cc1plus; exit 0;; esac
echo "compile $$" >> "{log}"
{before}
while [ $# -gt 0 ]; do
  if [ "$1" = -o ]; then echo "made by {version} from $(cksum < "$3")" > "$2"; shift; fi
  shift
done
{after}
"""


@dataclass
class FakeCompiler:
    """A script in QUIRE_CXX's place. `compiles` counts the runs that were not questions."""

    path: Path
    log: Path

    def write(self, version: str = "1.0", note: str = "", before: str = "", after: str = "") -> FakeCompiler:
        text = FAKE.format(version=version, note=note, log=self.log, before=before, after=after)
        draft = self.path.with_suffix(".new")
        draft.write_text(text)
        draft.chmod(0o755)
        draft.replace(self.path)
        return self

    @property
    def compiles(self) -> int:
        return len(self.log.read_text().splitlines()) if self.log.exists() else 0


@pytest.fixture
def templates(tmp_path: Path) -> Path:
    """A template root with the real templates and one test kernel."""
    root = tmp_path / "templates"
    (root / "include/quire/kernels").mkdir(parents=True)
    (root / "include/quire/core").mkdir()
    for name in ("variant.jinja", "build.ninja.jinja"):
        shutil.copy(_templates.root() / name, root / name)
    (root / "include/quire/kernels/scale.h").write_text(KERNEL)
    (root / "include/quire/core/factor.h").write_text(FACTOR)
    return root


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache, a clean environment, and a JIT that remembers nothing of other tests."""
    root = tmp_path / "cache"
    for name in ("QUIRE_JIT", "QUIRE_NVCC", "QUIRE_CXX", "QUIRE_TOOLCHAIN", "QUIRE_MAX_JOBS", "QUIRE_RECORD", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(root))
    reset(monkeypatch)
    yield root
    reset(monkeypatch)


def reset(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put this process where a new one starts."""
    for name in ("_modules", "_stores"):
        monkeypatch.setattr(jit, name, {})
    monkeypatch.setattr(jit, "_recorded", set())
    monkeypatch.setattr(jit, "_sealed", False)
    monkeypatch.setattr(jit, "_private_store", None)
    monkeypatch.setattr(jit, "_record_to", None)
    monkeypatch.setattr(progress, "_warned", set())


@pytest.fixture
def restart(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Forget what this process knows, as a new process would."""
    return lambda: reset(monkeypatch)


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeCompiler:
    """A fake g++ named by QUIRE_CXX; its artifacts cannot be loaded, so tests use `jit.build`."""
    compiler = FakeCompiler(tmp_path / "fake-g++", tmp_path / "compiles.log").write()
    monkeypatch.setenv("QUIRE_CXX", str(compiler.path))
    return compiler


@pytest.fixture
def no_processes(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Call it, and from then on starting a process fails the test."""

    def refuse(*arguments: object, **_: object) -> None:
        raise AssertionError(f"a process was started: {arguments[0] if arguments else ''}")

    return lambda: monkeypatch.setattr(subprocess, "Popen", refuse)


PARAMS = Struct("ScaleParams", 16, (("x", 0), ("n", 8), ("factor", 12)))

HOST = Spec(
    slug="scale-host",
    target="x86-64-v3" if sys.platform == "linux" and __import__("platform").machine() == "x86_64" else "aarch64",
    header="quire/kernels/scale.h",
    kernel="Scale",
    entry="quire_scale",
    params=PARAMS,
    types=(("T", "float"),),
    constants=(("kThreads", 128),),
    asserts=(("kThreads", 128),),
    warmup="--backend cpu --head-dim 64",
)

DEVICE = replace(HOST, slug="scale-sm90a", target="sm90a")


