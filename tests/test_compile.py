"""Calls under torch.compile, torch.export, make_fx, functionalize and FakeTensorMode: recorded, and right when run."""

from __future__ import annotations

import gc

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import quire
from problems import offsets

HEADS, KV_HEADS, DIM, PAGE_SIZE, PAGES = 4, 2, 64, 4, 64
INT = torch.int32
TRACERS = ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]

# torch's own: what its tracers do to themselves.
pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


@pytest.fixture(autouse=True)
def _no_graphs():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def pages(kv_lens):
    """The index arrays of requests of these lengths, their pages in a random order."""
    counts = [-(-n // PAGE_SIZE) for n in kv_lens]
    last = [n - (count - 1) * PAGE_SIZE for n, count in zip(kv_lens, counts, strict=True)]
    return offsets(counts), torch.randperm(PAGES)[: sum(counts)].to(INT), torch.tensor(last, dtype=INT)


def plan_prefill(wrapper, qo_lens, kv_lens):
    wrapper.plan(
        offsets(qo_lens), *pages(kv_lens), HEADS, KV_HEADS, DIM, PAGE_SIZE, causal=True, q_data_type=torch.float32
    )


def prefill(qo_lens=(3, 5), kv_lens=(9, 12)):
    wrapper = quire.BatchPrefillWithPagedKVCacheWrapper(torch.empty(1 << 20, dtype=torch.uint8))
    plan_prefill(wrapper, qo_lens, kv_lens)
    return wrapper


def decode():
    wrapper = quire.BatchDecodeWithPagedKVCacheWrapper(torch.empty(1 << 20, dtype=torch.uint8))
    wrapper.plan(*pages([9, 12]), HEADS, KV_HEADS, DIM, PAGE_SIZE, data_type=torch.float32)
    return wrapper


def ragged():
    wrapper = quire.BatchPrefillWithRaggedKVCacheWrapper(torch.empty(1 << 20, dtype=torch.uint8))
    wrapper.plan(offsets([3, 5]), offsets([9, 12]), HEADS, KV_HEADS, DIM, causal=True, q_data_type=torch.float32)
    return wrapper


def rows(count, heads=HEADS):
    return torch.randn(count, heads, DIM)


def cache():
    return torch.randn(PAGES, 2, PAGE_SIZE, KV_HEADS, DIM)


def call_single_prefill():
    return lambda q, k, v: quire.single_prefill_with_kv_cache(q, k, v, causal=True, return_lse=True), (
        rows(5), rows(9, KV_HEADS), rows(9, KV_HEADS),
    )  # fmt: skip


def call_custom_mask():
    mask = torch.rand(5, 9) < 0.7
    return lambda q, k, v, mask: (quire.single_prefill_with_kv_cache(q, k, v, custom_mask=mask, v_scale=0.5),), (
        rows(5), rows(9, KV_HEADS), rows(9, KV_HEADS), mask,
    )  # fmt: skip


def call_single_decode():
    def call(q, k, v):
        o, lse = quire.single_decode_with_kv_cache(q, k, v, return_lse=True)
        return o, lse, quire.single_decode_with_kv_cache(o, k, v)

    return call, (torch.randn(HEADS, DIM), rows(9, KV_HEADS), rows(9, KV_HEADS))


def call_paged():
    wrapper = prefill()
    return lambda q, cache: wrapper.run(q * 2, cache, return_lse=True), (rows(8), cache())


def call_out():
    """`out` and `lse` of the caller, the cache as a pair, scales."""
    wrapper = decode()

    def call(q, cache, out, lse):
        pair = cache[:, 0], cache[:, 1]
        wrapper.run(q, pair, out=out, lse=lse, v_scale=0.5, k_scale=2.0, q_len_per_req=1)
        return out + 1, lse + 1

    return call, (rows(2), cache(), rows(2), torch.randn(2, HEADS))


def call_ragged():
    wrapper = ragged()
    return lambda q, k, v: (wrapper.run(q, k, v),), (rows(8), rows(21, KV_HEADS), rows(21, KV_HEADS))


def call_cascade():
    wrapper = quire.MultiLevelCascadeAttentionWrapper(2, torch.empty(1 << 20, dtype=torch.uint8))
    shared, unique = pages([8]), pages([9, 12])
    wrapper.plan(
        [offsets([8]), offsets([3, 5])], *zip(shared, unique, strict=True), HEADS, KV_HEADS, DIM, PAGE_SIZE,
        q_data_type=torch.float32,
    )  # fmt: skip
    return lambda q, cache: (wrapper.run(q, cache),), (rows(8), cache())


def call_merge():
    def call(v_a, s_a, v_b, s_b):
        v, s = quire.merge_state(v_a, s_a, v_b, s_b)
        quire.merge_state_in_place(v, s, v_b + 1, s_b)
        quire.merge_state_in_place(v_a, s_a, v_b, s_b, torch.arange(5) % 2 == 0)
        return v, s, v_a, *quire.merge_states(torch.stack((v, v_b), 1), torch.stack((s, s_b), 1))

    return call, (rows(5), torch.randn(5, HEADS), rows(5), torch.randn(5, HEADS))


def call_append():
    indptr, indices, last = pages([9, 12])
    tokens = torch.tensor([0, 1], dtype=INT), torch.tensor([8, 11], dtype=INT)

    def call(key, value, both, k_cache, v_cache):
        for paged in (both, (k_cache, v_cache), (both[:, 1], both[:, 0])):
            quire.append_paged_kv_cache(key, value, *tokens, paged, indices, indptr, last)
            key = key + 1
        return both.sum(), k_cache * 2

    return call, (rows(2, KV_HEADS), rows(2, KV_HEADS), cache(), cache()[:, 0], cache()[:, 1].contiguous())


def call_rope():
    indptr, indices, _ = pages([9, 12])
    tokens = torch.tensor([0, 1], dtype=INT), torch.tensor([8, 11], dtype=INT)
    positions, angles = torch.tensor([8, 11]), torch.randn(20, DIM)

    def call(q, k, v, both):
        q_rope, k_rope = quire.apply_rope(q, k, torch.tensor([0, 2]), torch.tensor([5]), rotary_dim=32)
        quire.apply_rope_pos_ids_inplace(q, k, positions, interleave=True)
        flat = quire.apply_rope_with_cos_sin_cache(positions, q.flatten(1), k.flatten(1), DIM, angles)
        out = quire.rope_append_paged_kv_cache(q, k, v, *tokens, both, indices, indptr)
        more = quire.rope.rope_quantize_fp8(q, k, None, None, angles, positions)
        return q_rope, k_rope, *flat, out, *(part.float() for part in more[:2]), both.sum()

    return call, (rows(2), rows(2, KV_HEADS), rows(2, KV_HEADS), cache())


CALLS = [
    call_single_prefill, call_custom_mask, call_single_decode, call_paged, call_out, call_ragged, call_cascade,
    call_merge, call_append, call_rope,
]  # fmt: skip


def name_of(make):
    return make.__name__.removeprefix("call_")


@pytest.fixture(params=CALLS, ids=name_of)
def case(request):
    """A call, its arguments, what it returns and what it has made of its arguments."""
    call, args = request.param()
    after = tuple(arg.clone() for arg in args)
    return call, args, (call(*after), after)


def check(call, args, expected):
    """`call` returns the same, and writes the same into its arguments."""
    written = tuple(arg.clone() for arg in args)
    torch.testing.assert_close((call(*written), written), expected)


@pytest.mark.parametrize("compiler", TRACERS)
def test_compiles_to_one_graph(case, compiler):
    """fullgraph=True: a graph break is an error."""
    call, args, expected = case
    check(torch.compile(call, backend=compiler, fullgraph=True), args, expected)


@pytest.mark.slow
@pytest.mark.parametrize("case", CALLS[::3], ids=name_of, indirect=True)
def test_compiles_with_graphs_of_its_own(case):
    """On the CPU there are none, and the result must be right: that of inductor, which the test above has for all."""
    call, args, expected = case
    check(torch.compile(call, mode="reduce-overhead", fullgraph=True), args, expected)


def test_make_fx_records_operators(case):
    call, args, expected = case
    module = make_fx(call)(*(arg.clone() for arg in args))
    assert any("quire" in str(node.target) for node in module.graph.nodes)
    check(module, args, expected)


def test_functionalize(case):
    call, args, expected = case
    check(torch.func.functionalize(call), args, expected)
    module = make_fx(torch.func.functionalize(call))(*(arg.clone() for arg in args))
    writes = [n for n in module.graph.nodes if getattr(getattr(n.target, "_schema", None), "is_mutable", False)]
    assert all(node.target is torch.ops.aten.copy_.default for node in writes), writes  # of arguments, at the end
    check(module, args, expected)


def test_fake_tensors_have_the_right_signature(case):
    call, args, ((*results,), _) = case
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = call(*(mode.from_tensor(arg) for arg in args))
    assert [(t.shape, t.dtype, t.stride()) for t in fake] == [(t.shape, t.dtype, t.stride()) for t in results]


def test_export(case):
    check_export(*case, strict=False)


@pytest.mark.slow
@pytest.mark.parametrize("case", CALLS[1::2], ids=name_of, indirect=True)
def test_strict_export(case):
    """It traces as torch.compile does."""
    check_export(*case, strict=True)


def check_export(call, args, expected, *, strict):

    class Module(torch.nn.Module):
        def forward(self, *args):
            return call(*args)

    exported = torch.export.export(Module(), args, strict=strict)
    check(exported.module(), args, expected)
    check(exported.run_decompositions().module(), args, expected)


def test_single_calls_can_be_saved(tmp_path):
    call, args = call_single_prefill()

    class Module(torch.nn.Module):
        def forward(self, *args):
            return call(*args)

    torch.export.save(torch.export.export(Module(), args), tmp_path / "single.pt2")
    torch.testing.assert_close(torch.export.load(tmp_path / "single.pt2").module()(*args), call(*args))


BATCHES = [((3, 5), (9, 12)), ((2, 1, 7), (30, 5, 8)), ((4,), (9,)), ((1,) * 6, (2,) * 6), ((16, 2), (16, 64))]


@pytest.mark.parametrize(("dynamic", "most"), [(None, 2), (True, 1)])
def test_plans_again_without_compiling_again(dynamic, most):
    """A new batch is another plan, not another graph: only the number of rows becomes dynamic."""
    wrapper, kv_cache, counter = prefill(), cache(), CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(
        lambda q: wrapper.run(q, kv_cache, return_lse=True), backend=counter, fullgraph=True, dynamic=dynamic
    )
    for qo_lens, kv_lens in BATCHES:
        plan_prefill(wrapper, qo_lens, kv_lens)
        q = rows(sum(qo_lens))
        torch.testing.assert_close(compiled(q), wrapper.run(q, kv_cache, return_lse=True))
    assert counter.frame_count <= most


def test_single_calls_of_other_lengths_do_not_compile_again():
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(call_single_prefill()[0], backend=counter, fullgraph=True)
    for qo_len, kv_len in ((3, 5), (4, 9), (7, 7), (12, 20)):
        args = rows(qo_len), rows(kv_len, KV_HEADS), rows(kv_len, KV_HEADS)
        torch.testing.assert_close(compiled(*args), call_single_prefill()[0](*args))
    assert counter.frame_count <= 3


def test_many_wrappers_share_a_graph():
    """As a server has one for each batch size."""
    counter, q, kv_cache = CompileCounterWithBackend("eager"), rows(8), cache()
    compiled = torch.compile(lambda wrapper, q: wrapper.run(q, kv_cache), backend=counter, fullgraph=True)
    wrappers = [prefill((3, 5), (9 + i, 12)) for i in range(5)]
    for wrapper in wrappers:
        torch.testing.assert_close(compiled(wrapper, q), wrapper.run(q, kv_cache))
    assert counter.frame_count <= 2


def test_a_wrapper_that_is_gone_is_an_error():
    wrapper, q, kv_cache = prefill(), rows(8), cache()
    graph = make_fx(wrapper.run)(q, kv_cache)
    del wrapper
    gc.collect()
    with pytest.raises(quire.PlanError, match="is gone"):
        graph(q, kv_cache)


def test_errors_of_a_compiled_call_are_those_of_the_call():
    wrapper, kv_cache = prefill(), cache()
    compiled = torch.compile(lambda q: wrapper.run(q, kv_cache), backend="aot_eager", fullgraph=True)
    with pytest.raises(quire.ValidationError, match="nnz_qo=8"):
        compiled(rows(9))


def test_gradients_are_refused(case):
    call, args, _ = case
    args = [arg.clone().requires_grad_() if arg.is_floating_point() else arg for arg in args]
    for trace in (make_fx, lambda call: torch.compile(call, backend="aot_eager", fullgraph=True)):
        with pytest.raises(Exception, match="inference only"):
            trace(call)(*args)
    with torch.no_grad():
        torch.compile(call, backend="aot_eager", fullgraph=True)(*args)
    with pytest.raises(quire.ValidationError, match="inference only"):
        torch.func.grad(lambda q: call(q, *args[1:])[0].sum())(args[0])


def test_vmap_is_refused():
    call, (q, k, v) = call_single_prefill()
    with pytest.raises(RuntimeError, match="Batching rule not implemented for quire::single"):
        torch.func.vmap(lambda q: call(q, k, v))(q[None])


_ANGLES = torch.tensor([8, 11]), None, None, torch.zeros(20, DIM), False, 1.0, 1.0, None
OPERATORS = {
    "rope": lambda: (rows(2), rows(2, KV_HEADS), rows(2), rows(2, KV_HEADS), None, *_ANGLES),
    "rope_in_place": lambda: (rows(2), rows(2, KV_HEADS), None, *_ANGLES),
    "rope_append": lambda: (
        rows(2), rows(2, KV_HEADS), rows(2, KV_HEADS), rows(2), cache(), None, torch.tensor([0, 1], dtype=INT),
        torch.tensor([8, 11], dtype=INT), torch.arange(6, dtype=INT), offsets([3, 3]), "NHD", None, None, None, False,
        1.0, 1e4, None, None, 1e-6, 1.0, 1.0, 1.0,
    ),
    "run": lambda: (prefill(), rows(8), cache(), None, rows(8), torch.randn(8, HEADS)),
    "run_with_options": lambda: (
        prefill(), rows(8), cache(), None, rows(8), torch.randn(8, HEADS), torch.randn(HEADS), 0.5, None, 2.0, -1,
        None, [],
    ),
    "run_captured": lambda: (prefill(), rows(8), cache(), None, rows(8), None),
    "run_captured_with_options": lambda: (prefill(), rows(8), cache(), None, rows(8), None, None, 0.5),
    "merge_state": lambda: (rows(5), torch.randn(5, HEADS), rows(5), torch.randn(5, HEADS)),
    "merge_states": lambda: (torch.randn(5, 3, HEADS, DIM), torch.randn(5, 3, HEADS)),
    "merge_state_in_place": lambda: (rows(5), torch.randn(5, HEADS), rows(5), torch.randn(5, HEADS)),
    "append_paged_kv_cache": lambda: (
        rows(2, KV_HEADS), rows(2, KV_HEADS), torch.tensor([0, 1], dtype=INT), torch.tensor([8, 11], dtype=INT),
        cache(), None, torch.arange(6, dtype=INT), offsets([3, 3]), torch.tensor([1, 4], dtype=INT), "NHD",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OPERATORS)
def test_operators_pass_the_checks_of_torch(name):
    first, *rest = OPERATORS[name]()
    wrapper = first if isinstance(first, quire.BatchPrefillWithPagedKVCacheWrapper) else None
    args = (first if wrapper is None else wrapper._handle, *rest)
    torch.library.opcheck(getattr(torch.ops.quire, name).default, args)


def test_the_single_operator_passes_the_checks_of_torch():
    options = {
        "decode": False, "kv_layout": "NHD", "pos_encoding_mode": "NONE", "window_left": -1, "logits_soft_cap": None,
        "sm_scale": None, "q_scale": None, "k_scale": None, "v_scale": None, "backend": "auto",
    }  # fmt: skip
    args = rows(5), rows(9, KV_HEADS), rows(9, KV_HEADS), rows(5), torch.randn(5, HEADS)
    torch.library.opcheck(torch.ops.quire.single.default, args, options)


def test_eager_calls_do_not_enter_the_dispatcher(case, monkeypatch):
    call, args, _ = case

    def refuse(*_, **__):
        raise AssertionError("an eager call has called an operator")

    monkeypatch.setattr("quire.engine.operators._record", refuse)
    call(*args)


def _profiled(call, *args):
    """Names of what a profile of the host shows: a profile of a GPU needs rights that a machine may not give."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        call(*args)
    return {event.name for event in profile.events()}


def test_profiles_name_eager_calls_and_operators():
    wrapper, q, kv_cache = prefill(), rows(8), cache()
    names = _profiled(wrapper.run, q, kv_cache)
    assert any(name.startswith("quire::attention_cpu.") for name in names), names
    assert "quire::run" not in names
    names = _profiled(quire.merge_state, q, q[..., 0].contiguous(), q, q[..., 0].contiguous())
    assert any(name.startswith("quire::merge_pair.") for name in names), names
    compiled = torch.compile(wrapper.run, backend="eager", fullgraph=True)
    compiled(q, kv_cache)
    names = _profiled(compiled, q, kv_cache)
    assert "quire::run" in names, names
