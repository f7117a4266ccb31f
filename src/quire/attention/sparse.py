"""Block-sparse attention: computes only the blocks of keys that a block-sparse matrix lists.

The API is FlashInfer's (https://docs.flashinfer.ai/api/sparse.html). A row of blocks is planned as a request whose
pages are the listed blocks (quire.engine.batch), so the kernels are those for paged caches.
"""

# @foreign declares them, and tests/test_foreign.py looks

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, overload

import torch

from quire.engine.batch import BlockLists, BlockMatrix, lists_of_heads
from quire.engine.checks import check_output, check_shape, check_tensor
from quire.engine.operands import OperandValue, RemappedOperands, variant_of
from quire.engine.operators import is_tracing
from quire.engine.options import PlanOptions, foreign, heads, options_of
from quire.engine.run import Result, RunOptions
from quire.engine.spec import AttentionSpec
from quire.engine.upcast import check_scales
from quire.engine.wrapper import AttentionWrapper, Pair, SparseKeywords
from quire.errors import ValidationError
from quire.kernels.expressions.variant import Variant

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["BlockSparseAttentionWrapper", "VariableBlockSparseAttentionWrapper"]

_TILE_ROWS = 128  #: of the tensor-core kernels


class BlockListsWrapper(AttentionWrapper):
    """What both wrappers share: plans of lists of blocks.

    float_workspace_buffer, backend: as in BatchDecodeWithPagedKVCacheWrapper.
    variant: a quire.Variant of the caller's own. q_idx, kv_idx, head, qo_len and kv_len are those of the whole matrix,
        and request is 0. plan() takes what its mask reads, by name, and run() what only its score reads.
    """

    def __init__(
        self, float_workspace_buffer: torch.Tensor, backend: str = "auto", *, variant: Variant | None = None
    ) -> None:
        super().__init__(float_workspace_buffer, "NHD", False, backend)
        self._of_matrix = variant_of(variant)
        self._remapped: RemappedOperands | None = None  # once planned, what it reads

    def _plan_lists(
        self, lists: BlockLists, options: PlanOptions, heads: tuple[int, int], sizes: tuple[int, int],
        operands: Mapping[str, Any], mask: torch.Tensor | None = None, packed_mask: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        """heads: query and KV heads; sizes: queries and keys of the matrix."""
        remapped = None
        if self._of_matrix is not None:
            if self._of_matrix.has_mask and (mask is not None or packed_mask is not None):
                raise ValidationError("mask: expected none beside a variant with a mask: let that read a tensor.")
            remapped = lists.remapped(self._of_matrix, heads, options.group_size, sizes, self._workspace.device)
            options, (operands,) = options._replace(variant=remapped.planned), remapped.of_plan(operands)
        self.set_plan(AttentionSpec(lists.indices(), options, mask, packed_mask, operands=operands))
        self._remapped = remapped

    def _of_run(self, operands: Mapping[str, Any]) -> Mapping[str, Any]:
        return operands if self._remapped is None else self._remapped.of_run(operands, is_tracing())[0]


class BlockSparseAttentionWrapper(BlockListsWrapper):
    """Attention under a block-sparse matrix (BSR, as in SciPy) of M queries and N keys, with blocks of R x C.

    float_workspace_buffer, backend, variant: see BlockListsWrapper.

    >>> wrapper = quire.BlockSparseAttentionWrapper(torch.empty(1 << 20, dtype=torch.uint8))
    >>> indptr = torch.tensor([0, 1, 3], dtype=torch.int32)  # two rows of blocks, with one block and two blocks
    >>> indices = torch.tensor([2, 0, 2], dtype=torch.int32)  # the block columns
    >>> wrapper.plan(indptr, indices, 32, 48, 16, 16, num_qo_heads=8, num_kv_heads=2, head_dim=64)
    >>> q, k, v = (torch.randn(n, heads, 64).half() for n, heads in ((32, 8), (48, 2), (48, 2)))
    >>> wrapper.run(q, k, v).shape
    torch.Size([32, 8, 64])
    """

    @foreign(
        refused="block_mask kv_block_lens q2k_indices q2k_num kv_splits use_clc q_scale k_scale v_scale",
        permissions="use_fp16_qk_reduction non_blocking",
    )
    def plan(
        self, indptr: torch.Tensor, indices: torch.Tensor, M: int, N: int, R: int, C: int, num_qo_heads: int,
        num_kv_heads: int, head_dim: int, mask: torch.Tensor | None = None, packed_mask: torch.Tensor | None = None,
        causal: bool = False, pos_encoding_mode: str = "NONE", use_fp16_qk_reduction: bool = False,
        logits_soft_cap: float | None = None, sm_scale: float | None = None, rope_scale: float | None = None,
        rope_theta: float | None = None, q_data_type: str | torch.dtype = "float16",
        kv_data_type: str | torch.dtype | None = None, o_data_type: str | torch.dtype | None = None,
        non_blocking: bool = True, block_mask: Any = None, kv_block_lens: Any = None, q2k_indices: Any = None,
        q2k_num: Any = None, kv_splits: Any = None, use_clc: Any = None, q_scale: Any = None, k_scale: Any = None,
        v_scale: Any = None, **operands: OperandValue,
    ) -> None:  # fmt: skip
        """Plan a matrix, once for all layers that use it.

        indptr: int32 [ceil(M / R) + 1], offsets of rows of blocks into indices. indices: int32, the block column of
            each listed block, in 0..ceil(N / C) - 1 and in any order; a block that is listed twice counts twice. A row
            of blocks without any gives 0, and lse -inf. If the arrays are on a device, plan() waits for it.
        M, N, R, C: numbers of queries and of keys, and the rows and columns of a block; the last blocks may be smaller.
            Blocks whose width gcd(C, N) is a multiple of 8 are the fastest.
        mask: bool [listed blocks, R, C], which elements of each block are visible; None: all. Or packed_mask: the mask
            as bits from quire.packbits, with a matrix [queries, listed keys] for each row of blocks, which begins with
            a new byte.
        causal, pos_encoding_mode: apply to each row of blocks separately, as if there were no other keys than the
            listed ones, and the last of them had the position of the last query. If R == C and each row lists its block
            on the diagonal last, `causal` is the causal mask of the whole matrix.
        num_qo_heads, num_kv_heads, head_dim, sm_scale, logits_soft_cap, rope_scale, rope_theta, q_data_type,
            kv_data_type, o_data_type: as in BatchPrefillWithPagedKVCacheWrapper.plan(); results have q's type by
            default. use_fp16_qk_reduction and non_blocking are permissions, which Quire does not need.
        operands: tensors and numbers, by name, that the mask of the constructor's variant reads.

        Other arguments belong to kernels for other GPUs and are refused. VariableBlockSparseAttentionWrapper has
        separate blocks for each head. Raises ValidationError naming the argument, or UnsupportedError with each
        kernel's reason.
        """
        if mask is not None and packed_mask is not None:
            raise ValidationError("packed_mask: expected it or mask, got both.")
        matrix = BlockMatrix.of(indptr, indices, M, N, R, C)
        lists = matrix.lists()
        options = _options({**locals(), "page_size": lists.page_size})
        bools = None if mask is None else matrix.flat_mask(mask)
        shape = matrix.num_rows, matrix.num_columns
        self._plan_lists(lists, options, heads(num_qo_heads, num_kv_heads), shape, operands, bools, packed_mask)
        self._num_keys, self._page_size = matrix.num_columns, lists.page_size

    begin_forward = plan

    @overload
    def run(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, return_lse: Literal[False] = False,
        **options: Unpack[SparseKeywords],
    ) -> torch.Tensor: ...  # fmt: skip
    @overload
    def run(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, return_lse: Literal[True],
        **options: Unpack[SparseKeywords],
    ) -> Pair: ...  # fmt: skip
    @overload
    def run(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale_q: torch.Tensor | None = None,
        scale_k: torch.Tensor | None = None, scale_v: torch.Tensor | None = None, out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None, return_lse: bool = False, enable_pdl: bool | None = None,
        **operands: OperandValue,
    ) -> Result: ...  # fmt: skip
    def run(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale_q: torch.Tensor | None = None,
        scale_k: torch.Tensor | None = None, scale_v: torch.Tensor | None = None, out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None, return_lse: bool = False, enable_pdl: bool | None = None,
        **operands: OperandValue,
    ) -> Result:  # fmt: skip
        """Attention of q [M, num_qo_heads, head_dim] over k and v [N, num_kv_heads, head_dim], as planned.

        out, lse: tensors that results are written into. scale_q, scale_k, scale_v, enable_pdl: as q_scale, k_scale,
        v_scale and enable_pdl of BatchPrefillWithPagedKVCacheWrapper.run(). operands: what the score of the
        constructor's variant reads.

        Returns o [M, num_qo_heads, head_dim], or (o, lse) with return_lse=True, lse [M, num_qo_heads] in float32, base
        2. Raises PlanError before plan(), ValidationError for tensors that do not fit the plan.
        """
        check_scales(q, scale_q=scale_q, scale_k=scale_k, scale_v=scale_v)
        runner, pages = self._runner(), (self._pages(k, "k"), self._pages(v, "v"))
        options = RunOptions(
            q_scale=scale_q, k_scale=scale_k, v_scale=scale_v, enable_pdl=enable_pdl, operands=self._of_run(operands)
        )
        return runner.run(q, pages, out, lse, return_lse, options)

    def _pages(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        """Keys or values as pages [num_pages, page_size, num_kv_heads, head_dim]."""
        _check(tensor, name, {"N": self._num_keys, "num_kv_heads": None, "head_dim": None})
        return tensor.view(tensor.shape[0] // self._page_size, self._page_size, *tensor.shape[1:])

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale_q: torch.Tensor | None = None,
        scale_k: torch.Tensor | None = None, scale_v: torch.Tensor | None = None, pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False, logits_soft_cap: float | None = None, sm_scale: float | None = None,
        rope_scale: float | None = None, rope_theta: float | None = None, **operands: OperandValue,
    ) -> Result:  # fmt: skip
        """run() with arguments of plan(); plans again where they differ from what was planned."""
        self._replan({**locals(), "window_left": -1})
        more: dict[str, Any] = operands
        return self.run(q, k, v, scale_q, scale_k, scale_v, **more)


class VariableBlockSparseAttentionWrapper(BlockListsWrapper):
    """Attention with a block-sparse matrix for each KV head, whose rows and columns of blocks may have any size.

    float_workspace_buffer, backend, variant: see BlockListsWrapper.

    >>> wrapper = quire.VariableBlockSparseAttentionWrapper(torch.empty(1 << 20, dtype=torch.uint8))
    >>> shown = torch.tensor([[[False, False, True], [True, False, True]]])  # [num_kv_heads, rows, columns] of blocks
    >>> rows, columns = torch.tensor([[2, 4]]), torch.tensor([[8, 16, 24]])  # their sizes: 6 queries, 48 keys
    >>> wrapper.plan(shown, rows, columns, num_qo_heads=4, num_kv_heads=1, head_dim=64)
    >>> q, k, v = (torch.randn(heads, n, 64).half() for heads, n in ((4, 6), (1, 48), (1, 48)))
    >>> wrapper.run(q, k, v).shape
    torch.Size([4, 6, 64])
    """

    @foreign(permissions="use_fp16_qk_reduction non_blocking")
    def plan(
        self, block_mask_map: torch.Tensor, block_row_sz: torch.Tensor, block_col_sz: torch.Tensor, num_qo_heads: int,
        num_kv_heads: int, head_dim: int, causal: bool = False, pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False, logits_soft_cap: float | None = None, sm_scale: float | None = None,
        rope_scale: float | None = None, rope_theta: float | None = None, non_blocking: bool = True,
        q_data_type: str | torch.dtype = "float16", kv_data_type: str | torch.dtype | None = None,
        **operands: OperandValue,
    ) -> None:  # fmt: skip
        """Plan the matrices, once for all layers that use them.

        block_mask_map: bool [num_kv_heads, MB, NB], which blocks the query heads of each KV head see.
        block_row_sz, block_col_sz: integers [num_kv_heads, MB] and [num_kv_heads, NB], the rows and columns of blocks.
            Their sums must be qo_len and kv_len for each head. Columns whose common divisor is a multiple of 8 are the
            fastest; otherwise keys are gathered one by one. If the rows are multiples of 128, or if there is one query
            head for each KV head, q and the result need not be copied.
        pos_encoding_mode: "NONE" or "ROPE_LLAMA". operands: what the mask of the constructor's variant reads, by name.

        The other arguments, and the meaning of `causal`, are those of BlockSparseAttentionWrapper.plan(). If arrays are
        on a device, plan() waits for it. Raises ValidationError naming the argument, or UnsupportedError with each
        kernel's reason.
        """
        qo, kv = heads(num_qo_heads, num_kv_heads)
        if pos_encoding_mode == "ALIBI":
            raise ValidationError(
                "pos_encoding_mode: expected 'NONE' or 'ROPE_LLAMA', got 'ALIBI': heads are planned as requests of one "
                "KV head, whose slopes would be those of the first heads."
            )
        lists, group = lists_of_heads(block_mask_map, block_row_sz, block_col_sz, kv), qo // kv
        if not (lists.qo_indptr % _TILE_ROWS).any():  # then row tiles are full without the heads of a group in them
            lists, group = lists.for_each_query_head(kv, group), 1
        sizes = {"num_qo_heads": group, "num_kv_heads": 1, "page_size": lists.page_size}
        options = _variable_options({**locals(), **sizes})
        qo_len, kv_len = int(lists.qo_indptr[-1]) * group // qo, int(block_col_sz[0].sum())
        self._plan_lists(lists, options, (qo, kv), (qo_len, kv_len), operands)
        self._shape = _Shape(qo, kv, group, qo_len, kv_len, lists.page_size)

    begin_forward = plan

    @overload
    def run(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, return_lse: Literal[False] = False,
        **options: Unpack[SparseKeywords],
    ) -> torch.Tensor: ...  # fmt: skip
    @overload
    def run(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, return_lse: Literal[True],
        **options: Unpack[SparseKeywords],
    ) -> Pair: ...  # fmt: skip
    @overload
    def run(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None, return_lse: bool = False, enable_pdl: bool | None = None,
        **operands: OperandValue,
    ) -> Result: ...  # fmt: skip
    def run(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None, return_lse: bool = False, enable_pdl: bool | None = None,
        **operands: OperandValue,
    ) -> Result:  # fmt: skip
        """Attention of q [num_qo_heads, qo_len, head_dim] over k and v [num_kv_heads, kv_len, head_dim], as planned.

        k and v are copied if their heads are not adjacent in memory. out, lse: tensors that results are written into.
        enable_pdl: as in BatchPrefillWithPagedKVCacheWrapper.run(). operands: what the score of the constructor's
        variant reads.

        Returns o [num_qo_heads, qo_len, head_dim], or (o, lse) with return_lse=True, lse [num_qo_heads, qo_len] in
        float32, base 2. Raises PlanError before plan(), ValidationError for tensors that do not fit the plan.
        """
        runner, shape = self._runner(), self._shape
        own_out, own_lse = shape.written(out, "out"), shape.written(lse, "lse")
        result: Any = runner.run(
            shape.query_rows(q, "q"), (shape.pages(k, "k"), shape.pages(v, "v")), own_out, own_lse, return_lse,
            RunOptions(enable_pdl=enable_pdl, operands=self._of_run(operands)),
        )  # fmt: skip
        o, statistics = result if return_lse else (result, own_lse)
        o = shape.finish(o, out)
        statistics = None if statistics is None else shape.finish(statistics, lse)
        return (o, statistics) if return_lse else o

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False, logits_soft_cap: float | None = None, sm_scale: float | None = None,
        rope_scale: float | None = None, rope_theta: float | None = None, **operands: OperandValue,
    ) -> Result:  # fmt: skip
        """run() with arguments of plan(); plans again where they differ from what was planned."""
        self._replan({**locals(), "window_left": -1})
        more: dict[str, Any] = operands
        return self.run(q, k, v, **more)


_options = options_of(BlockSparseAttentionWrapper.plan, also="page_size")
_variable_options = options_of(VariableBlockSparseAttentionWrapper.plan, also="page_size")


class _Shape(NamedTuple):
    """Tensors with heads first, and what the kernel is given: rows [heads * length, group, head_dim]."""

    num_qo_heads: int
    num_kv_heads: int
    group: int  #: query heads in a row: those of a KV head, or one
    qo_len: int
    kv_len: int
    page_size: int

    def query_rows(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        """[num_qo_heads, qo_len, ...] as [num_qo_heads / group * qo_len, group, ...]."""
        more: dict[str, int | None] = {} if name == "lse" else {"head_dim": None}
        _check(tensor, name, {"num_qo_heads": self.num_qo_heads, "qo_len": self.qo_len, **more})
        return tensor.view(self.num_qo_heads // self.group, self.group, *tensor.shape[1:]).transpose(1, 2).flatten(0, 1)

    def pages(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        """Keys or values as pages [num_pages, page_size, 1, head_dim], head after head."""
        _check(tensor, name, {"num_kv_heads": self.num_kv_heads, "kv_len": self.kv_len, "head_dim": None})
        num_pages = self.num_kv_heads * self.kv_len // self.page_size
        return tensor.flatten(0, 1).unsqueeze(1).view(num_pages, self.page_size, 1, tensor.shape[2])

    def written(self, tensor: torch.Tensor | None, name: str) -> torch.Tensor | None:
        """What the kernel writes for the caller's `tensor`: its rows, or a new tensor of such rows."""
        if tensor is None:
            return None
        if not is_tracing():
            check_output(tensor, name)
        rows = self.query_rows(tensor, name)
        return rows if self._is_in_place(tensor) else rows.new_empty(rows.shape)

    def finish(self, rows: torch.Tensor, given: torch.Tensor | None) -> torch.Tensor:
        """Rows with heads first, in `given` if there is one."""
        by_heads = rows.view(self.num_qo_heads // self.group, self.qo_len, *rows.shape[1:]).transpose(1, 2)
        if given is None:
            return by_heads.flatten(0, 1)
        if not self._is_in_place(given):
            given.unflatten(0, by_heads.shape[:2]).copy_(by_heads)  # type: ignore[no-untyped-call]
        return given

    def _is_in_place(self, given: torch.Tensor) -> bool:
        """Whether the kernel writes into the caller's tensor."""
        return self.group == 1 and given.is_contiguous()


def _check(tensor: torch.Tensor, name: str, sizes: dict[str, int | None]) -> None:
    """A tensor of these sizes; one that torch traces has no memory to look at."""
    check_shape(tensor if is_tracing() else check_tensor(tensor, name), name, sizes)
