"""Functions of host libraries for another machine, called under an emulator on memory of this process.

A call's memory travels as a file: the parameter struct, and for each address in it the bytes from there on. What the
function has changed in the file is then changed here. So plan() and run() work as on the other machine, with arrays of
at most WINDOW_BYTES.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from bisect import bisect_right
from pathlib import Path

import numpy as np

WINDOW_BYTES = 1 << 19  #: that are copied from each address on
_PARAMS_BYTES = 1024  #: at least a parameter struct
_PAGE = 4096
_SOURCE = Path(__file__).with_name("emulated.cpp")

COMPILER = shutil.which("aarch64-linux-gnu-g++")
EMULATOR = shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")
LIBRARIES = Path("/usr/aarch64-linux-gnu")


def build_driver(directory: Path) -> Path:
    """The program that calls; it is compiled for aarch64."""
    driver = directory / "emulated"
    subprocess.run([str(COMPILER), "-O1", str(_SOURCE), "-o", str(driver), "-ldl"], check=True, timeout=120)
    return driver


class Emulated:
    """Stands for a function that ctypes has loaded: `function(address of the parameter struct) -> int`."""

    def __init__(self, driver: Path, library: Path, name: str) -> None:
        self._command = [str(EMULATOR), "-L", str(LIBRARIES), str(driver), str(library), name]
        self._file = library.with_name(f"{library.name}.memory")
        self.calls = 0

    def __call__(self, params: int) -> int:
        windows = _windows(params)
        starts = [begin for begin, _ in windows]
        at = dict(zip(starts, np.cumsum([0, *(len(memory) for _, memory in windows)]).tolist(), strict=False))
        sent = np.concatenate([memory for _, memory in windows])

        def place(address: int) -> int:
            begin = starts[bisect_right(starts, address) - 1]
            return at[begin] + address - begin

        words = [place(params) + 8 * i for i in _pointers(params)]
        relocated = sent.copy()
        for word in words:
            field = relocated[word : word + 8].view(np.uint64)
            field[0] = place(int(field[0]))
        relocated.tofile(self._file)
        done = subprocess.run(
            [*self._command, str(self._file), str(place(params)), *map(str, words)],
            capture_output=True, text=True, timeout=300,
        )  # fmt: skip
        assert done.returncode in (0, 1), done.stderr
        received = np.fromfile(self._file, np.uint8)
        for word in words:
            received[word : word + 8] = sent[word : word + 8]
        for begin, memory in windows:
            part = slice(at[begin], at[begin] + len(memory))
            changed = np.flatnonzero(received[part] != sent[part])
            memory[changed] = received[part][changed]
        self.calls += 1
        return done.returncode


def _windows(params: int) -> list[tuple[int, np.ndarray]]:
    """(address, memory) of what a call may use: pages, none of them twice, in ascending order."""
    maps = _writable()
    wanted = [(params, _PARAMS_BYTES), *((address, WINDOW_BYTES) for address in _pointers(params).values())]
    windows: list[list[int]] = []
    for address, size in sorted(wanted):
        begin, end = address // _PAGE * _PAGE, min(-(-(address + size) // _PAGE) * _PAGE, _end(maps, address))
        if windows and begin <= windows[-1][1]:
            windows[-1][1] = max(windows[-1][1], end)
        else:
            windows.append([begin, end])
    return [(begin, _memory(begin, end - begin)) for begin, end in windows]


def _pointers(params: int) -> dict[int, int]:
    """The words of a parameter struct that are addresses: number of the word -> address."""
    maps = _writable()
    words = _memory(params, min(_PARAMS_BYTES, _end(maps, params) - params)).view(np.uint64).tolist()
    return {i: word for i, word in enumerate(words) if _end(maps, word)}


def _writable() -> list[tuple[int, int]]:
    """This process's memory that can be read and written: (begin, end), in ascending order, neighbours as one."""
    found: list[tuple[int, int]] = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        place, mode, *_ = line.split()
        begin, end = (int(word, 16) for word in place.split("-"))
        if mode.startswith("rw") and found and found[-1][1] == begin:
            found[-1] = (found[-1][0], end)
        elif mode.startswith("rw"):
            found.append((begin, end))
    return found


def _end(maps: list[tuple[int, int]], address: int) -> int:
    """Where the memory around an address ends; 0 if it is no address."""
    return next((end for begin, end in maps if begin <= address < end), 0)


def _memory(begin: int, size: int) -> np.ndarray:
    """Memory of this process as bytes."""
    return np.frombuffer((ctypes.c_uint8 * size).from_address(begin), np.uint8)
