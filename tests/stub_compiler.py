"""A compiler that takes no time: a script that answers questions and hands out a library made beforehand.

The library exports the entry of every operation, so entries pass each check of a real one; calling it does nothing.
"""

from __future__ import annotations

import shutil
import subprocess
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

from quire.jit.compilation import Report
from quire.jit.toolchain import Outcome, Toolchain
from quire.jit.unit import Request
from quire.kernels.operation import OPERATIONS

_SCRIPT = """#!/bin/sh
case " $* " in *" --version "*) echo "g++ (Stub) 1.0"; exit 0;; esac
case " $* " in *" -dumpmachine "*) echo stub-linux; exit 0;; *" -print-prog-name="*) echo /bin/sh; exit 0;; esac
echo "compile $$" >> "{log}"
{before}
while [ $# -gt 0 ]; do
  if [ "$1" = -o ]; then cp "{library}" "$2"; shift; fi
  shift
done
"""


@cache
def _library() -> Path:
    """A host library, compiled once for all tests."""
    directory = Path(mkdtemp(prefix="quire-stub-"))
    functions = "".join(f"int quire_{name}(void *params) {{ return 0; }}\n" for name in OPERATIONS)
    (directory / "stub.c").write_text(functions)
    command = ["g++", "-x", "c", "-O0", "-shared", "-fPIC", "-o", "stub.so", "stub.c"]
    subprocess.run(command, cwd=directory, check=True)
    return directory / "stub.so"


def write_stub(path: Path, before: str = "") -> Path:
    """A compiler at `path` for QUIRE_CXX; `before` runs ahead of each compile. `compiles(path)` counts them."""
    path.write_text(_SCRIPT.format(log=path.with_suffix(".log"), library=_library(), before=before))
    path.chmod(0o755)
    return path


def handed_out(toolchain: Toolchain, request: Request, staging: Path) -> Outcome:
    """Stands for Toolchain.build(): the library, without a process. The toolchain is asked its version as before."""
    shutil.copyfile(_library(), staging / toolchain.artifact)
    (staging / toolchain.source).write_text(request.source, encoding="utf-8")
    return Outcome("", "", 0.0, None, Report(), None)


def compiles(path: Path) -> int:
    """How often the stub at `path` has compiled."""
    log = path.with_suffix(".log")
    return len(log.read_text().splitlines()) if log.exists() else 0
