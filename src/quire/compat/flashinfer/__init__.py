"""Quire as a drop-in replacement of FlashInfer, for programs that import `flashinfer`.

    import quire.compat.flashinfer as compat
    compat.activate()               # before or after `import flashinfer`

    python -m quire.compat.flashinfer serve.py --model ...

Once Quire is installed, vLLM and SGLang call activate() in each of their processes, by way of quire.compat.engines
(VLLM_PLUGINS and SGLANG_PLUGINS restrict which plug-ins they load).

If FlashInfer is installed, Quire replaces its functions for attention, pages and packed bits, and leaves all others:
norms, sampling, GEMMs, MoE, communication. A call that Quire refuses, because of an argument or because no kernel takes
the problem, goes to FlashInfer; the log says so once for each cause, and report() counts such calls. Wrong input stays
an error. Nothing is replaced on a machine with a GPU on which no variant of Quire has run (`quire matrix`), unless
QUIRE_FLASHINFER=on says so; QUIRE_FLASHINFER=off leaves FlashInfer alone anywhere.

If FlashInfer is not installed, Quire provides a package of that name, with the version that engines require. The
package has Quire's functions, and sampling, norms and activations in plain torch. It also has those other names that
engines import unconditionally; calling one of them raises UnsupportedError.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, wraps
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import Distribution, DistributionFinder
from os import PathLike
from pathlib import Path
from types import ModuleType
from typing import Any

import quire
from quire import public
from quire.compat.flashinfer import fallback, plain_torch
from quire.engine.operands import ATTENTION_SINK, SinkText
from quire.errors import UnsupportedError
from quire.jit import config, events
from quire.kernels.features import DTYPES

__all__ = ["activate", "deactivate", "report"]


def activate() -> None:
    """Serve `flashinfer`'s attention from now on, in this process. May be called repeatedly."""
    wish = config.flashinfer_overlay()
    if standin.is_active() or overlay.is_active() or wish == "off":
        return
    is_installed = _installed() is not None
    if is_installed and wish == "auto" and (gpus := fallback.untried_gpus()):
        events.info(
            f"FlashInfer keeps its attention, as no variant of Quire has run on {', '.join(gpus)} (quire matrix); "
            f"QUIRE_FLASHINFER=on replaces it"
        )
        return
    fallback.start("flashinfer")
    (overlay if is_installed else standin).activate()


def deactivate() -> None:
    """Undo activate(). Names that a program has imported from `flashinfer` in the meantime remain Quire's."""
    overlay.deactivate()
    standin.deactivate()
    fallback.stop("flashinfer")


def report() -> str:
    """The calls since activate(), one per line: those served, how often and by which kernel, those left to an installed
    FlashInfer, and why, and those refused.

    >>> from quire.compat import flashinfer as compat
    >>> compat.activate()
    >>> q, k, v = torch.randn(8, 64), torch.randn(10, 2, 64), torch.randn(10, 2, 64)
    >>> quire.single_decode_with_kv_cache(q, k, v).shape
    torch.Size([8, 64])
    >>> compat.report().split()[:3]
    ['served', 'single_decode_with_kv_cache', '1']
    >>> compat.deactivate()
    """
    return fallback.report()


def _installed() -> ModuleSpec | None:
    """Where FlashInfer is installed, or was imported from."""
    loaded = sys.modules.get("flashinfer")
    return importlib.util.find_spec("flashinfer") if loaded is None else loaded.__spec__


# --- names -----------------------------------------------------------------------------------------------------------


#: The release whose surface is meant. Engines compare it with what they need.
VERSION = "0.7.2"

#: Modules of both libraries.
MODULES = (
    "attention", "cascade", "cudnn", "decode", "mla", "page", "parallel_attention", "pod", "prefill", "quantization",
    "rope", "sparse", "xqa",
)  # fmt: skip

#: Names that take modules of FlashInfer's JIT. An installed FlashInfer keeps its own, which run them; Quire's take a
#: quire.Variant.
_OF_JIT_MODULES = "_with_jit_module"
#: The module with C++ texts. Those of an installed FlashInfer stay, of a type that Quire recognises.
_OF_TEXT = "jit.attention.variants"


@cache
def served() -> Mapping[str, Mapping[str, Any]]:
    """Quire's names by the module of FlashInfer in which they are; "" is the package itself."""
    table = {}
    for module in MODULES:
        if importlib.util.find_spec(f"quire.{module}") is not None:
            namespace = importlib.import_module(f"quire.{module}")
            names = [name for name in namespace.__all__ if not name.endswith(_OF_JIT_MODULES)]
            table[module] = {name: getattr(namespace, name) for name in names}
    # What run() then takes is built in.
    table[_OF_TEXT] = {"attention_sink_decl": dict.fromkeys(("fa2", "fa3"), ATTENTION_SINK)}
    of_modules = {name for names in table.values() for name in names}
    table[""] = {name: getattr(quire, name) for name in vars(public)["__all__"] if name in of_modules}
    return table


class Refusing(type):
    """A class for a name that Quire has not: it may be imported, compared, inherited from; not called."""

    path: str

    def __call__(cls, *_args: Any, **_kwargs: Any) -> Any:
        """What the name would have been called for."""
        calls = importlib.import_module("quire.compat.flashinfer.fallback")
        calls.refused(cls.path)
        raise UnsupportedError(
            f"flashinfer.{cls.path}: Quire stands in for FlashInfer's attention alone and has no such kernel; install "
            f"flashinfer-python, which is then used for it, or choose another implementation in the engine."
        )

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return refusing(f"{cls.path}.{name}")


def refusing(path: str) -> Refusing:
    """A placeholder for the name `path` of the package flashinfer."""
    return Refusing(path.rpartition(".")[2], (), {"path": path, "__doc__": "Not a kernel of Quire's."})


#: Names outside attention that vLLM and SGLang import without a guard. No module is here that engines look for in order
#: to choose FlashInfer's communication or MoE.
REFUSED: Mapping[str, tuple[str, ...]] = {
    "": (
        "SfLayout", "bmm_fp8", "mm_mxfp8", "mxfp8_quantize", "nvfp4_block_scale_interleave", "nvfp4_quantize",
        "shuffle_matrix_a", "shuffle_matrix_sf_a", "top_k",
    ),
    "fp4_quantization": ("block_scale_interleave",),
    "fused_moe": (),
    "fused_moe.core": ("get_w2_permute_indices_with_cache", "_maybe_get_cached_w3_w1_permute_indices"),
    "gemm": ("fp8_blockscale_gemm_sm90", "gemm_fp8_nt_groupwise"),
    "utils": ("FP4Tensor",),
}  # fmt: skip


@contextmanager
def _nothing_to_tune(*_args: Any, **_kwargs: Any) -> Iterator[None]:
    """autotune() of FlashInfer: Quire plans without measuring."""
    yield


def _check_cuda_arch(*_args: Any, **_kwargs: Any) -> None:
    """vLLM then takes its own sampler, which is faster than one of plain torch."""
    raise RuntimeError("Quire stands in for FlashInfer, and compiles no kernels of FlashInfer's for any GPU.")


class _WithoutTokenScales(quire.mla.BatchMLAPagedAttentionWrapper):
    """The wrapper of latents for programs that look for `ckv_scale_arr`.

    vLLM concludes from this argument that FlashInfer's plans are there, whose arrays its sparse MLA on Hopper changes.
    """

    @wraps(quire.mla.BatchMLAPagedAttentionWrapper.run)
    def run(self, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        """The same."""
        return super().run(*args, **kwargs)

    _whole = inspect.signature(run)
    _shown = tuple(parameter for name, parameter in _whole.parameters.items() if name != "ckv_scale_arr")
    run.__signature__ = _whole.replace(parameters=_shown)  # type: ignore[attr-defined]


_WithoutTokenScales.__name__ = _WithoutTokenScales.__qualname__ = "BatchMLAPagedAttentionWrapper"


def _counter_bytes(*_args: Any, **_kwargs: Any) -> int:
    """Of the counter buffer of trtllm_batch_decode_with_kv_cache(), which Quire does not need."""
    return 16


#: What is no kernel and can be had without FlashInfer.
OWN: Mapping[str, Mapping[str, Any]] = {
    "": {
        "__version__": VERSION, "autotune": _nothing_to_tune, "autotune_v2": _nothing_to_tune,
        **plain_torch.NORMS, **plain_torch.ACTIVATIONS,
    },
    "activation": plain_torch.ACTIVATIONS,
    "autotuner": {"autotune": _nothing_to_tune},
    "concat_ops": {"concat_mla_k": plain_torch.concat_mla_k},
    "decode": {
        "single_decode_with_kv_cache_with_jit_module": quire.decode.single_decode_with_kv_cache_with_jit_module,
    },
    "jit": {},
    "jit.attention": {},
    "jit.utils": {"filename_safe_dtype_map": {dtype.torch: dtype.slug for dtype in DTYPES}},
    "jit.core": {"logger": logging.getLogger("flashinfer.jit"), "check_cuda_arch": _check_cuda_arch},
    "norm": plain_torch.NORMS,
    "prefill": {
        "single_prefill_with_kv_cache_with_jit_module": quire.prefill.single_prefill_with_kv_cache_with_jit_module,
    },
    "sampling": plain_torch.SAMPLING,
    "utils": {
        **plain_torch.UTILS,
        "get_alibi_slopes": quire.get_alibi_slopes,
        "get_trtllm_gen_multi_ctas_kv_counter_bytes": _counter_bytes,
    },
}  # fmt: skip


# --- finders ---------------------------------------------------------------------------------------------------------


_ROOT = "flashinfer"
#: vLLM takes FlashInfer as usable where this package is, or a compiler; Quire needs neither with a warm cache.
_CUBINS = "flashinfer_cubin"


def _contents(tail: str) -> dict[str, Any]:
    """The names of a module; of the package with its modules."""
    path = f"{tail}." if tail else ""
    names: dict[str, Any] = {name: refusing(path + name) for name in REFUSED.get(tail, ())}
    names |= dict(OWN.get(tail, {})) | dict(served().get(tail, {}))
    replaced = {_WithoutTokenScales.__name__: _WithoutTokenScales}
    return {name: replaced.get(name, value) for name, value in names.items()}


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


def spec_and_then(
    finder: MetaPathFinder, fullname: str, path: Sequence[str] | None, target: ModuleType | None,
    then: Callable[[str], None],
) -> ModuleSpec | None:  # fmt: skip
    """The spec that others than `finder` find, whose loader calls `then` with the name of the module afterwards."""
    finders = (other for other in sys.meta_path if other is not finder)
    spec = next(filter(None, (other.find_spec(fullname, path, target) for other in finders)), None)
    if spec is not None and spec.loader is not None:
        exec_module = spec.loader.exec_module

        def exec_and_then(module: ModuleType) -> None:
            exec_module(module)
            then(fullname)

        spec.loader.exec_module = exec_and_then  # type: ignore[method-assign]  # of this loader alone
    return spec


_MISSING = object()


class _Overlay(MetaPathFinder):
    """Quire's names over those of an installed FlashInfer, also of each module that is imported later.

    While the package itself is being imported nothing is replaced: its own modules keep what they inherit from. Behind
    each of Quire's names stands what was there.
    """

    def __init__(self) -> None:
        self._laid: list[tuple[Any, Any, Any]] = []  #: a value of Quire's, what was there, and both as one
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
        return spec_and_then(self, fullname, path, target, self.loaded)

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
                is_done = any(present is made for *_, made in self._laid)
                if not is_done and (tail == "" or not isinstance(present, ModuleType)):
                    self._replaced.append((module, name, present))
                    setattr(module, name, self._over(*(getattr(x, name, x) for x in (value, present))))

    def _over(self, value: Any, present: Any) -> Any:
        """Quire's `value` with what is `present` behind it: one object under all of their names."""
        for mine, theirs, made in self._laid:
            if mine is value and theirs is present:
                return made
        if isinstance(value, dict) and isinstance(present, dict):
            made = {name: SinkText(text) for name, text in present.items()}
        else:
            made = value if present is _MISSING else fallback.over(value, present)
        self._laid.append((value, present, made))
        return made


overlay = _Overlay()
