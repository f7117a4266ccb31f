"""Entries of the cache that hold PTX in place of machine code, made by nvcc through Quire's own builder.

Their names differ from those of cubins, as flags are part of a name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from quire import jit
from quire.errors import CacheError
from quire.jit import builder, driver, toolchain
from quire.jit.unit import Spec, read_exports

#: An array of a unit: its name, and its bytes in decimal. Zeros at the end are left out.
_ARRAY = re.compile(r"\.global \.align \d+ \.b8 (\w+)\[(\d+)\](?: = \{([^}]*)\})?;")


def exports_of(image: bytes, spec: Spec) -> dict[str, int]:
    """unit.read_exports() for PTX as well."""
    if is_machine_code(image):
        return read_exports(image, spec)
    text = image.decode()
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
        raise CacheError(f"{slug} was found as machine code, in a package of prebuilt variants: uninstall that first")
    return image.decode()


@contextmanager
def compiled_to_ptx(levels: dict[str, str]) -> Iterator[pytest.MonkeyPatch]:
    """In here the targets `levels` are compiled to PTX of a level each, such as {"sm120": "90"}; by nvcc alone."""
    flags = toolchain.Nvcc.flags

    def ptx_flags(self: toolchain.Nvcc, target: str) -> tuple[str, ...]:
        if target not in levels:
            return flags(self, target)
        return ("-ptx", "-O3", "-std=c++17", f"--gpu-architecture=compute_{levels[target]}")

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QUIRE_TOOLCHAIN", "nvcc")
        patch.setattr(toolchain.Nvcc, "flags", ptx_flags)
        patch.setattr(builder, "read_exports", exports_of)
        forget()
        yield patch
    forget()


def forget() -> None:
    """Forget what was decided and loaded for another GPU."""
    from quire.engine import planner, spec

    driver.cuda_target.cache_clear()
    spec._decide.cache_clear()
    planner._prepare.cache_clear()
    jit.forget()
