"""What serving engines do with the surface beside what its pages show."""

from __future__ import annotations

import math
import re

import pytest
import torch
from torch import Tensor

import quire
from calls import decode_wrapper, paged_wrapper, plan_decode, plan_paged, plan_ragged, ragged_wrapper
from problems import PagedCache, Problem, any_dtype, block_tables, ints, poisoned, workspace
from test_xqa import LAYOUTS

SHAPE = (3, 1, 20), (40, 0, 65)
PAGE_SIZE = 8


def prefill(device: str, dtype: torch.dtype = torch.float32, **more: object) -> Problem:
    return Problem(*SHAPE, device=device, dtype=dtype, **{"causal": True, **more})


def decodes(device: str, dtype: torch.dtype = torch.float32, kv_lens: tuple = (40, 1, 65), **more: object) -> Problem:
    return Problem((1,) * len(kv_lens), kv_lens, device=device, dtype=dtype, **more)


def graph_buffers(device: str, batch: int, *, decode: bool = False, mask_bytes: int = 0) -> dict[str, Tensor]:
    """The constructor's buffers of a paged wrapper for CUDA graphs."""
    end = "fer" if decode else ""
    lengths = {"paged_kv_indptr_buf": batch + 1, "paged_kv_indices_buf": 64, "paged_kv_last_page_len_buf": batch}
    if not decode:
        lengths["qo_indptr_buf"] = batch + 1
    buffers = {name + end: torch.zeros(n, dtype=torch.int32, device=device) for name, n in lengths.items()}
    if mask_bytes:
        buffers["custom_mask_buf"] = torch.zeros(mask_bytes, dtype=torch.uint8, device=device)
        buffers["mask_indptr_buf"] = torch.zeros(batch + 1, dtype=torch.int32, device=device)
    return buffers


def graph_decoder(device: str, batch: int = 3, **more: object) -> quire.BatchDecodeWithPagedKVCacheWrapper:
    buffers = graph_buffers(device, batch, decode=True)
    return quire.BatchDecodeWithPagedKVCacheWrapper(workspace(device), "NHD", True, **buffers, **more)


def graph_prefill(device: str, batch: int = 3, mask_bytes: int = 0) -> quire.BatchPrefillWithPagedKVCacheWrapper:
    buffers = graph_buffers(device, batch, mask_bytes=mask_bytes)
    return quire.BatchPrefillWithPagedKVCacheWrapper(workspace(device), "NHD", True, **buffers)


# forward() of wrappers for CUDA graphs


@pytest.mark.parametrize("more", [{"sm_scale": 64**-0.5 * (1 + 2**-52)}, {"sm_scale": 0.1, "soft_cap": 20.0}], ids=str)
def test_forward_gives_the_scale_and_the_cap(device, more):
    """plan() knows neither, before the capture and before each replay."""
    wrapper, bare = graph_decoder(device), {"logits_soft_cap": None, "sm_scale": None}
    for seed, kv_lens in enumerate(((40, 1, 65), (9, 30, 2), (64, 64, 0))):
        p = decodes(device, any_dtype(device), kv_lens, seed=seed, **more)
        cache = p.paged(PAGE_SIZE)
        plan_decode(wrapper, p, cache, plan=bare)
        p.check(wrapper.forward(p.q, cache.kv, sm_scale=p.sm_scale, logits_soft_cap=p.soft_cap))


def test_scales_of_layers_differ(device):
    """They are numbers of a launch: nothing is planned anew."""
    p = decodes(device, any_dtype(device), soft_cap=20.0)
    cache, wrapper = p.paged(PAGE_SIZE), graph_decoder(device)
    plan_decode(wrapper, p, cache)
    plan = wrapper._attention._plan
    for scale, cap in ((0.1, 20.0), (0.3, 20.0), (0.1, 5.0)):
        p.sm_scale, p.soft_cap = scale, cap
        p.check(wrapper.forward(p.q, cache.kv, sm_scale=scale, logits_soft_cap=cap))
    assert wrapper._attention._plan is plan and wrapper._sm_scale == 0.1 and wrapper._logits_soft_cap == 5.0


def test_the_first_forward_fixes_the_mask(device):
    """plan() has causal=False by default, and goes on having it."""
    wrapper, told = graph_prefill(device), {"causal": False, "window_left": -1}
    for seed, shape in enumerate((((3, 1, 20), (40, 2, 65)), ((20, 3, 1), (30, 3, 1)))):
        p = Problem(*shape, device=device, dtype=any_dtype(device), causal=True, window_left=9, seed=seed)
        cache = p.paged(PAGE_SIZE)
        plan_paged(wrapper, p, cache, plan=told)
        if seed:
            with pytest.raises(quire.PlanError, match=r"run\(\): expected forward\(\)"):
                wrapper.run(p.q, cache.kv)
        p.check(wrapper.forward(p.q, cache.kv, causal=True, window_left=9))
        assert wrapper._causal and wrapper._window_left == 9
    with pytest.raises(quire.PlanError, match="causal: expected True"):
        wrapper.forward(p.q, cache.kv, causal=False, window_left=9)
    with pytest.raises(quire.PlanError, match="logits: expected"):
        wrapper.forward(p.q, cache.kv, causal=True, window_left=10)
    with pytest.raises(quire.PlanError, match="page_size: expected 8"):
        plan_paged(wrapper, p, p.paged(16), plan=told)
    plan_paged(wrapper, p, cache)  # told what forward() said
    p.check(wrapper.run(p.q, cache.kv))


def test_run_fixes_the_mask_too(device):
    """A capture may hold it."""
    p, wrapper = prefill(device, any_dtype(device)), graph_prefill(device)
    cache = p.paged(PAGE_SIZE)
    plan_paged(wrapper, p, cache)
    p.check(wrapper.run(p.q, cache.kv))
    with pytest.raises(quire.PlanError, match="causal: expected True"):
        wrapper.forward(p.q, cache.kv, causal=False)
    p.check(wrapper.run(p.q, cache.kv))


def test_a_mask_of_bits_takes_the_place_of_causal(device):
    p = prefill(device, any_dtype(device)).random_mask()
    cache, wrapper = p.paged(PAGE_SIZE), graph_prefill(device, mask_bytes=4000)
    plan_paged(wrapper, p, cache)
    for causal in (False, True):
        p.check(wrapper.forward(p.q, cache.kv, causal=causal))


def test_forward_plans_once(device):
    """Where only the scale differs from plan()'s."""
    p = prefill(device, any_dtype(device), sm_scale=0.1)
    cache, wrapper = p.paged(PAGE_SIZE), paged_wrapper(p, p.paged(PAGE_SIZE), "auto")
    plan_paged(wrapper, p, cache, plan={"sm_scale": None})
    plan = wrapper._attention._plan
    p.check(wrapper.forward(p.q, cache.kv, causal=True, sm_scale=0.1))
    assert wrapper._attention._plan is plan
    p.causal = False
    p.check(wrapper.forward(p.q, cache.kv, causal=False, sm_scale=0.1))
    assert wrapper._attention._plan is not plan


def test_between_replays_sglang_plans_by_the_module(device):
    """As its fast_prefill_plan() does: page numbers and bits lie in the buffers, lengths come from the host."""
    first = Problem((4, 4), (30, 50), device=device, dtype=any_dtype(device)).random_mask()
    wrapper = graph_prefill(device, 2, mask_bytes=4000)
    assert wrapper._cached_module is None and wrapper._max_total_num_rows is None
    plan_paged(wrapper, first, first.paged(PAGE_SIZE))
    p = Problem((4, 4), (33, 20), device=device, dtype=any_dtype(device), seed=1).random_mask(seed=5)
    cache, bits = p.paged(PAGE_SIZE), p.packed_mask()
    wrapper._paged_kv_indices_buf[: len(cache.indices)] = cache.indices
    wrapper._custom_mask_buf[: len(bits)] = bits
    wrapper._plan_info = wrapper._cached_module.plan(
        wrapper._float_workspace_buffer, wrapper._int_workspace_buffer, wrapper._pin_memory_int_workspace_buffer,
        ints(p.qo_indptr, "cpu"), cache.indptr.cpu(), ints(p.kv_lens, "cpu"), wrapper._max_total_num_rows, 2,
        p.num_qo_heads, p.num_kv_heads, PAGE_SIZE, True, p.head_dim, p.head_dim, False, -1, -1, False, 0, 0,
    )  # fmt: skip
    p.check(wrapper.forward(p.q, cache.kv))


# Arguments that repeat others, and those that other libraries need


def test_lengths_are_taken_and_compared(device, backend):
    p = prefill(device, any_dtype(device))
    cache, wrapper = p.paged(PAGE_SIZE), paged_wrapper(p, p.paged(PAGE_SIZE), backend)
    right = {
        "seq_lens": ints(p.kv_lens, "cpu"),
        "seq_lens_q": ints(p.qo_lens, "cpu"),
        "block_tables": block_tables(cache),
    }
    plan_paged(wrapper, p, cache, plan={**right, "max_token_per_sequence": 20, "max_sequence_kv": 65})
    p.check(wrapper.run(p.q, cache.kv))
    of_cudnn = {name: right[name].view(-1, 1, 1, 1) for name in ("seq_lens", "seq_lens_q")}
    plan_paged(wrapper, p, cache, plan=of_cudnn)
    p.check(wrapper.run(p.q, cache.kv))
    for name, wrong in (
        ("seq_lens", ints((40, 0, 66), "cpu")),
        ("seq_lens", ints((40, 1, 65), "cpu").to(torch.int64)),
        ("seq_lens", ints((40, 0), "cpu")),
        ("seq_lens_q", ints((3, 1, 21), "cpu")),
        ("max_token_per_sequence", 19),
        ("max_sequence_kv", 64),
    ):
        with pytest.raises(quire.ValidationError, match=rf"^{name}: expected"):
            plan_paged(wrapper, p, cache, index_device="cpu", plan={name: wrong})
    if device == "cpu":
        with pytest.raises(quire.ValidationError, match="block_tables: expected request 0"):
            plan_paged(wrapper, p, cache, plan={"block_tables": right["block_tables"].flip(1)})
    p.check(wrapper.run(p.q, cache.kv))


def test_lengths_of_ragged_keys(device):
    p = prefill(device, any_dtype(device))
    wrapper, lens = (
        ragged_wrapper(p, "auto"),
        {"seq_lens": ints(p.kv_lens, "cpu"), "seq_lens_q": ints(p.qo_lens, "cpu")},
    )
    plan_ragged(wrapper, p, plan={**lens, "max_token_per_sequence": 20, "max_sequence_kv": 65})
    p.check(wrapper.run(p.q, p.k, p.v))
    for name, wrong in (
        ("seq_lens", ints((40, 0, 66), "cpu")),
        ("max_sequence_kv", 64),
        ("seq_lens_q", lens["seq_lens"]),
    ):
        with pytest.raises(quire.ValidationError, match=rf"^{name}: expected"):
            plan_ragged(wrapper, p, index_device="cpu", plan={name: wrong})


def test_lengths_of_decodes(device):
    p = decodes(device, any_dtype(device), (40, 0, 65))
    cache, wrapper = p.paged(PAGE_SIZE), decode_wrapper(p, p.paged(PAGE_SIZE), "auto")
    plan_decode(wrapper, p, cache, plan={"seq_lens": ints(p.kv_lens, "cpu"), "block_tables": block_tables(cache)})
    p.check(wrapper.run(p.q, cache.kv))
    with pytest.raises(quire.ValidationError, match=r"seq_lens: expected 65 tokens of request 2, .* got 64"):
        plan_decode(wrapper, p, cache, plan={"seq_lens": ints((40, 0, 64), "cpu")})


@pytest.mark.parametrize("where", ["host", "device"])
def test_page_offsets_of_a_part_of_a_batch(device, backend, where):
    """vLLM plans prefills with the offsets of the whole batch, from where the decodes end."""
    p = prefill(device, any_dtype(device))
    cache, wrapper = p.paged(PAGE_SIZE), paged_wrapper(p, p.paged(PAGE_SIZE), backend)
    ahead = torch.full((5,), -1, dtype=torch.int32, device=cache.indices.device)
    indices = torch.cat([ahead, cache.indices]).to("cpu" if where == "host" else device)
    part = PagedCache(cache.kv, cache.indptr + 5, indices, cache.last_page_len, PAGE_SIZE, cache.kv_layout)
    plan_paged(wrapper, p, part, plan={"seq_lens": ints(p.kv_lens, "cpu")})
    p.check(wrapper.run(p.q, cache.kv))
    p.causal = False
    p.check(wrapper.forward(p.q, cache.kv))  # from what plan() has kept
    lens = quire.get_seq_lens(part.indptr, part.last_page_len, PAGE_SIZE)
    assert lens.tolist() == list(p.kv_lens)


def test_ragged_offsets_of_a_part_of_a_batch(device, backend):
    p = prefill(device, any_dtype(device))
    wrapper = ragged_wrapper(p, backend)
    nothing = torch.full((7, *p.k.shape[1:]), math.nan, dtype=p.dtype, device=device)
    indptr = ints([n + 7 for n in p.kv_indptr], device)
    wrapper.plan(ints(p.qo_indptr, device), indptr, 4, 2, 64, causal=True, q_data_type=p.dtype)
    p.check(wrapper.run(p.q, torch.cat([nothing, p.k]), torch.cat([nothing, p.v])))
    with pytest.raises(quire.ValidationError, match="kv_indptr: expected to begin with 0 or more"):
        wrapper.plan(ints(p.qo_indptr, device), indptr - 8, 4, 2, 64, q_data_type=p.dtype)


def test_never_splitting_goes_before_a_size_of_splits(device):
    p = decodes(device, any_dtype(device))
    cache, wrapper = p.paged(PAGE_SIZE), decode_wrapper(p, p.paged(PAGE_SIZE), "auto")
    results = []
    for plan in ({"disable_split_kv": True}, {"disable_split_kv": True, "fixed_split_size": 2048}):
        plan_decode(wrapper, p, cache, plan=plan)
        results.append(wrapper.run(p.q, cache.kv))
    assert torch.equal(*results)
    p.check(results[1])


@pytest.mark.parametrize("name", ["fa2", "fa3", "cutlass", "trtllm-gen", "cudnn", "xqa"])
def test_names_of_other_implementations_are_wishes(device, name):
    p = decodes(device, any_dtype(device))
    cache = p.paged(PAGE_SIZE)
    wrapper, auto = (decode_wrapper(p, cache, backend) for backend in (name, "auto"))
    for w in (wrapper, auto):
        plan_decode(w, p, cache)
    assert wrapper.explain() == auto.explain() and wrapper._backend == name
    p.check(wrapper.run(p.q, cache.kv))
    with pytest.raises(quire.ValidationError, match="backend: expected one of auto, quire:decode"):
        plan_decode(decode_wrapper(p, cache, "fa9"), p, cache)


# Fewer heads than planned


@pytest.mark.parametrize("heads", [(4, 2), (2, 1), (6, 2)], ids=str)
def test_fewer_heads_than_planned(device, heads):
    """SGLang plans once for all layers, with the heads of the widest."""
    more = {"num_qo_heads": heads[0], "num_kv_heads": heads[1]}
    for p, plan in (
        (decodes(device, any_dtype(device), **more), plan_decode),
        (prefill(device, any_dtype(device), **more), plan_paged),
    ):
        cache = p.paged(PAGE_SIZE, "HND")
        make = decode_wrapper if plan is plan_decode else paged_wrapper
        wrapper = make(p, cache, "auto")
        wide = Problem(p.qo_lens, p.kv_lens, 8, 2, dtype=p.dtype, device=device, causal=p.causal)
        plan(wrapper, wide, cache)
        wide.check(wrapper.run(wide.q, wide.paged(PAGE_SIZE, "HND").kv))
        for _ in range(2):
            p.check(*wrapper.run(p.q, cache.kv, out=torch.empty_like(p.q), return_lse=True))
        p.check(wrapper.run(p.q, cache.kv))
        wide.check(wrapper.run(wide.q, wide.paged(PAGE_SIZE, "HND").kv))
    with pytest.raises(quire.ValidationError, match="num_qo_heads=8"):
        wrapper.run(torch.zeros(24, 9, 64, dtype=p.dtype, device=device), cache.kv)


def test_fewer_heads_in_graphs(device):
    """Captured launches of narrow layers follow later plans too."""
    wrapper, replays = graph_decoder(device), []
    for seed, kv_lens in enumerate(((40, 1, 65), (9, 30, 2))):
        wide = decodes(device, any_dtype(device), kv_lens, num_qo_heads=8, seed=seed)
        narrow = decodes(device, any_dtype(device), kv_lens, num_qo_heads=4, num_kv_heads=1, seed=seed, sm_scale=0.2)
        cache = wide.paged(PAGE_SIZE)
        plan_decode(wrapper, wide, cache)
        wide.check(wrapper.forward(wide.q, cache.kv))
        narrow.check(wrapper.forward(narrow.q, narrow.paged(PAGE_SIZE).kv, sm_scale=0.2))
        (held,) = wrapper._attention._by_heads.values()
        replays.append(held._plan._params.num_ctas)
    assert len(set(replays)) == 1


# The workspace


def test_a_small_workspace_means_fewer_partitions(monkeypatch):
    """Not an error: whole row tiles need none."""
    monkeypatch.setattr("quire.engine.planner.get_num_threads", lambda: 132)
    p = Problem((1, 1), (3000, 700), num_qo_heads=8, num_kv_heads=1, head_dim=128, dtype=torch.bfloat16)
    cache = p.paged(16)
    for num_bytes, partitions in ((1 << 16, r"[1-9]\d*"), (16, "0")):
        wrapper = quire.BatchDecodeWithPagedKVCacheWrapper(torch.empty(num_bytes, dtype=torch.uint8))
        plan_decode(wrapper, p, cache)
        assert (
            wrapper.workspace_size(
                cache.indptr, cache.indices, cache.last_page_len, 8, 1, 128, 16, q_data_type=p.dtype
            )[0]
            > num_bytes
        )
        assert re.search(rf"hold the partial results of {partitions} partitions, not of 132", wrapper.explain())
        p.check(wrapper.run(p.q, cache.kv))


def test_unaligned_workspaces(device):
    buffer = torch.empty(1 << 16, dtype=torch.uint8, device=device)[1:]
    with pytest.raises(quire.ValidationError, match="float_workspace_buffer must be 16-byte aligned"):
        quire.BatchDecodeWithPagedKVCacheWrapper(buffer)
    wrapper = quire.BatchDecodeWithPagedKVCacheWrapper(workspace(device))
    with pytest.raises(quire.ValidationError, match="int_workspace_buffer must be 16-byte aligned"):
        wrapper.reset_workspace_buffer(workspace(device), buffer)


# Private names


def test_private_names(device):
    p = prefill(device, any_dtype(device), window_left=30, soft_cap=20.0, sm_scale=0.2)
    cache, wrapper = p.paged(PAGE_SIZE), paged_wrapper(p, p.paged(PAGE_SIZE), "fa2")
    assert wrapper._custom_mask_buf is None and wrapper._plan_info is None and wrapper._kv_layout == "NHD"
    shared = wrapper._int_workspace_buffer
    wrapper._int_workspace_buffer = shared  # mini-SGLang
    plan_paged(wrapper, p, cache)
    assert (wrapper._sm_scale, wrapper._window_left, wrapper._logits_soft_cap, wrapper._causal) == (0.2, 30, 20.0, True)
    assert wrapper.device == torch.device(device) and wrapper._float_workspace_buffer.device == wrapper.device
    for buffer, array in (
        (wrapper._qo_indptr_buf, ints(p.qo_indptr, device)), (wrapper._paged_kv_indptr_buf, cache.indptr),
        (wrapper._paged_kv_indices_buf, cache.indices), (wrapper._paged_kv_last_page_len_buf, cache.last_page_len),
    ):  # fmt: skip
        assert torch.equal(buffer, array)
    graph = graph_prefill(device, mask_bytes=100)
    assert graph._custom_mask_buf.numel() == 100 and graph._mask_indptr_buf.numel() == 4
    assert graph._paged_kv_indices_buf.numel() == 64 and graph._max_total_num_rows is None


# Wrappers and functions that engines import


@pytest.mark.parametrize("kv_layout", LAYOUTS)
def test_batch_attention(device, dtype, kv_layout):
    """Prefills and decodes at once, under a cap."""
    p = prefill(device, dtype, soft_cap=20.0, sm_scale=0.2)
    cache = p.paged(PAGE_SIZE, kv_layout)
    wrapper = quire.BatchAttention(kv_layout, device=device)
    indices = ints(p.qo_indptr, device), cache.indptr, cache.indices, ints(p.kv_lens, device)
    wrapper.plan(*indices, 4, 2, 64, 64, PAGE_SIZE, True, 0.2, 20.0, dtype, dtype)
    p.check(*wrapper.run(p.q, cache.kv, logits_soft_cap=20.0))
    out, lse = torch.empty_like(p.q), torch.empty(24, 4, device=device)
    assert wrapper.run(p.q, cache.kv, out, lse)[0] is out
    p.check(out, lse)
    assert "attention" in wrapper.explain()
    with pytest.raises(quire.ValidationError, match=r"logits_soft_cap: expected 20\.0"):
        wrapper.run(p.q, cache.kv, logits_soft_cap=3.0)
    with pytest.raises(quire.ValidationError, match="kv_len_arr"):
        wrapper.plan(*indices[:3], ints((1, 2), device), 4, 2, 64, 64, PAGE_SIZE)
    with pytest.raises(quire.ValidationError, match="use_profiler"):
        wrapper.plan(*indices, 4, 2, 64, 64, PAGE_SIZE, use_profiler=True)


def test_sinks_by_position(device):
    dtype = any_dtype(device)
    p = prefill(device, dtype, sm_scale=0.2, window_left=30)
    cache, sinks = p.paged(PAGE_SIZE), torch.randn(4, device=device)
    wrapper = quire.BatchAttentionWithAttentionSinkWrapper(
        workspace(device), "NHD", backend="fa3", q_data_type=dtype, kv_data_type=dtype, head_dim_qk=64, head_dim_vo=64,
        window_left=30,
    )  # fmt: skip
    assert isinstance(wrapper, quire.BatchPrefillWithPagedKVCacheWrapper)
    tables = ints(p.qo_indptr, device), *cache.tables()
    wrapper.plan(*tables, 4, 2, 64, PAGE_SIZE, causal=True)
    p.check(wrapper.run(p.q, cache.kv, sinks, 0.2), sinks=sinks)
    p.check(*wrapper.run(p.q, cache.kv, sinks=sinks, return_lse=True), sinks=sinks)
    p.sm_scale = 0.1
    p.check(wrapper.run(p.q, cache.kv, sinks, 0.1, out=torch.empty_like(p.q)), sinks=sinks)
    with pytest.raises(quire.ValidationError, match="sink: expected it or sinks"):
        wrapper.run(p.q, cache.kv, sinks, sinks=sinks)
    with pytest.raises(quire.ValidationError, match=r"head_dim_qk, head_dim_vo: expected \(64, 64\)"):
        wrapper.plan(*tables, 4, 2, 128, PAGE_SIZE)


def test_pod(device):
    dtype = any_dtype(device)
    p, d = Problem((20,), (50,), device=device, dtype=dtype, causal=True), decodes(device, dtype)
    cache = d.paged(PAGE_SIZE)
    wrapper = quire.PODWithPagedKVCacheWrapper(workspace(device))
    wrapper.plan(*cache.tables(), 4, 2, 64, PAGE_SIZE, q_data_type=dtype)
    prefilled, decoded = wrapper.run(p.q, p.k, p.v, d.q, cache.kv, causal_p=True)
    p.check(prefilled)
    d.check(decoded)
    p.causal, p.mask = False, torch.rand(20 * 50) < 0.5
    p.mask = p.mask.to(device)
    mask = p.mask.view(20, 50)
    prefilled, decoded = wrapper.run(
        p.q, p.k, p.v, d.q, cache.kv, custom_mask_p=mask, return_lse_p=True, return_lse_d=True, window_left_d=-1
    )
    p.check(*prefilled)
    d.check(*decoded)
    with pytest.raises(quire.ValidationError, match="window_left_d: expected -1"):
        wrapper.run(p.q, p.k, p.v, d.q, cache.kv, window_left_d=3)


def test_batch_pod(device):
    dtype = any_dtype(device)
    p, d = prefill(device, dtype), decodes(device, dtype)
    caches = p.paged(PAGE_SIZE), d.paged(PAGE_SIZE)
    wrapper = quire.BatchPODWithPagedKVCacheWrapper(workspace(device))
    tables = [(ints(x.qo_indptr, device), *c.tables()) for x, c in zip((p, d), caches, strict=True)]
    wrapper.plan(*tables[0], *tables[1], 4, 2, 64, PAGE_SIZE, data_type=dtype, q_data_type=None)
    mask = prefill(device, dtype).random_mask().mask
    for causal, bits in ((True, None), (False, mask), (False, None), (True, None)):
        p.causal, p.mask = causal, bits
        prefilled, decoded = wrapper.run(
            p.q, caches[0].kv, d.q, caches[1].kv, custom_mask_p=bits, causal_p=causal, return_lse=True
        )
        p.check(*prefilled)
        d.check(*decoded)


@pytest.mark.parametrize("kv_layout", LAYOUTS)
def test_trtllm_decode(device, dtype, kv_layout):
    p = Problem((2, 2, 2), (40, 2, 65), device=device, dtype=dtype, causal=True, window_left=30, sm_scale=0.2)
    cache, sinks = p.paged(16, kv_layout), torch.randn(4, device=device)
    call = (p.q, cache.kv, workspace(device), block_tables(cache), ints(p.kv_lens, device), 65, 0.2, 1.0, 30)
    more = {"kv_layout": kv_layout, "q_len_per_req": 2, "backend": "trtllm-gen"}
    p.check(quire.trtllm_batch_decode_with_kv_cache(*call, sinks=sinks, out_dtype=dtype, **more), sinks=sinks)
    out, lse = quire.trtllm_batch_decode_with_kv_cache(*call, return_lse=True, **more)
    p.check(out, lse)
    with pytest.raises(quire.ValidationError, match="uses_shared_paged_kv_idx: not supported"):
        quire.trtllm_batch_decode_with_kv_cache(*call, **more, uses_shared_paged_kv_idx=False)
    total = ints(p.kv_lens, device)
    for given, text in (
        ({"cp_rank": 1}, "cp_rank: expected a number below cp_world=1"),
        ({"cp_world": 2}, "causal_seqlens_kv_global: expected int32"),
        ({"cp_world": 2, "causal_seqlens_kv_global": total}, "causal_seqlens_kv_global: expected None beside"),
        (
            {"cp_world": 2, "causal_seqlens_kv_global": total[1:], "window_left": -1},
            "causal_seqlens_kv_global: expected",
        ),
    ):
        with pytest.raises(quire.QuireError, match=text):
            quire.trtllm_batch_decode_with_kv_cache(*call[:-1], **{"window_left": 30, **more, **given})


@pytest.mark.parametrize("world", [2, 3])
def test_trtllm_decode_of_ranks(device, dtype, world):
    """Keys dealt to ranks in turn, also to none: what the ranks find, merged, is attention over all keys."""
    p = Problem((2, 2, 2), (40, 2, 65), device=device, dtype=dtype, causal=True, sm_scale=0.2)
    states = []
    for rank in range(world):
        lens = [len(range(rank, n, world)) for n in p.kv_lens]
        cache = poisoned((3, 2, 40, p.num_kv_heads, p.head_dim), dtype, device)
        for i, begin in enumerate(p.kv_indptr[:-1]):
            keys = torch.arange(rank, p.kv_lens[i], world) + begin
            cache[i, 0, : len(keys)], cache[i, 1, : len(keys)] = p.k[keys], p.v[keys]
        states.append(
            quire.trtllm_batch_decode_with_kv_cache(
                p.q, cache, workspace(device), ints(range(3), device)[:, None], ints(lens, device), 40, 0.2, 1.0,
                kv_layout="NHD", q_len_per_req=2, return_lse=True, cp_world=world, cp_rank=rank,
                causal_seqlens_kv_global=ints([n - 2 for n in p.kv_lens], device),
            )
        )  # fmt: skip
    p.check(*quire.merge_states(*(torch.stack(each, 1) for each in zip(*states, strict=True))))


@pytest.mark.parametrize("kv_layout", LAYOUTS)
@pytest.mark.parametrize("sums", ["tokens", "pages"])
def test_trtllm_context(device, dtype, kv_layout, sums):
    """vLLM's sums are of pages."""
    p = prefill(device, dtype, window_left=30, sm_scale=0.2)
    cache, sinks = p.paged(16, kv_layout), torch.randn(4, device=device)
    cumulated = cache.indptr if sums == "pages" else ints(p.kv_indptr, device)

    def call(**more: object) -> object:
        given = {"kv_layout": kv_layout, "causal": p.causal, **more}
        tables = given.pop("block_tables", block_tables(cache))
        return quire.trtllm_batch_context_with_kv_cache(
            p.q, cache.kv, workspace(device), tables, ints(p.kv_lens, device), 20, 65, 0.2, 1.0, 3,
            ints(p.qo_indptr, device), given.pop("cum_seq_lens_kv", cumulated), 30, **given,
        )  # fmt: skip

    p.check(call(sinks=sinks), sinks=sinks)
    out = torch.empty_like(p.q)
    assert call(out=out)[0].data_ptr() == out.data_ptr()
    p.check(out)
    p.causal = False
    p.check(*call(return_lse=True))
    for name, value in (("o_sf_scale", 1.0), ("uses_shared_paged_kv_idx", False)):
        with pytest.raises(quire.ValidationError, match="not supported"):
            call(**{name: value})
    if device == "cpu":
        with pytest.raises(quire.ValidationError, match="cum_seq_lens_kv: expected the sums"):
            call(cum_seq_lens_kv=ints((0, 1, 2, 3), device))
        with pytest.raises(quire.ValidationError, match="block_tables: expected values that fit 32 bits"):
            call(block_tables=block_tables(cache).long() + 2**32)


def test_compressed_keys_are_appended(device, dtype):
    """Through pages in any order; a request of -1 is skipped."""
    ckv_cache, kpe_cache = (torch.zeros(6, PAGE_SIZE, dim, dtype=dtype, device=device) for dim in (512, 64))
    ckv, kpe = (torch.randn(4, dim, device=device).to(dtype) for dim in (512, 64))
    requests, positions = ints((0, 1, -1, 1), device), ints((3, 8, 0, 9), device)
    tables = ints((4, 5, 1), device), ints((0, 1, 3), device), ints((4, 2), device)
    quire.append_paged_mla_kv_cache(ckv, kpe, requests, positions, ckv_cache, kpe_cache, *tables)
    for new, cache in ((ckv, ckv_cache), (kpe, kpe_cache)):
        for row, (page, token) in {0: (4, 3), 1: (1, 0), 3: (1, 1)}.items():
            assert torch.equal(cache[page, token], new[row])
            cache[page, token] = 0
        assert not cache.any()
    with pytest.raises(quire.ValidationError, match="kpe_cache: expected"):
        quire.append_paged_mla_kv_cache(ckv, kpe, requests, positions, ckv_cache, kpe_cache[0], *tables)
