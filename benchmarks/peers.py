"""Providers: who can compute a row. Each refuses a row with a reason, or prepares once and returns what launches.

A provider sees several sets of inputs of one row (so that small rows can be rotated through more memory than the L2
holds) and plans for all of them at once, as a serving engine does over its layers. What is prepared allocates nothing
that it could have reserved and never waits for the device, so that it can be captured in a CUDA graph.

Packages that are not installed are a reason, not an error.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import quire
from inputs import Inputs
from rows import Row

__all__ = ["Launch", "Provider", "Refused", "providers", "select_providers"]

#: Launches the set of that number and returns its output [nnz_qo, num_qo_heads, head_dim_vo].
Launch = Callable[[int], torch.Tensor]
Sets = list[Inputs]

WORKSPACE = 512 << 20  #: of each library; Quire widens 8-bit keys into it, where it holds them


class Refused(Exception):
    """A provider does not take a row; the text says why."""


@dataclass(frozen=True)
class Provider:
    """Something that computes rows."""

    name: str
    peer: bool  #: measured against, not by
    reject: Callable[[Row, torch.device], str | None]  #: why not; None: it takes the row as far as can be told so far
    prepare: Callable[[Sets], Launch]  #: raises Refused where only planning tells


def providers() -> list[Provider]:
    """All of them, installed or not: quire with each backend first."""
    return [*_quire_providers(), *_flashinfer_providers(), *_fa3_providers(), *_torch_providers()]


def select_providers(names: tuple[str, ...]) -> list[Provider]:
    """Those of these names, in the order of the list; () all. Raises ValueError for an unknown name."""
    known = providers()
    for name in names:
        if name not in {provider.name for provider in known}:
            raise ValueError(f"--providers: expected some of {', '.join(p.name for p in known)}, got {name!r}")
    return [provider for provider in known if not names or provider.name in names]


@cache
def _workspace(device: torch.device, num_bytes: int, owner: str) -> torch.Tensor:  # noqa: ARG001  (one per owner)
    return torch.zeros(num_bytes, dtype=torch.uint8, device=device)


# --- quire -----------------------------------------------------------------------------------------------------------


def _quire_providers() -> list[Provider]:
    """Each backend, and what the promise of determinism.py costs."""
    promising = Provider("quire-deterministic", False, partial(_quire_rejects, "auto"), partial(_quire, "auto", True))
    plain = [
        Provider(
            "quire" if backend == "auto" else backend.replace(":", "-"),
            False,
            partial(_quire_rejects, backend),
            partial(_quire, backend, None),
        )
        for backend in quire.backends()
    ]
    return [*plain, promising]


def _quire_rejects(backend: str, row: Row, device: torch.device) -> str | None:  # noqa: ARG001
    if backend == "quire:cpu" and device.type != "cpu":
        return "the tensors are on a GPU"
    return None


def _quire(backend: str, deterministic: bool | None, sets: Sets) -> Launch:
    """Plan with the wrapper that the row's kind is for."""
    prepare = {"ragged": _quire_ragged, "paged": _quire_paged, "decode": _quire_decode}[sets[0].row.kind]
    try:
        built = {"backend": backend, "deterministic": deterministic}
        return prepare(built, sets, _workspace(sets[0].q.device, WORKSPACE, "quire"))
    except quire.UnsupportedError as error:
        raise Refused(_reasons(error)) from error


def _reasons(error: quire.UnsupportedError) -> str:
    """What the kernels that were asked say, on one line; the error's first line if none was."""
    first, *verdicts = str(error).splitlines()
    asked = [" ".join(line.split()) for line in verdicts if not line.endswith("was asked for")]
    return "; ".join(asked) or first


def _quire_ragged(built: dict[str, Any], sets: Sets, workspace: torch.Tensor) -> Launch:
    row, indices = sets[0].row, sets[0].indices
    graph = _graph_buffers(sets[0], qo_indptr_buf=indices.qo_indptr, kv_indptr_buf=indices.kv_indptr)
    wrapper = quire.BatchPrefillWithRaggedKVCacheWrapper(workspace, **built, **graph)
    wrapper.plan(
        indices.qo_indptr, indices.kv_indptr, row.num_qo_heads, row.num_kv_heads, row.head_dim_qk, row.head_dim_vo,
        **_masking(sets[0]), **_logits(row), q_data_type=row.q_type, kv_data_type=row.kv_type,
    )  # fmt: skip
    return lambda i: _tensor(wrapper.run(sets[i].q, sets[i].k, sets[i].v, out=sets[i].out, sinks=sets[i].sinks))


def _quire_paged(built: dict[str, Any], sets: Sets, workspace: torch.Tensor) -> Launch:
    row, indices = sets[0].row, sets[0].indices
    graph = _graph_buffers(
        sets[0], qo_indptr_buf=indices.qo_indptr, paged_kv_indptr_buf=indices.page_indptr,
        paged_kv_indices_buf=indices.pages, paged_kv_last_page_len_buf=indices.last_page_len,
    )  # fmt: skip
    wrapper = quire.BatchPrefillWithPagedKVCacheWrapper(workspace, **built, **graph)
    wrapper.plan(
        indices.qo_indptr, indices.page_indptr, indices.pages, indices.last_page_len, row.num_qo_heads,
        row.num_kv_heads, row.head_dim_qk, row.page_size, **_masking(sets[0]), **_logits(row),
        q_data_type=row.q_type, kv_data_type=row.kv_type,
    )  # fmt: skip
    return lambda i: _tensor(wrapper.run(sets[i].q, _cache(sets[i]), out=sets[i].out, sinks=sets[i].sinks))


def _quire_decode(built: dict[str, Any], sets: Sets, workspace: torch.Tensor) -> Launch:
    row, indices = sets[0].row, sets[0].indices
    graph = _graph_buffers(
        sets[0], paged_kv_indptr_buffer=indices.page_indptr, paged_kv_indices_buffer=indices.pages,
        paged_kv_last_page_len_buffer=indices.last_page_len,
    )  # fmt: skip
    wrapper = quire.BatchDecodeWithPagedKVCacheWrapper(workspace, **built, **graph)
    wrapper.plan(
        indices.page_indptr, indices.pages, indices.last_page_len, row.num_qo_heads, row.num_kv_heads,
        row.head_dim_qk, row.page_size, **_logits(row), q_data_type=row.q_type, kv_data_type=row.kv_type,
        q_len_per_req=row.qo_lens[0],
    )  # fmt: skip
    return lambda i: _tensor(wrapper.run(sets[i].q, _cache(sets[i]), out=sets[i].out, sinks=sets[i].sinks))


def _graph_buffers(inputs: Inputs, **like: torch.Tensor) -> dict[str, Any]:
    """What a wrapper whose run() is going to be captured is constructed with; nothing for a row that is not small."""
    device = inputs.q.device
    if device.type != "cuda" or not inputs.row.is_small:
        return {}
    return {"use_cuda_graph": True, **{name: tensor.to(device) for name, tensor in like.items()}}


def _tensor(result: Any) -> torch.Tensor:
    if not isinstance(result, torch.Tensor):
        raise TypeError(f"run(): expected one tensor, got {type(result).__name__}.")
    return result


def _cache(inputs: Inputs) -> torch.Tensor:
    if inputs.cache is None:
        raise Refused("the row has no pages")
    return inputs.cache


def _masking(inputs: Inputs) -> dict[str, Any]:
    """causal=, or a flat custom mask that equals it."""
    row = inputs.row
    if row.mask != "custom":
        return {"causal": row.mask == "causal"}
    device = inputs.q.device
    parts = [
        (torch.arange(kv, device=device) <= torch.arange(q, device=device)[:, None] + kv - q).flatten()
        for q, kv in zip(row.qo_lens, row.kv_lens, strict=True)
    ]
    return {"custom_mask": torch.cat(parts)}


def _logits(row: Row) -> dict[str, Any]:
    return {
        "sm_scale": row.sm_scale, "window_left": row.window_left, "logits_soft_cap": row.soft_cap,
        "pos_encoding_mode": row.pos_encoding,
    }  # fmt: skip


# --- FlashInfer ------------------------------------------------------------------------------------------------------


def _flashinfer_providers() -> list[Provider]:
    return [
        Provider("fi-fa2", True, partial(_flashinfer_rejects, "fa2"), partial(_flashinfer_prefill, "fa2")),
        Provider("fi-fa3", True, partial(_flashinfer_rejects, "fa3"), partial(_flashinfer_prefill, "fa3")),
        Provider("fi-decode", True, partial(_flashinfer_rejects, "decode"), partial(_flashinfer_decode, False)),
        Provider("fi-decode-tc", True, partial(_flashinfer_rejects, "decode-tc"), partial(_flashinfer_decode, True)),
        Provider("fi-xqa", True, partial(_flashinfer_rejects, "xqa"), _flashinfer_xqa),
    ]


def _missing(package: str, device: torch.device) -> str | None:
    if importlib.util.find_spec(package) is None:
        return f"{package} is not installed"
    return None if device.type == "cuda" else "it needs a GPU"


def _flashinfer_rejects(backend: str, row: Row, device: torch.device) -> str | None:
    q_len = max(row.qo_lens)
    if reason := _missing("flashinfer", device):
        return reason
    if backend == "fa3" and row.mask == "custom":
        return "fa3 has no custom masks"
    if backend in ("fa3", "xqa") and row.pos_encoding != "NONE":
        return f"{backend} has no position encodings"
    if backend == "fa3" and row.kv_dtype != row.dtype:
        return f"fa3 does not take kv dtype {row.kv_dtype} with q dtype {row.dtype}"
    if row.sinks and (row.kind == "ragged" or backend.startswith("decode")):
        return "its sinks are in other wrappers"
    if backend in ("decode", "decode-tc", "xqa") and row.kind != "decode":
        return "it only decodes"
    if backend == "decode" and q_len > 1:
        return "one query a request"
    if backend in ("fa2", "fa3") and row.kind == "decode" and q_len == 1 and not row.sinks:
        return "its decode wrappers are for this"  # decode-tc is the same kernel
    if backend == "xqa" and row.soft_cap:
        return "it has no soft cap"
    return None


def _flashinfer_prefill(backend: str, sets: Sets) -> Launch:
    import flashinfer

    row, indices = sets[0].row, sets[0].indices
    workspace = _workspace(sets[0].q.device, WORKSPACE, "flashinfer")
    types = {"q_data_type": row.q_type, "kv_data_type": row.kv_type}
    if row.kind == "ragged":
        ragged = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace, backend=backend)
        ragged.plan(
            indices.qo_indptr, indices.kv_indptr, row.num_qo_heads, row.num_kv_heads, row.head_dim_qk,
            head_dim_vo=row.head_dim_vo, **_masking(sets[0]), **_logits(row), **types,
        )  # fmt: skip
        return lambda i: ragged.run(sets[i].q, sets[i].k, sets[i].v, out=sets[i].out)
    paged = _flashinfer_paged(flashinfer, backend, row, workspace)
    paged.plan(
        indices.qo_indptr, indices.page_indptr, indices.pages, indices.last_page_len, row.num_qo_heads,
        row.num_kv_heads, row.head_dim_qk, row.page_size, **_masking(sets[0]), **_logits(row), **types,
    )  # fmt: skip
    if row.sinks:  # of the wrapper with sinks, run() takes them and the scale by position
        return lambda i: paged.run(sets[i].q, _cache(sets[i]), sets[i].sinks, row.sm_scale, out=sets[i].out)
    return lambda i: paged.run(sets[i].q, _cache(sets[i]), out=sets[i].out)


def _flashinfer_paged(flashinfer: Any, backend: str, row: Row, workspace: torch.Tensor) -> Any:
    if not row.sinks:
        return flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend=backend)
    return flashinfer.BatchAttentionWithAttentionSinkWrapper(
        workspace, "NHD", backend=backend, q_data_type=row.q_type, kv_data_type=row.kv_type,
        head_dim_qk=row.head_dim_qk, head_dim_vo=row.head_dim_vo, window_left=row.window_left,
    )  # fmt: skip


def _flashinfer_decode(use_tensor_cores: bool, sets: Sets) -> Launch:
    import flashinfer

    row, indices = sets[0].row, sets[0].indices
    workspace = _workspace(sets[0].q.device, WORKSPACE, "flashinfer")
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        workspace, "NHD", use_tensor_cores=use_tensor_cores, backend="fa2"
    )
    wrapper.plan(
        indices.page_indptr, indices.pages, indices.last_page_len, row.num_qo_heads, row.num_kv_heads, row.head_dim_qk,
        row.page_size, **_logits(row), q_data_type=row.q_type, kv_data_type=row.kv_type,
        q_len_per_req=row.qo_lens[0],
    )  # fmt: skip
    return lambda i: wrapper.run(sets[i].q, _cache(sets[i]), out=sets[i].out, q_len_per_req=row.qo_lens[0])


def _flashinfer_xqa(sets: Sets) -> Launch:
    """Needs zeros in its workspace once, and int32 tables on the device. The tree mask is the causal one."""
    from flashinfer.decode import xqa_batch_decode_with_kv_cache

    row, device = sets[0].row, sets[0].q.device
    workspace = _workspace(device, WORKSPACE, "xqa")
    table = sets[0].indices.page_table().to(device)
    lengths = torch.tensor(row.kv_lens, dtype=torch.uint32, device=device)
    q_len = row.qo_lens[0]
    shape = (row.batch_size, q_len) if q_len > 1 else (row.batch_size,)
    mask = _draft_mask(row.batch_size, q_len).to(device) if q_len > 1 else None

    def launch(i: int) -> torch.Tensor:
        out = sets[i].out.view(*shape, row.num_qo_heads, row.head_dim_vo)
        xqa_batch_decode_with_kv_cache(
            sets[i].q, _cache(sets[i]), workspace, table, lengths, max(row.kv_lens), bmm1_scale=row.sm_scale,
            bmm2_scale=1.0, window_left=row.window_left, out=out, sinks=sets[i].sinks, q_len_per_req=q_len, mask=mask,
        )  # fmt: skip
        return sets[i].out

    return launch


def _draft_mask(batch_size: int, q_len: int) -> torch.Tensor:
    """[batch_size, q_len, words of 16 bits, in whole pairs]: query i sees the drafts 0..i."""
    words = -(-q_len // 32) * 2
    visible = torch.arange(words * 16) <= torch.arange(q_len)[:, None]
    bits = visible.view(q_len, words, 16).to(torch.int32) << torch.arange(16, dtype=torch.int32)
    return bits.sum(-1).to(torch.int32).to(torch.uint16).expand(batch_size, q_len, words).contiguous()


# --- FlashAttention-3 ------------------------------------------------------------------------------------------------


def _fa3_providers() -> list[Provider]:
    return [Provider("fa3", True, _fa3_rejects, _fa3)]


@cache
def _fa3_lacks(feature: str) -> bool:
    """Whether the installed wheel was built without a feature, such as PAGEDKV."""
    if importlib.util.find_spec("fa3_fwd_config") is None:
        return False
    import fa3_fwd_config

    return bool(fa3_fwd_config.CONFIG["build_flags"].get(f"FLASHATTENTION_DISABLE_{feature}", False))


def _fa3_rejects(row: Row, device: torch.device) -> str | None:
    if reason := _missing("fa3_fwd_interface", device):
        return reason
    needs = {
        "LOCAL": row.window_left >= 0,
        "SOFTCAP": row.soft_cap > 0,
        "FP16": row.dtype == "fp16",
        "PAGEDKV": bool(row.page_size) and not row.uniform,  # equal lengths run on a contiguous copy instead
    }
    for feature, needed in needs.items():
        if needed and _fa3_lacks(feature):
            return f"the wheel was built with FLASHATTENTION_DISABLE_{feature}"
    if row.mask == "custom":
        return "it has no custom masks"
    if row.pos_encoding != "NONE":
        return "it is not asked for position encodings"
    if row.sinks:
        return "it has no sinks"
    return None if row.kv_dtype == row.dtype else f"kv dtype {row.kv_dtype} differs from q dtype {row.dtype}"


def _fa3(sets: Sets) -> Launch:
    row = sets[0].row
    if row.kind == "ragged":
        return _fa3_ragged(sets)
    return _fa3_contiguous(sets) if _fa3_lacks("PAGEDKV") else _fa3_paged(sets)


def _fa3_options(row: Row) -> dict[str, Any]:
    return {
        "softmax_scale": row.sm_scale,
        "causal": row.mask == "causal",
        "window_size": (row.window_left, 0 if row.window_left >= 0 else -1),
        "softcap": row.soft_cap,
    }


def _fa3_ragged(sets: Sets) -> Launch:
    from fa3_fwd_interface import flash_attn_varlen_func

    row, device = sets[0].row, sets[0].q.device
    qo, kv = sets[0].indices.qo_indptr.to(device), sets[0].indices.kv_indptr.to(device)
    longest = max(row.qo_lens), max(row.kv_lens)
    return lambda i: flash_attn_varlen_func(sets[i].q, sets[i].k, sets[i].v, qo, kv, *longest, **_fa3_options(row))


def _fa3_contiguous(sets: Sets) -> Launch:
    """Equal lengths on keys and values without pages: a lighter task than the row's, where the wheel has no pages."""
    from fa3_fwd_interface import flash_attn_with_kvcache

    row = sets[0].row
    lengths = torch.tensor(row.kv_lens, dtype=torch.int32, device=sets[0].q.device)
    copies = [inputs.contiguous() for inputs in sets]
    shape = (row.batch_size, row.qo_lens[0])
    return lambda i: flash_attn_with_kvcache(
        sets[i].q.unflatten(0, shape), *copies[i], cache_seqlens=lengths, **_fa3_options(row)
    ).flatten(0, 1)


def _fa3_paged(sets: Sets) -> Launch:
    from fa3_fwd_interface import flash_attn_with_kvcache

    row, device = sets[0].row, sets[0].q.device
    lengths = torch.tensor(row.kv_lens, dtype=torch.int32, device=device)
    table = sets[0].indices.page_table().to(device)
    qo = sets[0].indices.qo_indptr.to(device)
    return lambda i: flash_attn_with_kvcache(
        sets[i].q, sets[i].k, sets[i].v, cache_seqlens=lengths, page_table=table, cu_seqlens_q=qo,
        max_seqlen_q=max(row.qo_lens), **_fa3_options(row),
    )  # fmt: skip


# --- torch -----------------------------------------------------------------------------------------------------------

_TORCH = {
    "torch-cudnn": SDPBackend.CUDNN_ATTENTION,
    "torch-flash": SDPBackend.FLASH_ATTENTION,
    "torch-math": SDPBackend.MATH,
}


def _torch_providers() -> list[Provider]:
    return [Provider(name, True, partial(_torch_rejects, name), partial(_torch, _TORCH[name])) for name in _TORCH]


def _torch_rejects(name: str, row: Row, device: torch.device) -> str | None:
    if name == "torch-math" and device.type == "cuda":
        return "it writes out all scores: for the cpu only"
    if name == "torch-cudnn" and device.type != "cuda":
        return "it needs a GPU"
    if not row.uniform:
        return "lengths differ"
    if row.mask == "custom" or row.window_left >= 0 or row.soft_cap or row.sinks or row.pos_encoding != "NONE":
        return "no custom mask, window, soft cap, sinks or positions without writing out a bias"
    if row.kv_dtype != row.dtype:
        return f"kv dtype {row.kv_dtype} differs from q dtype {row.dtype}"
    if row.mask == "causal" and row.qo_lens[0] != row.kv_lens[0]:
        return "is_causal begins with the first key"
    return None


def _torch(backend: SDPBackend, sets: Sets) -> Launch:
    """Paged rows run on a copy without pages: a lighter task than the row's."""
    row = sets[0].row
    shape = (row.batch_size, row.qo_lens[0])
    operands = [[t.transpose(1, 2) for t in (inputs.q.unflatten(0, shape), *inputs.contiguous())] for inputs in sets]
    causal, grouped = row.mask == "causal", row.num_qo_heads != row.num_kv_heads

    def launch(i: int) -> torch.Tensor:
        with sdpa_kernel(backend):
            q, k, v = operands[i]
            out = scaled_dot_product_attention(q, k, v, is_causal=causal, scale=row.sm_scale, enable_gqa=grouped)
        return out.transpose(1, 2).flatten(0, 1)

    return launch
