"""DeepSeek's attention in one call, without a plan(): MLA over a block table, prefill of ragged keys and values.

And the index arrays of quire.mla's plan() in one object.
"""

# ruff: noqa: ARG001  # @foreign declares them, and tests/test_foreign.py looks

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from quire.cache.latents import LATENT_DIM, ROW_BYTES, cached_parts, is_packed, latent_parts
from quire.calls import Output, Scale, check_lengths, indices_of
from quire.calls.decode import TableCall
from quire.calls.prefill import ragged_batch, wide_query
from quire.engine.attention import AttentionCall
from quire.engine.batch import row_indices, row_lengths, selected_keys
from quire.engine.checks import (
    batch_size_of,
    check_flags,
    check_output,
    check_positive,
    check_same_device,
    check_shape,
    check_tensor,
    device_indices,
    host_indices,
    last_entry,
    number,
    page_indices,
    refuse,
    to_int32,
)
from quire.engine.device import UserWorkspace
from quire.engine.options import PlanOptions, Types, foreign, heads, logits_options
from quire.engine.plan_cache import replayed
from quire.engine.run import Result, RunOptions
from quire.engine.schedule import LEAST_TILE, Indices, Lengths, check_offsets, check_range
from quire.engine.spec import AttentionSpec, check_repeated
from quire.engine.tensors import LN2
from quire.errors import UnsupportedError, ValidationError
from quire.kernels.features import KVLayout


@replayed
@foreign(
    refused="uses_shared_paged_kv_idx enable_dcp cp_world cp_rank causal_seqlens_kv_global",
    permissions="is_var_seq cute_dsl_impl kv_scale_format multi_ctas_kv_counter_buffer use_fp16_softmax "
    "skip_softmax_threshold_scale_factor",
)
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
    kv_scale_format and the counter buffer concern FlashInfer's kernels and have no effect; use_fp16_softmax and
    skip_softmax_threshold_scale_factor permit what Quire's do not do. Arguments for distributed attention are refused.

    With sparse_mla_top_k > 0, block_tables [*query.shape[:-2], sparse_mla_top_k] are the tokens that each query attends
    to, page number * page_size + index in the page. seq_lens (per request or per
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
    if return_lse_base not in (None, "base2", "basee"):
        raise ValidationError(f"return_lse_base: expected one of base2, basee, got {return_lse_base!r}.")
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
        most = _fewest((seq_lens, sparse_mla_top_k_lens), table, q_len, cum_seq_lens_q)
        tables, seq_lens = selected_keys(table, most, kv_cache.shape[0] * kv_cache.shape[1])
        q_len, cum_seq_lens_q, max_seq_len = 1, None, sparse_mla_top_k
    else:
        refuse(sparse_mla_top_k_lens=sparse_mla_top_k_lens)
        seq_lens = check_tensor(seq_lens, "seq_lens")
    result = TableCall.of_latents(
        latent_parts(q_rows, "query"), cached_parts(kv_cache, "kv_cache"), workspace, tables, seq_lens,
        max_seq_len, Scale.of_logits(bmm1_scale, "bmm1_scale", workspace.device),
        Scale.of(bmm2_scale, "bmm2_scale", workspace.device), q_len=q_len,
        q_cu_seq_lens=cum_seq_lens_q, out=None if out is None else out.view(*q_rows.shape[:-1], LATENT_DIM),
        lse=statistics, return_lse=return_lse, sinks=_one_tensor(sinks), enable_pdl=enable_pdl, backend=backend,
        lse_unit=LN2 if return_lse_base == "basee" else 1.0, is_selected=bool(sparse_mla_top_k),
    ).attend()  # fmt: skip
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

    Returns [batch_size, q_len, num_heads, kv_lora_rank]. Raises ValidationError or UnsupportedError.

    >>> query, kv_cache = torch.randn(2, 1, 16, 576).bfloat16(), torch.randn(6, 16, 576).bfloat16()
    >>> block_tables, seq_lens = torch.tensor([[4, 0], [2, 0]]).int(), torch.tensor([21, 16]).int()
    >>> quire.mla.xqa_batch_decode_with_kv_cache_mla(
    ...     query, kv_cache, torch.empty(1 << 20, dtype=torch.uint8), 128, 512, 64, block_tables, seq_lens, 32,
    ...     bmm1_scale=192**-0.5,
    ... ).shape
    torch.Size([2, 1, 16, 512])
    """
    result: torch.Tensor = trtllm_batch_decode_with_kv_cache_mla(
        query, kv_cache, workspace_buffer, qk_nope_head_dim, kv_lora_rank, qk_rope_head_dim, block_tables, seq_lens,
        max_seq_len, out=out, bmm1_scale=bmm1_scale, bmm2_scale=bmm2_scale, sinks=sinks, enable_pdl=enable_pdl,
    )  # fmt: skip
    return result


def _check_mirror(lens: Any, name: str, offsets: torch.Tensor, batch_size: int) -> None:
    """Lengths on the host repeat offsets."""
    if lens is None:
        return
    given = host_indices(lens, name, batch_size)
    if offsets.is_cpu and not torch.equal(given, offsets.diff().to(given.dtype)):
        raise ValidationError(f"{name}: expected {offsets.diff().tolist()}, as the offsets say, got {given.tolist()}.")


@replayed
@foreign(
    refused="sage_attn_sfs num_elts_per_sage_attn_blk uses_spcompress",
    permissions="skip_softmax_threshold_scale_factor o_sf_scale use_fp16_softmax",
)
def trtllm_ragged_attention_deepseek(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, workspace_buffer: torch.Tensor,
    seq_lens: torch.Tensor, max_q_len: int, max_kv_len: int, bmm1_scale: float | torch.Tensor,
    bmm2_scale: float | torch.Tensor, o_sf_scale: float | None, batch_size: int, window_left: int,
    cum_seq_lens_q: torch.Tensor, cum_seq_lens_kv: torch.Tensor, enable_pdl: bool | None, is_causal: bool,
    return_lse: bool, attention_sinks: torch.Tensor | None = None,
    skip_softmax_threshold_scale_factor: float | None = None, out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None, sage_attn_sfs: Any = (None, None, None, None),
    num_elts_per_sage_attn_blk: Any = (0, 0, 0, 0), backend: str = "trtllm-gen",
    q_seq_lens_cpu: torch.Tensor | None = None, kv_seq_lens_cpu: torch.Tensor | None = None,
    use_fp16_softmax: bool | None = None, uses_spcompress: bool | None = None,
) -> Result:  # fmt: skip
    """Attention of ragged queries, keys and values, as DeepSeek's models prefill before projections are absorbed; like
    FlashInfer's function.

    query: [nnz_qo, num_qo_heads, head_dim_qk]; key and value: [nnz_kv, num_kv_heads, head_dim_qk and head_dim_vo], 192
        and 128 in DeepSeek's models, or others that the wrappers take. With q of 8 bits the result is bfloat16.
    seq_lens: int32 [batch_size], keys of each request; cum_seq_lens_q, cum_seq_lens_kv: int32 [batch_size + 1],
        offsets. max_q_len and max_kv_len are upper bounds of the lengths. If all arrays are on a GPU, only the GPU
        reads them, and the call may be captured in a CUDA graph; keys of 8 bits are planned on the host, which waits.
    bmm1_scale is the whole factor of q . k, bmm2_scale the factor of the result; tensors of one element are read.
    is_causal: query i of a request sees keys up to i + kv_len - qo_len. window_left, attention_sinks float32
        [num_qo_heads], enable_pdl, backend: as in a wrapper's plan() and run(). o_sf_scale concerns results of 4 bits
        and has no effect.
    q_seq_lens_cpu, kv_seq_lens_cpu: int32 [batch_size], the lengths on the host; redundant, and compared with offsets
        that lie there, too.
    out, lse: tensors that results are written into; lse float32 [nnz_qo, num_qo_heads], base 2.

    Returns o [nnz_qo, num_qo_heads, head_dim_vo], or with return_lse=True (o, lse). Raises ValidationError naming the
    argument, or UnsupportedError with each kernel's reason.

    >>> q, k, v = torch.randn(5, 4, 192), torch.randn(9, 4, 192), torch.randn(9, 4, 128)
    >>> offsets = torch.tensor([[0, 3, 5], [0, 5, 9]], dtype=torch.int32)
    >>> quire.prefill.trtllm_ragged_attention_deepseek(
    ...     q, k, v, torch.empty(1 << 20, dtype=torch.uint8), offsets[1].diff(), 3, 5, 192**-0.5, 1.0, 1.0, 2, -1,
    ...     offsets[0], offsets[1], enable_pdl=None, is_causal=True, return_lse=False,
    ... ).shape
    torch.Size([5, 4, 128])
    """
    check_flags(is_causal=is_causal, return_lse=return_lse, enable_pdl=enable_pdl)
    workspace = UserWorkspace(workspace_buffer, "workspace_buffer")
    for tensor, name in ((query, "query"), (key, "key"), (value, "value")):
        check_shape(check_tensor(tensor, name), name, {"tokens": None, "num_heads": None, "head_dim": None})
        check_same_device(tensor, name, workspace.device)
    check_shape(value, "value", {"nnz_kv": key.shape[0], "num_kv_heads": key.shape[1], "head_dim_vo": None})
    check_shape(query, "query", {"nnz_qo": None, "num_qo_heads": None, "head_dim_qk": key.shape[2]})
    wide = wide_query(query, out, None)
    output = Output.of(out, wide, value.shape[2], 1.0)
    options = PlanOptions(
        *heads(query.shape[1], key.shape[1]), key.shape[2], value.shape[2],
        Types.of(wide.dtype, key.dtype, output.result.dtype),
        logits_options(key.shape[2], number(bmm1_scale, "bmm1_scale", positive=True), window_left, None, "NONE"),
        is_causal, page_size=0,
    )  # fmt: skip
    if return_lse and lse is None:
        lse = torch.empty(query.shape[:2], dtype=torch.float32, device=query.device)
    arrays = check_positive(batch_size, "batch_size"), seq_lens, cum_seq_lens_q, cum_seq_lens_kv
    _check_mirror(q_seq_lens_cpu, "q_seq_lens_cpu", cum_seq_lens_q, batch_size)
    _check_mirror(kv_seq_lens_cpu, "kv_seq_lens_cpu", cum_seq_lens_kv, batch_size)
    indices: Indices | Lengths | None = None
    if key.itemsize > 1:
        indices = _ragged_lengths(*arrays, query, key, output.result, options)
    if indices is None:
        indices = ragged_batch(*arrays, max_q_len, max_kv_len)
        assert indices.qo_indptr is not None
        check_shape(query, "query", {"nnz_qo": last_entry(indices.qo_indptr), "heads": None, "head_dim_qk": None})
    run_options = RunOptions(attention_sinks, v_scale=number(bmm2_scale, "bmm2_scale"), enable_pdl=enable_pdl)
    AttentionCall(
        AttentionSpec(indices, options), wide, (key, value), workspace, KVLayout.NHD, backend, output.result, lse,
        options=run_options,
    ).attend()  # fmt: skip
    result = output.finish()
    return (result, lse) if return_lse else result


def _ragged_lengths(
    batch_size: int, seq_lens: Any, cum_seq_lens_q: Any, cum_seq_lens_kv: Any, query: torch.Tensor, key: torch.Tensor,
    out: torch.Tensor, options: PlanOptions,
) -> Lengths | None:  # fmt: skip
    """The batch for a plan on the GPU; None if the host has to plan."""
    given = {"seq_lens": seq_lens, "cum_seq_lens_q": cum_seq_lens_q, "cum_seq_lens_kv": cum_seq_lens_kv}
    if not query.is_cuda or any(check_tensor(tensor, name).is_cpu for name, tensor in given.items()):
        return None
    for name, tensor in given.items():
        check_shape(tensor, name, {"entries": batch_size + (name != "seq_lens")})
        check_same_device(tensor, name, query.device)
    qo_indptr, kv_indptr = (device_indices(given[name], name) for name in ("cum_seq_lens_q", "cum_seq_lens_kv"))
    lengths = Lengths(
        None, None, 0, 0, qo_indptr=qo_indptr, kv_indptr=kv_indptr, num_rows=query.shape[0], num_tokens=key.shape[0],
        results=(out if out.is_contiguous() else None, None),
    )  # fmt: skip
    return lengths if lengths.can_be_counted(*LEAST_TILE, options.num_kv_heads, options.group_size) else None


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


_OFFSETS = ("qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr")
_TABLES = ("cum_seq_lens_q", "block_tables", "seq_lens")


@dataclass(frozen=True, eq=False)
class MLAPlanMetadata:
    """The `metadata` of BatchMLAPagedAttentionWrapper.plan(), created by csr(), dense() or dual().

    qo_indptr, kv_indptr [batch_size + 1], kv_indices [pages], kv_len_arr [batch_size]: offsets and page numbers.
    cum_seq_lens_q [batch_size + 1], block_tables [batch_size, pages], seq_lens [batch_size], max_q_len: a block
    table. All int32, on the host or the device of the calls; plan() raises the errors.

    >>> table = quire.mla.MLAPlanMetadata.dense(
    ...     torch.tensor([0, 1, 2]), torch.tensor([[4, 0], [2, 0]]), torch.tensor([21, 16])
    ... )
    >>> table.seq_lens.tolist()
    [21, 16]
    """

    qo_indptr: torch.Tensor | None = None
    kv_indptr: torch.Tensor | None = None
    kv_indices: torch.Tensor | None = None
    kv_len_arr: torch.Tensor | None = None
    cum_seq_lens_q: torch.Tensor | None = None
    block_tables: torch.Tensor | None = None
    seq_lens: torch.Tensor | None = None
    max_q_len: int | None = None

    @classmethod
    def csr(
        cls, qo_indptr: torch.Tensor, kv_indptr: torch.Tensor, kv_indices: torch.Tensor, kv_len_arr: torch.Tensor
    ) -> MLAPlanMetadata:
        """A batch as offsets and page numbers."""
        return cls(qo_indptr, kv_indptr, kv_indices, kv_len_arr)

    @classmethod
    def dense(
        cls, cum_seq_lens_q: torch.Tensor, block_tables: torch.Tensor, seq_lens: torch.Tensor,
        max_q_len: int | None = None,
    ) -> MLAPlanMetadata:  # fmt: skip
        """A batch as a block table and lengths."""
        return cls(None, None, None, None, cum_seq_lens_q, block_tables, seq_lens, max_q_len)

    @classmethod
    def dual(
        cls, qo_indptr: torch.Tensor, kv_indptr: torch.Tensor, kv_indices: torch.Tensor, kv_len_arr: torch.Tensor, *,
        cum_seq_lens_q: torch.Tensor, block_tables: torch.Tensor, seq_lens: torch.Tensor,
        max_q_len: int | None = None,
    ) -> MLAPlanMetadata:  # fmt: skip
        """Both, which must agree if they are on the host."""
        return cls(qo_indptr, kv_indptr, kv_indices, kv_len_arr, cum_seq_lens_q, block_tables, seq_lens, max_q_len)

    def or_else(self, metadata: Any) -> MLAPlanMetadata:
        """`metadata`, Quire's or FlashInfer's object of this kind, which excludes flat arguments, `self`; or these."""
        names = (*_OFFSETS, *_TABLES, "max_q_len")
        if metadata is None:
            return self
        if not all(hasattr(metadata, name) for name in names):
            raise ValidationError(f"metadata: expected MLAPlanMetadata, got {type(metadata).__name__}.")
        if any(getattr(self, name) is not None for name in names):
            raise ValidationError("metadata: expected it or arrays beside it, and not both.")
        return MLAPlanMetadata(*(getattr(metadata, name) for name in names))

    def indices(self, page_size: int) -> Indices:
        """What the planner is given. ValidationError naming the array that is wrong or missing."""
        given = [names for names in (_OFFSETS, _TABLES) if any(getattr(self, name) is not None for name in names)]
        for names in given or [_OFFSETS]:
            for name in names:
                if getattr(self, name) is None:
                    raise ValidationError(f"{name}: expected a tensor, as of {', '.join(names)}; got None.")
        result = self._from_offsets(page_size) if _OFFSETS in given else self._from_tables(page_size)
        if len(given) == 2:
            self._check_tables(result)
        if self.max_q_len is not None:
            if _TABLES not in given:
                raise ValidationError(f"max_q_len: expected it beside cum_seq_lens_q, got {self.max_q_len}.")
            check_repeated(result, max_token_per_sequence=self.max_q_len)
        return result

    def _from_offsets(self, page_size: int) -> Indices:
        qo_indptr = self._on_host("qo_indptr")
        batch = batch_size_of(qo_indptr, "qo_indptr")
        lens, kv_indptr = self._on_host("kv_len_arr", batch), self._on_host("kv_indptr")
        if kv_indptr.shape[0] < batch + 1:
            check_shape(kv_indptr, "kv_indptr", {"batch_size + 1": batch + 1})
        kv_indptr = kv_indptr[: batch + 1]  # of a buffer for more requests
        pages = page_indices(self.kv_indices)
        used = lens if page_size == 1 else (lens + (page_size - 1)).div_(page_size, rounding_mode="floor")
        if not torch.equal(used, kv_indptr.diff()):
            kv_indptr, pages = _without_surplus(kv_indptr, pages, lens, used, page_size)
        # Of requests without pages the planner asks for no tokens of a last one: there this is page_size.
        last = torch.add(lens, used, alpha=-page_size).add_(page_size)
        return Indices(batch, qo_indptr, 0, kv_indptr, last, pages, page_size)

    def _from_tables(self, page_size: int) -> Indices:
        tables = to_int32(check_tensor(self.block_tables, "block_tables"), "block_tables")
        check_shape(tables, "block_tables", {"batch_size": None, "pages": None})
        batch, num_pages = tables.shape
        lens, qo_indptr = self._on_host("seq_lens", batch), self._on_host("cum_seq_lens_q", batch + 1)
        check_lengths(lens, num_pages, page_size, num_pages * page_size, "block_tables")
        return indices_of(tables, lens, qo_indptr, 0, page_size)

    def _check_tables(self, indices: Indices) -> None:
        """Check that the block table agrees with the offsets, if both are on the host."""
        for name, first_name in (("cum_seq_lens_q", "qo_indptr"), ("seq_lens", "kv_len_arr")):
            first, again = self._on_host(first_name), check_tensor(getattr(self, name), name)
            check_shape(again, name, {"entries": first.shape[0]})
            if again.is_cpu and not torch.equal(to_int32(again, name), first):
                raise ValidationError(f"{name}: expected {first.tolist()}, as {first_name} says, got {again.tolist()}.")
        check_repeated(indices, block_tables=self.block_tables)

    def _on_host(self, name: str, length: int | None = None) -> torch.Tensor:
        return host_indices(getattr(self, name), name, length)


def _without_surplus(
    kv_indptr: torch.Tensor, pages: torch.Tensor, lens: torch.Tensor, used: torch.Tensor, page_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Offsets and page numbers without surplus pages, which the lengths do not use."""
    check_offsets(kv_indptr, "kv_indptr")
    if page_size > 1:
        used = lens // page_size + (lens % page_size > 0)  # without a sum beyond 32 bits
    check_range(lens, "kv_len_arr", 0, 2**31 - 1, "lengths from 0 on")
    if bool((used > kv_indptr.diff()).any()) or int(kv_indptr[-1]) > pages.numel():
        raise ValidationError(
            f"kv_len_arr: expected at most as many tokens as fit the pages of {page_size} tokens that kv_indptr and "
            f"kv_indices give each request, got {lens.tolist()} tokens in {kv_indptr.diff().tolist()} pages."
        )
    indptr = torch.zeros_like(kv_indptr)
    torch.cumsum(used, 0, out=indptr[1:])
    shift = torch.repeat_interleave(kv_indptr[:-1] - indptr[:-1], used)
    return indptr, pages[(torch.arange(shift.numel(), device="cpu") + shift).to(pages.device)]
