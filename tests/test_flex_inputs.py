"""What flex_attention takes: tensors of any strides, batches and head dims, and block masks with lists of any kind."""

from __future__ import annotations

import ctypes
import gc
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as theirs
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, noop_mask

import quire
from quire.attention import flex_inputs
from quire.attention.flex_inputs import mask_of, states_of
from quire.engine import plan_cache, planner

BATCH, HEADS, KV_HEADS, Q_LEN, KV_LEN = 2, 4, 2, 70, 100
SOURCE = torch.Generator().manual_seed(5)


def draw(device: str, heads: int, length: int, head_dim: int = 64, batch: int = BATCH) -> Tensor:
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    return torch.randn(batch, heads, length, head_dim, generator=SOURCE).to(dtype).to(device)


def reference(q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Softmax in float64 over the keys that each query sees."""
    k, v = (t.expand(len(q), -1, -1, -1).repeat_interleave(q.shape[1] // t.shape[1], 1).double() for t in (k, v))
    score = q.double() @ k.transpose(2, 3) / math.sqrt(q.shape[3])
    score = score if seen is None else score.masked_fill(~seen, -math.inf)
    weights = torch.softmax(score, 3).masked_fill((score == -math.inf).all(3, keepdim=True), 0.0)
    return weights @ v, torch.logsumexp(score, 3)


def check(q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None = None, **options: Any) -> None:
    o, lse = quire.flex_attention(q, k, v, enable_gqa=True, return_lse=True, **options)
    truth, of_rows = reference(q, k, v, seen)
    assert o.shape == truth.shape and o.dtype is q.dtype
    assert (o - truth).abs().max() < (1e-5 if q.is_cpu else 2e-2)
    assert torch.equal(lse.isinf(), of_rows.isinf()) and (lse - of_rows).nan_to_num(0.0).abs().max() < 1e-4


# --- tensors ---------------------------------------------------------------------------------------------------------


def test_key_and_value_of_one_batch(device):
    q = draw(device, HEADS, Q_LEN)
    k, v = (draw(device, KV_HEADS, KV_LEN, batch=1) for _ in range(2))
    for _ in range(3):
        check(q, k, v)


def test_strides(device):
    q = draw(device, HEADS, Q_LEN)
    k, v = (draw(device, 1, KV_LEN) for _ in range(2))
    check(q, k.expand(-1, KV_HEADS, -1, -1), v.expand(-1, KV_HEADS, -1, -1))
    backwards = q.transpose(2, 3).contiguous().transpose(2, 3)
    check(backwards, k, v)
    odd = torch.empty(BATCH, HEADS, Q_LEN, 67, dtype=q.dtype, device=device)[..., 1:65]
    odd.copy_(q)
    check(odd, k, v)
    check(q[:, :, ::2], k[:, :, 1::3], v[:, :, 1::3])


def in_order(tensor: Tensor, of_heads: bool) -> Tensor:
    """[batch, heads, length, head_dim], contiguous or as the transpose of a contiguous [batch, length, heads, ...]."""
    return tensor.contiguous() if of_heads else tensor.transpose(1, 2).contiguous().transpose(1, 2)


#: Of query, key and value: whether they are contiguous; and the names of what is copied.
ORDERS = {
    (True, True, True): (), (False, False, False): (), (True, True, False): ("value",),
    (True, False, False): ("query",), (False, True, True): ("query",),
}  # fmt: skip


@pytest.mark.parametrize("order", ORDERS)
def test_orders_of_heads_and_tokens(order, device):
    """Batches that lie one after another as heads are not copied; the result has the order of the query."""
    slopes = torch.rand(BATCH, HEADS, generator=SOURCE).to(device)
    tensors = [draw(device, HEADS, 40), *(draw(device, KV_HEADS, KV_LEN) for _ in range(2))]
    q, k, v = (in_order(t, of_heads) for t, of_heads in zip(tensors, order, strict=True))
    wide_k, wide_v = (t.repeat_interleave(2, 1).double() for t in (k, v))
    at = torch.arange(KV_LEN, device=device)
    score = q.double() @ wide_k.transpose(2, 3) / 8 - slopes[:, :, None, None] * at
    for _ in range(3):  # planned, recorded, replayed
        o, lse = quire.flex_attention(
            q, k, v, lambda s, b, h, i, j: s - slopes[b, h] * j, enable_gqa=True, return_lse=True
        )
        assert (o - torch.softmax(score, 3) @ wide_v).abs().max() < (1e-5 if device == "cpu" else 2e-2)
        assert (lse - score.logsumexp(3)).abs().max() < 1e-4 and o.stride() == q.stride()
    found = quire.explain_flex_attention(q, k, v, enable_gqa=True)
    assert found.figures["copied in each call"] == (", ".join(ORDERS[order]) or "nothing")
    assert ("requests" in found.figures) is (sum(order) > 1)


@pytest.mark.parametrize("of_heads", [True, False])
def test_one_request_has_the_order_of_its_query(of_heads, device):
    q, k, v = (draw(device, heads, KV_LEN)[:1] for heads in (HEADS, KV_HEADS, KV_HEADS))
    q = in_order(q, of_heads)
    compiled = torch.compile(quire.flex_attention, backend="aot_eager", fullgraph=True)
    for call in (quire.flex_attention, quire.flex_attention, quire.flex_attention, compiled):
        o = call(q, k, v, enable_gqa=True)
        wanted = torch.softmax(q.double() @ k.double().repeat_interleave(2, 1).transpose(2, 3) / 8, 3)
        wanted = wanted @ v.double().repeat_interleave(2, 1)
        assert (o - wanted).abs().max() < (1e-5 if device == "cpu" else 2e-2)
        assert o.is_contiguous() is of_heads and o.transpose(1, 2).is_contiguous() is not of_heads


def test_steps_of_decode_copy_nothing(device):
    """Neither with a query as a projection leaves it, nor with a part of a longer cache."""
    q = draw(device, 1, HEADS).transpose(1, 2)
    k, v = (draw(device, KV_HEADS, KV_LEN)[:, :, :64] for _ in range(2))
    for _ in range(3):
        check(q, k, v)
    assert flex_inputs.Inputs.of(q, k, v, True).copied == ()


def test_sizes_of_captured_tensors_are_checked_as_functions_read_them(device):
    q, short = draw(device, HEADS, Q_LEN), torch.rand(HEADS - 1, device=device)
    with pytest.raises(quire.ValidationError, match=f"expected at least {HEADS} elements in dimension 0, which head"):
        quire.flex_attention(q, q, q, lambda s, b, h, i, j: s * short[h])


@pytest.mark.slow
@pytest.mark.parametrize(("head_dim", "head_dim_vo"), [(16, 16), (17, 59)])
def test_head_dims_that_kernels_lack(head_dim, head_dim_vo, device):
    q, k = draw(device, HEADS, Q_LEN, head_dim), draw(device, KV_HEADS, KV_LEN, head_dim)
    check(q, k, draw(device, KV_HEADS, KV_LEN, head_dim_vo))


def test_what_is_refused():
    q, k = draw("cpu", HEADS, Q_LEN), draw("cpu", HEADS, KV_LEN)
    for tensors, message in (
        ((q.double(), k.double(), k.double()), "query: expected float16, bfloat16 or, on a CPU, float32"),
        ((q, k.half(), k), "key: expected the dtype of query"),
        ((q, k, k.half()), "value: expected the dtype of query"),
        ((q, k[:, :2], k[:, :2]), "key: expected"),
        ((torch.cat([q, q]), k, k), "key: expected"),
        ((q, k[:1], k), "value: expected"),
    ):
        with pytest.raises(ValueError, match=message):
            quire.flex_attention(*tensors)


def test_options_of_torchs_kernels_and_other_results():
    q, k = draw("cpu", HEADS, Q_LEN), draw("cpu", HEADS, KV_LEN)
    o, lse = quire.flex_attention(q, k, k, return_lse=True)
    assert torch.equal(quire.flex_attention(q, k, k, kernel_options={"BLOCK_M": 64, "num_stages": 2}), o)
    with pytest.raises(quire.ValidationError, match="kernel_options: expected a dict"):
        quire.flex_attention(q, k, k, kernel_options=64)
    if not hasattr(theirs, "AuxRequest"):
        return
    for wants in (True, False):
        again, aux = quire.flex_attention(q, k, k, return_aux=theirs.AuxRequest(lse=wants))
        assert torch.equal(again, o) and aux.max_scores is None
        assert torch.equal(aux.lse, lse) if wants else aux.lse is None
    with pytest.raises(quire.ValidationError, match="return_lse: expected it or return_aux, got both"):
        quire.flex_attention(q, k, k, return_aux=theirs.AuxRequest(lse=True), return_lse=True)
    with pytest.raises(quire.ValidationError, match="return_aux: expected torch's AuxRequest, got bool"):
        quire.flex_attention(q, k, k, return_aux=True)


@pytest.mark.skipif(not hasattr(theirs, "AuxRequest"), reason="this torch has no AuxRequest")
def test_largest_scores(device):
    """Of the scores as score_mod leaves them; -inf for a query that sees nothing."""
    q, k = draw(device, HEADS, Q_LEN), draw(device, HEADS, KV_LEN)
    mask = create_block_mask(lambda b, h, i, j: (i % 3 > 0) & (j <= i), None, None, Q_LEN, KV_LEN, device=device)

    def attend(attention: object, *tensors: Tensor, **wanted: bool) -> tuple[Tensor, theirs.AuxOutput]:
        return attention(*tensors, capped, mask, 0.2, return_aux=theirs.AuxRequest(**wanted))

    def capped(s, b, h, i, j):
        return 5 * torch.tanh(s / 5) - 0.1 * j

    if device != "cpu":
        with pytest.raises(quire.UnsupportedError, match="maximum of logits"):
            attend(quire.flex_attention, q, k, k, max_scores=True)
        return
    rows, columns = torch.arange(Q_LEN)[:, None], torch.arange(KV_LEN)
    scores = capped(q.double() @ k.double().transpose(2, 3) * 0.2, 0, 0, rows, columns)
    scores = scores.masked_fill(~((rows % 3 > 0) & (columns <= rows)), -math.inf)
    for call in (quire.flex_attention, torch.compile(quire.flex_attention, backend="aot_eager", fullgraph=True)):
        for lse in (False, True):
            for _ in range(3):  # planned, recorded, replayed
                got, more = attend(call, q, k, k, lse=lse, max_scores=True)
            o = torch.softmax(scores, 3).nan_to_num() @ k.double()
            torch.testing.assert_close(got.double(), o, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(more.max_scores.double(), scores.amax(3), rtol=1e-4, atol=1e-4)
            assert (more.lse is None) is not lse
            if lse:
                torch.testing.assert_close(more.lse.double(), scores.logsumexp(3), rtol=1e-4, atol=1e-4)


# --- block masks -----------------------------------------------------------------------------------------------------


def banded(b, h, q_idx, kv_idx):
    return (q_idx // 8 + kv_idx // 8) % 3 != 0


def elements(mask: BlockMask, function: Any = None) -> Tensor:
    """Which elements a block mask shows: those of full blocks, and of partial ones those of the function."""
    rows, keys = mask.BLOCK_SIZE
    q_len, kv_len = mask.shape[-2:]
    states = states_of(mask).repeat_interleave(rows, 2)[:, :, :q_len].repeat_interleave(keys, 3)[..., :kv_len]
    if function is None:
        return states > 0
    sizes = (*states.shape[:2], q_len, kv_len)
    at = [
        torch.arange(n, device=states.device).view(*(-1 if d == i else 1 for d in range(4)))
        for i, n in enumerate(sizes)
    ]
    return (states == 2) | ((states == 1) & function(*at))


def lists(partial: Tensor, full: Tensor, function: Any, block: tuple[int, int], lens: tuple[int, int]) -> BlockMask:
    """A block mask of these states [batch, heads, rows, columns], written by hand."""
    found = []
    for states in (partial, full):
        order = torch.argsort(states.int(), dim=-1, descending=True, stable=True).int()
        found += [states.sum(-1).int(), order]
    return BlockMask.from_kv_blocks(*found, BLOCK_SIZE=block, mask_mod=function, seq_lengths=lens)


def drawn_states(device: str, batch: int, heads: int, block: tuple[int, int]) -> tuple[Tensor, Tensor]:
    shape = (batch, heads, -(-Q_LEN // block[0]), -(-KV_LEN // block[1]))
    kind = torch.randint(0, 3, shape, generator=SOURCE).to(device)
    return kind == 1, kind == 2


@pytest.mark.parametrize("batch, heads", [(1, 1), (BATCH, HEADS)])
def test_lists_without_a_function(batch, heads, device):
    q, k, v = draw(device, HEADS, Q_LEN), *(draw(device, KV_HEADS, KV_LEN) for _ in range(2))
    mask = lists(*drawn_states(device, batch, heads, (16, 32)), None, (16, 32), (Q_LEN, KV_LEN))
    for _ in range(2):
        check(q, k, v, elements(mask), block_mask=mask)


@pytest.mark.parametrize("batch, heads", [(BATCH, 1), (1, HEADS)])
def test_lists_that_differ_from_their_function(batch, heads, device):
    q, k, v = draw(device, HEADS, Q_LEN), *(draw(device, KV_HEADS, KV_LEN) for _ in range(2))
    mask = lists(*drawn_states(device, batch, heads, (16, 32)), banded, (16, 32), (Q_LEN, KV_LEN))
    for _ in range(2):
        check(q, k, v, elements(mask, banded), block_mask=mask)
    assert mask_of(mask) is not banded


def test_lists_that_hide_some_of_a_causal_mask(device):
    def causal(b, h, q_idx, kv_idx):
        return q_idx + (KV_LEN - Q_LEN) >= kv_idx

    q, k, v = draw(device, HEADS, Q_LEN), *(draw(device, KV_HEADS, KV_LEN) for _ in range(2))
    states = states_of(create_block_mask(causal, None, None, Q_LEN, KV_LEN, device=device, BLOCK_SIZE=(16, 32)))
    states[..., 1] = 0
    mask = lists(states == 1, states == 2, causal, (16, 32), (Q_LEN, KV_LEN))
    check(q, k, v, elements(mask, causal), block_mask=mask)
    assert mask_of(mask) is not causal


@pytest.mark.parametrize("block", [128, (16, 32), 512])
def test_lists_that_say_what_their_function_says(block, device):
    """Such a function is the mask: kernels look up no lists."""
    q, k, v = draw(device, HEADS, Q_LEN), *(draw(device, KV_HEADS, KV_LEN) for _ in range(2))
    mask = create_block_mask(banded, BATCH, HEADS, Q_LEN, KV_LEN, device=device, BLOCK_SIZE=block)
    check(q, k, v, elements(mask, banded), block_mask=mask)
    assert mask_of(mask) is banded


def of_heads(b, h, q_idx, kv_idx):
    return (q_idx + 30 >= kv_idx) & (q_idx + 30 - kv_idx < (b * 4 + h) * 12)


@pytest.mark.parametrize("heads_first", [True, False])
def test_heads_with_masks_of_their_own(heads_first, device):
    """Lists of heads are found to say what the function says, and each KV head has a block mask of its own."""
    q, k, v = (in_order(draw(device, n, 100), heads_first) for n in (HEADS, KV_HEADS, KV_HEADS))
    mask = create_block_mask(of_heads, BATCH, HEADS, 100, 100, device=device, BLOCK_SIZE=16)
    for _ in range(3):
        check(q, k, v, elements(mask, of_heads), block_mask=mask)
    assert mask_of(mask) is of_heads
    plan = [*plan_cache._plans.entries.values()][-1].plan
    masks = (BATCH if heads_first else 1) * KV_HEADS
    stride = plan.plan.operands.block_mask_stride
    assert plan.spec.indices.batch_size * masks == BATCH * KV_HEADS and stride > 0
    if device != "cpu":
        return
    states = np.frombuffer(ctypes.string_at(plan.plan.operands.block_mask, stride * masks), dtype=np.uint8)
    visible = (states.reshape(masks, stride) & 1).sum(1)
    assert visible[0] < visible[-1] and visible[0] < stride


def test_block_masks_that_would_take_too_much_memory(device, monkeypatch):
    """All heads then share one."""
    monkeypatch.setattr(planner, "_MOST_MASK_BYTES", 1)
    q, k, v = (draw(device, n, 100) for n in (HEADS, KV_HEADS, KV_HEADS))
    mask = create_block_mask(of_heads, BATCH, HEADS, 100, 100, device=device, BLOCK_SIZE=16)
    check(q, k, v, elements(mask, of_heads), block_mask=mask)
    assert [*plan_cache._plans.entries.values()][-1].plan.plan.operands.block_mask_stride == 0


def test_a_block_longer_than_all_lengths(device):
    q, k, v = draw(device, HEADS, Q_LEN), *(draw(device, KV_HEADS, KV_LEN) for _ in range(2))
    one = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device)
    mask = lists(one, ~one, banded, (1 << 30, 1 << 30), (Q_LEN, KV_LEN))
    at = [
        torch.arange(n, device=device).view(*(-1 if d == i else 1 for d in range(2)))
        for i, n in enumerate((Q_LEN, KV_LEN))
    ]
    check(q, k, v, banded(0, 0, *at), block_mask=mask)
    assert mask_of(mask) is banded


@pytest.mark.slow
def test_comparisons_with_lists():
    """Of the masks that kernels have, blocks are known without evaluating anything."""
    for name, function in {
        "causal": lambda b, h, i, j: i + 30 >= j, "window": lambda b, h, i, j: (i + 30 >= j) & (i + 30 - j <= 9),
        "left": lambda b, h, i, j: i + 30 - j <= 40,
    }.items():  # fmt: skip
        for block in ((16, 32), (128, 128), (7, 11)):
            mask = create_block_mask(function, None, None, Q_LEN, KV_LEN, device="cpu", BLOCK_SIZE=block)
            q, k = torch.zeros(1, 2, Q_LEN, 32), torch.zeros(1, 2, KV_LEN, 32)
            quire.flex_attention(q, k, k, block_mask=mask)
            assert mask_of(mask) is function, name
            assert torch.equal(elements(mask, function), elements(mask) & function(*_grid(mask)))


def _grid(mask: BlockMask) -> list[Tensor]:
    sizes = (1, 1, *mask.shape[-2:])
    return [torch.arange(n).view(*(-1 if d == i else 1 for d in range(4))) for i, n in enumerate(sizes)]


def test_a_mask_made_for_longer_lengths():
    long = create_block_mask(lambda b, h, i, j: i + 30 >= j, None, None, 512, 512, device="cpu")
    q, k = draw("cpu", HEADS, Q_LEN), draw("cpu", KV_HEADS, KV_LEN)
    with pytest.raises(quire.ValidationError, match=rf"block_mask: .*_adjust\({Q_LEN}, {KV_LEN}\)"):
        quire.flex_attention(q, k, k, block_mask=long, enable_gqa=True)
    part = long._adjust(Q_LEN, KV_LEN)
    check(q, k, k, elements(part, long.mask_mod), block_mask=part)


def test_block_masks_that_are_refused():
    q, k = draw("cpu", HEADS, Q_LEN), draw("cpu", HEADS, KV_LEN)
    mask = create_block_mask(banded, 3, None, Q_LEN, KV_LEN, device="cpu")
    with pytest.raises(quire.ValidationError, match="block_mask: expected a batch of 1 or 2"):
        quire.flex_attention(q, k, k, block_mask=mask)
    if hasattr(theirs, "_sliced_mask_mod_error"):
        with pytest.raises(quire.ValidationError, match="got a slice of a block mask"):
            quire.flex_attention(q, k, k, block_mask=mask[:1])


def test_a_mask_for_all_lengths():
    q, k = draw("cpu", HEADS, Q_LEN), draw("cpu", HEADS, KV_LEN)
    mask = theirs._create_empty_block_mask(q, k)
    assert mask.mask_mod is noop_mask
    check(q, k, k, block_mask=mask)


def test_nothing_is_kept_of_a_mask_that_is_gone():
    q = torch.zeros(1, 2, Q_LEN, 32)
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, Q_LEN, Q_LEN, device="cpu")
    quire.flex_attention(q, q, q, block_mask=mask)
    place = id(mask)
    assert place in flex_inputs._known
    del mask
    gc.collect()
    assert place not in flex_inputs._known


def test_torchs_paged_attention():
    """One cache for all requests, a batch of 1, whose block mask and score follow a table of pages."""
    paged = pytest.importorskip("torch.nn.attention.experimental._paged_attention")
    page_size, lens = 16, (64, 32)
    cache = paged.PagedAttention(12, page_size, BATCH, device="cpu")
    q = draw("cpu", KV_HEADS, 32)
    k, v = (draw("cpu", KV_HEADS, 64) for _ in range(2))
    pages = [torch.zeros(1, KV_HEADS, 12 * page_size, 64) for _ in range(2)]
    for request in (1, 0):
        cache.reserve(torch.tensor(request), torch.tensor(lens[request]))
    every = torch.arange(BATCH)
    for request, length in enumerate(lens):
        at, own = torch.arange(length)[None], slice(request, request + 1)
        cache.assign(every[own], at, k[own, :, :length], v[own, :, :length], *pages)

    def causal(b, h, q_idx, kv_idx):
        return q_idx >= kv_idx

    def steep(score, b, h, q_idx, kv_idx):
        return score + 0.1 * (kv_idx - q_idx)

    logical = create_block_mask(causal, BATCH, None, 32, 64, device="cpu", BLOCK_SIZE=(16, page_size))
    mask = cache.convert_logical_block_mask(logical)
    o = quire.flex_attention(q, *pages, cache.get_score_mod(steep), mask)
    i, j = torch.arange(32)[:, None], torch.arange(64)
    scores = (q.double() @ k.double().transpose(2, 3) / 8 + 0.1 * (j - i)).masked_fill(i < j, -math.inf)
    assert (o - torch.softmax(scores, 3) @ v.double()).abs().max() < 1e-5
