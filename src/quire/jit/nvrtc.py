"""NVRTC as a toolchain: libnvrtc, which pip's torch brings along, makes cubins without nvcc, g++ and CUDA headers.

It runs in a child process (nvrtc_worker.py), which a time limit can stop and whose memory (some 150 MB) goes with it.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

from quire import config
from quire.errors import CompileError
from quire.jit import ninja, nvrtc_worker, report
from quire.jit.request import Request
from quire.jit.toolchain import CUDA_TARGETS, Toolchain, ask

#: Where toolkits and distributions put their libraries.
_SYSTEM_DIRECTORIES = ("/usr/local/cuda/lib64", "/usr/lib64", "/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu")

#: What nvcc takes from g++ and NVRTC has not (__builtin_offsetof: before 13.4), in words that it has.
_BUILTINS = (
    "__builtin_offsetof(type,field)=((size_t)__INTADDR__(&((type*)0)->field))",
    "__builtin_huge_valf()=__builtin_bit_cast(float,0x7f800000)",
    "__builtin_nanf(text)=__builtin_bit_cast(float,0x7fc00000)",
)


def _package(name: str, *parts: str) -> Iterator[Path]:
    """The directory `parts` of an installed package, which is not imported."""
    spec = importlib.util.find_spec(name)
    for root in (spec.submodule_search_locations or ()) if spec is not None else ():
        yield Path(root, *parts)


def _directories() -> Iterator[tuple[str, Path]]:
    """(description, directory) of each place, in order."""
    for wheel in ("cu13", "cuda_nvrtc"):
        yield from (("wheel nvidia-cuda-nvrtc", path) for path in _package("nvidia", wheel, "lib"))
    yield from (("torch", path) for path in _package("torch", "lib"))
    home = config.cuda_home()
    if home is not None:
        yield "CUDA_HOME", home / "lib64"
    yield from (("LD_LIBRARY_PATH", path) for path in config.library_path())
    yield from (("system", Path(path)) for path in _SYSTEM_DIRECTORIES)


def _library(directory: Path) -> str | None:
    """The newest libnvrtc in a directory: libnvrtc.so.13, or libnvrtc-<digest>.so.12 as old torch wheels name it."""
    names = [path.name for path in directory.glob("libnvrtc*.so*")] if directory.is_dir() else []
    found = [name for name in names if not name.startswith("libnvrtc-builtins") and ".alt." not in name]
    return str(directory / max(found, key=lambda name: (name.rpartition(".so")[2], name))) if found else None


class Nvrtc(Toolchain):
    """NVRTC, to a bare cubin. Its machine code is not nvcc's bit for bit: the front ends differ."""

    name = "nvrtc"
    source = "variant.cu"
    artifact = "variant.cubin"
    install_hint = "Install NVRTC (`pip install nvidia-cuda-nvrtc`, which torch's CUDA wheels bring along)"

    @classmethod
    def places(cls) -> Iterator[tuple[str, str | None, bool]]:
        named = config.toolchain() == cls.name
        for description, directory in _directories():
            yield f"{description} {directory}/libnvrtc.so", _library(directory), named

    def flags(self, target: str) -> tuple[str, ...]:
        """-default-device: a generic lambda of a device function is else taken for a host function."""
        arch = f"--gpu-architecture=sm_{CUDA_TARGETS[target]}"
        builtins = (f"--define-macro={builtin}" for builtin in _BUILTINS)
        return (arch, "--std=c++17", "-default-device", "--ptxas-options=-v", *builtins)

    def read_report(self, log: str) -> report.Report:
        return report.parse_nvcc(log)

    def _worker(self) -> list[str]:
        """The command line of a child with this library: without site-packages, which it needs not and start slowly."""
        if not sys.executable:
            raise CompileError(
                "NVRTC runs in a Python of its own, and sys.executable does not name one; "
                "set sys.executable, or install nvcc and set QUIRE_TOOLCHAIN=nvcc"
            )
        return [sys.executable, "-I", "-S", nvrtc_worker.__file__, self.path]

    def _ask_version(self) -> tuple[str, list[str]]:
        """The library compiles with a second one, its builtins."""
        builtins = sorted(Path(self.path).resolve().parent.glob("libnvrtc-builtins*.so*"))
        return "\n".join(ask([*self._worker(), "--version"])), [str(path.resolve()) for path in builtins]

    def _words(self, target: str) -> list[str]:
        return [*self._worker(), self.source, self.artifact, "build.log", *self.flags(target), "--include-path=include"]

    def _run(self, request: Request, staging: Path, words: list[str]) -> ninja.Run:  # noqa: ARG002
        return ninja.run(staging, words)
