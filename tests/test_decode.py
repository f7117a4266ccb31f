"""Decode from a paged cache, against the oracle."""

from __future__ import annotations

import inspect
import math
import warnings
from functools import partial

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import quire
from calls import decode, decode_wrapper, pending, plan_decode
from problems import FORMS, HEAD_DIMS, Problem, equal_queries, poisoned, workspace

PAGE_SIZES = (1, 3, 8, 16, 64, 128)
LAYOUTS = ("NHD", "HND")
GROUP_SIZES = (1, 2, 3, 4, 5, 7, 8, 16)
KV_LENS = (37, 1, 0, 300, 128, 129)


def batch(dtype, device, kv_lens=KV_LENS, **more):
    """One query per request."""
    return equal_queries(1, kv_lens, dtype=dtype, device=device, **more)


@pytest.mark.parametrize("kv_layout", LAYOUTS)
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_page_sizes(device, backend, dtype, page_size, kv_layout):
    p = batch(dtype, device)
    p.check(*decode(p, p.paged(page_size, kv_layout), backend))


@pytest.mark.parametrize("signature", FORMS)
@pytest.mark.parametrize("kv_layout", LAYOUTS)
def test_cache_forms(device, backend, dtype, kv_layout, signature):
    p = batch(dtype, device)
    p.check(*decode(p, p.paged(8, kv_layout, signature), backend))


@pytest.mark.part(0, 3)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_head_dims(device, backend, head_dim):
    dtype = torch.float16 if head_dim % 32 == 0 else torch.bfloat16
    p = batch(dtype, device, head_dim=head_dim)
    p.check(*decode(p, p.paged(16), backend))


@pytest.mark.parametrize("group_size", GROUP_SIZES)
@pytest.mark.parametrize("num_kv_heads", [1, 3])
def test_group_sizes(device, backend, dtype, num_kv_heads, group_size):
    p = batch(dtype, device, num_qo_heads=num_kv_heads * group_size, num_kv_heads=num_kv_heads)
    p.check(*decode(p, p.paged(16), backend))


@pytest.mark.parametrize("soft_cap", [None, 5.0])
@pytest.mark.parametrize("window_left", [-1, 0, 7, 1000])
def test_windows_and_soft_caps(device, backend, dtype, window_left, soft_cap):
    p = batch(dtype, device, window_left=window_left, soft_cap=soft_cap, sm_scale=0.2)
    p.check(*decode(p, p.paged(16), backend))


@pytest.mark.one_type
@pytest.mark.parametrize("q_len", [1, 3])
@pytest.mark.parametrize("chunk", [1, 16, 50, 4096])
def test_chunks(device, backend, dtype, chunk, q_len):
    kv_lens = (1, 0, 49, 50, 51, 5000)
    p = Problem((q_len,) * 6, kv_lens, num_qo_heads=8, dtype=dtype, device=device, attention_chunk_size=chunk)
    cache = p.paged(16)
    wrapper = decode_wrapper(p, cache, backend)
    plan_decode(wrapper, p, cache, plan={"q_len_per_req": q_len})
    p.check(*wrapper.run(p.q, cache.kv, return_lse=True))
    p.sm_scale = 0.3
    p.check(wrapper.forward(p.q, cache.kv, sm_scale=0.3))


@pytest.mark.parametrize(
    "kv_lens", [(1,), (0,), (0, 0, 5), (5000,), (1, 5000, 3), tuple(range(70)), (64,) * 9], ids=lambda n: str(n)[:24]
)
def test_lengths(device, backend, dtype, kv_lens):
    p = batch(dtype, device, kv_lens, num_qo_heads=8, num_kv_heads=1)
    p.check(*decode(p, p.paged(16), backend))


@pytest.mark.parametrize("split", [-1, 128])
@pytest.mark.parametrize("num_kv_heads", [1, 3, 4, 16, 20])
def test_heads_side_by_side(device, backend, num_kv_heads, split):
    """On a host a thread attends to several KV heads at a time where it has many; here it has 20 requests of each."""
    lens = (300, 1, 0, 64, 65) * 4
    p = Problem(
        (1,) * 20, lens, num_qo_heads=2 * num_kv_heads, num_kv_heads=num_kv_heads, dtype=torch.bfloat16, device=device
    )
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        p.check(*decode(p, p.paged(16), backend, plan={"fixed_split_size": split}))
    finally:
        torch.set_num_threads(before)


def test_no_requests_at_all(device, backend, dtype):
    """An idle step: a batch of none gives an empty result."""
    p = batch(dtype, device, ())
    out, lse = decode(p, p.paged(16), backend)
    assert out.shape[0] == lse.shape[0] == 0


@pytest.mark.parametrize("q_len", [2, 4])
def test_several_queries_per_request(device, backend, dtype, q_len):
    """The last q_len tokens of each request ask at once, causally."""
    kv_lens = (37, 4, 300)
    p = Problem((q_len,) * 3, kv_lens, dtype=dtype, device=device, causal=True)
    p.check(*decode(p, p.paged(16), backend, plan={"q_len_per_req": q_len}))


@pytest.mark.parametrize("q_len", [1, 3])
def test_what_is_said_of_the_right_side(device, backend, dtype, q_len):
    """FlashInfer 0.7 has arguments that repeat what decode is: none is to the right, and several queries are causal."""
    p = Problem((q_len,) * 3, (40, 7, 65), causal=q_len > 1, device=device, dtype=dtype)
    cache, said = p.paged(16), {"q_len_per_req": q_len, "window_right": 0}
    for is_causal in (None, q_len > 1):
        p.check(*decode(p, cache, backend, plan={**said, "is_causal": is_causal}))
    for wrong in ({"window_right": -1}, {"window_right": None}, {"is_causal": q_len == 1}, {"is_causal": 0}):
        (name,) = wrong
        with pytest.raises(quire.ValidationError, match=f"^{name}: expected "):
            decode(p, cache, backend, plan={**said, **wrong})


def test_sinks(device, backend, dtype):
    p = batch(dtype, device)
    cache = p.paged()
    wrapper = decode_wrapper(p, cache, backend)
    plan_decode(wrapper, p, cache)
    sinks = torch.linspace(-2.0, 3.0, p.num_qo_heads).to(device)
    p.check(wrapper.run(p.q, cache.kv, sinks=sinks), sinks=sinks)
    p.check(wrapper.run(p.q, cache.kv))


def test_run_scales(device, backend, dtype):
    p = batch(dtype, device)
    got = decode(p, p.paged(), backend, run={"q_scale": 0.5, "k_scale": 1.5, "v_scale": 0.25})
    p.sm_scale = 0.75 / math.sqrt(p.head_dim)
    p.check(*got, v_scale=0.25)


def test_query_view(device, backend, dtype):
    p = batch(dtype, device)
    wide = poisoned((p.q.shape[0], p.num_qo_heads + 2, p.head_dim + 8), dtype, device)
    wide[:, 2:, 8:] = p.q
    p.q = wide[:, 2:, 8:]
    p.check(*decode(p, p.paged(), backend))


@pytest.mark.parametrize("index_device", ["cpu", None])
def test_index_arrays_on_host_or_device(device, backend, dtype, index_device):
    p = batch(dtype, device)
    p.check(*decode(p, p.paged(), backend, index_device=index_device))


def test_results_are_allocated_if_not_given(device, backend, dtype):
    p = batch(dtype, device)
    cache = p.paged()
    out, lse = decode(p, cache, backend)
    wrapper = decode_wrapper(p, cache, backend)
    plan_decode(wrapper, p, cache)
    assert torch.equal(wrapper.run(p.q, cache.kv), out)
    for pair in (wrapper.run(p.q, cache.kv, return_lse=True), wrapper.run_return_lse(p.q, cache.kv)):
        assert torch.equal(pair[0], out)
        assert torch.equal(pair[1], lse)


@pytest.mark.parametrize("use_tensor_cores", [False, True])
def test_use_tensor_cores_is_accepted(device, backend, dtype, use_tensor_cores):
    p = batch(dtype, device)
    cache = p.paged()
    wrapper = decode_wrapper(p, cache, backend, use_tensor_cores=use_tensor_cores)
    plan_decode(wrapper, p, cache)
    p.check(wrapper.run(p.q, cache.kv))
    assert wrapper.use_tensor_cores in (True, False)
    assert wrapper.is_cuda_graph_enabled is False


def test_backend_is_chosen_by_itself(device, dtype):
    p = batch(dtype, device)
    cache = p.paged()
    wrapper = quire.BatchDecodeWithPagedKVCacheWrapper(workspace(device))
    plan_decode(wrapper, p, cache)
    p.check(wrapper.run(p.q, cache.kv))


def start_of(problem, cache):
    """The positional arguments that open plan() in every release."""
    return *cache.tables(), problem.num_qo_heads, problem.num_kv_heads, problem.head_dim, cache.page_size


@pytest.mark.one_type
def test_old_verbs(device, backend, dtype):
    """begin_forward plans, forward runs with its own options, end_forward does nothing."""
    p = batch(dtype, device)
    cache = p.paged()
    wrapper = decode_wrapper(p, cache, backend)
    wrapper.begin_forward(*start_of(p, cache), data_type=dtype)
    for window, cap in [(-1, None), (20, None), (-1, 4.0)]:
        p.window_left, p.soft_cap = window, cap
        p.check(wrapper.forward(p.q, cache.kv, window_left=window, logits_soft_cap=cap))
        p.check(*wrapper.forward_return_lse(p.q, cache.kv, window_left=window, logits_soft_cap=cap))
    wrapper.end_forward()


def test_data_type_is_that_of_q_too(device, backend, dtype):
    """plan(data_type=) alone fixes the dtype of the queries as well."""
    p = batch(dtype, device)
    cache = p.paged()
    wrapper = decode_wrapper(p, cache, backend)
    wrapper.plan(*start_of(p, cache), data_type=dtype)
    p.check(wrapper.run(p.q, cache.kv))


def test_plan_by_position(device, backend, dtype):
    """Options after page_size were positional once; today that is deprecated and still works."""
    p = batch(dtype, device, window_left=20, soft_cap=4.0)
    cache = p.paged()
    wrapper = decode_wrapper(p, cache, backend)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        wrapper.plan(*start_of(p, cache), "NONE", 20, 4.0, dtype, dtype)
    p.check(wrapper.run(p.q, cache.kv))


@pending("fast_decode_plan")
def test_fast_decode_plan(device, backend, dtype):
    """SGLang plans again through this function, with host offsets."""
    p = batch(dtype, device)
    cache = p.paged()
    wrapper = decode_wrapper(p, cache, backend)
    wrapper.plan(*start_of(p, cache), q_data_type=dtype)
    quire.fast_decode_plan(wrapper, *start_of(p, cache), q_data_type=dtype, data_type=dtype)
    p.check(wrapper.run(p.q, cache.kv))
    other = batch(dtype, device, (5, 60, 1, 9, 0, 200), seed=3)
    again = other.paged()
    begin = (again.indptr.cpu(), again.indices, again.last_page_len, 4, 2, 64, again.page_size)
    wrapper.plan = partial(quire.fast_decode_plan, wrapper)  # where programs put it
    wrapper.plan(*begin, q_data_type=dtype, data_type=dtype)
    other.check(wrapper.run(other.q, again.kv))
    assert "q_len_per_req" in inspect.signature(quire.fast_decode_plan).parameters


@pytest.mark.one_type
def test_what_serving_code_looks_at(device, backend, dtype):
    """vLLM asserts on these after plan()."""
    p = batch(dtype, device, window_left=20, soft_cap=4.0, sm_scale=0.3)
    cache = p.paged()
    wrapper = decode_wrapper(p, cache, backend)
    plan_decode(wrapper, p, cache)
    assert (wrapper._window_left, wrapper._logits_soft_cap, wrapper._sm_scale) == (20, 4.0, 0.3)
    p.soft_cap = None
    plan_decode(wrapper, p, cache)
    assert wrapper._logits_soft_cap == 0.0


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_batch(device, backend, dtype, data):
    num_kv_heads, group = data.draw(st.integers(1, 3)), data.draw(st.sampled_from(GROUP_SIZES))
    p = batch(
        dtype,
        device,
        tuple(data.draw(st.lists(st.integers(0, 400), min_size=1, max_size=8))),
        num_qo_heads=num_kv_heads * group,
        num_kv_heads=num_kv_heads,
        head_dim=data.draw(st.sampled_from([64, 128])),
        window_left=data.draw(st.sampled_from([-1, -1, 0, 33])),
        seed=data.draw(st.integers(0, 1 << 30)),
    )
    page_size = data.draw(st.sampled_from([1, 3, 8, 16]))
    layout, signature = data.draw(st.sampled_from(LAYOUTS)), data.draw(st.sampled_from(FORMS))
    cache = p.paged(page_size, layout, signature, order_seed=data.draw(st.integers(0, 99)))
    p.check(*decode(p, cache, backend, index_device=data.draw(st.sampled_from(["cpu", None]))))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pending("CUDAGraphBatchDecodeWithPagedKVCacheWrapper")
def test_decode_in_a_cuda_graph():
    """Captured once, replayed after each new plan."""
    device, batches = "cuda:0", [(50, 9, 3, 70), (300, 7, 1, 1), (5, 120, 30, 2)]
    static_kv = tuple(torch.zeros(48, 16, 2, 64, dtype=torch.float16, device=device) for _ in range(2))
    static_q = torch.zeros(4, 4, 64, dtype=torch.float16, device=device)
    out = torch.zeros_like(static_q)
    buffers = [torch.zeros(n, dtype=torch.int32, device=device) for n in (5, 64, 4)]
    wrapper = quire.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(workspace(device), *buffers)
    graph = None
    for kv_lens in batches:
        p = batch(torch.float16, device, kv_lens)
        cache = p.paged(16, spare=48 - sum(-(-n // 16) for n in kv_lens))
        plan_decode(wrapper, p, cache)
        for to, source in zip(static_kv, cache.kv, strict=True):
            to.copy_(source)
        static_q.copy_(p.q)
        if graph is None:
            wrapper.run(static_q, static_kv, out=out)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                wrapper.run(static_q, static_kv, out=out)
        out.fill_(math.nan)
        graph.replay()
        p.check(out)
