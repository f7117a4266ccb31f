"""Finders of modules that serve Quire's names under `flashinfer`: a stand-in for the package, or names laid over it."""

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


class _StandIn(DistributionFinder, MetaPathFinder, Loader):
    """A package `flashinfer` for programs where none is installed: Quire's names, and refusals for some others.

    Finds and makes its modules, and their distributions.
    """

    def is_active(self) -> bool:
        """Whether the package can be imported."""
        return self in sys.meta_path

    def activate(self) -> None:
        """Make the package importable."""
        sys.meta_path.append(self)

    def deactivate(self) -> None:
        """Forget it."""
        if not self.is_active():
            return
        sys.meta_path.remove(self)
        for name in [name for name in sys.modules if name.split(".")[0] in (_ROOT, _CUBINS)]:
            del sys.modules[name]

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


standin = _StandIn()


_MISSING = object()


class _Overlay(MetaPathFinder):
    """Quire's names over those of an installed FlashInfer, also of each module that is imported later.

    While the package itself is being imported nothing is replaced: its own modules keep what they inherit from.
    """

    def __init__(self) -> None:
        self._is_loaded = False  #: the package
        self._replaced: list[tuple[ModuleType, str, Any]] = []  #: with what was there before

    def is_active(self) -> bool:
        """Whether names are replaced."""
        return self in sys.meta_path

    def activate(self) -> None:
        """Replace names in what is loaded, and in what will be."""
        sys.meta_path.insert(0, self)
        self._is_loaded = _ROOT in sys.modules
        self._replace_all()

    def deactivate(self) -> None:
        """Put back what was there."""
        if self.is_active():
            sys.meta_path.remove(self)
        for module, name, value in reversed(self._replaced):
            if value is _MISSING:
                delattr(module, name)
            else:
                setattr(module, name, value)
        self._replaced.clear()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec that others find, with a loader that replaces names afterwards."""
        root, _, tail = fullname.partition(".")
        if root != _ROOT or tail not in served():
            return None
        finders = (finder for finder in sys.meta_path if finder is not self)
        spec = next(filter(None, (finder.find_spec(fullname, path, target) for finder in finders)), None)
        if spec is not None and spec.loader is not None:
            exec_module = spec.loader.exec_module

            def exec_and_replace(module: ModuleType) -> None:
                exec_module(module)
                self.loaded(fullname)

            spec.loader.exec_module = exec_and_replace  # type: ignore[method-assign]  # of this loader alone
        return spec

    def loaded(self, fullname: str) -> None:
        """A module has been executed."""
        self._is_loaded |= fullname == _ROOT
        if self._is_loaded:
            self._replace_all()

    def _replace_all(self) -> None:
        for tail, names in served().items():
            module = sys.modules.get(f"{_ROOT}.{tail}" if tail else _ROOT)
            if module is None:
                continue
            for name, value in names.items():
                present = getattr(module, name, _MISSING)
                if present is not value and (tail == "" or not isinstance(present, ModuleType)):
                    self._replaced.append((module, name, present))
                    setattr(module, name, value)


overlay = _Overlay()
