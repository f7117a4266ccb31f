"""FlashInfer's calls of cuDNN (https://docs.flashinfer.ai/api/attention.html), served by Quire's kernels."""

# ruff: noqa: ARG001  # @foreign declares them, and tests/test_foreign.py looks

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from quire.calls import Output, PagedKV, Scale, check_lengths, indices_of
from quire.calls.decode import TableCall
from quire.calls.prefill import wide_query
from quire.engine.attention import AttentionCall
from quire.engine.checks import (
    check_flags,
    check_output,
    check_positive,
    check_same_device,
    check_shape,
    check_tensor,
    host_indices,
    number,
    refuse,
    to_int32,
)
from quire.engine.device import UserWorkspace, refuse_capture
from quire.engine.options import PlanOptions, Types, foreign, heads, logits_options
from quire.engine.plan_cache import replayed
from quire.engine.run import Result, RunOptions
from quire.engine.schedule import Indices
from quire.engine.spec import AttentionSpec
from quire.engine.tensors import LN2
from quire.errors import ValidationError
from quire.kernels.features import KVLayout, dtype_of

__all__ = ["cudnn_batch_decode_with_kv_cache", "cudnn_batch_prefill_with_kv_cache"]

#: Numbers of an lse that a call makes: 4 GiB.
_MOST_LSE = 2**30


@replayed
@foreign(refused="batch_offsets_k batch_offsets_v", permissions="is_cuda_graph_compatible")
def cudnn_batch_decode_with_kv_cache(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, scale: float | torch.Tensor,
    workspace_buffer: torch.Tensor, *, max_sequence_kv: int, actual_seq_lens_kv: torch.Tensor | None = None,
    block_tables: torch.Tensor | None = None, is_cuda_graph_compatible: bool = False,
    batch_offsets_q: torch.Tensor | None = None, batch_offsets_o: torch.Tensor | None = None,
    batch_offsets_k: torch.Tensor | None = None, batch_offsets_v: torch.Tensor | None = None,
    out: torch.Tensor | None = None, return_lse: bool = False, lse: torch.Tensor | None = None, q_len_per_req: int = 1,
    window_left: int = -1, sinks: torch.Tensor | None = None, backend: str = "auto",
) -> Result:  # fmt: skip
    """xqa_batch_decode_with_kv_cache() with the arguments of FlashInfer's function of this name.

    q: [batch_size * q_len_per_req, num_qo_heads, head_dim]. k_cache, v_cache: [num_pages, num_kv_heads, page_size,
    head_dim], with any strides but a contiguous last dimension. scale: the whole factor of q . k. actual_seq_lens_kv
    int32 [batch_size] or [batch_size, 1, 1, 1], at most max_sequence_kv tokens each, and block_tables int32
    [batch_size, pages] are required; if they are on a GPU, only the GPU reads them. window_left and sinks as in
    xqa_batch_decode_with_kv_cache(); several queries of a request are causal. out: in q's dtype or float8_e4m3fn.

    is_cuda_graph_compatible has no effect, because each call may be captured. batch_offsets_q and batch_offsets_o,
    int32 or int64 [batch_size] or [batch_size + 1], repeat where each request begins in q and out, in elements: those
    on the host are compared. batch_offsets_k and batch_offsets_v are refused, because pages have no offsets.

    Returns o [batch_size * q_len_per_req, num_qo_heads, head_dim], or (o, lse) with return_lse=True, lse [batch_size *
    q_len_per_req, num_qo_heads] float32, base 2. Raises ValidationError naming the argument, or UnsupportedError with
    each kernel's reason.

    >>> q = torch.randn(2, 8, 64, dtype=torch.bfloat16)
    >>> k_cache, v_cache = torch.randn(2, 6, 2, 16, 64, dtype=torch.bfloat16)
    >>> quire.cudnn_batch_decode_with_kv_cache(
    ...     q, k_cache, v_cache, 64**-0.5, torch.empty(1 << 20, dtype=torch.uint8), max_sequence_kv=32,
    ...     actual_seq_lens_kv=torch.tensor([21, 16]), block_tables=torch.tensor([[4, 0], [2, 0]]),
    ... ).shape
    torch.Size([2, 8, 64])
    """
    check_flags(return_lse=return_lse)
    workspace = UserWorkspace(workspace_buffer, "workspace_buffer")
    q_len = check_positive(q_len_per_req, "q_len_per_req")
    cache, lens = _pages(k_cache, v_cache), _lengths(actual_seq_lens_kv, "actual_seq_lens_kv")
    batch_size = lens.shape[0]
    rows = {"batch_size * q_len_per_req": batch_size * q_len}
    check_shape(check_tensor(q, "q"), "q", {**rows, "num_qo_heads": None, "head_dim": cache.head_dim_qk})
    _check_dense(batch_offsets_q, "batch_offsets_q", batch_size, q_len * q.stride(0))
    _check_dense(batch_offsets_o, "batch_offsets_o", batch_size, q_len * q.shape[1] * cache.head_dim_vo)
    tables = _check_tables(block_tables, lens, cache.page_size, max_sequence_kv)
    return TableCall(
        q, cache, workspace, tables, lens, max_sequence_kv,
        Scale.of_logits(scale, "scale", workspace.device), Scale(1.0), KVLayout.HND, q_len=q_len,
        window_left=window_left, out=out, sinks=sinks, lse=lse, return_lse=return_lse, backend=backend,
    ).attend()  # fmt: skip


@replayed
@foreign(permissions="is_cuda_graph_compatible")
def cudnn_batch_prefill_with_kv_cache(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, scale: float, workspace_buffer: torch.Tensor, *,
    max_token_per_sequence: int, max_sequence_kv: int, actual_seq_lens_q: torch.Tensor | None = None,
    actual_seq_lens_kv: torch.Tensor | None = None, block_tables: torch.Tensor | None = None, causal: bool,
    return_lse: bool, q_scale: torch.Tensor | float | None = None, k_scale: torch.Tensor | float | None = None,
    v_scale: torch.Tensor | float | None = None, batch_offsets_q: torch.Tensor | None = None,
    batch_offsets_o: torch.Tensor | None = None, batch_offsets_k: torch.Tensor | None = None,
    batch_offsets_v: torch.Tensor | None = None, batch_offsets_stats: torch.Tensor | None = None,
    batch_offsets_units: str = "elements", out: torch.Tensor | None = None, lse: torch.Tensor | None = None,
    is_cuda_graph_compatible: bool = False, backend: str | None = None,
    o_data_type: str | torch.dtype | None = None, lse_base: str = "log2",
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """Attention of the new tokens of each request, with the arguments of FlashInfer's function of this name.

    q: [nnz_qo, num_qo_heads, head_dim_qk], request after request. k_cache, v_cache: [nnz_kv, num_kv_heads, head_dim_qk
        and head_dim_vo], request after request; with block_tables int32 [batch_size, pages] the pages [num_pages,
        num_kv_heads, page_size, head_dim_qk and head_dim_vo].
    scale: the whole factor of q . k. q_scale, k_scale, v_scale: further factors, as for tensors of 8 bits, each a
        number or a tensor of one element.
    actual_seq_lens_q, actual_seq_lens_kv: int32 [batch_size] or [batch_size, 1, 1, 1], at most max_token_per_sequence
        and max_sequence_kv. The scheduler runs on the host: if they are on a GPU, the call waits for it, and it cannot
        be captured in a CUDA graph; is_cuda_graph_compatible has no effect.
    batch_offsets_q, _k, _v, _o, _stats: int32 or int64 [batch_size + 1], where each request begins in q, k_cache,
        v_cache, out and lse, in elements or, with batch_offsets_units="tokens", in tokens. They are compared with the
        sums of the lengths, because requests lie one after the other. Offsets in tokens may replace lengths.
    causal: query i of a request sees key j if j <= i + kv_len - qo_len; else it sees all keys.
    backend: None or "cubin" for the fastest kernel, or as in the wrappers. out, o_data_type: the result, and its type:
        q's by default, bfloat16 for q of 8 bits.
    lse: float32 [batch_size, max_token_per_sequence, num_qo_heads], in which rows beyond a request's length become
        -inf. With batch_offsets_stats the rows of requests follow one another in it, and it may also be [nnz_qo,
        num_qo_heads]. lse_base: "log2" or "ln".

    Returns (o, lse), o [nnz_qo, num_qo_heads, head_dim_vo], lse None without return_lse=True. Raises ValidationError
    naming the argument, or UnsupportedError with each kernel's reason.

    >>> q, k, v = torch.randn(5, 8, 64), torch.randn(7, 2, 64), torch.randn(7, 2, 64)
    >>> o, lse = quire.cudnn.cudnn_batch_prefill_with_kv_cache(
    ...     q, k, v, 64**-0.5, torch.empty(1 << 20, dtype=torch.uint8), max_token_per_sequence=3, max_sequence_kv=4,
    ...     actual_seq_lens_q=torch.tensor([3, 2]), actual_seq_lens_kv=torch.tensor([4, 3]), causal=True,
    ...     return_lse=True,
    ... )
    >>> o.shape, lse.shape
    (torch.Size([5, 8, 64]), torch.Size([2, 3, 8]))
    """
    check_flags(causal=causal, return_lse=return_lse)
    for name, value, words in (
        ("batch_offsets_units", batch_offsets_units, ("elements", "tokens")), ("lse_base", lse_base, ("log2", "ln")),
    ):  # fmt: skip
        if value not in words:
            raise ValidationError(f"{name}: expected {words[0]!r} or {words[1]!r}, got {value!r}.")
    workspace = UserWorkspace(workspace_buffer, "workspace_buffer")
    refuse_capture("cudnn_batch_prefill_with_kv_cache()", workspace.device)
    offsets = _Offsets(
        batch_offsets_q, batch_offsets_k, batch_offsets_v, batch_offsets_o, batch_offsets_stats,
        batch_offsets_units == "tokens",
    )  # fmt: skip
    lens = _Lengths.of(actual_seq_lens_q, actual_seq_lens_kv, offsets, max_token_per_sequence)
    if block_tables is None:
        layout, cache = KVLayout.NHD, _ragged(k_cache, v_cache, lens, max_sequence_kv)
        indices = Indices(lens.batch_size, lens.qo_indptr, 0, lens.kv_indptr, None, None, 1)
    else:
        refuse(batch_offsets_k=batch_offsets_k, batch_offsets_v=batch_offsets_v)
        layout, cache = KVLayout.HND, _pages(k_cache, v_cache)
        tables = _check_tables(block_tables, lens.kv, cache.page_size, max_sequence_kv)
        indices = indices_of(tables, lens.kv, lens.qo_indptr, 0, cache.page_size)
    sizes = {"nnz_qo": int(lens.qo_indptr[-1]), "num_qo_heads": None, "head_dim_qk": cache.head_dim_qk}
    check_shape(check_tensor(q, "q"), "q", sizes)
    for tensor, name in ((q, "q"), (k_cache, "k_cache"), (v_cache, "v_cache")):
        check_same_device(tensor, name, workspace.device)
    offsets.check(lens, q.shape[1], cache)
    query, output = _output(q, out, o_data_type, cache.head_dim_vo)
    options = PlanOptions(
        *heads(q.shape[1], cache.num_kv_heads), cache.head_dim_qk, cache.head_dim_vo,
        Types.of(query.dtype, k_cache.dtype, output.result.dtype),
        logits_options(cache.head_dim_qk, number(scale, "scale", positive=True), -1, None, "NONE"), causal,
        cache.page_size,
    )  # fmt: skip
    rows = None
    if return_lse or lse is not None:
        lse = _lse(lse, lens, max_token_per_sequence, q, offsets.stats is not None)
        rows = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    name = "auto" if backend is None or backend == "cubin" else backend
    lse_unit = LN2 if lse_base == "ln" else 1.0
    AttentionCall(
        AttentionSpec(indices, options), query, cache.caller, workspace, layout, name, output.result, rows,
        options=RunOptions(q_scale=q_scale, k_scale=k_scale, v_scale=v_scale, lse_unit=lse_unit),
    ).attend()  # fmt: skip
    if rows is not None and lse is not None:
        _place(rows, lse, lens, offsets.stats is not None)
    return output.finish(), lse if return_lse else None


class _Offsets(NamedTuple):
    """Where each request begins in the tensors of a call: int32 or int64 [batch_size + 1], or None."""

    q: Any
    k: Any
    v: Any
    o: Any
    stats: Any
    in_tokens: bool

    def check(self, lens: _Lengths, num_qo_heads: int, cache: PagedKV) -> None:
        """Requests lie one after the other in each tensor."""
        for name, indptr, row in (
            ("q", lens.qo_indptr, num_qo_heads * cache.head_dim_qk),
            ("k", lens.kv_indptr, cache.num_kv_heads * cache.head_dim_qk),
            ("v", lens.kv_indptr, cache.num_kv_heads * cache.head_dim_vo),
            ("o", lens.qo_indptr, num_qo_heads * cache.head_dim_vo),
            ("stats", lens.qo_indptr, num_qo_heads),
        ):
            given = getattr(self, name)
            if given is not None:
                unit = "tokens" if self.in_tokens else f"elements, {row} for each token"
                _check_numbers(given, f"batch_offsets_{name}", indptr.long() * (1 if self.in_tokens else row), unit)


class _Lengths(NamedTuple):
    """The tokens of queries and of keys of each request, on the host: int32 [batch_size]."""

    qo: torch.Tensor
    kv: torch.Tensor
    qo_indptr: torch.Tensor
    kv_indptr: torch.Tensor

    @classmethod
    def of(cls, qo_lens: Any, kv_lens: Any, offsets: _Offsets, most: Any) -> _Lengths:
        """From the lengths or, in tokens, the offsets."""
        qo = _lengths_or_offsets(qo_lens, "actual_seq_lens_q", offsets.q, "batch_offsets_q", offsets.in_tokens)
        kv = _lengths_or_offsets(kv_lens, "actual_seq_lens_kv", offsets.k, "batch_offsets_k", offsets.in_tokens)
        _check_most(qo, "actual_seq_lens_q", most, "max_token_per_sequence")
        check_shape(kv, "actual_seq_lens_kv", {"batch_size": qo.shape[0]})
        if kv.shape[0] and int(kv.min()) < 0:
            raise ValidationError(f"actual_seq_lens_kv: expected no negative length, got {int(kv.min())}.")
        return cls(qo, kv, _sums(qo), _sums(kv))

    @property
    def batch_size(self) -> int:
        return self.qo.shape[0]


def _lengths(lens: Any, name: str) -> torch.Tensor:
    """int32 [batch_size] of lengths, which may have cuDNN's dimensions of 1."""
    if check_tensor(lens, name).dim() == 4:
        check_shape(lens, name, {"batch_size": None, "heads": 1, "rows": 1, "columns": 1})
        lens = lens.flatten()
    check_shape(lens, name, {"batch_size": None})
    return lens.view(torch.int32) if lens.dtype is torch.uint32 else to_int32(lens, name)


def _lengths_or_offsets(lens: Any, name: str, offsets: Any, other: str, in_tokens: bool) -> torch.Tensor:
    if lens is not None:
        return _lengths(lens, name).cpu()
    if offsets is None or not in_tokens:
        raise ValidationError(f"{name}: expected it, or {other} with batch_offsets_units='tokens'; got None.")
    return host_indices(offsets, other).diff()


def _sums(lens: torch.Tensor) -> torch.Tensor:
    indptr = torch.zeros(lens.shape[0] + 1, dtype=torch.int32, device="cpu")
    torch.cumsum(lens, 0, out=indptr[1:])
    return indptr


def offsets_in_tokens(offsets: Any, name: str, lens: Any, row: int) -> Any:
    """Offsets of a plan(), which count elements in FlashInfer's backend of cuDNN, `row` for each token: those that the
    lengths say, on the host, if so; else as they are.
    """
    if lens is None:
        return offsets
    sums = _sums(_lengths(lens, "seq_lens").cpu())
    counts_elements = row > 1 and sums.shape[0] > 1 and int(sums[-1]) > 0
    if not counts_elements or check_tensor(offsets, name).shape != sums.shape:
        return offsets
    return sums if torch.equal(offsets.cpu().long(), sums.long() * row) else offsets


def check_offsets_of(given: Any, name: str, indptr: torch.Tensor, row: int) -> None:
    """Offsets of values or results are those of keys or queries, in tokens or in elements."""
    if given is None:
        return
    expected = (indptr - indptr[:1]).long()
    check_shape(check_tensor(given, name), name, {"batch_size + 1": expected.shape[0]})
    numbers = given.cpu().long()
    if not (torch.equal(numbers, expected) or torch.equal(numbers, expected * row)):
        raise ValidationError(
            f"{name}: expected requests one after the other, {expected.tolist()} in tokens or {row} times that in "
            f"elements, got {numbers.tolist()}; copy them together."
        )


def _check_most(lens: torch.Tensor, name: str, most: Any, bound: str) -> None:
    """Lengths on the host are 0..most."""
    longest = check_positive(most, bound)
    if lens.shape[0] and not 0 <= int(lens.min()) <= int(lens.max()) <= longest:
        raise ValidationError(
            f"{name}: expected 0..{longest} ({bound}={longest}), got {int(lens.min())}..{int(lens.max())}."
        )


def _check_numbers(given: Any, name: str, expected: torch.Tensor, unit: str) -> None:
    """Integers that repeat what lengths say."""
    check_shape(check_tensor(given, name), name, {"batch_size + 1": expected.shape[0]})
    if given.dtype not in (torch.int32, torch.int64):
        raise ValidationError(f"{name}: expected dtype torch.int32 or torch.int64, got {given.dtype}.")
    if not torch.equal(given.cpu().long(), expected):
        raise ValidationError(
            f"{name}: expected requests one after the other, {expected.tolist()} in {unit}, got {given.tolist()}; copy "
            f"them together, or plan a wrapper."
        )


def _check_dense(given: Any, name: str, batch_size: int, step: int) -> None:
    """Offsets of decode, with or without the last one; those on a GPU are not waited for."""
    if given is None:
        return
    expected = torch.arange(batch_size + 1, device="cpu") * step
    if check_tensor(given, name).dim() == 1 and given.shape[0] == batch_size:
        expected = expected[:-1]
    if given.is_cpu:
        _check_numbers(given, name, expected, f"elements, {step} for each request")
    check_shape(given, name, {"batch_size + 1": expected.shape[0]})


def _check_tables(block_tables: Any, lens: torch.Tensor, page_size: int, most: Any) -> torch.Tensor:
    """int32 tables of pages that hold the lengths; lengths on a GPU are not waited for."""
    tables = check_tensor(block_tables, "block_tables")
    check_shape(tables, "block_tables", {"batch_size": lens.shape[0], "pages": None})
    longest = check_positive(most, "max_sequence_kv")
    if lens.is_cpu:
        check_lengths(lens, tables.shape[1], page_size, longest, "max_sequence_kv", "actual_seq_lens_kv")
    return to_int32(tables, "block_tables")


def _pages(k_cache: Any, v_cache: Any) -> PagedKV:
    """Of pages [num_pages, num_kv_heads, page_size, head_dim]."""
    sizes: dict[str, int | None] = dict.fromkeys(("num_pages", "num_kv_heads", "page_size", "head_dim_qk"))
    check_shape(check_tensor(k_cache, "k_cache"), "k_cache", sizes)
    pages = dict(zip(("num_pages", "num_kv_heads", "page_size"), k_cache.shape, strict=False))
    _check_values(v_cache, k_cache, pages)
    return PagedKV.of((k_cache, v_cache), KVLayout.HND)


def _ragged(k: Any, v: Any, lens: _Lengths, most: Any) -> PagedKV:
    """Of keys [nnz_kv, num_kv_heads, head_dim_qk], without pages."""
    _check_most(lens.kv, "actual_seq_lens_kv", most, "max_sequence_kv")
    nnz_kv = int(lens.kv_indptr[-1])
    sizes: dict[str, int | None] = {"nnz_kv": nnz_kv, "num_kv_heads": None, "head_dim_qk": None}
    check_shape(check_tensor(k, "k_cache"), "k_cache", sizes)
    _check_values(v, k, {"nnz_kv": nnz_kv, "num_kv_heads": k.shape[1]})
    return PagedKV((k, v), 0, k.shape[1], k.shape[2], v.shape[2])


def _check_values(v_cache: Any, k_cache: torch.Tensor, sizes: dict[str, int]) -> None:
    check_shape(check_tensor(v_cache, "v_cache"), "v_cache", {**sizes, "head_dim_vo": None})
    if v_cache.dtype is not k_cache.dtype:
        raise ValidationError(f"v_cache: expected the dtype of k_cache, {k_cache.dtype}, got {v_cache.dtype}.")


def _output(q: torch.Tensor, out: Any, o_data_type: Any, head_dim_vo: int) -> tuple[torch.Tensor, Output]:
    """The queries, 16 bits wide at least, and where the result goes."""
    dtype = None if o_data_type is None else dtype_of(o_data_type, "o_data_type").torch
    if out is not None and dtype is not None and check_output(out, "out").dtype is not dtype:
        raise ValidationError(f"out: expected o_data_type={dtype}, got {out.dtype}.")
    query = wide_query(q, out, dtype)
    return query, Output.of(out, query, head_dim_vo, 1.0, dtype)


def _lse(lse: Any, lens: _Lengths, most: int, q: torch.Tensor, is_packed: bool) -> torch.Tensor:
    """The caller's lse, or a new one [batch_size, max_token_per_sequence, num_qo_heads]."""
    shape = lens.batch_size, most, q.shape[1]
    if lse is None:
        if math.prod(shape) > _MOST_LSE:
            raise ValidationError(
                f"max_token_per_sequence: expected an lse of at most {_MOST_LSE} numbers, got {list(shape)}; pass the "
                f"longest of actual_seq_lens_q, {int(lens.qo.max())}."
            )
        return torch.empty(shape, dtype=torch.float32, device=q.device)
    names = ("batch_size", "max_token_per_sequence", "num_qo_heads")
    if not (is_packed and check_tensor(lse, "lse").shape == q.shape[:2]):
        check_shape(check_tensor(lse, "lse"), "lse", dict(zip(names, shape, strict=True)))
    if lse.dtype is not torch.float32:
        raise ValidationError(f"lse: expected dtype torch.float32, got {lse.dtype}.")
    check_same_device(lse, "lse", q.device)
    return check_output(lse, "lse")


def _place(rows: torch.Tensor, lse: torch.Tensor, lens: _Lengths, is_packed: bool) -> None:
    """Write an lse [nnz_qo, num_qo_heads] where the caller has it; rows in which nothing belongs become -inf."""
    if lse.dim() == 2:
        lse.copy_(rows)
        return
    places = torch.arange(rows.shape[0], device="cpu")
    if not is_packed:
        padding = torch.arange(lens.batch_size, device="cpu") * lse.shape[1] - lens.qo_indptr[:-1]
        places += padding.repeat_interleave(lens.qo)
    lse.fill_(-math.inf)
    lse[(places // lse.shape[1]).to(lse.device), (places % lse.shape[1]).to(lse.device)] = rows
