"""The test kernel: one header and its dependency, two specs, and a compiler that is a script."""

from __future__ import annotations

import logging
import platform
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from quire.jit import Spec, Struct

KERNEL = """#pragma once
#include "quire/core/factor.h"
#ifdef __CUDACC__
#define QUIRE_TEST_FN __device__ static
#else
#include <math.h>
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

#: A compiler that answers questions, writes a line into a log for each run, and makes an artifact out of its source: a
#: library that was made beforehand, with a line about the source behind its end.
FAKE = """#!/bin/sh
# {note}
case " $* " in *" --version "*) echo "g++ (Fake) {version}"; exit 0;; esac
case " $* " in *" -dumpmachine "*) echo fake-linux; exit 0;; *" -print-prog-name=cc1plus "*) echo cc1plus; exit 0;; esac
echo "compile $$" >> "{log}"
{before}
while [ $# -gt 0 ]; do
  if [ "$1" = -o ]; then {{ cat "{library}"; echo "made by {version} from $(cksum < "$3")"; }} > "$2"; shift; fi
  shift
done
{after}
"""


@dataclass
class FakeCompiler:
    """A script in QUIRE_CXX's place. `compiles` counts the runs that were not questions."""

    path: Path
    log: Path
    library: ClassVar[Path]  #: what it makes; a fixture of the session sets it

    def write(self, version: str = "1.0", note: str = "", before: str = "", after: str = "") -> FakeCompiler:
        text = FAKE.format(version=version, note=note, log=self.log, library=self.library, before=before, after=after)
        draft = self.path.with_suffix(".new")
        draft.write_text(text)
        draft.chmod(0o755)
        draft.replace(self.path)
        return self

    @property
    def compiles(self) -> int:
        return len(self.log.read_text().splitlines()) if self.log.exists() else 0


PARAMS = Struct("ScaleParams", 16, (("x", 0), ("n", 8), ("factor", 12)))

HOST = Spec(
    slug="scale.host",
    target="x86-64-v3" if platform.machine() == "x86_64" else "aarch64",
    header="quire/kernels/scale.h",
    kernel="Scale",
    entry="quire_scale",
    params=PARAMS,
    types=(("T", "float"),),
    constants=(("kThreads", 128),),
    asserts=(("kThreads", 128),),
    warmup="--backend cpu --head-dim 64",
    fields=(("backend", "cpu"), ("threads", "128")),
)

DEVICE = replace(HOST, slug="scale.sm90a", target="sm90a")


class Collect:
    """The lines that Quire logs inside a `with` block."""

    def __init__(self) -> None:
        self.lines = lines = []

        class Handler(logging.Handler):
            def emit(self, record: logging.LogRecord) -> None:
                lines.append(record.getMessage())

        self.logger, self.handler = logging.getLogger("quire"), Handler()

    def __enter__(self) -> list[str]:
        self.logger.addHandler(self.handler)
        return self.lines

    def __exit__(self, *_: object) -> None:
        self.logger.removeHandler(self.handler)
