"""Keys and values of 8 bits: the truth is attention over the numbers that are stored, times their scales."""

from __future__ import annotations

import pytest
import torch

import oracle
import quire
from calls import (
    decode,
    decode_wrapper,
    no_synchronisation,
    plan_decode,
    plan_ragged,
    prefill,
    prefill_paged,
    prefill_ragged,
    ragged_wrapper,
)
from problems import FORMS, HEAD_DIMS, Problem, equal_queries, ints, poisoned, workspace

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
KV_DTYPES = pytest.mark.parametrize("kv_dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])
KV_LENS = (37, 1, 0, 300, 128, 129)
SCALES = {"k_scale": 0.05, "v_scale": 1.75}


def batch(dtype, device, kv_dtype, kv_lens=KV_LENS, q_len=1, **more):
    """q_len queries per request; keys and values quantised with scales of their own."""
    return equal_queries(q_len, kv_lens, **{"dtype": dtype, "device": device, "kv_dtype": kv_dtype, **SCALES, **more})


def scales(p):
    """Keywords of run()."""
    return {"k_scale": p.k_scale, "v_scale": p.v_scale}


def check_decode(p, cache, backend, **plan):
    """Decode equals the oracle."""
    plan["kv_data_type"] = p.kv_dtype
    p.check(*decode(p, cache, backend, plan=plan, run=scales(p)))


@KV_DTYPES
@pytest.mark.parametrize("page_size", [1, 3, 8, 16, 64, 128])
def test_page_sizes(device, backend, dtype, kv_dtype, page_size):
    p = batch(dtype, device, kv_dtype)
    check_decode(p, p.paged(page_size), backend)


@KV_DTYPES
@pytest.mark.parametrize("signature", FORMS)
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_cache_forms(device, backend, dtype, kv_dtype, kv_layout, signature):
    p = batch(dtype, device, kv_dtype)
    check_decode(p, p.paged(16, kv_layout, signature), backend)


@pytest.mark.part(2, 3)
@pytest.mark.first(2)
@pytest.mark.each_value
@KV_DTYPES
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_head_dims(device, backend, kv_dtype, head_dim):
    dtype = torch.float16 if head_dim % 32 == 0 else torch.bfloat16
    p = batch(dtype, device, kv_dtype, head_dim=head_dim)
    check_decode(p, p.paged(16), backend)


@KV_DTYPES
@pytest.mark.parametrize("group_size", [1, 2, 5, 8, 16])
def test_group_sizes(device, backend, dtype, kv_dtype, group_size):
    p = batch(dtype, device, kv_dtype, num_qo_heads=2 * group_size)
    check_decode(p, p.paged(16), backend)


@pytest.mark.each_value
@pytest.mark.first(1)
@KV_DTYPES
@pytest.mark.parametrize("soft_cap", [None, 5.0])
@pytest.mark.parametrize("window_left", [-1, 0, 33])
def test_windows_and_soft_caps(device, backend, dtype, kv_dtype, window_left, soft_cap):
    p = batch(dtype, device, kv_dtype, window_left=window_left, soft_cap=soft_cap, sm_scale=0.2)
    check_decode(p, p.paged(16), backend)


@pytest.mark.each_value
@pytest.mark.first(1)
@KV_DTYPES
@pytest.mark.parametrize("q_len", [2, 4, 8])
def test_several_queries_per_request(device, backend, dtype, kv_dtype, q_len):
    """A window and the causal tail, so that masked keys hold numbers and NaN lies beyond."""
    p = batch(dtype, device, kv_dtype, (37, 8, 300), q_len, window_left=40)
    check_decode(p, p.paged(16), backend, q_len_per_req=q_len)


@KV_DTYPES
def test_sinks(device, backend, dtype, kv_dtype):
    p = batch(dtype, device, kv_dtype)
    cache = p.paged(16)
    wrapper = decode_wrapper(p, cache, backend)
    plan_decode(wrapper, p, cache, plan={"kv_data_type": kv_dtype})
    sinks = torch.linspace(-2.0, 3.0, p.num_qo_heads).to(device)
    p.check(wrapper.run(p.q, cache.kv, sinks=sinks, **scales(p)), sinks=sinks)


@pytest.mark.slow
@KV_DTYPES
def test_long_keys_are_within_5e_3(device, backend, dtype, kv_dtype):
    """Absolutely: P is rounded no further than to 16 bits, where kernels that multiply in 8 bits are at 4e-2."""
    p = batch(dtype, device, kv_dtype, (4096, 1000), num_qo_heads=8, head_dim=128, k_scale=1.0, v_scale=1.0)
    out, lse = decode(p, p.paged(16), backend, plan={"kv_data_type": kv_dtype}, run=scales(p))
    p.check(out, lse)
    assert float((out.cpu().double() - p.expected().o).abs().max()) <= 5e-3


@KV_DTYPES
def test_every_code_is_widened_exactly(device, backend, dtype, kv_dtype):
    """One key a request: its value comes out as it is, all 256 codes with NaN and infinity among them."""
    codes = torch.arange(256, dtype=torch.uint8).to(device)
    values = codes.view(kv_dtype).view(4, 1, 1, 64)
    keys = torch.zeros(4, 1, 1, 64, dtype=torch.uint8, device=device).view(kv_dtype)
    tables = (torch.arange(5, dtype=torch.int32), torch.arange(4, dtype=torch.int32), torch.ones(4, dtype=torch.int32))
    wrapper = quire.BatchDecodeWithPagedKVCacheWrapper(workspace(device), backend=backend)
    wrapper.plan(*tables, 1, 1, 64, 1, q_data_type=dtype, kv_data_type=kv_dtype)
    out = wrapper.run(poisoned((4, 1, 64), dtype, device).zero_(), (keys, values)).cpu().flatten()
    stored = codes.cpu().view(kv_dtype)
    got, want = out.double(), stored.double()
    if device != "cpu":  # a product of matrices also multiplies padding by 0: a request that holds no NaN is exact
        whole = torch.isfinite(want).view(4, 64).all(dim=1).repeat_interleave(64)
        got, want = got[whole], want[whole]
    assert torch.equal(torch.isnan(got), torch.isnan(want))
    assert torch.equal(got.nan_to_num(0.0), want.nan_to_num(0.0))


@KV_DTYPES
@pytest.mark.parametrize("head_dim", [64, 80])
def test_appended_keys_are_the_cache(device, kv_dtype, head_dim):
    """Every byte of a cache that append fills is that of one that was laid out by hand, its NaN too."""
    p = batch(torch.float16, device, kv_dtype, head_dim=head_dim)
    cache = p.paged(16)
    filled = tuple(poisoned(t.shape, kv_dtype, device) for t in cache.kv)
    requests, positions = oracle.get_batch_indices_positions(p.kv_indptr, p.kv_lens)
    tables = (cache.indices, cache.indptr, cache.last_page_len)
    quire.append_paged_kv_cache(p.k, p.v, ints(requests, device), ints(positions, device), filled, *tables)
    for got, want in zip(filled, cache.kv, strict=True):
        assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))


@pytest.mark.each_value
@pytest.mark.first(1)
@KV_DTYPES
@pytest.mark.parametrize(("qo_lens", "head_dim"), [((40, 3, 200), 64), ((1, 17, 64), 128)])
def test_prefill(device, backend, dtype, kv_dtype, qo_lens, head_dim):
    """Many rows: paged and ragged, causal and custom masks."""
    plan = {"kv_data_type": kv_dtype}
    options = {"dtype": dtype, "device": device, "kv_dtype": kv_dtype, "causal": True, "head_dim": head_dim, **SCALES}
    p = Problem(qo_lens, (90, 17, 250), **options)
    p.check(*prefill_paged(p, p.paged(16), backend, plan=plan, run=scales(p)))
    p.causal = False
    p.random_mask()
    p.check(*prefill_ragged(p, backend, plan=plan, run=scales(p)))


@pytest.mark.each_value
@pytest.mark.slow
@pytest.mark.parametrize(("page_size", "options"), [
    (1, {}),
    (8, {"kv_dtype": E5M2}),
    (24, {"window_left": 200, "num_qo_heads": 4}),
    (128, {"soft_cap": 10.0}),
    (5, {"window_left": 200, "soft_cap": 10.0, "causal": False}),
    (16, {"num_qo_heads": 10}),
    (64, {"pos_encoding_mode": "ALIBI", "head_dim": 64}),
])  # fmt: skip
@pytest.mark.parametrize("kind", ["paged", "ragged"])
def test_long_prefill(device, backend, dtype, kind, page_size, options):
    """Many KV tiles and row tiles, requests without queries or with few keys, a group that divides no row tile."""
    options = {"causal": True, "head_dim": 128, "num_qo_heads": 8, "kv_dtype": E4M3, **options, **SCALES}
    p = Problem((400, 1, 0, 130), (800, 333, 70, 1000), dtype=dtype, device=device, **options)
    p.check(*prefill(p, kind, backend, page_size=page_size, plan={"kv_data_type": p.kv_dtype}, run=scales(p)))


@pytest.mark.one_type
@pytest.mark.slow
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_tall_row_tiles(device, backend, dtype, page_size):
    """More than 2048 query rows a KV head; requests that end amid a page and a KV tile."""
    heads = {"num_qo_heads": 16, "num_kv_heads": 2, "head_dim": 128}
    p = Problem((300, 270), (300, 717), dtype=dtype, device=device, kv_dtype=E4M3, causal=True, **heads, **SCALES)
    plan = {"kv_data_type": E4M3}
    p.check(*prefill_paged(p, p.paged(page_size), backend, plan=plan, run=scales(p)))
    if page_size == 1:
        p.check(*prefill_ragged(p, backend, plan=plan, run=scales(p)))


#: Powers of two, by which nothing is rounded.
HEAD_SCALES = {"q_scale": (0.5, 0.25, 1.0, 2.0), "k_scale": (0.25, 0.5), "v_scale": (2.0, 0.5)}


def of_eight_bit_queries(device, dtype):
    """A problem as it is given, and the one of 16 bits that it stands for; and the scales of its heads."""
    given = Problem((20, 1, 0, 7), (40, 70, 3, 7), dtype=torch.float16, kv_dtype=dtype, device=device, causal=True)
    given.q = given.q.to(dtype)
    scales = {name: torch.tensor(values, device=device) for name, values in HEAD_SCALES.items()}
    of_q, of_k, of_v = (scale.half()[:, None] for scale in scales.values())
    truth = Problem(given.qo_lens, given.kv_lens, dtype=torch.float16, device=device, causal=True)
    truth.q, truth.k, truth.v = given.q.half() * of_q, given.k.half() * of_k, given.v.half() * of_v
    return given, truth, scales


@pytest.mark.part(0, 2)
@pytest.mark.slow
@KV_DTYPES
def test_queries_of_eight_bits(device, kv_dtype):
    """Every call takes them, with a scale for each head, by keyword or by position."""
    given, truth, scales = of_eight_bit_queries(device, kv_dtype)
    plan = {"q_data_type": kv_dtype}
    truth.check(*prefill_paged(given, given.paged(8), "auto", plan=plan, run=scales))
    truth.check(*prefill_ragged(given, "auto", plan=plan, run=scales))
    wrapper = ragged_wrapper(given, "auto")
    plan_ragged(wrapper, given, plan=plan)
    truth.check(wrapper.run(given.q, given.k, given.v, *scales.values()))
    q, k, v = given.q[:20], given.k[:40], given.v[:40]
    by_name = {f"scale_{name[0]}": scale for name, scale in scales.items()}
    one = quire.single_prefill_with_kv_cache(q, k, v, causal=True, **by_name)
    torch.testing.assert_close(one, wrapper.run(given.q, given.k, given.v, *scales.values())[:20], atol=2e-3, rtol=2e-3)
    sparse = quire.BlockSparseAttentionWrapper(workspace(device))
    indptr, indices = ints([0, 1, 2], device), ints([1, 0], device)
    sparse.plan(indptr, indices, 20, 40, 10, 20, 4, 2, 64, q_data_type=kv_dtype)
    seen = torch.zeros(20, 40, dtype=torch.bool)
    seen[:10, 20:] = seen[10:, :20] = True
    expected = quire.single_prefill_with_kv_cache(q, k, v, custom_mask=seen.to(device), **by_name)
    torch.testing.assert_close(sparse.run(q, k, v, **by_name), expected, atol=2e-3, rtol=2e-3)


#: Scales of 4 query heads and 2 KV heads: beyond the range of float16 and far apart, so that they must not be rounded
#: in it; those of both at a time; of either sign or 0.
WIDE_SCALES = {
    "large": ((2.0, 2.0, 2.0, 2.0), None),
    "far apart": ((3e4, 1.0, 1e-3, 7e-7), None),
    "both": ((1e-9, 3e-9, 2e-8, 1e-9), (7e12, 1e-3)),
    "of keys": (None, (3e5, 0.7)),
    "signs": ((-3e3, 0.0, 1.0, -1e-4), (-1.0, 2.5)),
    "zeros": ((0.0, 0.0, 0.0, 0.0), None),
}


class WideQueries:
    """8-bit queries of one request, with scales of heads that float16 cannot multiply; keys make logits of size 1."""

    def __init__(self, device, q_dtype, scales, qo_len, kv_len=70):
        of_q, of_k = (None if scale is None else torch.tensor(scale) for scale in scales)
        factors = torch.ones(4) if of_q is None else of_q
        self.factors = (factors if of_k is None else factors * of_k.repeat_interleave(2)).double()
        self.scales = {"q": of_q, "k": of_k}
        source = torch.Generator().manual_seed(0)
        q, k, v = (torch.randn(n, h, 64, generator=source) for n, h in ((qo_len, 4), (kv_len, 2), (kv_len, 2)))
        sizes = torch.finfo(q_dtype).max / 2 / self.factors.abs().clamp(min=1.0).sqrt().float()
        self.q = (q / q.abs().amax() * sizes[:, None]).to(q_dtype)
        self.scaled = self.q.double() * self.factors[:, None]
        largest = self.scaled.abs().amax((0, 2)).view(2, 2).amax(1).clamp(min=0.1)
        self.k, self.v = (k * (8 / largest[:, None])).half(), v.half()
        self.device = device

    def given(self):
        """q, k, v, and the scales as keywords of run()."""
        scales = {f"{of}_scale": scale.to(self.device) for of, scale in self.scales.items() if scale is not None}
        return *(t.to(self.device) for t in (self.q, self.k, self.v)), scales

    def check(self, out, causal):
        """Each head apart: torch's own error is that over queries whose range is moved to 1."""
        for head in range(4):
            largest = self.scaled[:, head].abs().amax().clamp(min=1e-30)
            q = (self.scaled[:, head] / largest)[:, None]
            k, v = (t[:, head // 2][:, None] for t in (self.k, self.v))
            options = {"sm_scale": 0.125 * float(largest), "causal": causal}
            lens = [0, q.shape[0]], [0, k.shape[0]]
            truth = oracle.attention(q, k, v, *lens, **options)
            own = oracle.torch_error(q.half(), k, v, *lens, **options)
            oracle.assert_close(out[:, head : head + 1], truth.o, own, what=f"head {head}")


@KV_DTYPES
@pytest.mark.parametrize("scales", WIDE_SCALES)
@pytest.mark.parametrize("kind", ["single", "ragged", "paged", "decode"])
def test_scales_of_heads_beyond_float16(device, kind, scales, kv_dtype):
    """Queries times the scales of their heads may be any numbers, not only those of float16."""
    p = WideQueries(device, kv_dtype, WIDE_SCALES[scales], 1 if kind == "decode" else 20)
    q, k, v, of_heads = p.given()
    types, pages = {"q_data_type": kv_dtype, "kv_data_type": "float16"}, (ints([0, 7], device), ints(range(7), device))
    cache, last = tuple(t.view(7, 10, 2, 64) for t in (k, v)), ints([10], device)
    if kind == "single":
        by_name = {f"scale_{name[0]}": scale for name, scale in of_heads.items()}
        p.check(quire.single_prefill_with_kv_cache(q, k, v, causal=True, **by_name), causal=True)
    elif kind == "ragged":
        wrapper = quire.BatchPrefillWithRaggedKVCacheWrapper(workspace(device))
        wrapper.plan(ints([0, 20], device), ints([0, 70], device), 4, 2, 64, causal=True, **types)
        p.check(wrapper.run(q, k, v, **of_heads), causal=True)
    elif kind == "paged":
        wrapper = quire.BatchPrefillWithPagedKVCacheWrapper(workspace(device))
        wrapper.plan(ints([0, 20], device), *pages, last, 4, 2, 64, 10, causal=True, **types)
        p.check(wrapper.run(q, cache, **of_heads), causal=True)
    else:
        wrapper = quire.BatchDecodeWithPagedKVCacheWrapper(workspace(device))
        wrapper.plan(*pages, last, 4, 2, 64, 10, **types)
        p.check(wrapper.run(q, cache, **of_heads), causal=False)


def test_a_row_that_is_not_finite_leaves_others_as_they_are(device):
    """NaN and infinity in 8-bit queries are their own rows' matter."""
    p = WideQueries(device, E5M2, WIDE_SCALES["large"], 20)
    q, k, v, of_heads = p.given()
    whole = quire.single_prefill_with_kv_cache(q, k, v, scale_q=of_heads["q_scale"])
    q[3, 1, 5], q[7, 2, 0] = torch.tensor([torch.nan, torch.inf], device=device).to(E5M2)
    out = quire.single_prefill_with_kv_cache(q, k, v, scale_q=of_heads["q_scale"])
    assert out[3, 1].isnan().all() and out[7, 2].isnan().any()
    out[3, 1], out[7, 2] = whole[3, 1], whole[7, 2]
    assert torch.equal(out, whole)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_scales_of_heads_without_a_synchronisation():
    """Over pages, whose kernels read a scale of logits on the GPU."""
    device = "cuda:0"
    p = WideQueries(device, E5M2, WIDE_SCALES["far apart"], 20)
    q, k, v, of_heads = p.given()
    cache = tuple(t.view(7, 10, 2, 64) for t in (k, v))
    wrapper = quire.BatchPrefillWithPagedKVCacheWrapper(workspace(device))
    tables = ints([0, 20], device), ints([0, 7], device), ints(range(7), device), ints([10], device)
    wrapper.plan(*tables, 4, 2, 64, 10, causal=True, q_data_type=E5M2, kv_data_type="float16")
    p.check(wrapper.run(q, cache, **of_heads), causal=True)
    with no_synchronisation():
        out = wrapper.run(q, cache, **of_heads)
    p.check(out, causal=True)


def test_decode_with_queries_of_eight_bits(device, backend):
    """Scales that are numbers, and a type of results."""
    p = batch(torch.float16, device, E4M3)
    p.q = p.q.to(E4M3)
    cache, wrapper = p.paged(16), decode_wrapper(p, p.paged(16), backend)
    plan_decode(wrapper, p, cache, plan={"q_data_type": E4M3, "kv_data_type": E4M3, "o_data_type": "float16"})
    out = wrapper.run(p.q, cache.kv, 1.0, p.k_scale, p.v_scale)
    p.q = p.q.half()
    p.check(out)
    with pytest.raises(quire.ValidationError, match=r"q_scale: expected \[heads=4\]"):
        wrapper.run(p.q.to(E4M3), cache.kv, q_scale=torch.ones(3, device=device))
    with pytest.raises(quire.ValidationError, match="expected each once"):
        wrapper.run(p.q.to(E4M3), cache.kv, 1.0, 2.0, 3.0, v_scale=1.0)


def test_what_the_cpu_refuses():
    """8-bit results, and keys of another 16-bit type than the queries'."""
    wrapper = quire.BatchDecodeWithPagedKVCacheWrapper(workspace("cpu"))
    tables = (torch.tensor([0, 1]), torch.tensor([0]), torch.tensor([1]), 4, 2, 64, 8)
    for types, reason in [
        ({"q_data_type": "bfloat16", "o_data_type": E4M3}, "o dtype e4m3 is not fp32, fp16 or bf16"),
        ({"q_data_type": "bfloat16", "kv_data_type": "float16"}, "kv dtype fp16 differs from q dtype bf16"),
    ]:
        with pytest.raises(quire.UnsupportedError, match=reason):
            wrapper.plan(*(t.int() if isinstance(t, torch.Tensor) else t for t in tables), **types)
