"""Attention over the ranks of a torch.distributed process group: NCCL for GPUs, gloo for CPUs.

    ContextParallelDecode   decode with the cached tokens distributed over ranks (vLLM's decode context parallel)
    merge_over_ranks        its exchange and merge, for results of any wrapper, including MLA
    ZigzagPrefill           causal prefill with the tokens distributed so that all ranks have equal work
    RingAttention           attention of tokens that are distributed in any way, under windows and custom variants
    Ulysses                 exchanges tokens per rank for heads per rank, and back
    MeshAttention           both, along the dimensions of a torch DeviceMesh

Every rank of the group makes the same calls in the same order, as with any collective. A group may
have any size, also 1, and its ranks may be on several hosts. docs/tutorial/ranks.md has examples.

Each call raises ValidationError naming the argument, PlanError before plan() or without a process group, and RankError
if another rank fails or does not answer in time.
"""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple, overload

import torch

from quire.attention.decode import BatchDecodeWithPagedKVCacheWrapper
from quire.attention.prefill import BatchPrefillWithPagedKVCacheWrapper
from quire.distributed.exchange import Exchange, State, check_agreement, exchange_of, ranks_of, refuse_positions
from quire.distributed.prefill import MeshAttention, Ulysses, Zigzag, ZigzagPrefill
from quire.distributed.ring import InOrder, RingAttention
from quire.engine.attention import planned
from quire.engine.checks import check_flags, check_positive, check_shape, check_tensor, host_indices, is_choice
from quire.engine.tensors import PagedCache, to_base_e
from quire.engine.upcast import scales_of_values
from quire.engine.wrapper import Pair
from quire.errors import PlanError, UnsupportedError, ValidationError, teach
from quire.kernels.features import dtype_of

__all__ = [
    "ContextParallelDecode", "InOrder", "Interleave", "MeshAttention", "RingAttention", "Ulysses", "Zigzag",
    "ZigzagPrefill", "merge_over_ranks",
]  # fmt: skip


_LOG2_E = math.log2(math.e)
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)  #: of o; the first is that of lse
Wrapper = BatchDecodeWithPagedKVCacheWrapper | BatchPrefillWithPagedKVCacheWrapper


class ContextParallelDecode:
    """Decode of a batch whose cache is distributed over ranks: attention to the rank's own tokens, then one exchange
    and merge.

    wrapper: computes the attention to the tokens of this rank: a BatchDecodeWithPagedKVCacheWrapper, also one for CUDA
        graphs, or a BatchPrefillWithPagedKVCacheWrapper for several queries per request.
    group: a torch.distributed process group; None: all processes. Calls of this object are collectives of the group.
    interleave_size: how many consecutive tokens of a request are on one rank: see quire.distributed.Interleave.
    exchange: "all_to_all": each rank gets its part of the heads; "all_gather": every rank gets all heads, which sends
        more bytes; "peer_memory": as all_to_all, but by reads over NVLink, for the GPUs of one host.

    >>> from quire.distributed import ContextParallelDecode, Interleave
    >>> wrapper = quire.BatchDecodeWithPagedKVCacheWrapper(torch.empty(1 << 20, dtype=torch.uint8))
    >>> decode = ContextParallelDecode(wrapper)  # the group has one rank here
    >>> seq_lens, int32 = torch.tensor([21, 16]), {"dtype": torch.int32}
    >>> decode.plan(
    ...     seq_lens, torch.tensor([0, 2, 3], **int32), torch.tensor([4, 0, 2], **int32), num_qo_heads=8,
    ...     num_kv_heads=2, head_dim=64, page_size=16, q_data_type=torch.bfloat16,
    ... )
    >>> q, cache = torch.randn(2, 8, 64).bfloat16(), torch.randn(6, 2, 16, 2, 64).bfloat16()
    >>> decode.run(q, cache).shape  # [rows, num_qo_heads / size of the group, head_dim]
    torch.Size([2, 8, 64])
    """

    def __init__(
        self, wrapper: Wrapper, group: Any = None, *, interleave_size: int = 1, exchange: str = "all_to_all"
    ) -> None:
        self._ranks = ranks_of(group)
        if not isinstance(wrapper, Wrapper):
            raise ValidationError(
                f"wrapper: expected a BatchDecodeWithPagedKVCacheWrapper or a BatchPrefillWithPagedKVCacheWrapper, got "
                f"{type(wrapper).__name__}; merge_over_ranks() merges results of others."
            )
        self._wrapper, self._kind = wrapper, exchange
        self.interleave = Interleave(
            check_positive(interleave_size, "interleave_size"), self._ranks.rank, self._ranks.size
        )
        self._exchange: Exchange | None = None
        self._made: tuple[tuple[Any, ...], Exchange] | None = None  # with its sizes

    def plan(
        self, seq_lens: torch.Tensor, indptr: torch.Tensor, indices: torch.Tensor, num_qo_heads: int, num_kv_heads: int,
        head_dim: int, page_size: int, *, q_len_per_req: int = 1, q_data_type: str | torch.dtype = "float16",
        o_data_type: str | torch.dtype | None = None, check_ranks: bool = False, **options: Any,
    ) -> None:  # fmt: skip
        """Plan a batch.

        seq_lens: int [batch_size], tokens of each request on all ranks together, including the new ones; the same on
            all ranks. The number of tokens on this rank follows from it.
        indptr: int32 [batch_size + 1], offsets into indices, the page numbers of this rank. A request has pages for its
            tokens on this rank, and none if it has no tokens there.
        q_len_per_req: queries of each request, which are its last tokens and see no later ones.
        o_data_type: the type of the partial results that are exchanged; None: q_data_type.
        check_ranks: compare lengths and options with the other ranks, which waits for them.
        options: as in the wrapper's plan(): sm_scale, logits_soft_cap, kv_data_type, fixed_split_size, ... Those that
            depend on positions (window_left, pos_encoding_mode, ...) are refused. With fixed_split_size or
            disable_split_kv the result of a request does not depend on the rest of the batch, bit for bit.
        """
        check_flags(check_ranks=check_ranks)
        refuse_positions("ContextParallelDecode", options)
        lens, rows = host_indices(seq_lens, "seq_lens"), check_positive(q_len_per_req, "q_len_per_req")
        if check_ranks:
            check_agreement(
                self._ranks, seq_lens=lens.tolist(), interleave_size=self.interleave.interleave_size,
                exchange=self._kind, q_len_per_req=rows, num_qo_heads=num_qo_heads, head_dim=head_dim,
                options=str(sorted(options.items())),
            )  # fmt: skip
        if lens.numel() and int(lens.min()) < rows:
            raise ValidationError(f"seq_lens: expected at least q_len_per_req={rows} tokens, got {int(lens.min())}.")
        dtype = dtype_of(o_data_type or q_data_type, "o_data_type").torch
        exchange = self._exchange_of(lens.numel() * rows, num_qo_heads, head_dim, dtype)
        here = self.interleave.lengths(lens)
        indptr = _checked_pages(host_indices(indptr, "indptr", lens.numel() + 1), here, page_size)
        self._plan_here(
            rows, lens, here, indptr, indices, (num_qo_heads, num_kv_heads, head_dim, page_size),
            q_data_type=q_data_type, o_data_type=o_data_type, **options,
        )  # fmt: skip
        self._exchange = exchange

    def _exchange_of(self, rows: int, num_heads: int, head_dim: int, dtype: torch.dtype) -> Exchange:
        """The current exchange if it fits, else a new one. All ranks allocate memory that peers read together."""
        sizes = rows, num_heads, head_dim, dtype
        if self._made is None or self._made[0] != sizes:
            self._made = sizes, exchange_of(self._kind, self._ranks, *sizes, self._wrapper.device)
        return self._made[1]

    def _plan_here(
        self, q_len: int, lens: torch.Tensor, here: torch.Tensor, indptr: torch.Tensor, indices: torch.Tensor,
        shape: Any, **options: Any,
    ) -> None:  # fmt: skip
        last = ((here - 1) % shape[-1] + 1).int()
        if isinstance(self._wrapper, BatchPrefillWithPagedKVCacheWrapper):
            qo_indptr = torch.arange(lens.numel() + 1, dtype=torch.int32, device="cpu") * q_len
            mask = self._mask(q_len, lens, here) if q_len > 1 else None
            options["custom_mask"] = mask
            self._wrapper.plan(qo_indptr, indptr, indices, last, *shape, **options)
        elif q_len > 1:
            raise UnsupportedError(
                f"q_len_per_req: with {q_len} queries a request the tokens here need a mask; make this object of a "
                f"BatchPrefillWithPagedKVCacheWrapper."
            )
        else:
            self._wrapper.plan(indptr, indices, last, *shape, **options)

    def _mask(self, q_len: int, lens: torch.Tensor, here: torch.Tensor) -> torch.Tensor:
        """Which tokens of this rank each query sees: bool, flat."""
        ends = self.interleave.lengths(lens[:, None] - q_len + 1 + torch.arange(q_len, device="cpu"))
        parts = [torch.arange(int(n), device="cpu") < end[:, None] for n, end in zip(here, ends, strict=True)]
        return torch.cat([part.flatten() for part in parts]).to(self._wrapper.device)

    @overload
    def run(
        self, q: torch.Tensor, paged_kv_cache: PagedCache, *, sinks: torch.Tensor | None = None,
        return_lse: Literal[False] = False, lse_base: str = "log2", **options: Any,
    ) -> torch.Tensor: ...  # fmt: skip
    @overload
    def run(
        self, q: torch.Tensor, paged_kv_cache: PagedCache, *, sinks: torch.Tensor | None = None,
        return_lse: Literal[True], lse_base: str = "log2", **options: Any,
    ) -> Pair: ...  # fmt: skip
    def run(
        self, q: torch.Tensor, paged_kv_cache: PagedCache, *, sinks: torch.Tensor | None = None,
        return_lse: bool = False, lse_base: str = "log2", **options: Any,
    ) -> torch.Tensor | Pair:  # fmt: skip
        """Attention of q [batch_size * q_len_per_req, num_qo_heads, head_dim], the same on all ranks, to the tokens of
        all ranks; returns o [rows, num_qo_heads / size, head_dim] (with "all_gather": of all heads), or (o, lse).

        sinks: as in the wrapper's run(), the same on all ranks. They are added to the denominator once.
        lse_base: "ln" for an lse in base e. options: as in the wrapper's run(): q_scale, k_scale, v_scale.
        """
        if not is_choice(lse_base, ("log2", "ln")):
            raise ValidationError(f"lse_base: expected 'log2' or 'ln', got {lse_base!r}.")
        if options.pop("lse_layout", "NH") != "NH":
            raise UnsupportedError("lse_layout: expected 'NH', as results of ranks are merged row by row.")
        if self._exchange is None:
            raise PlanError("run() was called before plan(): call plan() first, once per batch.")
        out, partial = self._exchange.results()
        sinks = sinks if self._ranks.rank == 0 else None
        scale, scales = 1.0, None
        if self._ranks.size > 1:  # results times v_scale may be beyond the range that the merged result is in
            spec = planned(self._wrapper._attention).spec
            scale, scales = scales_of_values(spec.options, check_tensor(q, "q"), options.pop("v_scale", None))
        self._wrapper.run(q, paged_kv_cache, out=out, lse=partial, return_lse=True, sinks=sinks, **options)
        o, lse = self._exchange.merge(out, partial, scale)
        if scales is not None:
            o.mul_(scales if o.shape[1] == scales.shape[0] else scales.view(-1, o.shape[1], 1)[self._ranks.rank])
        if lse_base == "ln":
            to_base_e(lse)
        return (o, lse) if return_lse else o


def _checked_pages(indptr: torch.Tensor, here: torch.Tensor, page_size: int) -> torch.Tensor:
    """`indptr`, if each request has the pages that its tokens here need."""
    needed = -(-here // check_positive(page_size, "page_size"))
    wrong = (indptr.diff() != needed).nonzero()
    if wrong.numel():
        at = int(wrong[0])
        raise ValidationError(
            f"indptr: expected {int(needed[at])} pages for request {at}, of whose tokens {int(here[at])} are on this "
            f"rank, got {int(indptr.diff()[at])}."
        )
    return indptr


class Interleave(NamedTuple):
    """Runs of interleave_size tokens are assigned to the ranks in turn, and a rank stores its tokens contiguously.

    Token t of a request is on rank t // interleave_size % num_ranks. With interleave_size=1 neighbouring tokens are on
    different ranks; with the page size of the cache, a page has consecutive tokens. The numbers of tokens of two ranks
    differ by at most interleave_size. This is the layout of vLLM's decode context parallel
    (cp_kv_cache_interleave_size).

    >>> from quire.distributed import Interleave
    >>> own = Interleave(interleave_size=2, rank=1, num_ranks=2)
    >>> own.lengths(torch.tensor([1, 3, 9]))  # how many tokens of each request are on this rank
    tensor([0, 1, 4])
    >>> positions = torch.arange(9)
    >>> positions[own.holds(positions)]
    tensor([2, 3, 6, 7])
    >>> own.places(torch.tensor([2, 3, 6, 7]))  # their indices among the tokens of this rank
    tensor([0, 1, 2, 3])
    """

    interleave_size: int
    rank: int
    num_ranks: int

    def lengths(self, seq_lens: torch.Tensor) -> torch.Tensor:
        """How many of the first seq_lens tokens are on this rank."""
        stride = self.interleave_size * self.num_ranks
        rest = seq_lens % stride - self.interleave_size * self.rank
        return seq_lens // stride * self.interleave_size + rest.clamp(0, self.interleave_size)

    def holds(self, positions: torch.Tensor) -> torch.Tensor:
        """Whether tokens are on this rank: bool."""
        return positions // self.interleave_size % self.num_ranks == self.rank

    def places(self, positions: torch.Tensor) -> torch.Tensor:
        """The indices of tokens among the tokens of their rank: where to append them in its cache."""
        stride = self.interleave_size * self.num_ranks
        return positions // stride * self.interleave_size + positions % self.interleave_size


def merge_over_ranks(
    o: torch.Tensor, lse: torch.Tensor, group: Any = None, *, exchange: str = "all_to_all", natural_lse: bool = False
) -> State:
    """Merges the (o, lse) that all ranks computed for the same queries, each over its own keys.

    o: float32, float16 or bfloat16 [rows, num_qo_heads, head_dim]. lse: float32 [rows, num_qo_heads], base 2, as
        Quire's wrappers return it (run(..., return_lse=True)). natural_lse: lse is a natural logarithm, like
        FlashAttention's, and so is the returned lse. A rank without keys for a row passes lse -inf and any o.
    group: a torch.distributed process group; None: all processes.
    exchange: "all_to_all": each rank gets its part of the heads, [rows, num_qo_heads / size, head_dim], rank 0 the
        first; "all_gather": every rank gets all heads.

    Outputs and lse are exchanged in one message. They are merged in the order of ranks, so that results are repeatable.
    Raises ValidationError naming the argument. All ranks must have tensors of the same shape.

    >>> from quire.distributed import merge_over_ranks
    >>> o, lse = torch.randn(3, 8, 64), torch.randn(3, 8)
    >>> merged, merged_lse = merge_over_ranks(o, lse)  # of a group of one
    >>> torch.equal(merged, o)
    True
    """
    ranks = ranks_of(group)
    check_shape(check_tensor(o, "o"), "o", dict.fromkeys(("rows", "num_qo_heads", "head_dim")))
    check_shape(check_tensor(lse, "lse"), "lse", {"rows": o.shape[0], "num_qo_heads": o.shape[1]})
    check_flags(natural_lse=natural_lse)
    for tensor, name, dtypes in ((o, "o", _DTYPES), (lse, "lse", _DTYPES[:1])):
        if tensor.dtype not in dtypes:
            raise ValidationError(f"{name}: expected dtype {', '.join(map(str, dtypes))}, got {tensor.dtype}.")
    if isinstance(exchange, str) and exchange == "peer_memory":
        raise ValidationError(
            "exchange: expected 'all_to_all' or 'all_gather', as o lies in memory of this rank alone."
        )
    chosen = exchange_of(exchange, ranks, o.shape[0], o.shape[1], o.shape[2], o.dtype, o.device)
    lse = lse * _LOG2_E if natural_lse else lse
    if ranks.size == 1:  # nothing is merged, and o of a row without keys may hold anything
        o = o.masked_fill((lse == -math.inf)[..., None], 0.0)
    merged, total = chosen.merge(o, lse)
    return merged, total / _LOG2_E if natural_lse else total


teach(globals(), __all__)
