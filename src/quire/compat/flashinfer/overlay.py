"""Quire's names over those of an installed FlashInfer."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from quire.compat.flashinfer.names import served

_ROOT = "flashinfer"
_replaced: list[tuple[ModuleType, str, Any]] = []  # with what was there before
_MISSING = object()


class _Finder(MetaPathFinder):
    """Lays the names over each module of FlashInfer that is imported later.

    While the package itself is being imported nothing is replaced: its own modules keep what they inherit from.
    """

    is_loaded = False  #: the package

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
        self.is_loaded |= fullname == _ROOT
        if self.is_loaded:
            _replace_all()


_finder = _Finder()


def is_active() -> bool:
    """Whether names are replaced."""
    return _finder in sys.meta_path


def activate() -> None:
    """Replace names in what is loaded, and in what will be."""
    sys.meta_path.insert(0, _finder)
    _finder.is_loaded = _ROOT in sys.modules
    _replace_all()


def deactivate() -> None:
    """Put back what was there."""
    if is_active():
        sys.meta_path.remove(_finder)
    for module, name, value in reversed(_replaced):
        if value is _MISSING:
            delattr(module, name)
        else:
            setattr(module, name, value)
    _replaced.clear()


def _replace_all() -> None:
    for tail, names in served().items():
        module = sys.modules.get(f"{_ROOT}.{tail}" if tail else _ROOT)
        if module is None:
            continue
        for name, value in names.items():
            present = getattr(module, name, _MISSING)
            if present is not value and (tail == "" or not isinstance(present, ModuleType)):
                _replaced.append((module, name, present))
                setattr(module, name, value)
