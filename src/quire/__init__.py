"""Quire: attention kernels for LLM serving, compiled just in time.

The surface is FlashInfer's: `import quire as flashinfer` runs what its pages show.

dir(quire) lists the public names, help(quire.single_prefill_with_kv_cache) explains one of them, and the tutorial is in
docs/. Start with these:

    single_prefill_with_kv_cache            attention of one request
    BatchPrefillWithPagedKVCacheWrapper     of a batch over a paged cache: plan() once per batch, run() once per layer
    BatchDecodeWithPagedKVCacheWrapper      the same for one new token a request
    append_paged_kv_cache                   writes new keys and values into the pages
"""

# The public names are those of quire/public.py. A program that has imported torch gets all of them at once, so that no
# call pays for an import later and torch's operators are registered. In other programs the first use of a name loads
# them: `quire cache` and `quire --help` never need torch.

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


if not TYPE_CHECKING:  # type checkers would take any name

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
