"""xqa(), in each of the spellings that its name has had, against the oracle."""

from __future__ import annotations

import inspect
import math
import subprocess
import sys
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

import oracle
import quire
from calls import no_synchronisation
from problems import PagedCache, Problem, block_tables, ints, poisoned, workspace
from quire.calls.xqa import xqa
from test_xqa import LAYOUTS, Draft, batch, fp16, with_draft

KV_LENS = (37, 1, 0, 300, 128, 129)


def rows_of(cache: Tensor) -> Tensor:
    """A cache as the oldest page has it: [total_num_cache_heads, head_dim]."""
    return cache.reshape(-1, cache.shape[-1])


def call(p: Problem, cache: PagedCache, **more: object) -> Tensor:
    """As the youngest page calls it, with queries [batch_size, num_qo_heads, head_dim]; `more` overrides."""
    k_cache, v_cache = cache.kv
    right: dict[str, object] = {
        "q": p.q, "k_cache": k_cache, "v_cache": v_cache, "head_dim": p.head_dim, "page_size": cache.page_size,
        "num_kv_heads": p.num_kv_heads, "kv_layout": cache.kv_layout,
    }  # fmt: skip
    if "page_table" not in more:
        right["page_table"] = block_tables(cache)
    if "seq_lens" not in more:
        right["seq_lens"] = ints(p.kv_lens, p.device)
    return quire.xqa(**{**right, **more})


def old_call(p: Problem, cache: PagedCache, **more: object) -> Tensor:
    """As the oldest page calls it, by position, with one beam; gives back the rows of `output`, which was NaN."""
    output = poisoned((len(p.kv_lens), 1, p.num_qo_heads, p.head_dim), p.dtype, p.device)
    k_cache, v_cache = (rows_of(t) for t in cache.kv)
    seq_lens = ints(p.kv_lens, p.device).view(torch.uint32)[:, None]
    semaphores = torch.zeros(64, dtype=torch.int32, device=p.device).view(torch.uint32)
    got = quire.xqa.xqa(
        p.q[:, None], k_cache, v_cache, block_tables(cache), seq_lens, output, workspace(p.device), semaphores,
        p.num_kv_heads, cache.page_size, **more,
    )  # fmt: skip
    assert got is output
    return output[:, 0]


@pytest.mark.slow
def test_both_names():
    """A module that can be called, whatever was imported before it."""
    assert quire.xqa.xqa is xqa and quire.xqa_mla is quire.xqa.xqa_mla
    assert inspect.signature(quire.xqa) == inspect.signature(xqa)
    first = "import quire as flashinfer; called = flashinfer.xqa; import torch; assert called is flashinfer.xqa"
    subprocess.run([sys.executable, "-W", "error", "-c", f"{first}; assert callable(called)"], check=True)


@pytest.mark.one_type
@pytest.mark.parametrize("mode", ["ROPE_LLAMA", "ALIBI"])
def test_position_encodings(device, dtype, mode):
    p = batch(dtype, device, KV_LENS, pos_encoding_mode=mode)
    p.check(call(p, p.paged(16), pos_encoding_mode=mode))
    if mode == "ROPE_LLAMA":
        p.rope_scale, p.rope_theta = 2.0, 5e3
        p.check(call(p, p.paged(16), pos_encoding_mode=mode, rope_scale=2.0, rope_theta=5e3))


def test_signature_of_the_oldest_page():
    names = [
        "q", "k_cache", "v_cache", "page_table", "seq_lens", "output", "workspace_buffer", "semaphores",
        "num_kv_heads", "page_size", "sinks", "q_scale", "kv_scale", "sliding_win_size",
    ]  # fmt: skip
    assert [*inspect.signature(quire.xqa).parameters][: len(names)] == names


@pytest.mark.parametrize("page_size", [16, 32, 64, 128])
@pytest.mark.parametrize("kv_layout", LAYOUTS)
def test_page_sizes(device, backend, dtype, page_size, kv_layout):
    p = batch(dtype, device, KV_LENS)
    p.check(call(p, p.paged(page_size, kv_layout), backend=backend))


@pytest.mark.parametrize("page_size", [16, 64])
def test_the_oldest_page(device, backend, dtype, page_size):
    p = batch(dtype, device, KV_LENS)
    p.check(old_call(p, p.paged(page_size), backend=backend))


def test_rows_of_a_cache_of_heads_first(device, dtype):
    p = batch(dtype, device, KV_LENS)
    cache = p.paged(16, "HND")
    k_cache, v_cache = (rows_of(t) for t in cache.kv)
    p.check(call(p, cache, k_cache=k_cache, v_cache=v_cache))


def test_all_of_the_oldest_page_by_position(device, dtype):
    """sinks, q_scale, kv_scale, sliding_win_size and sm_count, which stands where kv_layout is today."""
    p = batch(dtype, device, KV_LENS, window_left=39, v_scale=0.5, k_scale=1.0)
    p.sm_scale = 1.5 * 0.5 / math.sqrt(p.head_dim)
    cache = p.paged(16)
    sinks = torch.linspace(-2.0, 3.0, p.num_qo_heads).view(p.num_kv_heads, -1).to(device)
    output = poisoned((len(KV_LENS), 1, p.num_qo_heads, p.head_dim), dtype, device)
    kv_scale = torch.tensor([0.5], device=device)
    quire.xqa(
        p.q[:, None], *(rows_of(t) for t in cache.kv), block_tables(cache), ints(KV_LENS, device)[:, None], output,
        workspace(device), torch.zeros(64, dtype=torch.int32, device=device), p.num_kv_heads, 16, sinks, 1.5, kv_scale,
        40, 132,
    )  # fmt: skip
    p.check(output[:, 0], sinks=sinks.flatten())


@pytest.mark.parametrize("signature", [float, torch.tensor, lambda x: torch.tensor([x])], ids=["float", "0-d", "1-d"])
def test_scales(device, backend, dtype, signature):
    """Logits are q . k * q_scale * kv_scale / sqrt(head_dim), and kv_scale multiplies the result."""
    p = batch(dtype, device, KV_LENS, v_scale=2.0)
    p.sm_scale = 0.25 * 2.0 / math.sqrt(p.head_dim)
    scales = [signature(x) for x in (0.25, 2.0)]
    scales = [x if isinstance(x, float) else x.to(device) for x in scales]
    p.check(call(p, p.paged(16), q_scale=scales[0], kv_scale=scales[1], backend=backend))
    assert torch.equal(
        call(p, p.paged(16), q_scale=0.25, kv_scale=scales[1]), call(p, p.paged(16), q_scale=scales[0], kv_scale=2.0)
    )


@pytest.mark.parametrize("name", ["sliding_win_size", "sliding_window_size"])
@pytest.mark.parametrize("keys", [1, 8, 1000])
def test_windows(device, backend, dtype, name, keys):
    """The number of keys, the query's own among them."""
    p = batch(dtype, device, KV_LENS, window_left=keys - 1)
    p.check(call(p, p.paged(16), **{name: keys}, backend=backend))


def test_windows_that_are_off(device, dtype):
    p = batch(dtype, device, KV_LENS)
    cache = p.paged(16)
    want = call(p, cache)
    p.check(want)
    for off in ({"sliding_win_size": 0}, {"sliding_window_size": -1}, {"sliding_window_size": 0}):
        assert torch.equal(call(p, cache, **off), want)


def test_sinks_in_both_shapes(device, backend, dtype):
    p = batch(dtype, device, KV_LENS)
    sinks = torch.linspace(-2.0, 3.0, p.num_qo_heads).to(device)
    for shape in ((p.num_qo_heads,), (p.num_kv_heads, -1)):
        p.check(call(p, p.paged(16), sinks=sinks.view(shape), backend=backend), sinks=sinks)


def beside_sink_tokens(sinks: Tensor, rows: Tensor, lens: Sequence[int], value: float) -> Tensor:
    """Ragged keys with sink tokens before those of each request; with 0 as `value` their values."""
    parts = rows.split(list(lens))
    return torch.cat([torch.cat([sinks.to(rows.dtype) * value, part]) for part in parts])


def check_beside_sink_tokens(p: Problem, sinks: Tensor, out: Tensor, rows: Tensor | None = None) -> None:
    """Against the oracle, for which sink tokens are keys that all queries see, with values of 0."""
    k, v = (beside_sink_tokens(sinks, t.to(p.dtype), p.kv_lens, one) for t, one in ((p.k, 1.0), (p.v, 0.0)))
    lens = [n + sinks.shape[0] for n in p.kv_lens]
    own = [
        oracle.visible(m, n, causal=p.causal, window_left=p.window_left) if mask is None else mask
        for m, n, mask in zip(
            p.qo_lens, p.kv_lens, oracle.split_mask(p.mask, p.qo_indptr, p.kv_indptr), strict=True
        )
    ]  # fmt: skip
    seen = [torch.cat([torch.ones(mask.shape[0], sinks.shape[0]).bool(), mask.cpu().bool()], 1) for mask in own]
    options = {"mask": torch.cat([mask.flatten() for mask in seen]), "sm_scale": p.sm_scale, "v_scale": p.v_scale}
    problem = p.q, k, v, p.qo_indptr, oracle.indptr_of(lens)
    truth = oracle.attention(*problem, **options).o
    oracle.assert_close(out, truth, oracle.torch_error(*problem, **options), p.qo_indptr)


def sink_tokens(p: Problem, count: int = 5, dtype: torch.dtype | None = None) -> Tensor:
    """Keys that take about half of the weight of some of the requests of these tests."""
    source = torch.Generator().manual_seed(7)
    sinks = 2 * torch.randn(count, p.num_kv_heads, p.head_dim, generator=source)
    return sinks.to(dtype or p.dtype).to(p.device)


@pytest.mark.parametrize("count", [1, 4, 33])
@pytest.mark.parametrize("window", [0, 8])
def test_sink_tokens(device, backend, dtype, count, window):
    """Keys without values, which no window hides; a request without tokens of its own gives zeros."""
    p = batch(dtype, device, KV_LENS, num_qo_heads=8, window_left=window - 1)
    sinks = sink_tokens(p, count)
    out = call(p, p.paged(16), sinks=sinks, sliding_win_size=window, backend=backend)
    check_beside_sink_tokens(p, sinks, out)
    assert not out[KV_LENS.index(0)].any()


def test_sink_tokens_take_the_scales(device, dtype):
    """q_scale and kv_scale multiply q . k of a sink token too, as numbers and on their device."""
    p = batch(dtype, device, KV_LENS, v_scale=2.0)
    p.sm_scale = 0.25 * 2.0 / math.sqrt(p.head_dim)
    sinks, cache, output = sink_tokens(p), p.paged(16), poisoned(p.q.shape, dtype, device)
    assert call(p, cache, sinks=sinks, q_scale=0.25, kv_scale=2.0, output=output) is output
    check_beside_sink_tokens(p, sinks, output)
    scales = (torch.tensor([x], device=device) for x in (0.25, 2.0))
    got = call(p, cache, sinks=sinks.float(), **dict(zip(("q_scale", "kv_scale"), scales, strict=True)))
    torch.testing.assert_close(got, output)


@pytest.mark.one_type
@pytest.mark.parametrize("with_mask", [False, True])
def test_sink_tokens_of_drafts(device, dtype, with_mask):
    """Every query sees them, whatever the mask of the draft says."""
    p = batch(dtype, device, (300, 9, 64), 4)
    cache, draft, more = p.paged(16), Draft.tree(3, 4), {}
    if with_mask:
        with_draft(p, draft)
        more["mask"] = draft.words(device)
    q, sinks = p.q.view(3, 1, 4, p.num_qo_heads, p.head_dim), sink_tokens(p)
    out = call(p, cache, q=q, q_seq_len=4, sinks=sinks, **more)
    assert out.shape == q.shape
    check_beside_sink_tokens(p, sinks, out.view(p.q.shape))


def test_sink_tokens_of_ragged_drafts(device, dtype):
    """Requests of different numbers of new tokens."""
    p = Problem((1, 3, 2), (30, 9, 64), dtype=dtype, device=device, causal=True)
    sinks = sink_tokens(p)
    out = call(p, p.paged(16), q_cu_seq_lens=ints(p.qo_indptr, device), q_seq_len=3, sinks=sinks)
    check_beside_sink_tokens(p, sinks, out)


def test_sink_tokens_and_e4m3(device, dtype):
    """A cache and a result of 8 bits; the factor of the result is applied before its range is."""
    p = batch(dtype, device, KV_LENS, kv_dtype=torch.float8_e4m3fn, k_scale=0.5, v_scale=0.5)
    sinks, cache = sink_tokens(p, dtype=torch.float8_e4m3fn), p.paged(32)
    wide = call(p, cache, kv_scale=0.5, sinks=sinks)
    output = torch.empty(p.q.shape, dtype=torch.float8_e4m3fn, device=device)
    assert call(p, cache, kv_scale=0.5, output=output, rcp_out_scale=500.0, sinks=sinks) is output
    want = (wide.float() * 500).clamp(-448, 448)
    assert ((output.float() - want).abs() <= 2.0**-4 * want.abs() + 2.0**-10 * 500).all()
    p.sm_scale = 0.5 / math.sqrt(p.head_dim)
    check_beside_sink_tokens(p, sinks, wide)


def test_sink_tokens_that_take_all_weight(device, dtype):
    """Logits beyond the range of exp() leave zeros, and far below that of keys no trace."""
    p = batch(dtype, device, (40, 3))
    p.k[..., 0], p.q[..., 0] = 0.0, 8.0
    sinks, cache = torch.zeros(2, p.num_kv_heads, p.head_dim, device=device), p.paged(16)
    plain = call(p, cache)
    sinks[..., 0] = 3e3
    assert not call(p, cache, sinks=sinks).any()
    assert torch.equal(call(p, cache, sinks=-sinks), plain)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_sink_tokens_in_a_graph():
    """The host waits for nothing, and replays see new sink tokens and lengths."""
    p = batch(torch.bfloat16, "cuda:0", KV_LENS)
    sinks, cache = sink_tokens(p), p.paged(16)
    where = {"page_table": block_tables(cache), "seq_lens": ints(p.kv_lens, "cuda:0")}
    call(p, cache, sinks=sinks, **where)
    with no_synchronisation():
        out = call(p, cache, sinks=sinks, **where)
    check_beside_sink_tokens(p, sinks, out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call(p, cache, sinks=sinks, **where)
    sinks.mul_(-0.5)
    out.fill_(math.nan)
    graph.replay()
    check_beside_sink_tokens(p, sinks, out)


def test_e4m3_in_and_out(device, dtype):
    p = batch(dtype, device, KV_LENS, kv_dtype=torch.float8_e4m3fn, k_scale=0.5, v_scale=0.5)
    cache = p.paged(32)
    wide = call(p, cache, kv_scale=0.5)
    p.check(wide)
    output = torch.empty(p.q.shape, dtype=torch.float8_e4m3fn, device=device)
    assert call(p, cache, kv_scale=0.5, output=output, rcp_out_scale=8.0) is output
    eightfold = call(p, cache, q_scale=0.5 / 4.0, kv_scale=4.0)  # the same logits, and eight times the values
    assert torch.equal(output.float(), eightfold.clamp(-448, 448).to(output.dtype).float())
    assert not torch.equal(output.float(), wide.to(output.dtype).float())


@pytest.mark.parametrize("with_mask", [False, True])
def test_drafts(device, dtype, with_mask):
    """[batch_size, 1, q_seq_len, num_qo_heads, head_dim], and an output of that shape."""
    p = batch(dtype, device, (300, 9, 64), 4)
    cache, draft, more = p.paged(16), Draft.tree(3, 4), {}
    if with_mask:
        with_draft(p, draft)
        more["mask"] = draft.words(device)
    q = p.q.view(3, 1, 4, p.num_qo_heads, p.head_dim)
    output = poisoned(q.shape, dtype, device)
    assert call(p, cache, q=q, q_seq_len=4, output=output, **more) is output
    p.check(output.view(p.q.shape))
    assert call(p, cache, q=q, q_seq_len=4, **more).shape == q.shape


def test_results_where_the_caller_wants_them(device, dtype):
    """A view with strides, of queries in another one."""
    p = batch(dtype, device, KV_LENS)
    wide = poisoned((len(KV_LENS), 2, p.num_qo_heads, p.head_dim), dtype, device)
    call(p, p.paged(16), q=p.q.unsqueeze(1), output=wide[:, 1:])
    p.check(wide[:, 1])
    assert wide[:, 0].isnan().all()


def test_permissions_are_not_needed(device, dtype):
    """Scratch of any contents, and semaphores that nobody counts with."""
    p = batch(dtype, device, KV_LENS)
    cache = p.paged(16)
    want = call(p, cache)
    semaphores = torch.full((64,), 7, dtype=torch.int32, device=device)
    for more in ({"semaphores": semaphores}, {"sm_count": 3}, {"enable_pdl": False}, {"enable_pdl": True}):
        assert torch.equal(call(p, cache, **more), want)
    p.check(call(p, cache, workspace_buffer=workspace(device), semaphores=semaphores))


def test_no_requests(device, dtype):
    p = batch(dtype, device, ())
    assert call(p, p.paged(16)).shape == (0, p.num_qo_heads, p.head_dim)


WRONG = {
    "beams": ({"q": fp16(2, 2, 4, 64)}, r"q: expected \[batch_size, beam width=1"),
    "q dims": ({"q": fp16(4, 64)}, "q: expected"),
    "q_seq_len": ({"q_seq_len": 2}, "q_seq_len: expected 1 for q of 3 dimensions"),
    "drafts": ({"q": fp16(2, 1, 3, 4, 64), "q_seq_len": 2}, "q: expected .*q_seq_len=2"),
    "head_dim": ({"head_dim": 128}, "head_dim: expected 64, q's last dimension, got 128"),
    "page_size": ({"page_size": 32}, "page_size: expected 16, as k_cache"),
    "no page_size": ({"k_cache": fp16(256, 64), "page_size": None}, "page_size: expected a positive integer"),
    "num_kv_heads": ({"num_kv_heads": 4}, "num_kv_heads: expected 2, as k_cache"),
    "cache dims": ({"k_cache": fp16(8, 32, 64)}, "k_cache: expected .*or its rows"),
    "cache rows": ({"k_cache": fp16(33, 64)}, "k_cache: expected a multiple of page_size . num_kv_heads=32 rows"),
    "v_cache": ({"v_cache": fp16(8, 16, 2, 64).float()}, "v_cache: expected k_cache's torch.float16"),
    "v_cache pages": ({"v_cache": fp16(7, 16, 2, 64)}, "v_cache: expected k_cache's"),
    "kv_layout": ({"kv_layout": "HDN"}, "kv_layout: expected 'NHD' or 'HND'"),
    "two sm_counts": ({"kv_layout": 3, "sm_count": 4}, "kv_layout: expected 'NHD' or 'HND', got 3"),
    "sm_count": ({"sm_count": 0}, "sm_count: expected a positive integer"),
    "seq_lens beams": ({"seq_lens": ints([[20, 5], [1, 2]], "cpu")}, "seq_lens: expected .*beam width=1"),
    "too long": ({"seq_lens": ints([20, 33], "cpu")}, r"seq_lens: expected 0\.\.32"),
    "output shape": ({"output": fp16(2, 1, 4, 64)}, "output: expected"),
    "q_scale": ({"q_scale": 0.0}, "q_scale: expected a positive number"),
    "kv_scale": ({"kv_scale": torch.ones(2)}, "kv_scale: expected a number or a tensor of one element"),
    "rcp_out_scale": ({"rcp_out_scale": 2.0}, "rcp_out_scale: expected 1 where output is not float8_e4m3fn"),
    "window": ({"sliding_win_size": -1}, "sliding_win_size: expected the number of keys, or 0"),
    "windows": ({"sliding_win_size": 3, "sliding_window_size": 4}, "sliding_window_size: expected -1 beside"),
    "sinks": ({"sinks": torch.zeros(3)}, "sinks: expected float32 logits .num_qo_heads=4"),
    "sink heads": ({"sinks": fp16(4, 4, 64)}, r"sinks: expected .num_sink_tokens, num_kv_heads=2, head_dim=64., got"),
    "sink dims": ({"sinks": fp16(4, 2, 32)}, r"sinks: expected .num_sink_tokens, num_kv_heads=2, head_dim=64., got"),
    "sink types": ({"sinks": fp16(4, 2, 64).int()}, "sinks: expected floating-point keys, got torch.int32"),
    "positions of sinks": (
        {"sinks": fp16(4, 2, 64), "pos_encoding_mode": "ALIBI"}, "sinks: expected logits of heads beside pos_encoding"
    ),
    "variants beside sinks": (
        {"sinks": fp16(4, 2, 64), "variant": quire.variants.soft_cap, "cap": 3.0},
        "sinks: expected logits of heads beside variant",
    ),
    "no dims": ({"q": fp16(2, 4, 0)}, "q: head_dim: expected a positive integer"),
    "no dims of drafts": ({"q": fp16(2, 1, 3, 4, 0), "q_seq_len": 3}, "q: head_dim: expected a positive integer"),
    "a number for q": ({"q": torch.tensor(1.0)}, "q: expected"),
    "semaphores": ({"semaphores": torch.zeros(3)}, "semaphores: expected dtype torch.uint32"),
    "workspace": ({"workspace_buffer": 3}, "workspace_buffer: expected a torch.Tensor"),
    "k_sf_cache": ({"k_sf_cache": fp16(1)}, "k_sf_cache: expected it and v_sf_cache, or neither"),
    "v_sf_cache": ({"v_sf_cache": fp16(1)}, "k_sf_cache: expected it and v_sf_cache, or neither"),
    "mask": ({"mask": torch.zeros(2, 1, 2)}, "mask: expected dtype torch.uint16"),
    "enable_pdl": ({"enable_pdl": 1}, "enable_pdl: expected a bool"),
    "rope_scale": ({"rope_scale": 2.0}, "rope_scale: expected None without pos_encoding_mode"),
    "rope_theta": ({"rope_theta": 1e5}, "rope_theta: expected None without pos_encoding_mode"),
    "pos_encoding_mode": ({"pos_encoding_mode": "ROPE"}, "pos_encoding_mode: expected 'NONE'"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments(case):
    change, message = WRONG[case]
    right: dict[str, object] = {
        "q": fp16(2, 4, 64), "k_cache": fp16(8, 16, 2, 64), "v_cache": fp16(8, 16, 2, 64), "page_size": 16,
        "page_table": ints([[0, 1], [2, 3]], "cpu"), "seq_lens": ints([20, 5], "cpu"), "num_kv_heads": 2,
    }  # fmt: skip
    assert not quire.xqa(**right).any()
    with pytest.raises(quire.ValidationError, match=message):
        quire.xqa(**{**right, **change})
