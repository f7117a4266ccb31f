"""A package `flashinfer` for programs where none is installed: Quire's names, and refusals for some others."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import Distribution, DistributionFinder
from os import PathLike
from pathlib import Path
from types import ModuleType
from typing import Any

from quire.compat.flashinfer.names import OWN, REFUSED, VERSION, refusing, served

_ROOT = "flashinfer"
#: vLLM takes FlashInfer as usable where this package is, or a compiler; Quire needs neither with a warm cache.
_CUBINS = "flashinfer_cubin"


def _contents(tail: str) -> dict[str, Any]:
    """The names of a module; of the package with its modules."""
    path = f"{tail}." if tail else ""
    names: dict[str, Any] = {name: refusing(path + name) for name in REFUSED.get(tail, ())}
    return names | dict(OWN.get(tail, {})) | dict(served().get(tail, {}))


def _modules() -> list[str]:
    """All modules but the package itself, outer ones first."""
    return sorted({*served(), *REFUSED, *OWN} - {""})


class _Distribution(Distribution):
    """What importlib.metadata says of the stand-in."""

    def __init__(self, name: str) -> None:
        self._name = name

    def read_text(self, filename: str) -> str | None:
        """The only file of it."""
        known = f"Metadata-Version: 2.1\nName: {self._name}\nVersion: {VERSION}\n"
        return known if filename == "METADATA" else None

    def locate_file(self, path: str | PathLike[str]) -> Path:
        """Beside this file; there are none."""
        return Path(__file__).parent / path


class _Finder(DistributionFinder, MetaPathFinder, Loader):
    """Finds and makes the modules, and their distributions."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """A spec for the package and each of its modules, wherever an import looks for it."""
        del path, target
        known = fullname in (_ROOT, _CUBINS)
        if not known and fullname.startswith(f"{_ROOT}."):
            known = fullname.removeprefix(f"{_ROOT}.") in _modules()
        return ModuleSpec(fullname, self, is_package=True) if known else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """An empty module."""
        return ModuleType(spec.name, "Quire in the place of FlashInfer: see quire.compat.flashinfer.")

    def exec_module(self, module: ModuleType) -> None:
        """Fill it."""
        if module.__name__ == _CUBINS:
            return
        vars(module).update(_contents(module.__name__.removeprefix(_ROOT).removeprefix(".")))
        if module.__name__ == _ROOT:
            for tail in _modules():
                importlib.import_module(f"{_ROOT}.{tail}")
            vars(module).update(_contents(""))  # a function goes before a module of its name, as in FlashInfer

    def find_distributions(
        self,
        context: DistributionFinder.Context = DistributionFinder.Context(),  # noqa: B008  # the signature of the base
    ) -> Iterable[Distribution]:
        """Those of the two packages, by name."""
        name = (context.name or "").lower().replace("-", "_")
        return [_Distribution(name.replace("_", "-"))] if name in ("flashinfer_python", _CUBINS) else []


_finder = _Finder()


def is_active() -> bool:
    """Whether the package can be imported."""
    return _finder in sys.meta_path


def activate() -> None:
    """Make the package importable."""
    sys.meta_path.append(_finder)


def deactivate() -> None:
    """Forget it."""
    if not is_active():
        return
    sys.meta_path.remove(_finder)
    for name in [name for name in sys.modules if name.split(".")[0] in (_ROOT, _CUBINS)]:
        del sys.modules[name]
