"""Entries of the cache that hold PTX in place of machine code, made by Quire's own builder.

They are in a cache of their own: an entry of one compiler may be found in the place of another's.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from quire import jit
from quire.engine import plan_cache, planner, spec
from quire.errors import CacheError
from quire.jit import builder, config, machine, nvrtc_worker, stores, toolchain
from quire.jit.unit import Spec, read_exports

#: An array of a unit: its name, and its bytes in decimal. Zeros at the end are left out.
_ARRAY = re.compile(r"\.global \.align \d+ \.b8 (\w+)\[(\d+)\](?: = \{([^}]*)\})?;")


def exports_of(image: bytes, spec: Spec) -> dict[str, int]:
    """unit.read_exports() for PTX as well."""
    if is_machine_code(image):
        return read_exports(image, spec)
    text = text_of(image, spec.slug)
    assert f".entry {spec.entry}(" in text, f"{spec.slug}: no entry point"
    if not spec.exports:
        return {}
    arrays = {name: (int(size), given or "") for name, size, given in _ARRAY.findall(text)}
    size, given = arrays[f"{spec.entry}_exports"]
    values = bytes(int(byte) for byte in given.split(",") if byte.strip()).ljust(size, b"\0")
    words = (int.from_bytes(values[i : i + 4], "little", signed=True) for i in range(0, size, 4))
    return dict(zip(spec.exports, words, strict=True))


def is_machine_code(image: bytes) -> bool:
    """Whether an artifact is an ELF file."""
    return image.startswith(b"\x7fELF")


def text_of(image: bytes, slug: str) -> str:
    """The PTX of an artifact."""
    if is_machine_code(image):
        raise CacheError(f"{slug} is machine code, and not PTX")
    return image.rstrip(b"\0").decode()


@contextmanager
def compiled_to_ptx(levels: Mapping[str, str]) -> Iterator[pytest.MonkeyPatch]:
    """In here the targets `levels` are compiled to PTX of a level each, such as {"sm86": "86"}.

    By the compiler that is found, nvcc or NVRTC, and no other: an entry of the other one is machine code.
    """
    of_nvcc, of_nvrtc = toolchain.Nvcc.flags, toolchain.Nvrtc.flags

    def nvcc_flags(self: toolchain.Nvcc, target: str) -> tuple[str, ...]:
        if target not in levels:
            return of_nvcc(self, target)
        return ("-ptx", "-O3", "-std=c++17", f"--gpu-architecture=compute_{levels[target]}")

    def nvrtc_flags(self: toolchain.Nvrtc, target: str) -> tuple[str, ...]:
        flags = of_nvrtc(self, target)
        return (f"--gpu-architecture=compute_{levels[target]}", *flags[1:]) if target in levels else flags

    def nvrtc_words(self: toolchain.Nvrtc, target: str) -> list[str]:
        words = of_words(self, target)
        place = words.index(nvrtc_worker.__file__)
        return [*words[:place], str(_TO_PTX), *words[place:]] if target in levels else words

    of_words = toolchain.Nvrtc._words
    found = toolchain.for_target(next(iter(levels)))
    with pytest.MonkeyPatch.context() as patch:
        root = config.cache_root()
        patch.setenv("QUIRE_CACHE_DIR", str(root.with_name(f"{root.name}-ptx")))
        patch.setenv("QUIRE_TOOLCHAIN", found.name)
        patch.delenv("QUIRE_SYSTEM_CACHE", raising=False)
        patch.setattr(stores, "_package_stores", lambda _: ())  # prebuilt variants are machine code
        patch.setattr(toolchain.Nvcc, "flags", nvcc_flags)
        patch.setattr(toolchain.Nvrtc, "flags", nvrtc_flags)
        patch.setattr(toolchain.Nvrtc, "_words", nvrtc_words)
        patch.setattr(builder, "read_exports", exports_of)
        patch.setattr(plan_cache, "_known", plan_cache._Known())
        patch.setattr(plan_cache, "_plans", plan_cache._Plans())
        _forget()
        yield patch
    _forget()


_TO_PTX = Path(__file__).with_name("nvrtc_to_ptx.py")


def _forget() -> None:
    """What was decided and loaded for another GPU."""
    machine.cuda_target.cache_clear()
    spec._decide.cache_clear()
    planner._prepare.cache_clear()
    jit.forget()
