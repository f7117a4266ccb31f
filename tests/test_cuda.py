"""What only a GPU shows: streams, synchronisations, several devices."""

from __future__ import annotations

import ctypes
import itertools

import pytest
import torch

import quire
from calls import (
    no_synchronisation,
    paged_wrapper,
    plan_paged,
    plan_ragged,
    prefill_paged,
    prefill_ragged,
    ragged_wrapper,
)
from problems import Problem, workspace
from quire.attention import variants
from quire.engine import launch
from quire.engine.launch import base_of
from quire.kernels.params import RowTile

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]


def problem(device: str, seed: int = 0) -> Problem:
    more = {"num_qo_heads": 8, "num_kv_heads": 2, "head_dim": 128, "dtype": torch.float16, "causal": True}
    return Problem((70, 1, 9), (300, 2000, 9), device=device, seed=seed, **more)


def test_a_run_is_on_the_current_stream(device, backend):
    """Work queued before it on the same stream is seen, without a synchronisation."""
    if device == "cpu":
        pytest.skip("the CPU has no streams")
    p = problem(device)
    wrapper = ragged_wrapper(p, backend)
    plan_ragged(wrapper, p)
    late = torch.zeros_like(p.q)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        late.copy_(p.q)
        out = wrapper.run(late, p.k, p.v)
    stream.synchronize()
    p.check(out)


@pytest.mark.parametrize("own_stream", [False, True])
def test_a_run_while_another_context_is_current(own_stream):
    """As another library may leave it."""
    p = problem("cuda:0")
    wrapper = ragged_wrapper(p, "auto")
    plan_ragged(wrapper, p)
    out = torch.empty_like(p.q)
    driver, other, current = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p(), ctypes.c_void_p()
    with torch.cuda.stream(torch.cuda.Stream() if own_stream else torch.cuda.default_stream()):
        torch.cuda.synchronize()
        assert driver.cuCtxCreate_v2(ctypes.byref(other), 0, 0) == 0
        try:
            wrapper.run(p.q, p.k, p.v, out=out)
            driver.cuCtxGetCurrent(ctypes.byref(current))
            assert current.value == other.value
        finally:
            driver.cuCtxDestroy_v2(other)
        torch.cuda.synchronize()
    p.check(out)


def test_host_index_arrays_plan_without_synchronising(device, backend):
    """Planning with host arrays only queues one copy."""
    if device == "cpu":
        pytest.skip("nothing to synchronise with")
    p = problem(device)
    cache = p.paged(16)
    wrapper = paged_wrapper(p, cache, backend)
    plan_paged(wrapper, p, cache)
    indptr, _, last = (t.cpu() for t in cache.tables())
    qo_indptr = torch.tensor(p.qo_indptr, dtype=torch.int32)
    heads = (p.num_qo_heads, p.num_kv_heads, p.head_dim, cache.page_size)
    with no_synchronisation():
        wrapper.plan(qo_indptr, indptr, cache.indices, last, *heads, causal=True, q_data_type=p.dtype)
        out = wrapper.run(p.q, cache.kv)
    p.check(out)


def test_pages_of_one_token_plan_without_synchronising(device, backend):
    """Their last_page_len says nothing, so one on the device is not waited for."""
    if device == "cpu":
        pytest.skip("nothing to synchronise with")
    p = Problem((1, 1, 1), (30, 0, 77), 8, 2, 128, dtype=torch.float16, device=device)
    cache = p.paged(1)
    wrapper = quire.BatchDecodeWithPagedKVCacheWrapper(workspace(device), backend=backend)
    indptr, last = cache.indptr.cpu(), cache.last_page_len
    assert last.device.type == "cuda"
    wrapper.plan(indptr, cache.indices, last, 8, 2, 128, 1, q_data_type=p.dtype)  # compiles
    with no_synchronisation():
        wrapper.plan(indptr, cache.indices, last, 8, 2, 128, 1, q_data_type=p.dtype)
        out = wrapper.run(p.q, cache.kv)
    p.check(out)


@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize("dtype_of_batch", [torch.float16, torch.bfloat16], ids=str)
def test_long_chunks(device, backend, dtype_of_batch, page_size):
    """More rows a request than the tiles for chunks are for."""
    if device == "cpu":
        pytest.skip("its tiles are the same for all")
    p = Problem((700, 900, 650), (700, 1500, 650), 32, 2, 128, dtype=dtype_of_batch, device=device, causal=True)
    p.check(*prefill_paged(p, p.paged(page_size), backend))


@pytest.mark.parametrize(
    ("head_dim", "more"), [(64, {}), (128, {}), (128, {"window_left": 700}), (128, {"soft_cap": 20.0}), (256, {})]
)
def test_masks_of_long_chunks(device, backend, head_dim, more):
    """Tiles of keys that all rows see, none, or some: of many rows, over more keys than a piece of work knows at once,
    and with bits that begin amid a word.
    """
    if device == "cpu":
        pytest.skip("its tiles are not classified")
    heads = {"num_qo_heads": 8, "num_kv_heads": 1, "head_dim": head_dim, "dtype": torch.bfloat16}
    p = Problem((800, 3, 1), (1000, 70_000, 333), device=device, **heads, **more).block_mask(60, 200)
    bits = p.packed_mask()
    odd = torch.cat([bits.new_zeros(3), bits])[3:]
    plan = {"custom_mask": None, "packed_custom_mask": odd}
    p.check(*prefill_ragged(p, backend, plan=plan))
    p.check(*prefill_paged(p, p.paged(16), backend, plan=plan))


class Memory:
    """Bytes of a GPU, as torch takes them."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (address, False), "version": 3}

    def read(self) -> bytes:
        return torch.as_tensor(self, device="cuda").cpu().numpy().tobytes()


def costs_of(tiles: list[RowTile], block_mask: bytes) -> list[int]:
    """3 for each KV tile that all rows see, and 5 for each that some see."""
    cost = (0, 5, 0, 3)
    units = [block_mask[tile.work_begin :][: tile.kv_end - tile.kv_begin] for tile in tiles]
    return [sum(cost[found] for found in own) for own in units]


@pytest.mark.parametrize(
    ("name", "of_variant", "in_graph"),
    [("quire:fa2", True, False), *(("quire:fa3", *both) for both in itertools.product((True, False), repeat=2))],
)
def test_row_tiles_that_see_most_come_first(name, of_variant, in_graph):
    """Request i has i^2 documents: what a mask leaves has another order than the lengths."""
    n, length = 10, 2048
    p = Problem((length,) * n, (length,) * n, 32, 8, 128, dtype=torch.bfloat16, device="cuda", causal=True)
    documents = torch.stack([torch.arange(length) * (1 + i * i) // length for i in range(n)]).int()
    mask = torch.cat([(d[:, None] == d).tril().flatten() for d in documents]).cuda()
    variant = variants.document_mask if of_variant else None
    plan = {"documents": documents.cuda()} if of_variant else {"custom_mask": mask, "causal": False}
    size = {"use_cuda_graph": True, "qo_indptr_buf": torch.zeros(n + 1, dtype=torch.int32, device="cuda")}
    size["kv_indptr_buf"] = size["qo_indptr_buf"].clone()
    if not of_variant:
        size["custom_mask_buf"] = torch.zeros(-(-mask.numel() // 8), dtype=torch.uint8, device="cuda")
        size["mask_indptr_buf"] = size["qo_indptr_buf"].clone()
    wrapper = quire.BatchPrefillWithRaggedKVCacheWrapper(
        workspace("cuda"), backend=name, variant=variant, **(size if in_graph else {})
    )
    plan_ragged(wrapper, p, plan=plan)
    planned = wrapper._attention._plan
    params, sizes = planned.params, planned.schedule.sizes
    assert sizes.is_dynamic or not sizes.is_partitioned, "partitions count on the order of row tiles"
    at, tile_bytes = base_of(params).tiles, ctypes.sizeof(RowTile)
    copied = Memory(at, sizes.num_tiles * tile_bytes).read()
    tiles = [RowTile.from_buffer_copy(copied, i * tile_bytes) for i in range(sizes.num_tiles)]
    places = {(tile.request, tile.row_begin) for tile in tiles}
    assert len(places) == sizes.num_tiles == n * -(-length * 4 // wrapper._attention.decision.key.tile_rows)
    units = max(tile.work_begin + tile.kv_end - tile.kv_begin for tile in tiles)
    costs = costs_of(tiles, Memory(params.operands.block_mask if of_variant else params.block_mask, units).read())
    buckets = [cost * 255 // max(costs) for cost in costs]
    assert buckets == sorted(buckets, reverse=True) and len(set(buckets)) > 10
    spans = [tile.kv_end - tile.kv_begin for tile in tiles]
    assert not of_variant or spans != sorted(spans, reverse=True), "the host's order"
    out = wrapper.run(p.q, p.k, p.v)
    alone = quire.BatchPrefillWithRaggedKVCacheWrapper(workspace("cuda"), backend="quire:fa2")
    plan_ragged(alone, p, plan={"custom_mask": mask, "causal": False})
    torch.testing.assert_close(out, alone.run(p.q, p.k, p.v), atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
def test_the_tallest_tiles_of_decode(head_dim, kv_dtype):
    """64 rows a request, on some GPUs fewer. auto leaves them to others if heads are wide and keys are not 8 bits."""
    more = {"dtype": torch.bfloat16, "kv_dtype": kv_dtype, "device": "cuda", "causal": True}
    p = Problem((8, 8, 8), (300, 17, 2000), 16, 2, head_dim, **more).within_tiles("quire:decode")
    p.check(*prefill_paged(p, p.paged(16), "quire:decode", plan={"kv_data_type": kv_dtype}))


def test_nvtx_ranges_are_named_after_variants(monkeypatch):
    """torch turns a range of its profiler into one of NVTX while emit_nvtx() is open."""
    p, named = problem("cuda:0"), []
    wrapper = ragged_wrapper(p, "auto")
    plan_ragged(wrapper, p)
    range_of = launch.record_function
    monkeypatch.setattr(launch, "record_function", lambda name: named.append(name) or range_of(name))
    wrapper.run(p.q, p.k, p.v)
    assert not named, "a run that is not profiled pays nothing"
    with torch.autograd.profiler.emit_nvtx():
        p.check(wrapper.run(p.q, p.k, p.v))
    assert named == [f"quire::{wrapper._attention.decision.key.slug}"]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_each_device_gets_its_own_launch():
    """Whatever the current device is, a call runs where its tensors are."""
    for current in (0, 1):
        torch.cuda.set_device(current)
        for index in (0, 1):
            p = problem(f"cuda:{index}")
            out = quire.single_prefill_with_kv_cache(p.q[:70], p.k[:300], p.v[:300], causal=True)
            assert out.device.index == index and torch.cuda.current_device() == current
            ragged = ragged_wrapper(p, "auto")
            plan_ragged(ragged, p)
            p.check(ragged.run(p.q, p.k, p.v))
