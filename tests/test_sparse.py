"""Block-sparse attention against the oracle, which is given the same blocks as a dense mask."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import oracle
import quire
from problems import Problem, ints, poisoned, workspace


def listed(rows: int, columns: int, density: float = 0.4, seed: int = 0, heads: int = 1) -> Tensor:
    """Which blocks are listed, bool [heads, rows, columns]; the second row of blocks lists none."""
    shown = torch.rand(heads, rows, columns, generator=torch.Generator().manual_seed(seed)) < density
    shown[:, 1] = False
    return shown


def bsr(shown: Tensor, order_seed: int | None = None) -> tuple[Tensor, Tensor]:
    """indptr and indices of bool [rows, columns], in ascending or random order of columns."""
    rows = []
    for row in shown:
        columns = row.nonzero().flatten()
        if order_seed is not None:
            columns = columns[torch.randperm(len(columns), generator=torch.Generator().manual_seed(order_seed))]
        rows.append(columns)
    return ints(oracle.indptr_of([len(row) for row in rows]), "cpu"), ints(torch.cat(rows), "cpu")


def dense(shown: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Blocks of these sizes as bool [queries, keys]."""
    return shown.repeat_interleave(rows, 0).repeat_interleave(columns, 1)


def sizes(length: int, block: int) -> Tensor:
    """Of blocks, the last of which is cut off."""
    return torch.tensor([min(block, length - at) for at in range(0, length, block)])


def attend(
    p: Problem, shown: Tensor, block: tuple[int, int], backend: str, order: int | None = None, **options: object
):
    """o and lse of a problem of one request; keys that no row lists are NaN."""
    wrapper = quire.BlockSparseAttentionWrapper(workspace(p.device), backend)
    (rows,), (columns,) = p.qo_lens, p.kv_lens
    options = {"causal": p.causal, "logits_soft_cap": p.soft_cap, "sm_scale": p.sm_scale, **options}
    wrapper.plan(
        *bsr(shown, order), rows, columns, *block, p.num_qo_heads, p.num_kv_heads, p.head_dim, q_data_type=p.dtype,
        **options,
    )  # fmt: skip
    seen = shown.any(0).repeat_interleave(block[1])[:columns].to(p.device)[:, None, None]
    k, v = (t.where(seen, torch.full_like(t, math.nan)) for t in (p.k, p.v))
    return wrapper, wrapper.run(p.q, k, v, return_lse=True)


def problem(device: str, dtype: torch.dtype, rows: int, columns: int, **more: object) -> Problem:
    return Problem((rows,), (columns,), dtype=dtype, device=device, **more)


@pytest.mark.parametrize(
    ("rows", "columns", "block"),
    [(96, 160, (16, 32)), (70, 100, (32, 40)), (65, 77, (16, 7)), (300, 520, (128, 128)), (6, 30, (1, 5))],
)
def test_blocks(device, backend, dtype, rows, columns, block):
    p = problem(device, dtype, rows, columns)
    heights, widths = sizes(rows, block[0]), sizes(columns, block[1])
    shown = listed(len(heights), len(widths))[0]
    _, (o, lse) = attend(p, shown, block, backend, order=3)
    seen = dense(shown, heights, widths)
    assert not seen.any(1).all(), "a row without blocks is tested"
    p.check(o, lse, mask=seen.flatten())


def test_options_of_plan(device, backend, dtype):
    """Soft cap, scale, query groups, and the tensors that run() writes."""
    p = problem(device, dtype, 64, 96, num_qo_heads=8, soft_cap=3.0, sm_scale=0.3)
    shown = listed(4, 3)[0]
    wrapper, _ = attend(p, shown, (16, 32), backend)
    out, lse = poisoned(p.q.shape, p.dtype, device), poisoned(p.q.shape[:2], torch.float32, device)
    k, v = (torch.stack([t, t], 1)[:, 1] for t in (p.k, p.v))
    wrapper.run(p.q, k, v, out=out, lse=lse, enable_pdl=False)
    mask = dense(shown, sizes(64, 16), sizes(96, 32)).flatten()
    p.check(out, lse, mask=mask)
    p.soft_cap, p.sm_scale = None, 0.5
    p.check(wrapper.forward(p.q, k, v, sm_scale=0.5), mask=mask)
    p.check(*wrapper.run_return_lse(p.q, k, v), mask=mask)


@pytest.mark.parametrize("kind", ["bool", "bits"])
def test_masks_of_blocks(device, backend, dtype, kind):
    p = problem(device, dtype, 70, 100)
    shown = listed(3, 3, 0.8)[0]
    indptr, indices = bsr(shown)
    bits = torch.rand(len(indices), 32, 40) < 0.5
    full = torch.zeros(3 * 32, 3 * 40, dtype=torch.bool)
    parts = []
    for row, (begin, end) in enumerate(zip(indptr.tolist(), indptr.tolist()[1:], strict=False)):
        for at in range(begin, end):
            column = int(indices[at])
            full[row * 32 : row * 32 + 32, column * 40 : column * 40 + 40] = bits[at]
        listed_keys = torch.cat(
            [torch.arange(i * 40, min(i * 40 + 40, 100)) for i in indices[begin:end]] or [indices[:0]]
        )
        parts.append(full[row * 32 : min(row * 32 + 32, 70)][:, listed_keys.long()].flatten())
    if kind == "bool":
        options = {"mask": bits.to(device)}
    else:
        cuts = oracle.indptr_of([len(part) for part in parts])
        options = {"packed_mask": oracle.segment_packbits(torch.cat(parts), cuts, "little")[0].to(device)}
    _, (o, lse) = attend(p, shown, (32, 40), backend, **options)
    p.check(o, lse, mask=full[:70, :100].flatten())


def test_causal_where_rows_list_their_diagonal_block_last(device, backend, dtype):
    p = problem(device, dtype, 120, 120, causal=True)
    shown = listed(5, 5, 0.5)[0].tril() | torch.eye(5, dtype=torch.bool)
    _, (o, lse) = attend(p, shown, (24, 24), backend)
    mask = dense(shown, sizes(120, 24), sizes(120, 24)) & torch.ones(120, 120, dtype=torch.bool).tril()
    p.check(o, lse, mask=mask.flatten())


@pytest.mark.first(1)
def test_causal_and_rotation_are_of_each_row_of_blocks(device, backend, dtype):
    """A row of blocks is a request, whose keys are those it lists."""
    rope = {"pos_encoding_mode": "ROPE_LLAMA", "rope_scale": 2.0, "rope_theta": 5e3}
    p = Problem((16, 16), (48, 32), dtype=dtype, device=device, causal=True, **rope)
    wrapper = quire.BlockSparseAttentionWrapper(workspace(device), backend)
    indptr, indices = ints([0, 3, 5], "cpu"), ints([0, 1, 2, 3, 4], "cpu")
    wrapper.plan(indptr, indices, 32, 80, 16, 16, 4, 2, 64, causal=True, **rope, q_data_type=dtype)
    p.check(*wrapper.run_return_lse(p.q, p.k, p.v))


def test_number_types():
    """Keys and values of 8 bits, and results of another type."""
    kv = torch.float8_e4m3fn
    p = Problem((32,), (48,), dtype=torch.bfloat16, kv_dtype=kv)
    mask = dense(listed(2, 3, 0.9)[0], sizes(32, 16), sizes(48, 16))
    types = {"q_data_type": torch.bfloat16, "kv_data_type": kv}
    wrapper = quire.BlockSparseAttentionWrapper(workspace("cpu"))
    wrapper.plan(*bsr(listed(2, 3, 0.9)[0]), 32, 48, 16, 16, 4, 2, 64, **types, o_data_type=torch.float32)
    o = wrapper.run(p.q, p.k, p.v)
    assert o.dtype is torch.float32 and (o - p.expected(mask=mask.flatten()).o).abs().max() < 0.01
    wrapper = quire.VariableBlockSparseAttentionWrapper(workspace("cpu"))
    widths = torch.full((2, 3), 16)
    wrapper.plan(listed(2, 3, 0.9).expand(2, -1, -1), widths[:, :2], widths, 4, 2, 64, **types)
    q, k, v = (t.view(torch.uint8 if t.itemsize == 1 else t.dtype).transpose(0, 1) for t in (p.q, p.k, p.v))
    o = wrapper.run(q, *(t.contiguous().view(kv) for t in (k, v)))
    p.check(o.transpose(0, 1), mask=mask.flatten())


def test_a_block_that_is_listed_twice_counts_twice():
    p = problem("cpu", torch.float32, 16, 32)
    wrapper = quire.BlockSparseAttentionWrapper(workspace("cpu"))
    wrapper.plan(ints([0, 3], "cpu"), ints([1, 0, 1], "cpu"), 16, 32, 16, 16, 4, 2, 64, q_data_type=torch.float32)
    o = wrapper.run(p.q, p.k, p.v)
    k, v = (torch.cat([t, t[16:]]) for t in (p.k, p.v))
    truth = oracle.attention(p.q, k, v, [0, 16], [0, 48])
    assert (o - truth.o).abs().max() < 1e-5


def test_plans_are_laid_on_pages_that_divide_blocks():
    """So that full blocks cost no mask, and cut-off ones read nothing else."""
    for columns, width, page_size in ((256, 64, 64), (100, 40, 20), (77, 7, 7), (78, 7, 1)):
        wrapper = quire.BlockSparseAttentionWrapper(workspace("cpu"))
        count = -(-columns // width)
        wrapper.plan(
            ints([0, count], "cpu"), ints(range(count), "cpu"), 8, columns, 8, width, 4, 2, 64,
            q_data_type=torch.float32,
        )  # fmt: skip
        spec = wrapper._attention.spec
        assert spec.options.page_size == page_size and spec.mask.name == "NONE"


BAD = {
    "indptr": {"indptr": [0, 2, 1]},
    "indptr: expected a tensor of shape": {"indptr": [0, 2]},
    "indices": {"indices": [0, 3]},
    "M": {"M": 0},
    "num_qo_heads": {"num_qo_heads": 3},
    "head_dim": {"head_dim": -1},
    "causal": {"causal": 1},
    "mask": {"mask": torch.ones(2, 16, 15, dtype=torch.bool)},
    "packed_mask": {"mask": torch.ones(2, 16, 16, dtype=torch.bool), "packed_mask": torch.ones(64, dtype=torch.uint8)},
    "block_mask": {"block_mask": torch.ones(2, 2, 3, dtype=torch.bool)},
    "kv_block_lens": {"kv_block_lens": torch.ones(3)},
    "q2k_indices": {"q2k_indices": torch.ones(3)},
    "q2k_num": {"q2k_num": torch.ones(3)},
    "kv_splits": {"kv_splits": 2},
    "use_clc": {"use_clc": True},
    "q_scale": {"q_scale": torch.ones(3)},
    "k_scale": {"k_scale": torch.ones(3)},
    "v_scale": {"v_scale": torch.ones(3)},
    "logits_soft_cap": {"logits_soft_cap": -1.0},
    "rope_scale": {"rope_scale": 2.0},
    "use_fp16_qk_reduction": {"use_fp16_qk_reduction": 1},
    "non_blocking": {"non_blocking": 1},
}


@pytest.mark.parametrize("name", BAD)
def test_wrong_arguments_of_plan(name):
    given = {"indptr": [0, 1, 2], "indices": [0, 2], "M": 32, "N": 48, "R": 16, "C": 16}
    given |= {"num_qo_heads": 4, "num_kv_heads": 2, "head_dim": 64, "q_data_type": torch.float32, **BAD[name]}
    given |= {key: ints(given[key], "cpu") for key in ("indptr", "indices")}
    with pytest.raises(quire.ValidationError, match=f"^{name}"):
        quire.BlockSparseAttentionWrapper(workspace("cpu")).plan(**given)


def test_wrong_arguments_of_run():
    p = problem("cpu", torch.float32, 64, 96)
    wrapper = quire.BlockSparseAttentionWrapper(workspace("cpu"))
    with pytest.raises(quire.PlanError):
        wrapper.run(p.q, p.k, p.v)
    wrapper, _ = attend(p, listed(4, 3)[0], (16, 32), "auto")
    for name in ("scale_q", "scale_k", "scale_v"):
        with pytest.raises(quire.ValidationError, match=name):
            wrapper.run(p.q, p.k, p.v, **{name: torch.ones(4)})
    with pytest.raises(quire.ValidationError, match="k: "):
        wrapper.run(p.q, p.k[:-1], p.v)
    with pytest.raises(quire.ValidationError, match="q: "):
        wrapper.run(p.q[:-1], p.k, p.v)


# Blocks of any size, of each head


def heads(device: str, dtype: torch.dtype, num_qo_heads: int, rows: int, columns: int, num_kv_heads: int = 2):
    """q, k and v, heads first."""
    source = torch.Generator().manual_seed(0)
    lens = (num_qo_heads, rows), (num_kv_heads, columns), (num_kv_heads, columns)
    return [torch.randn(h, n, 64, generator=source).to(dtype).to(device) for h, n in lens]


def check_heads(o: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, masks: list[Tensor]) -> None:
    group = q.shape[0] // k.shape[0]
    for head, mask in enumerate(masks):
        own = slice(head * group, (head + 1) * group)
        tensors = q[own].transpose(0, 1), k[head : head + 1].transpose(0, 1), v[head : head + 1].transpose(0, 1)
        ends = [0, q.shape[1]], [0, k.shape[1]]
        truth = oracle.attention(*tensors, *ends, mask=mask.flatten())
        error = oracle.torch_error(*tensors, *ends, mask=mask.flatten())
        oracle.assert_close(o[own].transpose(0, 1), truth.o, error, what=f"head {head}")
        oracle.assert_lse_close(lse[own].transpose(0, 1), truth.lse, magnitude=64.0)


@pytest.mark.parametrize(
    ("num_qo_heads", "rows", "columns"),
    [
        (4, [[5, 16, 0, 30], [20, 1, 29, 1]], [[8, 24, 16], [16, 16, 16]]),  # boxes of 8
        (4, [[5, 16], [20, 1]], [[9, 1, 11], [2, 16, 3]]),  # keys one by one
        (4, [[128, 128], [256, 0]], [[64, 64], [32, 96]]),  # heads that need no copies
        (2, [[5, 16], [20, 1]], [[8, 8, 16], [16, 8, 8]]),
    ],
)
def test_blocks_of_any_size(device, backend, dtype, num_qo_heads, rows, columns):
    rows, columns = torch.tensor(rows), torch.tensor(columns)
    q, k, v = heads(device, dtype, num_qo_heads, int(rows[0].sum()), int(columns[0].sum()))
    shown = listed(rows.shape[1], columns.shape[1], 0.6, heads=2)
    wrapper = quire.VariableBlockSparseAttentionWrapper(workspace(device), backend)
    wrapper.plan(shown.to(device), rows, columns.to(device), num_qo_heads, 2, 64, q_data_type=dtype)
    o, lse = wrapper.run(q, k, v, return_lse=True)
    masks = [dense(shown[h], rows[h], columns[h]) for h in range(2)]
    check_heads(o, lse, q, k, v, masks)
    strided = [torch.stack([t, t], 2)[:, :, 1] for t in (q, k, v)]
    out, statistics = poisoned(q.shape, dtype, device), poisoned(q.shape[:2], torch.float32, device)
    assert wrapper.run(*strided, out=out, lse=statistics) is out
    assert torch.equal(out, o) and torch.equal(statistics, lse)
    holes = poisoned((*q.shape[:2], 80), dtype, device)
    wrapper.run(q, k, v, out=holes[..., :64])
    assert torch.equal(holes[..., :64], o) and bool(holes[..., 64:].isnan().all())
    assert torch.equal(wrapper.forward(q, k, v, sm_scale=1 / 8), o)


def test_causal_blocks_of_any_size(device, backend, dtype):
    """Of each row of blocks, as in BlockSparseAttentionWrapper."""
    rows, columns = torch.tensor([[16, 48]] * 2), torch.tensor([[16, 48]] * 2)
    q, k, v = heads(device, dtype, 4, 64, 64)
    shown = torch.ones(2, 2, 2, dtype=torch.bool).tril()
    wrapper = quire.VariableBlockSparseAttentionWrapper(workspace(device), backend)
    wrapper.plan(shown, rows, columns, 4, 2, 64, causal=True, q_data_type=dtype)
    o, lse = wrapper.run_return_lse(q, k, v)
    check_heads(o, lse, q, k, v, [torch.ones(64, 64, dtype=torch.bool).tril()] * 2)


def test_options_of_heads():
    """Each KV head's rows of blocks are requests, here of all keys."""
    rope = {"pos_encoding_mode": "ROPE_LLAMA", "rope_scale": 2.0, "rope_theta": 5e3}
    p = problem("cpu", torch.float32, 32, 48, soft_cap=3.0, sm_scale=0.3, **rope)
    wrapper = quire.VariableBlockSparseAttentionWrapper(workspace("cpu"))
    options = {"sm_scale": 0.3, "logits_soft_cap": 3.0, **rope}
    wrapper.plan(
        torch.ones(2, 1, 2), torch.tensor([[32]] * 2), torch.tensor([[16, 32]] * 2), 4, 2, 64,
        q_data_type=torch.float32, **options,
    )  # fmt: skip
    o, lse = wrapper.run(*(t.transpose(0, 1) for t in (p.q, p.k, p.v)), return_lse=True, enable_pdl=False)
    p.check(o.transpose(0, 1), lse.t())


def test_heads_without_a_block():
    rows, columns = torch.tensor([[16, 16]]), torch.tensor([[8, 8]])
    wrapper = quire.VariableBlockSparseAttentionWrapper(workspace("cpu"))
    wrapper.plan(torch.zeros(1, 2, 2), rows, columns, 2, 1, 64, q_data_type=torch.float32)
    o, lse = wrapper.run_return_lse(*heads("cpu", torch.float32, 2, 32, 16, 1))
    assert not o.any() and bool((lse == -math.inf).all())


BAD_HEADS = {
    "block_mask_map": {"block_mask_map": torch.ones(2, 3)},
    "block_row_sz: expected .*sum": {"block_row_sz": torch.tensor([[5, 16], [20, 2]])},
    "block_row_sz: expected": {"block_row_sz": torch.tensor([[5, 16, 1], [20, 1, 1]])},
    "block_col_sz: expected .*sum": {"block_col_sz": torch.tensor([[8, -8, 16], [16, 8, -8]])},
    "num_qo_heads": {"num_qo_heads": 3},
    "pos_encoding_mode": {"pos_encoding_mode": "ALIBI"},
    "causal": {"causal": "no"},
    "use_fp16_qk_reduction": {"use_fp16_qk_reduction": 1},
    "non_blocking": {"non_blocking": 1},
}


@pytest.mark.parametrize("name", BAD_HEADS)
def test_wrong_arguments_of_blocks_of_any_size(name):
    given = {"block_mask_map": torch.ones(2, 2, 3), "block_row_sz": torch.tensor([[5, 16], [20, 1]])}
    given |= {"block_col_sz": torch.tensor([[8, 8, 16], [16, 8, 8]]), "num_qo_heads": 4, "num_kv_heads": 2}
    with pytest.raises(quire.ValidationError, match=f"^{name}"):
        wrapper = quire.VariableBlockSparseAttentionWrapper(workspace("cpu"))
        wrapper.plan(**{"head_dim": 64, "q_data_type": torch.float32, **given, **BAD_HEADS[name]})


def test_wrong_tensors_of_blocks_of_any_size():
    wrapper = quire.VariableBlockSparseAttentionWrapper(workspace("cpu"))
    q, k, v = heads("cpu", torch.float32, 4, 21, 32)
    with pytest.raises(quire.PlanError):
        wrapper.run(q, k, v)
    columns = torch.tensor([[8, 8, 16], [16, 8, 8]])
    wrapper.plan(torch.ones(2, 2, 3), torch.tensor([[5, 16], [20, 1]]), columns, 4, 2, 64, q_data_type=torch.float32)
    for name, given in (("q", (q[:, 1:], k, v)), ("k", (q, k[1:], v)), ("v", (q, k, v[:, 1:]))):
        with pytest.raises(quire.ValidationError, match=f"^{name}: "):
            wrapper.run(*given)
    with pytest.raises(quire.ValidationError, match="lse"):
        wrapper.run(q, k, v, lse=torch.empty(4, 20))
    with pytest.raises(quire.ValidationError, match="dtype"):
        wrapper.run(q, k, v, out=torch.empty(4, 21, 64, dtype=torch.float16))


@pytest.mark.parametrize("variable", [False, True])
def test_under_torch_compile(variable):
    p = problem("cpu", torch.float32, 64, 64)
    if variable:
        wrapper = quire.VariableBlockSparseAttentionWrapper(workspace("cpu"))
        shown, width = listed(4, 4)[0].expand(2, -1, -1), torch.full((2, 4), 16)
        wrapper.plan(shown, width, width, 4, 2, 64, q_data_type=torch.float32)
        tensors = [t.transpose(0, 1).contiguous() for t in (p.q, p.k, p.v)]
    else:
        wrapper = quire.BlockSparseAttentionWrapper(workspace("cpu"))
        wrapper.plan(*bsr(listed(4, 4)[0]), 64, 64, 16, 16, 4, 2, 64, q_data_type=torch.float32)
        tensors = [p.q, p.k, p.v]
    compiled = torch.compile(lambda *given: wrapper.run(*given, return_lse=True), fullgraph=True, backend="eager")
    for got, expected in zip(compiled(*tensors), wrapper.run(*tensors, return_lse=True), strict=True):
        assert torch.equal(got, expected)
