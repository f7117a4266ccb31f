"""Which names are Quire's, and which others a stand-in for FlashInfer must have."""

from __future__ import annotations

import importlib
import importlib.util
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

import quire
from quire import public
from quire.compat.flashinfer import devices
from quire.engine.operands import ATTENTION_SINK
from quire.errors import UnsupportedError
from quire.kernels.features import DTYPES

#: The release whose surface is meant. Engines compare it with what they need.
VERSION = "0.7.2"

#: Modules of both libraries.
MODULES = (
    "attention", "cascade", "cudnn", "decode", "mla", "page", "pod", "prefill", "quantization", "rope", "sparse", "xqa",
)  # fmt: skip

#: Names that take modules of FlashInfer's JIT. An installed FlashInfer keeps its own, which run them; Quire's take a
#: quire.Variant.
_OF_JIT_MODULES = "_with_jit_module"


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
    table["jit.attention.variants"] = {"attention_sink_decl": dict.fromkeys(("fa2", "fa3"), ATTENTION_SINK)}
    of_modules = {name for names in table.values() for name in names}
    table[""] = {name: getattr(quire, name) for name in vars(public)["__all__"] if name in of_modules}
    return table


class Refusing(type):
    """A class for a name that Quire has not: it may be imported, compared, inherited from; not called."""

    path: str

    def __call__(cls, *_args: Any, **_kwargs: Any) -> Any:
        """What the name would have been called for."""
        calls = importlib.import_module("quire.compat.flashinfer.devices")
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
#: to choose FlashInfer's communication, norms or sampling.
REFUSED: Mapping[str, tuple[str, ...]] = {
    "": (
        "SfLayout", "bmm_fp8", "mm_mxfp8", "mxfp8_quantize", "nvfp4_block_scale_interleave", "nvfp4_quantize",
        "nvfp4_quantize_append_paged_kv_cache_with_slot_mapping", "shuffle_matrix_a", "shuffle_matrix_sf_a", "top_k",
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


def _counter_bytes(*_args: Any, **_kwargs: Any) -> int:
    """Of the counter buffer of trtllm_batch_decode_with_kv_cache(), which Quire does not need."""
    return 16


#: What is no kernel and can be had without FlashInfer.
OWN: Mapping[str, Mapping[str, Any]] = {
    "": {
        "__version__": VERSION, "autotune": _nothing_to_tune, "autotune_v2": _nothing_to_tune,
    },
    "autotuner": {"autotune": _nothing_to_tune},
    "decode": {
        "single_decode_with_kv_cache_with_jit_module": quire.decode.single_decode_with_kv_cache_with_jit_module,
    },
    "jit": {},
    "jit.attention": {},
    "jit.utils": {"filename_safe_dtype_map": {dtype.torch: dtype.slug for dtype in DTYPES}},
    "jit.core": {"logger": logging.getLogger("flashinfer.jit")},
    "prefill": {
        "single_prefill_with_kv_cache_with_jit_module": quire.prefill.single_prefill_with_kv_cache_with_jit_module,
    },
    "utils": {
        name: value for name, value in vars(devices).items() if getattr(value, "__module__", "") == devices.__name__
    } | {
        "GPUArchitectureError": devices.GPUArchitectureError,
        "get_alibi_slopes": quire.get_alibi_slopes,
        "get_trtllm_gen_multi_ctas_kv_counter_bytes": _counter_bytes,
    },
}  # fmt: skip
