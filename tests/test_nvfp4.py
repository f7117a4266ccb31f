"""Keys and values of 4 bits: the truth is attention over the numbers that are stored, times their scales."""

from __future__ import annotations

import pytest
import torch

import oracle
import quire
from calls import outputs, plan_decode, plan_paged, plan_ragged, ragged_wrapper
from nvfp4_cases import SCALES, paged, quantise
from problems import Problem, block_tables, equal_queries, ints, poisoned, workspace
from ptx.impersonated import capability

#: Backends that read 4 bits.
CUDA_BACKENDS = {"decode": (8, 0), "fa2": (8, 0), "auto": (8, 0)}

PLAN = {"kv_data_type": "nvfp4"}
KV_LENS = (37, 1, 0, 300, 128, 129)
LAYOUTS = pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
FORMS = pytest.mark.parametrize("form", ["tensor", "tuple", "packed", "sliced"])
#: Relative error (L2) against keys and values that were not quantised: at most 0.15 is right, 0.76 is a wrong layout.
MOST_ERROR = 0.12


def batch(dtype, device, kv_lens=KV_LENS, q_len=1, **more):
    """q_len queries per request, and their quantised keys and values."""
    p = equal_queries(q_len, kv_lens, **{"dtype": dtype, "device": device, **SCALES, **more})
    return p, quantise(p)


def scales(p, cache):
    """Keywords of run()."""
    return {"k_scale": p.k_scale, "v_scale": p.v_scale, "kv_cache_sf": cache.sf}


def check_decode(p, cache, backend, plan=PLAN, **more):
    """Decode equals the oracle."""
    wrapper = quire.BatchDecodeWithPagedKVCacheWrapper(workspace(p.device), cache.kv_layout, backend=backend)
    plan_decode(wrapper, p, cache, plan=plan | more)
    out, lse = outputs(p)
    wrapper.run(p.q, cache.kv, out=out, lse=lse, return_lse=True, **scales(p, cache))
    p.check(out, lse)


def check_prefill(p, cache, backend, plan=PLAN):
    """Prefill over pages equals the oracle."""
    wrapper = quire.BatchPrefillWithPagedKVCacheWrapper(workspace(p.device), cache.kv_layout, backend=backend)
    plan_paged(wrapper, p, cache, plan=plan)
    out, lse = outputs(p)
    wrapper.run(p.q, cache.kv, out=out, lse=lse, return_lse=True, **scales(p, cache))
    p.check(out, lse)
    return wrapper


@pytest.mark.parametrize("page_size", [1, 3, 8, 16, 64, 128])
def test_page_sizes(device, backend, dtype, page_size):
    p, rows = batch(dtype, device)
    check_decode(p, paged(p, rows, page_size), backend)


@FORMS
@LAYOUTS
def test_cache_forms(device, backend, dtype, kv_layout, form):
    """One allocation for numbers and scales, too, as vLLM packs them."""
    p, rows = batch(dtype, device, head_dim=128)
    check_decode(p, paged(p, rows, 16, kv_layout, form), backend)


@pytest.mark.slow
@pytest.mark.each_value
@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
def test_head_dims(device, backend, head_dim):
    p, rows = batch(torch.float16 if head_dim == 64 else torch.bfloat16, device, head_dim=head_dim)
    check_decode(p, paged(p, rows), backend)


@pytest.mark.parametrize("group_size", [1, 2, 5, 8, 16])
def test_group_sizes(device, backend, dtype, group_size):
    p, rows = batch(dtype, device, num_qo_heads=2 * group_size)
    check_decode(p, paged(p, rows), backend)


@pytest.mark.slow
@pytest.mark.each_value
@pytest.mark.one_type
@pytest.mark.parametrize("soft_cap", [None, 5.0])
@pytest.mark.parametrize("window_left", [-1, 0, 33])
def test_windows_and_soft_caps(device, backend, dtype, window_left, soft_cap):
    p, rows = batch(dtype, device, window_left=window_left, soft_cap=soft_cap, sm_scale=0.2)
    check_decode(p, paged(p, rows), backend)


@pytest.mark.one_type
@pytest.mark.parametrize("q_len", [2, 4, 8, 16])
def test_several_queries_per_request(device, backend, dtype, q_len):
    """Tiles of 16, 32 and 64 rows; masked keys hold numbers, and NaN lies beyond."""
    p, rows = batch(dtype, device, (37, 16, 300), q_len, window_left=40, num_qo_heads=8)
    check_decode(p, paged(p, rows), backend, q_len_per_req=q_len)


@pytest.mark.first(1)
@pytest.mark.part(0, 2)
@pytest.mark.one_type
@pytest.mark.parametrize(("qo_lens", "head_dim"), [((40, 3, 200), 64), ((1, 17, 64), 128), ((9, 80, 5), 256)])
def test_prefill(device, backend, dtype, qo_lens, head_dim):
    """Many rows: causal, and ALiBi under a custom mask."""
    options = {"dtype": dtype, "device": device, "head_dim": head_dim, **SCALES}
    p = Problem(qo_lens, (90, 80, 250), causal=True, **options)
    check_prefill(p, paged(p, quantise(p)), backend)
    p = Problem(qo_lens, (90, 80, 250), pos_encoding_mode="ALIBI", **options).random_mask()
    check_prefill(p, paged(p, quantise(p), 8, "HND"), backend)


@pytest.mark.slow
@pytest.mark.one_type
@LAYOUTS
def test_ragged_prefill(device, backend, dtype, kv_layout):
    """Head dims that differ, keys and values without pages; the scales have rows of their own."""
    p = Problem((40, 3, 50), (90, 17, 250), dtype=dtype, device=device, causal=True, head_dim=192, head_dim_vo=128)
    rows = quantise(p)
    wrapper = ragged_wrapper(p, backend, kv_layout)
    plan_ragged(wrapper, p, plan=PLAN)
    swapped = [t.transpose(0, 1).contiguous() if kv_layout == "HND" else t for t in rows]
    k, v, k_sf, v_sf = swapped
    out, lse = outputs(p)
    wrapper.run(p.q, k, v, out=out, lse=lse, return_lse=True, kv_cache_sf=(k_sf.view(torch.float8_e4m3fn), v_sf))
    p.check(out, lse)


@pytest.mark.one_type
@pytest.mark.parametrize("qo_len", [1, 70])
def test_single_prefill(device, dtype, qo_len):
    p = Problem((qo_len,), (170,), dtype=dtype, device=device, causal=True, **SCALES)
    k, v, k_sf, v_sf = quantise(p)
    given = {"k_scale": p.k_scale, "v_scale": p.v_scale, "kv_cache_sf": (k_sf, v_sf)}
    p.check(quire.single_prefill_with_kv_cache(p.q, k, v, causal=True, **given))


@pytest.mark.slow
@pytest.mark.one_type
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_mixed_batches(device, dtype, kv_layout):
    """BatchAttention, and both kinds of POD."""
    p = Problem((40, 1, 1), (90, 17, 250), dtype=dtype, device=device, causal=True, **SCALES)
    cache = paged(p, quantise(p), 16, kv_layout)
    wrapper = quire.BatchAttention(kv_layout, device)
    heads = {"num_qo_heads": 4, "num_kv_heads": 2, "head_dim_qk": 64, "head_dim_vo": 64}
    wrapper.plan(
        ints(p.qo_indptr, device), cache.indptr, cache.indices, ints(p.kv_lens, device), **heads, page_size=16,
        causal=True, q_data_type=dtype, kv_data_type="nvfp4",
    )  # fmt: skip
    p.check(*wrapper.run(p.q, cache.kv, **scales(p, cache)))


@pytest.mark.slow
@pytest.mark.one_type
def test_prefill_beside_decode(device, dtype):
    """A prefill of 16 bits beside decodes over 4 bits, and both over 4 bits."""
    alone = Problem((33,), (120,), dtype=dtype, device=device, causal=True)
    p, rows = batch(dtype, device)
    cache = paged(p, rows)
    pod = quire.PODWithPagedKVCacheWrapper(workspace(device))
    options = {"q_data_type": dtype, "kv_data_type": "nvfp4"}
    pod.plan(cache.indptr, cache.indices, cache.last_page_len, 4, 2, 64, 16, **options)
    given = {"k_scale": p.k_scale, "v_scale": p.v_scale}
    first, second = pod.run(alone.q, alone.k, alone.v, p.q, cache.kv, causal_p=True, kv_cache_sf_d=cache.sf, **given)
    alone.check(first)
    p.check(second)
    prefills = Problem((33, 70), (120, 70), dtype=dtype, device=device, causal=True, **SCALES)
    pages = paged(prefills, quantise(prefills))
    both = quire.BatchPODWithPagedKVCacheWrapper(workspace(device))
    tables = [ints(prefills.qo_indptr, device), *pages.tables(), ints(p.qo_indptr, device), *cache.tables()]
    both.plan(*tables, 4, 2, 64, 16, **options)
    sf = {"kv_cache_sf_p": pages.sf, "kv_cache_sf_d": cache.sf}
    first, second = both.run(prefills.q, pages.kv, p.q, cache.kv, causal_p=True, **sf, **given)
    prefills.check(first)
    p.check(second)


@pytest.mark.slow
@pytest.mark.one_type
@pytest.mark.parametrize("backend_of_levels", ["auto", "quire:fa2"])
def test_cascades(device, dtype, backend_of_levels):
    """Requests of which all begin with the same pages: the levels are one launch, or several."""
    if device == "cpu" and backend_of_levels != "auto":
        backend_of_levels = "quire:cpu"
    p, rows = batch(dtype, device, (32 + 37, 32 + 5, 32 + 100), 4)
    first = p.kv_lens[0]
    for tensors in (rows, (p.k, p.v)):  # the other requests' first two pages are those of the first
        for tensor in tensors:
            for begin in (first, first + p.kv_lens[1]):
                tensor[begin : begin + 32] = tensor[:32]
    cache = paged(p, rows)
    pages = [cache.indices[a:b] for a, b in zip(cache.indptr[:-1].tolist(), cache.indptr[1:].tolist(), strict=True)]
    own = [page[2:] for page in pages]
    wrapper = quire.MultiLevelCascadeAttentionWrapper(2, workspace(device), backend=backend_of_levels)
    wrapper.plan(
        [ints([0, 12], device), ints(p.qo_indptr, device)],
        [ints([0, 2], device), ints(oracle.indptr_of([len(page) for page in own]), device)],
        [pages[0][:2], torch.cat(own)], [ints([16], device), cache.last_page_len], 4, 2, 64, 16, causal=True,
        q_data_type=dtype, kv_data_type="nvfp4",
    )  # fmt: skip
    p.check(wrapper.run(p.q, cache.kv, **scales(p, cache)))


TABLE_CALLS = ("xqa_batch_decode_with_kv_cache", "trtllm_batch_decode_with_kv_cache")


@pytest.mark.one_type
@FORMS
@LAYOUTS
@pytest.mark.parametrize("name", TABLE_CALLS)
def test_calls_over_block_tables(device, backend, dtype, name, kv_layout, form):
    p, rows = batch(dtype, device, (37, 4, 300), 4)
    cache = paged(p, rows, 16, kv_layout, form)
    run = getattr(quire.decode, name)
    out = run(
        p.q, cache.kv, workspace(device), block_tables(cache), ints(p.kv_lens, device), 300, p.k_scale / 8, p.v_scale,
        kv_layout=kv_layout, q_len_per_req=4, kv_cache_sf=cache.sf, backend=backend,
    )  # fmt: skip
    p.check(out)


@pytest.mark.one_type
@pytest.mark.parametrize("form", ["tensor", "packed"])
def test_context_over_block_tables(device, dtype, form):
    p = Problem((40, 3, 70), (90, 17, 250), dtype=dtype, device=device, causal=True, **SCALES)
    cache = paged(p, quantise(p), 16, "HND", form)
    out = quire.prefill.trtllm_batch_context_with_kv_cache(
        p.q, cache.kv, workspace(device), block_tables(cache), ints(p.kv_lens, device), 70, 250, p.k_scale / 8,
        p.v_scale, 3, ints(p.qo_indptr, device), ints(p.kv_indptr, device), kv_cache_sf=cache.sf,
    )  # fmt: skip
    p.check(out)


@pytest.mark.one_type
@LAYOUTS
@pytest.mark.parametrize("is_flat", [False, True])
def test_xqa(device, backend, dtype, kv_layout, is_flat):
    """kv_scale is the global scale of keys and of values; caches and scales in pages, or as rows."""
    p, rows = batch(dtype, device, (37, 1, 300), k_scale=0.25, v_scale=0.25)
    cache = paged(p, rows, 16, kv_layout)
    tensors = [t.flatten(0, 2) if is_flat else t for t in (*cache.kv, *cache.sf)]
    out = quire.xqa(
        p.q, *tensors[:2], block_tables(cache), ints(p.kv_lens, device), num_kv_heads=2, page_size=16, kv_scale=0.25,
        kv_layout=kv_layout, k_sf_cache=tensors[2], v_sf_cache=tensors[3], backend=backend,
    )  # fmt: skip
    p.check(out)


def test_bytes_of_torch(device):
    """plan() knows torch's names of the bytes, and run() takes its type of two numbers where there is one."""
    p, rows = batch(torch.bfloat16, device)
    cache = paged(p, rows)
    for kind in ("uint8", torch.uint8, "float4_e2m1fn_x2"):
        check_decode(p, cache, "auto", {"kv_data_type": kind})
    if hasattr(torch, "float4_e2m1fn_x2"):
        pairs = tuple(t.view(torch.float4_e2m1fn_x2) for t in cache.kv)
        check_decode(p, cache._replace(kv=pairs), "auto", {"kv_data_type": torch.float4_e2m1fn_x2})


@pytest.mark.parametrize("head_dim", [64, 128])
def test_every_code_is_exact(device, backend, dtype, head_dim):
    """One key a request: its value comes out as it is, each number with each scale."""
    codes = torch.arange(16, dtype=torch.uint8)
    numbers = (codes | codes << 4).repeat(head_dim // 32)[: head_dim // 2]
    factors = torch.arange(0x7F, dtype=torch.uint8)
    values = numbers.expand(0x7F, 1, 1, -1).contiguous().to(device)
    v_sf = factors[:, None, None, None].expand(-1, 1, 1, head_dim // 16).contiguous().to(device)
    keys, k_sf = torch.zeros_like(values), torch.zeros_like(v_sf)
    count = factors.numel()
    wrapper = quire.BatchDecodeWithPagedKVCacheWrapper(workspace(device), backend=backend)
    tables = ints(range(count + 1), device), ints(range(count), device), ints([1] * count, device)
    wrapper.plan(*tables, 1, 1, head_dim, 1, q_data_type=dtype, kv_data_type="nvfp4")
    out = wrapper.run(poisoned((count, 1, head_dim), dtype, device).zero_(), (keys, values), kv_cache_sf=(k_sf, v_sf))
    assert torch.equal(out.cpu().double()[:, None], oracle.nvfp4_numbers(values, v_sf))


@pytest.mark.one_type
def test_scales_that_are_nan_stay_with_their_request(device, backend, dtype):
    p, rows = batch(dtype, device, (40, 50))
    cache = paged(p, rows)
    wrapper = quire.BatchDecodeWithPagedKVCacheWrapper(workspace(device), backend=backend)
    plan_decode(wrapper, p, cache, plan=PLAN)
    before = wrapper.run(p.q, cache.kv, **scales(p, cache))
    cache.sf[0].view(torch.uint8)[cache.indices[0]] = 0x7F
    after = wrapper.run(p.q, cache.kv, **scales(p, cache))
    assert after[0].isnan().all() and torch.equal(after[1], before[1])


@LAYOUTS
@pytest.mark.parametrize("which", ["k", "v"])
def test_a_wrong_order_of_scales_is_far_from_the_truth(device, kv_layout, which):
    """Against keys and values that were not quantised: what a right and a wrong layout differ by."""
    p = Problem((1,) * 4, (200,) * 4, num_qo_heads=8, head_dim=128, dtype=torch.bfloat16, device=device)
    spread = torch.exp2(torch.randint(-4, 5, p.k.shape[:2], generator=torch.Generator().manual_seed(1)).to(device))
    p.k, p.v = p.k * 0.5, (p.v * spread[..., None]).to(p.dtype)
    truth = p.expected().o
    rows = quantise(p)
    cache = paged(p, rows, 16, kv_layout)
    wrapper = quire.BatchDecodeWithPagedKVCacheWrapper(workspace(device), kv_layout)
    plan_decode(wrapper, p, cache, plan=PLAN)

    def error(sf):
        out = wrapper.run(p.q, cache.kv, kv_cache_sf=sf).cpu().double()
        return float((out - truth).norm() / truth.norm())

    assert error(cache.sf) <= MOST_ERROR
    swizzled = list(cache.sf)
    at = "kv".index(which)
    order = (0, 2) if kv_layout == "NHD" else (0, 1)
    tiles = (
        swizzled[at].movedim(order, (0, 1)).view(torch.uint8)
    )  # [page, head, token, scales]: four tokens interleaved
    tiles = tiles.unflatten(2, (-1, 4)).transpose(3, 4).reshape(tiles.shape)
    swizzled[at] = tiles.movedim((0, 1), order).contiguous().view(torch.float8_e4m3fn)
    if which == "v":
        assert error(tuple(swizzled)) > 0.15
    else:
        assert not torch.equal(swizzled[at].view(torch.uint8), cache.sf[at].view(torch.uint8))


REFUSALS = {
    "no scales": (None, "kv_cache_sf: expected the scales of keys and values of 4 bits"),
    "one tensor": (lambda sf: sf[0], "kv_cache_sf: expected a pair"),
    "other type": (
        lambda sf: (sf[0].float(), sf[1].float()),
        r"kv_cache_sf\[0\]: expected scales of torch.float8_e4m3fn",
    ),
    "fewer pages": (lambda sf: (sf[0][:-1], sf[1]), "kv_cache_sf: expected scales of"),
    "fewer scales": (lambda sf: (sf[0][..., :2], sf[1]), r"kv_cache_sf \(keys\): expected \[.*num_k_scales=4"),
    "a dimension": (lambda sf: (sf[0][0], sf[1]), r"kv_cache_sf\[0\]: expected \[num_pages, page_size, num_kv_heads"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_wrong_scales(device, case):
    change, words = REFUSALS[case]
    p, rows = batch(torch.bfloat16, device)
    cache = paged(p, rows)
    wrapper = quire.BatchDecodeWithPagedKVCacheWrapper(workspace(device))
    plan_decode(wrapper, p, cache, plan=PLAN)
    with pytest.raises(quire.ValidationError, match=words):
        wrapper.run(p.q, cache.kv, kv_cache_sf=None if change is None else change(cache.sf))


def test_scales_of_another_cache(device):
    """Scales where numbers have 16 bits, and a cache of 16 bits where 4 were planned."""
    p = equal_queries(1, (40,), dtype=torch.bfloat16, device=device)
    wide, sf = p.paged(16), torch.zeros(6, 16, 2, 4, device=device).to(torch.float8_e4m3fn)
    wrapper = quire.BatchDecodeWithPagedKVCacheWrapper(workspace(device))
    plan_decode(wrapper, p, wide)
    with pytest.raises(quire.ValidationError, match="kv_cache_sf: expected None with keys and values of"):
        wrapper.run(p.q, wide.kv, kv_cache_sf=(sf, sf))
    plan_decode(wrapper, p, wide, plan=PLAN)
    with pytest.raises(quire.ValidationError, match=r"expected \[num_pages, .*head_dim_qk / 2=32\]"):
        wrapper.run(p.q, tuple(t.view(torch.uint8) for t in wide.kv), kv_cache_sf=(sf, sf))


def test_swizzled_values_are_refused_by_name(device):
    p, rows = batch(torch.bfloat16, device, (40,))
    cache = paged(p, rows, 16, "HND")
    with pytest.raises(quire.ValidationError, match="backend: expected another than 'trtllm-gen'"):
        quire.decode.trtllm_batch_decode_with_kv_cache(
            p.q, cache.kv, workspace(device), block_tables(cache), ints([40], device), 40, 1.0, 1.0,
            kv_cache_sf=cache.sf, backend="trtllm-gen",
        )  # fmt: skip


@pytest.mark.parametrize(
    ("target", "options", "words"),
    [
        ("sm90a", {"head_dim": 80}, "head_dim_qk=80: expected a multiple of 64 up to 256"),
        ("sm90a", {"head_dim": 512}, "head_dim_qk=512: expected a multiple of 64 up to 256"),
        ("sm80", {"mask": "causal+rope"}, "keys of 4 bits are not rotated in a kernel"),
        ("sm90a", {"backend": "quire:fa3"}, "it takes no keys and values of 4 bits"),
    ],
)  # fmt: skip
def test_what_gpus_refuse(target, options, words):
    asked = {"target": target, "dtype": "bf16", "kv_dtype": "nvfp4", "head_dim": 128, "page_size": 16, **options}
    answer = quire.is_supported(**asked)
    assert not answer and words in str(answer)


@pytest.mark.parametrize(("kv_lens", "num_rows"), [((700, 1300), 600), ((1024,), 1024)])
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_long_prefill_widens_ahead(dtype, device, page_size, kv_lens, num_rows):
    """On Hopper a launch before the kernel converts the pages; the result is that of 16-bit keys."""
    if device == "cpu":
        pytest.skip("the CPU widens where it copies")
    p = Problem((num_rows,) * len(kv_lens), kv_lens, num_qo_heads=8, head_dim=128, dtype=dtype, device=device,
                causal=True, **SCALES)  # fmt: skip
    wrapper = check_prefill(p, paged(p, quantise(p), page_size), "auto")
    is_hopper = capability()[0] == 9
    assert ("widened into" in str(wrapper.explain())) == is_hopper


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_plans_of_a_graph():
    """A captured run reads other lengths, numbers and scales when it is replayed."""
    device, dtype = "cuda:0", torch.bfloat16
    p, rows = batch(dtype, device, (300, 70))
    cache = paged(p, rows)
    buffers = [ints([0] * n, device) for n in (3, 64, 2)]
    wrapper = quire.BatchDecodeWithPagedKVCacheWrapper(workspace(device), "NHD", True, False, *(
        buffers[0], buffers[1], buffers[2]))  # fmt: skip
    plan_decode(wrapper, p, cache, plan=PLAN)
    run = lambda: wrapper.run(p.q, cache.kv, **scales(p, cache))  # noqa: E731
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    graph.replay()
    p.check(out)
    other, other_rows = batch(dtype, device, (170, 199), seed=3)
    pages = paged(other, other_rows)
    for mine, theirs in zip((*cache.kv, *cache.sf), (*pages.kv, *pages.sf), strict=True):
        mine[: theirs.shape[0]].copy_(theirs)
    p.q.copy_(other.q)
    plan_decode(wrapper, other, pages, plan=PLAN)
    graph.replay()
    other.check(out)


def test_compiled_calls_take_scales(device):
    """torch.compile passes the scales to the operator, whose result has the head's dims."""
    p, rows = batch(torch.bfloat16, device, (40, 50))
    cache = paged(p, rows)
    wrapper = quire.BatchDecodeWithPagedKVCacheWrapper(workspace(device))
    plan_decode(wrapper, p, cache, plan=PLAN)
    run = torch.compile(lambda q: wrapper.run(q, cache.kv, **scales(p, cache)), backend="eager", fullgraph=True)
    p.check(run(p.q))
