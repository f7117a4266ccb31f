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
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quire.public import *  # noqa: F403

__version__ = "0.1.0"

#: FlashInfer's names of modules, by the packages of Quire that have them: quire.page is quire.cache.page.
_MODULES = {
    "attention": ("cascade", "decode", "mla", "pod", "prefill", "sparse", "variants", "viz"),
    "cache": ("page", "quantization", "rope"),
    "calls": ("cudnn", "xqa"),
    "cli": ("aot",),
    "jit": ("config",),
}
_PLACES = {f"quire.{name}": f"quire.{package}.{name}" for package, names in _MODULES.items() for name in names}
_PLACES |= {"quire.expression": "quire.kernels.expressions", "quire.merge": "quire.cache"}
_PLACES["quire.parallel_attention"] = "quire.compat.flashinfer.parallel_attention"
#: Modules of FlashInfer that are not about attention.
_FLASHINFER_ALONE = frozenset(
    ("activation", "comm", "fp4_quantization", "fused_moe", "gemm", "logits_processor", "norm", "sampling", "topk")
)


class _Modules(MetaPathFinder, Loader):
    """Finds the modules of _PLACES under FlashInfer's names: one module, two names."""

    def find_spec(self, fullname: str, *_: Any) -> ModuleSpec | None:
        """Of a name of FlashInfer's; ModuleNotFoundError for its modules that are not about attention."""
        name = fullname.removeprefix("quire.")
        if name in _FLASHINFER_ALONE and name != fullname:  # `from quire import sampling` asks here, too
            raise ModuleNotFoundError(f"No module named {fullname!r}.{_instead(name)}")
        return ModuleSpec(fullname, self) if fullname in _PLACES else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Import the module under its own name."""
        module = import_module(_PLACES[spec.name])
        spec.loader_state = module.__spec__
        return module

    def get_code(self, fullname: str) -> Any:
        """For `python -m`, such as quire.viz."""
        spec = find_spec(_PLACES[fullname])
        return spec.loader.get_code(spec.name)  # type: ignore[union-attr]

    def exec_module(self, module: ModuleType) -> None:
        """It has been executed; the import system has replaced its spec."""
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state


sys.meta_path.append(_Modules())


def _load() -> None:
    names = import_module("quire.public")
    globals().update({name: getattr(names, name) for name in names.__all__}, __all__=names.__all__)


if not TYPE_CHECKING:  # type checkers would take any name

    def __getattr__(name: str) -> Any:
        """A submodule, or a public name, which loads all of them."""
        if name in _FLASHINFER_ALONE:
            raise AttributeError(f"module 'quire' has no attribute {name!r}.{_instead(name)}")
        if not name.startswith("__") and find_spec(f"quire.{name}") is not None:
            return import_module(f"quire.{name}")
        if not name.startswith("__") or name == "__all__":
            _load()
            if name in globals():
                return globals()[name]
        raise AttributeError(f"module 'quire' has no attribute {name!r}.{_instead(name)}")


def _instead(name: str) -> str:
    """What to do about a name that is not there."""
    from difflib import get_close_matches

    if name in _FLASHINFER_ALONE:
        return f" It has attention alone; FlashInfer's {name} is flashinfer.{name}, which Quire leaves as it is."
    found = get_close_matches(name, globals().get("__all__", ()), 1, 0.8)
    return f" Did you mean quire.{found[0]}?" if found else " dir(quire) lists the names."


def __dir__() -> list[str]:
    """What is public: a name that is not there may change."""
    _load()
    return sorted([*globals()["__all__"], "__version__"])


if "torch" in sys.modules:
    _load()
