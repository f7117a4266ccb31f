"""Keyword arguments shared by overloads, which tell type checkers whether a call returns o or (o, lse)."""

from __future__ import annotations

from typing import TypedDict

import torch

Pair = tuple[torch.Tensor, torch.Tensor]  #: (o, lse)


class RunKeywords(TypedDict, total=False):
    """What run() of each planned wrapper takes beside its tensors."""

    q_scale: float | None
    k_scale: float | None
    v_scale: float | None
    out: torch.Tensor | None
    lse: torch.Tensor | None
    enable_pdl: bool | None
    window_left: int | None
    sinks: torch.Tensor | None


class PrefillKeywords(RunKeywords, total=False):
    """What run() of the prefill wrappers takes."""

    lse_base: str
    lse_layout: str


class DecodeKeywords(RunKeywords, total=False):
    """What run() of the decode wrapper takes."""

    q_len_per_req: int | None


class SparseKeywords(TypedDict, total=False):
    """What run() of the block-sparse wrappers takes."""

    out: torch.Tensor | None
    lse: torch.Tensor | None
    enable_pdl: bool | None


class LatentKeywords(TypedDict, total=False):
    """What run() of the wrapper of latents takes."""

    query: torch.Tensor | None
    kv_cache: torch.Tensor | None
    out: torch.Tensor | None
    lse: torch.Tensor | None
    kv_len: torch.Tensor | None
    page_table: torch.Tensor | None
    return_lse_base_on_e: bool
    o_scale: float | None
    ckv_scale: float | None
    kpe_scale: float | None
    sinks: torch.Tensor | None
    enable_pdl: bool | None


class _SingleKeywords(TypedDict, total=False):
    kv_layout: str
    backend: str
    pos_encoding_mode: str
    sm_scale: float | None
    window_left: int
    logits_soft_cap: float | None
    rope_scale: float | None
    rope_theta: float | None
    k_scale: float | None
    v_scale: float | None


class SingleDecodeKeywords(_SingleKeywords, total=False):
    """What single_decode_with_kv_cache() takes beside its tensors."""

    q_scale: float | None
    use_tensor_cores: bool


class SinglePrefillKeywords(_SingleKeywords, total=False):
    """What single_prefill_with_kv_cache() takes beside its tensors."""

    o_dtype: torch.dtype | None
    custom_mask: torch.Tensor | None
    packed_custom_mask: torch.Tensor | None
    causal: bool
    use_fp16_qk_reduction: bool
    allow_fp16_qk_reduction: bool
