"""Compile one unit with NVRTC in a process of its own, which can be stopped and whose memory goes with it.

    python nvrtc_worker.py LIBRARY --version                       print the library's version
    python nvrtc_worker.py LIBRARY SOURCE ARTIFACT LOG OPTION...   write the cubin and the log; exit 1 if it fails

It runs by its path rather than with `-m`, and imports nothing but ctypes: the package above would import torch.
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path
from typing import Any

#: The first release whose front end takes all of the headers.
OLDEST = (12, 4)


class Nvrtc:
    """The functions of libnvrtc that a compile takes."""

    def __init__(self, path: str) -> None:
        """Load the library; its builtins first and by their path, because it looks for them by name only."""
        try:
            for builtins in sorted(Path(path).resolve().parent.glob("libnvrtc-builtins*.so*")):
                if ".alt." not in builtins.name:
                    ctypes.CDLL(str(builtins))
            self._library = ctypes.CDLL(path)
        except OSError as error:
            sys.exit(f"error: libnvrtc cannot be loaded: {error}")
        self._library.nvrtcGetErrorString.restype = ctypes.c_char_p

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function that must succeed."""
        code = getattr(self._library, name)(*arguments)
        if code:
            sys.exit(f"error: {name}: {self._library.nvrtcGetErrorString(code).decode()}")

    def compile(self, source: bytes, name: str, options: list[str]) -> tuple[ctypes.c_void_p, bool]:
        """A compiled program, and whether it compiled."""
        program, words = ctypes.c_void_p(), [option.encode() for option in options]
        self.call("nvrtcCreateProgram", ctypes.byref(program), source, name.encode(), 0, None, None)
        code = self._library.nvrtcCompileProgram(program, len(words), (ctypes.c_char_p * len(words))(*words))
        return program, code == 0

    def read(self, what: str, program: ctypes.c_void_p) -> bytes:
        """A result of a program: its "CUBIN", "PTX" or "ProgramLog"."""
        size = ctypes.c_size_t()
        self.call(f"nvrtcGet{what}Size", program, ctypes.byref(size))
        result = ctypes.create_string_buffer(size.value)
        self.call(f"nvrtcGet{what}", program, result)
        return result.raw

    def log(self, program: ctypes.c_void_p) -> str:
        """What the compiler said."""
        return self.read("ProgramLog", program).rstrip(b"\0").decode(errors="replace")


def version(nvrtc: Nvrtc) -> int:
    """Print what identifies the compiler to the build, which nvrtcVersion() does not: it stands in the PTX it makes."""
    major, minor = ctypes.c_int(), ctypes.c_int()
    nvrtc.call("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
    if (major.value, minor.value) < OLDEST:
        sys.exit(
            f"error: expected NVRTC {OLDEST[0]}.{OLDEST[1]} or newer, found {major.value}.{minor.value}; "
            "`pip install nvidia-cuda-nvrtc`"
        )
    program, compiled = nvrtc.compile(b"", "empty.cu", [])
    if not compiled:
        sys.exit(f"error: {nvrtc.log(program)}")
    lines = [line.lstrip("/ ") for line in nvrtc.read("PTX", program).decode().splitlines()]
    print(*[line for line in lines if line.startswith(("Compiler Build ID", "Cuda compilation tools"))], sep="\n")
    return 0


def build(nvrtc: Nvrtc, source: str, artifact: str, log: str, *options: str) -> int:
    """Compile the file `source` to the cubin `artifact`; the exit status."""
    program, compiled = nvrtc.compile(Path(source).read_bytes(), source, list(options))
    Path(log).write_text(nvrtc.log(program), encoding="utf-8")
    if compiled:
        Path(artifact).write_bytes(nvrtc.read("CUBIN", program))
    return 0 if compiled else 1


if __name__ == "__main__":
    loaded = Nvrtc(sys.argv[1])
    sys.exit(version(loaded) if sys.argv[2:] == ["--version"] else build(loaded, *sys.argv[2:]))
