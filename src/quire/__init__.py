"""Quire: attention kernels for LLM serving, compiled just in time.

The surface is FlashInfer's: `import quire as flashinfer` runs what its pages show.

The public names are those of quire/public.py. A program that has imported torch gets all of them at once, so that no
call pays for an import later and torch's operators are registered. Without torch they come when the first one is used:
`quire cache` and `quire --help` never need it.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quire import public
    from quire.public import *  # noqa: F403

    __all__ = public.__all__

__version__ = "0.1.0"


def _load() -> None:
    names = import_module("quire.public")
    globals().update({name: getattr(names, name) for name in names.__all__}, __all__=names.__all__)


def __getattr__(name: str) -> Any:
    """A submodule, or a public name, which loads all of them."""
    if not name.startswith("__") and find_spec(f"quire.{name}") is not None:
        return import_module(f"quire.{name}")
    if not name.startswith("__") or name == "__all__":
        _load()
        if name in globals():
            return globals()[name]
    raise AttributeError(f"module 'quire' has no attribute {name!r}")


def __dir__() -> list[str]:
    """What is public: a name that is not there may change."""
    _load()
    return sorted([*globals()["__all__"], "__version__"])


if "torch" in sys.modules:
    _load()
