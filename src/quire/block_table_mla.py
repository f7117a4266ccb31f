"""Decode over a paged cache of MLA latents with a block table and lengths in one call, without a plan."""

from __future__ import annotations

from typing import Any

import torch

from quire.block_table_decode import decode_block_tables
from quire.errors import UnsupportedError, ValidationError
from quire.runtime.attention import Result
from quire.runtime.block_tables import CacheParts, Scale
from quire.runtime.checks import check_flags, check_output, check_positive, check_shape, check_tensor, refuse
from quire.runtime.layout import LATENT_DIM, ROW_BYTES, cached_parts, is_packed, latent_parts
from quire.runtime.lse_layout import LN2
from quire.runtime.replay import replayed
from quire.runtime.schedule import Lengths
from quire.runtime.selected_keys import row_indices, row_lengths, selected_keys, tokens_of
from quire.runtime.workspace import UserWorkspace, Workspace
from quire.types import KVLayout


@replayed
def trtllm_batch_decode_with_kv_cache_mla(
    query: torch.Tensor, kv_cache: torch.Tensor, workspace_buffer: torch.Tensor, qk_nope_head_dim: int,
    kv_lora_rank: int, qk_rope_head_dim: int, block_tables: torch.Tensor, seq_lens: torch.Tensor | None,
    max_seq_len: int, sparse_mla_top_k: int = 0, out: torch.Tensor | None = None,
    bmm1_scale: float | torch.Tensor = 1.0, bmm2_scale: float | torch.Tensor = 1.0, sinks: Any = None,
    skip_softmax_threshold_scale_factor: float | None = None, enable_pdl: bool | None = None, backend: str = "auto",
    is_var_seq: bool = True, uses_shared_paged_kv_idx: bool = True, lse: torch.Tensor | None = None,
    return_lse: bool = False, cute_dsl_impl: str = "auto", kv_scale_format: str = "auto",
    cum_seq_lens_q: torch.Tensor | None = None, max_q_len: int | None = None,
    multi_ctas_kv_counter_buffer: torch.Tensor | None = None, sparse_mla_top_k_lens: Any = None,
    enable_dcp: bool = False, cp_world: int = 1, cp_rank: int = 0, causal_seqlens_kv_global: Any = None,
    use_fp16_softmax: bool | None = None, return_lse_base: str | None = None,
) -> Result:  # fmt: skip
    """MLA of the last tokens of each request over its pages of latents, like FlashInfer's function.

    query: [batch_size, q_len, num_heads, kv_lora_rank + qk_rope_head_dim] in float16 or bfloat16 (on the CPU also
    float32); q_len > 1 is causal. Or [total_q, num_heads, ...] with cum_seq_lens_q int32 [batch_size + 1] and
    max_q_len, the largest number of queries of a request. kv_cache: [num_pages, page_size, kv_lora_rank +
    qk_rope_head_dim], or with a dimension of 1 before page_size, with any strides but a contiguous last dimension; or
    uint8 [num_pages, page_size, 656] with bfloat16 queries, FlashMLA's rows of 512 float8_e4m3fn numbers, a float32
    scale for each 128 of them and 64 bfloat16 numbers. block_tables int32 [batch_size, pages], seq_lens [batch_size],
    max_seq_len, bmm1_scale, bmm2_scale: as in xqa_batch_decode_with_kv_cache(). The host does not wait for arrays on a
    GPU, and the call may be captured in a CUDA graph. kv_lora_rank and qk_rope_head_dim are 512 and 64;
    qk_nope_head_dim is that of the model before projections were absorbed into `query`.

    out: [*query.shape[:-1], kv_lora_rank]. lse: float32 [rows, num_heads] or [batch_size, q_len, num_heads], written
    if given and returned with return_lse=True. return_lse_base: "base2" (None) or "basee". sinks: float32 [num_heads]
    logits (natural logarithm), or a list of one such tensor. backend: as in wrappers. is_var_seq, cute_dsl_impl,
    kv_scale_format and the counter buffer concern FlashInfer's kernels and have no effect. Arguments for distributed or
    approximate attention are refused.

    With sparse_mla_top_k > 0, block_tables [*query.shape[:-2], sparse_mla_top_k] are the tokens that each query attends
    to, page number * page_size + index in the page; pages must be contiguous in memory. seq_lens (per request or per
    query, or None) and sparse_mla_top_k_lens (per query) say how many of them are used. Indices below 0 or beyond the
    cache are ignored, and an index that is listed twice counts twice. max_seq_len is not used.

    Returns the result, or (result, lse). Raises ValidationError naming the argument, or UnsupportedError.

    >>> query = torch.randn(2, 1, 16, 576, dtype=torch.bfloat16)
    >>> kv_cache = torch.randn(6, 16, 576, dtype=torch.bfloat16)
    >>> block_tables = torch.tensor([[4, 0], [2, 0]], dtype=torch.int32)
    >>> quire.mla.trtllm_batch_decode_with_kv_cache_mla(
    ...     query, kv_cache, torch.empty(1 << 20, dtype=torch.uint8), 128, 512, 64, block_tables,
    ...     seq_lens=torch.tensor([21, 16], dtype=torch.int32), max_seq_len=32, bmm1_scale=192**-0.5,
    ... ).shape
    torch.Size([2, 1, 16, 512])
    """
    refuse(
        skip_softmax_threshold_scale_factor=skip_softmax_threshold_scale_factor,
        separate_page_tables=not uses_shared_paged_kv_idx, enable_dcp=enable_dcp,
        cp_world=None if cp_world == 1 else cp_world, cp_rank=cp_rank or None,
        causal_seqlens_kv_global=causal_seqlens_kv_global, use_fp16_softmax=use_fp16_softmax,
    )  # fmt: skip
    _check_choices(is_var_seq, cute_dsl_impl, kv_scale_format, return_lse_base, multi_ctas_kv_counter_buffer)
    check_positive(qk_nope_head_dim, "qk_nope_head_dim")
    check_positive(kv_lora_rank, "kv_lora_rank"), check_positive(qk_rope_head_dim, "qk_rope_head_dim")
    if (kv_lora_rank, qk_rope_head_dim) != (LATENT_DIM, 64):
        raise UnsupportedError(
            f"kv_lora_rank, qk_rope_head_dim: expected {LATENT_DIM} and 64, got {kv_lora_rank} and {qk_rope_head_dim}."
        )
    if (cum_seq_lens_q is None) != (max_q_len is None):
        raise ValidationError(f"max_q_len: expected it beside cum_seq_lens_q, and only there, got {max_q_len}.")
    head_dims: dict[str, int | None] = {"num_heads": None, "head_dim": LATENT_DIM + 64}
    rows: dict[str, int | None] = {"batch_size": None, "q_len": None} if max_q_len is None else {"total_q": None}
    check_shape(check_tensor(query, "query"), "query", {**rows, **head_dims})
    if check_tensor(kv_cache, "kv_cache").dim() == 4 and kv_cache.shape[1] == 1:
        kv_cache = kv_cache.squeeze(1)
    width = ROW_BYTES if is_packed(kv_cache) else LATENT_DIM + 64
    check_shape(kv_cache, "kv_cache", {"num_pages": None, "page_size": None, "head_dim": width})
    if out is not None:
        sizes = dict(zip((*rows, "num_heads"), query.shape, strict=False))
        check_shape(check_output(out, "out"), "out", {**sizes, "head_dim": LATENT_DIM})
    workspace = UserWorkspace(workspace_buffer, "workspace_buffer")
    q_rows, statistics = query.flatten(0, -3), None if lse is None else _rows_of_lse(lse, query)
    q_len = max_q_len or query.shape[1]
    tables: torch.Tensor | Lengths = block_tables
    if sparse_mla_top_k:
        table = row_indices(block_tables, query.shape[:-2], "block_tables", kv_cache.device)
        check_shape(table, "block_tables", {"rows": None, "sparse_mla_top_k": sparse_mla_top_k})
        kv_cache = tokens_of(kv_cache)
        most = _fewest((seq_lens, sparse_mla_top_k_lens), table, q_len, cum_seq_lens_q)
        tables, seq_lens = selected_keys(table, most, kv_cache.shape[0])
        q_len, cum_seq_lens_q, max_seq_len = 1, None, sparse_mla_top_k
    else:
        refuse(sparse_mla_top_k_lens=sparse_mla_top_k_lens)
        seq_lens = check_tensor(seq_lens, "seq_lens")
    result = decode_latents(
        latent_parts(q_rows, "query"), cached_parts(kv_cache, "kv_cache"), workspace, tables, seq_lens,
        max_seq_len, Scale.of(bmm1_scale, "bmm1_scale", workspace.device, positive=True),
        Scale.of(bmm2_scale, "bmm2_scale", workspace.device), q_len=q_len,
        q_cu_seq_lens=cum_seq_lens_q, out=None if out is None else out.view(*q_rows.shape[:-1], LATENT_DIM),
        lse=statistics, return_lse=return_lse, sinks=_one_tensor(sinks), enable_pdl=enable_pdl, backend=backend,
        lse_unit=LN2 if return_lse_base == "basee" else 1.0,
    )  # fmt: skip
    o, statistics = result if return_lse else (result, None)
    o = out if out is not None else o.view(*query.shape[:-1], LATENT_DIM)
    return (o, statistics if lse is None else lse) if return_lse else o


@replayed
def xqa_batch_decode_with_kv_cache_mla(
    query: torch.Tensor, kv_cache: torch.Tensor, workspace_buffer: torch.Tensor, qk_nope_head_dim: int,
    kv_lora_rank: int, qk_rope_head_dim: int, block_tables: torch.Tensor, seq_lens: torch.Tensor, max_seq_len: int,
    out: torch.Tensor | None = None, bmm1_scale: float | torch.Tensor = 1.0, bmm2_scale: float | torch.Tensor = 1.0,
    sinks: Any = None, enable_pdl: bool | None = None,
) -> torch.Tensor:  # fmt: skip
    """trtllm_batch_decode_with_kv_cache_mla() with the arguments of FlashInfer's function of this name, for any number
    of heads and of queries per request.

    Returns [batch_size, q_len, num_heads, kv_lora_rank]. Raises ValidationError or UnsupportedError. There is an
    example at trtllm_batch_decode_with_kv_cache_mla().
    """
    result: torch.Tensor = trtllm_batch_decode_with_kv_cache_mla(
        query, kv_cache, workspace_buffer, qk_nope_head_dim, kv_lora_rank, qk_rope_head_dim, block_tables, seq_lens,
        max_seq_len, out=out, bmm1_scale=bmm1_scale, bmm2_scale=bmm2_scale, sinks=sinks, enable_pdl=enable_pdl,
    )  # fmt: skip
    return result


def decode_latents(
    query: tuple[torch.Tensor, torch.Tensor], kv_cache: tuple[torch.Tensor, ...], workspace: Workspace,
    block_tables: torch.Tensor | Lengths, seq_lens: Any, max_seq_len: int, logits_scale: Scale, v_scale: Scale, *,
    q_len: int = 1, q_cu_seq_lens: torch.Tensor | None = None, out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None, return_lse: bool = False, sinks: torch.Tensor | None = None,
    enable_pdl: bool | None = None, backend: str = "auto", lse_unit: float = 1.0,
) -> Any:  # fmt: skip
    """decode_block_tables() for the parts of queries [rows, num_heads, dims] and of latents [num_pages, page_size,
    dims], that which is the value first, and the scales of latents [num_pages, page_size, scales] if they have any.
    """
    (q_nope, q_pe), (ckv, kpe, *scales) = query, kv_cache
    check_shape(q_nope, "q_nope", {"rows": q_pe.shape[0], "num_heads": q_pe.shape[1], "head_dim": None})
    cache = CacheParts.of((kpe.unsqueeze(2), ckv.unsqueeze(2)), KVLayout.NHD, is_one_type=not scales)
    return decode_block_tables(
        q_pe, cache, workspace, block_tables, seq_lens, max_seq_len, logits_scale, v_scale, KVLayout.NHD,
        q_len_per_req=q_len, q_cu_seq_lens=q_cu_seq_lens, window_left=-1, out=out, sinks=sinks, enable_pdl=enable_pdl,
        o_scale=1.0, mask=None, backend=backend, lse=lse, return_lse=return_lse, q_nope=q_nope,
        ckv_scales=scales[0].unsqueeze(2) if scales else None, lse_unit=lse_unit,
    )  # fmt: skip


def _fewest(
    lengths: tuple[Any, Any], table: torch.Tensor, q_len: int, offsets: torch.Tensor | None
) -> torch.Tensor | None:
    """How many indices of each row of `table` count, where seq_lens and sparse_mla_top_k_lens say it."""
    most = None
    for value, name in zip(lengths, ("seq_lens", "sparse_mla_top_k_lens"), strict=True):
        lens = row_lengths(value, name, table.shape[0], q_len, offsets)
        if lens is not None:
            lens = lens.to(table.device)
            most = lens if most is None else torch.minimum(most, lens)
    return most


def _check_choices(is_var_seq: Any, cute_dsl_impl: Any, kv_scale_format: Any, base: Any, counter: Any) -> None:
    """Arguments that choose among FlashInfer's kernels, and the base of an lse."""
    check_flags(is_var_seq=is_var_seq)
    for name, value, words in (
        ("cute_dsl_impl", cute_dsl_impl, ("auto", "modular", "monolithic")),
        ("kv_scale_format", kv_scale_format, ("auto", "pow2_fp32", "arbitrary_fp32")),
        ("return_lse_base", "base2" if base is None else base, ("base2", "basee")),
    ):
        if value not in words:
            raise ValidationError(f"{name}: expected one of {', '.join(words)}, got {value!r}.")
    if counter is not None:
        check_tensor(counter, "multi_ctas_kv_counter_buffer")


def _rows_of_lse(lse: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """lse [batch_size, q_len, num_heads] or [rows, num_heads] as the latter."""
    heads = dict(zip(("batch_size", "q_len", "num_heads"), query.shape, strict=False))
    if check_output(lse, "lse").dim() == 3:
        check_shape(lse, "lse", heads)
    return lse.view(-1, lse.shape[-1])


def _one_tensor(sinks: Any) -> Any:
    """Sinks, of which FlashInfer's functions take a list."""
    if isinstance(sinks, (list, tuple)):
        if len(sinks) != 1:
            raise ValidationError(f"sinks: expected a tensor or a list of one, got {len(sinks)}.")
        return sinks[0]
    return sinks
