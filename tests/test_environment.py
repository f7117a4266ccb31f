"""Quire inside torch as programs set it up: other defaults, autograd, fake tensors, views, threads, forks, and numbers
that nobody should pass. Each call is right, or refused with a sentence that says what to do; it never crashes, hangs or
is silently wrong.
"""

from __future__ import annotations

import ast
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

import quire
from isolation import isolated
from public_calls import BY_NAME, CALLS, DIM, HEADS, KV_HEADS, PAGE, Call, Results, Tensors, ints, workspace

NAMES = [call.name for call in CALLS]
WITH_FLOATS = [call.name for call in CALLS if call.floats]


def want_of(call: Call) -> Results:
    """What the call gives in a plain environment."""
    return tuple(result.clone() for result in call(call.make()))


def each(names: Iterable[str]) -> Iterator[str]:
    """The names, each told to stderr before it is tried: the last one is what a process died of."""
    for name in names:
        print(f"trying {name}", file=sys.stderr, flush=True)
        yield name


def assert_same(got: Sequence[Tensor], want: Sequence[Tensor]) -> None:
    """The same numbers, on the host, up to another order of summation."""
    assert len(got) == len(want)
    for ours, theirs in zip(got, want, strict=True):
        assert ours.device.type == "cpu"
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
        near = torch.isclose(ours.detach().resolve_neg(), theirs, rtol=1e-5, atol=1e-5)
        assert near.all(), f"{int((~near).sum())} of {near.numel()} elements differ"


def assert_right_or_refused(run: Callable[[], Sequence[Tensor]], want: Sequence[Tensor]) -> None:
    """The right result, or an error of Quire's that has something to say."""
    try:
        got = run()
    except quire.QuireError as error:
        assert len(str(error)) > 20
    else:
        assert_same(got, want)


# Defaults of torch


def _default_device() -> None:
    torch.set_default_device("meta")


def _device_context() -> None:
    torch.device("meta").__enter__()


def _default_bfloat16() -> None:
    torch.set_default_dtype(torch.bfloat16)


def _default_float64() -> None:
    torch.set_default_dtype(torch.float64)


def _inference_mode() -> None:
    torch.inference_mode().__enter__()


def _deterministic() -> None:
    torch.use_deterministic_algorithms(True)


DEFAULTS = {
    "set_default_device": _default_device,
    "with_torch_device": _device_context,
    "bfloat16": _default_bfloat16,
    "float64": _default_float64,
    "inference_mode": _inference_mode,
    "deterministic": _deterministic,
}


@pytest.mark.parametrize("default", DEFAULTS)
@isolated()
def test_defaults_do_not_matter(default: str) -> None:
    """Results of each call are the same under each, and so are a plan's that was made before."""
    want = {name: want_of(BY_NAME[name]) for name in NAMES}
    before, between = ({name: BY_NAME[name].make() for name in NAMES} for _ in range(2))
    planned_before = {name: BY_NAME[name].start(before[name]) for name in NAMES}
    DEFAULTS[default]()
    for name in each(NAMES):
        assert_same(BY_NAME[name](between[name]), want[name])
        assert_same(planned_before[name](before[name]), want[name])


@pytest.mark.parametrize("default", ["set_default_device", "with_torch_device", "bfloat16", "float64"])
@isolated()
def test_the_first_call_may_be_made_under_other_defaults(default: str) -> None:
    """What is loaded, planned and kept at first use is then as it always is."""
    calls = [(call, call.make(), call.make()) for call in CALLS]
    DEFAULTS[default]()
    first = [tuple(result.clone() for result in call(tensors)) for call, tensors, _ in calls]
    torch.set_default_device("cpu")
    torch.set_default_dtype(torch.float32)
    for (call, _, tensors), got in zip(calls, first, strict=True):
        assert_same(got, call(tensors))


def test_no_tensor_is_made_on_the_default_device() -> None:
    """Which engines set to the GPU, where arrays of the host would follow it."""
    makers = {"arange", "empty", "eye", "full", "linspace", "ones", "rand", "randn", "randperm", "tensor", "zeros"}
    found = [
        f"{file.name}:{node.lineno}"
        for file in Path(quire.__file__).parent.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in makers
        if isinstance(node.func.value, ast.Name) and node.func.value.id == "torch"
        if "device" not in {keyword.arg for keyword in node.keywords}
    ]
    assert not found


# Autograd


@pytest.mark.parametrize("name", WITH_FLOATS)
@isolated(together=WITH_FLOATS)
@pytest.mark.slow
def test_gradients_are_refused_and_not_lost(name: str) -> None:
    """An input that requires one is an error that says how to go on, and nothing is written."""
    call = BY_NAME[name]
    for tensor in each(call.floats):
        tensors = call.make()
        tensors[tensor].requires_grad_()
        kept = {n: t.detach().clone() for n, t in tensors.items()}
        with pytest.raises(quire.QuireError, match=r"no_grad|detach"):
            call(tensors)
        for n, t in tensors.items():
            assert "workspace" in n or torch.equal(t.detach(), kept[n]), f"{n} was written by a call that was refused"


@pytest.mark.parametrize("name", WITH_FLOATS)
@isolated(together=WITH_FLOATS)
@pytest.mark.slow
def test_no_gradient_is_asked_for_without_grad_mode(name: str) -> None:
    call = BY_NAME[name]
    want = want_of(call)
    for tensor in each(call.floats):
        for mode in (torch.no_grad, torch.inference_mode):
            tensors = call.make()
            tensors[tensor].requires_grad_()
            with mode():
                assert_same(call(tensors), want)


# Tensors that are not plain memory


@pytest.mark.parametrize("name", WITH_FLOATS)
@isolated(together=WITH_FLOATS)
def test_negated_views(name: str) -> None:
    """x.conj().imag is such a view: its numbers lie in memory with the other sign."""
    call = BY_NAME[name]
    want = want_of(call)
    for tensor in each(call.floats):
        tensors = call.make()
        tensors[tensor] = torch._neg_view(-tensors[tensor])
        assert tensors[tensor].is_neg()
        assert_right_or_refused(partial(call, tensors), want)


@pytest.mark.parametrize("name", WITH_FLOATS)
@isolated(together=WITH_FLOATS)
def test_complex_and_conjugated_tensors_are_refused(name: str) -> None:
    call = BY_NAME[name]
    for tensor in each(call.floats):
        tensors = call.make()
        tensors[tensor] = torch.complex(tensors[tensor], tensors[tensor]).conj()
        with pytest.raises(quire.QuireError):
            call(tensors)


@pytest.mark.parametrize("name", NAMES)
@isolated(together=NAMES)
def test_tensors_without_storage_are_refused(name: str) -> None:
    """FSDP frees parameters so: the shape is as it was, the memory is gone."""
    call = BY_NAME[name]
    for tensor in each(call.make()):
        tensors = call.make()
        run = call if tensor in call.planned else call.start(tensors)
        tensors[tensor].untyped_storage().resize_(0)
        with pytest.raises(quire.QuireError):
            run(tensors)


OUTPUTS = [
    ("BatchPrefillWithPagedKVCacheWrapper", "out"),
    ("BatchPrefillWithPagedKVCacheWrapper", "lse"),
    ("merge_state_in_place", "v"),
    ("merge_state_in_place", "s"),
    ("append_paged_kv_cache", "k_cache"),
    ("append_paged_kv_cache", "v_cache"),
    ("append_paged_kv_cache-one_tensor", "paged_kv_cache"),
    ("apply_llama31_rope_pos_ids_inplace", "q"),
    ("apply_llama31_rope_pos_ids_inplace", "k"),
    ("apply_rope_with_cos_sin_cache_inplace", "query"),
    ("apply_rope_with_cos_sin_cache_inplace", "key"),
    ("rope_append_paged_kv_cache", "out"),
    ("rope_append_paged_kv_cache", "k_cache"),
    ("rope_append_paged_kv_cache", "v_cache"),
    ("get_batch_indices_positions", "batch_indices"),
    ("get_batch_indices_positions", "positions"),
]


@pytest.mark.parametrize(("name", "tensor"), OUTPUTS)
def test_expanded_outputs_are_refused(name: str, tensor: str) -> None:
    """Rows that lie on each other cannot hold different results. Nothing is written."""
    tensors = BY_NAME[name].make()
    expanded = tensors[tensor][:1].clone().expand(tensors[tensor].shape)
    tensors[tensor] = expanded
    kept = {n: t.clone() for n, t in tensors.items()}
    with pytest.raises(quire.ValidationError, match="cache" if "cache" in tensor else tensor):
        BY_NAME[name](tensors)
    assert all(torch.equal(t, kept[n]) for n, t in tensors.items() if "workspace" not in n)


@pytest.mark.parametrize("out_heads", [True, False])
def test_expanded_xqa_outputs_are_refused(out_heads: bool) -> None:
    call = BY_NAME["xqa_batch_decode_with_kv_cache"]
    t = call.make()
    out = (
        torch.zeros(2, 1, DIM).expand(2, HEADS, DIM) if out_heads else torch.zeros(1, HEADS, DIM).expand(2, HEADS, DIM)
    )
    names = ("query", "workspace_buffer", "block_tables", "seq_lens")
    with pytest.raises(quire.ValidationError, match="out"):
        quire.xqa_batch_decode_with_kv_cache(
            kv_cache=(t["k_cache"], t["v_cache"]), max_seq_len=12, out=out, **{n: t[n] for n in names}
        )


@pytest.mark.parametrize("name", WITH_FLOATS)
@isolated(together=WITH_FLOATS)
def test_expanded_inputs(name: str) -> None:
    """Rows that lie on each other are the same numbers."""
    call = BY_NAME[name]
    for tensor in each(name for name in call.floats if (call.name, name) not in OUTPUTS):
        plain, expanded = call.make(), call.make()
        expanded[tensor] = expanded[tensor][:1].expand(expanded[tensor].shape)
        plain[tensor] = expanded[tensor].contiguous()
        assert_right_or_refused(partial(call, expanded), call(plain))


# Tracing


def _assert_fake_or_refused(run: Callable[[], Sequence[Tensor]], want: Sequence[Tensor]) -> None:
    from torch._subclasses.fake_tensor import FakeTensor

    try:
        got = run()
    except quire.QuireError as error:
        assert len(str(error)) > 20
        return
    for ours, theirs in zip(got, want, strict=True):
        assert isinstance(ours, FakeTensor)
        assert (ours.shape, ours.dtype, ours.device) == (theirs.shape, theirs.dtype, theirs.device)


@pytest.mark.parametrize("name", NAMES)
@isolated(together=NAMES)
def test_fake_tensors(name: str) -> None:
    """They have a shape and no memory: a fake result, or an error, whether plan() saw real tensors or fake ones.

    torch.compile traces run() of a wrapper that was planned on real ones.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    call = BY_NAME[name]
    want, tensors = want_of(call), call.make()
    run_planned = call.start(tensors)
    with FakeTensorMode() as mode:
        fakes = {n: mode.from_tensor(t) for n, t in tensors.items()}
        for run in (run_planned, call):
            _assert_fake_or_refused(partial(run, fakes), want)


@pytest.mark.parametrize("name", NAMES)
@isolated(together=NAMES)
def test_functionalized_tensors(name: str) -> None:
    """torch.func.functionalize wraps tensors, and a wrapper has no memory of its own."""
    call = BY_NAME[name]
    want, tensors = want_of(call), call.make()
    run = call.start(tensors)

    def on_values(*values: Tensor) -> Results:
        return run(dict(zip(tensors, values, strict=True)))

    assert_right_or_refused(lambda: torch.func.functionalize(on_values)(*tensors.values()), want)


@pytest.mark.parametrize("name", NAMES)
@isolated(together=NAMES)
def test_make_fx(name: str) -> None:
    """A traced graph computes what the call computes, or tracing is refused: it never returns fresh memory."""
    from torch.fx.experimental.proxy_tensor import make_fx

    call = BY_NAME[name]
    want, tensors = want_of(call), call.make()
    run = call.start(tensors)

    def on_values(*values: Tensor) -> Results:
        return run(dict(zip(tensors, values, strict=True)))

    def traced() -> Results:
        try:
            graph = make_fx(on_values)(*call.make().values())
        except RuntimeError as error:  # torch's own refusal of a value that a branch depends on
            if "tracing tensor" in str(error):
                return want
            raise
        return graph(*call.make().values())

    assert_right_or_refused(traced, want)


# Threads and processes


def _split_decode(buffer: Tensor, seed: int) -> tuple[quire.BatchDecodeWithPagedKVCacheWrapper, Tensor, Tensor]:
    """A planned wrapper whose batch is cut between threads, so that partial results go through the workspace."""
    pages, source = 256, torch.Generator().manual_seed(seed)
    wrapper = quire.BatchDecodeWithPagedKVCacheWrapper(buffer)
    wrapper.plan(ints(0, pages), ints(*range(pages)), ints(PAGE), HEADS, 1, DIM, PAGE, q_data_type=torch.float32)
    q = torch.randn(1, HEADS, DIM, generator=source)
    return wrapper, q, torch.randn(pages, 2, PAGE, 1, DIM, generator=source)


def _together(*functions: Callable[[], None]) -> list[BaseException | None]:
    """Calls them on threads that start at once; the exception of each."""
    start = threading.Barrier(len(functions))

    def one(function: Callable[[], None]) -> BaseException | None:
        start.wait()
        try:
            function()
        except BaseException as error:
            return error
        return None

    with ThreadPoolExecutor(len(functions)) as pool:
        return list(pool.map(one, functions))


def _assert_right_or_refused_on(*functions: Callable[[], None]) -> None:
    for error in _together(*functions):
        assert error is None or isinstance(error, quire.QuireError), repr(error)


def _checks(run: Callable[[], Tensor], want: Tensor, count: int) -> Callable[[], None]:
    def check() -> None:
        wrong = sum(not torch.equal(run(), want) for _ in range(count))
        assert not wrong, f"{wrong} of {count} runs are wrong"

    return check


@isolated(180)
def test_two_wrappers_on_one_workspace_on_two_threads() -> None:
    torch.set_num_threads(2)
    buffer, checks = workspace(1 << 22), []
    for seed in range(2):
        wrapper, q, cache = _split_decode(buffer, seed)
        checks.append(_checks(lambda w=wrapper, q=q, c=cache: w.run(q, c), wrapper.run(q, cache), 300))
    assert wrapper.workspace_size(
        ints(0, 256), ints(*range(256)), ints(PAGE), HEADS, 1, DIM, PAGE, q_data_type=torch.float32
    )[0], "nothing is cut: this test tests nothing"
    _assert_right_or_refused_on(*checks)


@isolated(180)
def test_runs_of_one_plan_on_several_threads() -> None:
    """Each with tensors of its own, of two strides: right, or a PlanError, but never the tensors of another thread."""
    torch.set_num_threads(2)
    wrapper, _, _ = _split_decode(workspace(1 << 22), 0)
    checks = []
    for seed in range(4):
        _, q, cache = _split_decode(workspace(1 << 22), seed)
        cache = cache.repeat(1, 1, 1, 1 + seed % 2, 1)[..., :1, :]
        out = torch.empty_like(q)
        checks.append(_checks(lambda q=q, c=cache, o=out: wrapper.run(q, c, out=o), wrapper.run(q, cache), 300))
    _assert_right_or_refused_on(*checks)


@isolated(180)
def test_planning_while_another_thread_runs() -> None:
    """plan() of one wrapper and run() of another, each with a workspace of its own."""
    wrapper, q, cache = _split_decode(workspace(1 << 22), 0)

    def plan() -> None:
        for seed in range(100):
            _split_decode(workspace(1 << 22), seed)

    _assert_right_or_refused_on(_checks(lambda: wrapper.run(q, cache), wrapper.run(q, cache), 200), plan)


@isolated(60)
def test_a_forked_child_works_or_says_what_to_do() -> None:
    """Threads of OpenMP do not live in a fork of a process that used them."""
    torch.set_num_threads(2)
    wrapper, q, cache = _split_decode(workspace(1 << 22), 0)
    want = wrapper.run(q, cache)
    child = os.fork()
    if child == 0:
        try:
            status = 0 if torch.equal(wrapper.run(q, cache), want) else 1
        except quire.QuireError as error:
            status = 0 if "set_num_threads" in str(error) or "spawn" in str(error) else 2
        os._exit(status)
    for _ in range(300):
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            assert os.waitstatus_to_exitcode(status) == 0
            return
        time.sleep(0.1)
    os.kill(child, 9)
    os.waitpid(child, 0)
    pytest.fail("the child hung in its first call")


# Numbers that are too large

HUGE = 2**31 - 1


def _plan_ragged(qo: list[int], kv: list[int], num_qo_heads: int = 1, num_kv_heads: int = 1, **options: object) -> None:
    wrapper = quire.BatchPrefillWithRaggedKVCacheWrapper(workspace())
    wrapper.plan(ints(*qo), ints(*kv), num_qo_heads, num_kv_heads, DIM, q_data_type=torch.float32, **options)


def _plan_paged(qo: list[int], pages: int, num_qo_heads: int = 1) -> None:
    wrapper = quire.BatchPrefillWithPagedKVCacheWrapper(workspace())
    tables = (ints(*qo), ints(0, pages), ints(*range(pages)), ints(PAGE))
    wrapper.plan(*tables, num_qo_heads, 1, DIM, PAGE, q_data_type=torch.float32)


def _plan_decode(q_len: int, batch: int = 1) -> None:
    wrapper = quire.BatchDecodeWithPagedKVCacheWrapper(workspace())
    tables = (ints(*range(batch + 1)), ints(*range(batch)), ints(*[PAGE] * batch))
    wrapper.plan(*tables, 1, 1, DIM, PAGE, q_len_per_req=q_len, q_data_type=torch.float32)


#: What the error is about: an argument, or what it counts.
ROWS = r"qo_indptr|num_qo_heads|num_kv_heads|q_len_per_req|query token"

TOO_LARGE: dict[str, tuple[Callable[[], None], str]] = {
    "rows": (lambda: _plan_ragged([0, HUGE], [0, 9]), ROWS),
    "rows-1": (lambda: _plan_ragged([0, HUGE - 1], [0, 9]), ROWS),
    "rows-647": (lambda: _plan_ragged([0, HUGE - 647], [0, 9]), ROWS),
    "rows-causal": (lambda: _plan_ragged([0, HUGE], [0, 9], causal=True), ROWS),
    "rows-in-the-second-request": (lambda: _plan_ragged([0, 1, HUGE], [0, 9, 9]), ROWS),
    "rows-paged": (lambda: _plan_paged([0, HUGE], 2), ROWS),
    "heads": (lambda: _plan_ragged([0, 3], [0, 9], num_qo_heads=HUGE), ROWS),
    "heads-of-both": (lambda: _plan_ragged([0, 3], [0, 9], HUGE, HUGE), ROWS),
    "heads-times-rows": (lambda: _plan_ragged([0, 1 << 20], [0, 9], num_qo_heads=1 << 20), ROWS),
    "keys": (lambda: _plan_ragged([0, 3], [0, HUGE], HEADS, HEADS), "kv_indptr|k:"),
    "q_len_per_req": (lambda: _plan_decode(HUGE), ROWS),
    "q_len_per_req-times-batch": (lambda: _plan_decode(1 << 30, batch=4), ROWS),
}


@pytest.mark.parametrize("case", TOO_LARGE)
@isolated(20)
def test_plans_that_are_too_large_are_refused_at_once(case: str) -> None:
    """Within seconds, with little memory, by an error about what the caller passed."""
    plan, names = TOO_LARGE[case]
    _plan_ragged([0, 1], [0, 1])
    began = time.process_time()
    if case == "keys":  # so many keys may exist, but then run() wants to see them
        with pytest.raises(quire.QuireError, match=names):
            plan()
            wrapper = quire.BatchPrefillWithRaggedKVCacheWrapper(workspace())
            wrapper.plan(ints(0, 3), ints(0, HUGE), HEADS, HEADS, DIM, q_data_type=torch.float32)
            few = torch.zeros(9, HEADS, DIM)
            wrapper.run(torch.zeros(3, HEADS, DIM), few, few)
    else:
        with pytest.raises(quire.ValidationError, match=names):
            plan()
    assert time.process_time() - began < 5.0


@isolated(60)
def test_run_looks_at_q_before_it_makes_room_for_results() -> None:
    import resource

    wrapper = quire.BatchPrefillWithRaggedKVCacheWrapper(workspace())
    wrapper.plan(ints(0, 10_000_000), ints(0, 9), 32, 1, DIM, q_data_type=torch.float32)  # 80 GB of results
    few = torch.zeros(9, 1, DIM)
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()  # noqa: PTH123, SIM115
    resource.setrlimit(resource.RLIMIT_AS, (used + (4 << 30), resource.RLIM_INFINITY))
    with pytest.raises(quire.ValidationError, match="q"):
        wrapper.run(torch.zeros(3, 32, DIM), few, few)


def test_lengths_beyond_int32_are_refused() -> None:
    with pytest.raises(quire.ValidationError, match=r"kv_indptr|page_size"):
        quire.get_seq_lens(ints(0, 1 << 30), ints(1), 16)
    with pytest.raises(quire.ValidationError, match="kv_last_page_len"):
        quire.get_seq_lens(ints(0, 1), torch.tensor([-(2**63)]), 16)
    with pytest.raises(quire.ValidationError, match="kv_indptr"):
        quire.get_seq_lens(torch.tensor([0, 1 << 40]), ints(1), 16)


def test_lengths_of_appended_tokens_beyond_int32_are_refused() -> None:
    for lens in (torch.tensor([1 << 40]), torch.tensor([-(2**63)]), torch.tensor([2**31])):
        with pytest.raises(quire.ValidationError, match="seq_lens"):
            quire.get_batch_indices_positions(ints(0, 3), lens, 3)
    with pytest.raises(quire.ValidationError, match="append_indptr"):
        quire.get_batch_indices_positions(torch.tensor([0, 1 << 40]), ints(5), 3)


@pytest.mark.parametrize("kind", [torch.float32, torch.float64, torch.bfloat16, torch.bool])
def test_lengths_that_are_no_integers_are_refused(kind: torch.dtype) -> None:
    lens = torch.tensor([2.75], dtype=torch.float64).to(kind)
    with pytest.raises(quire.ValidationError, match="seq_lens"):
        quire.get_batch_indices_positions(ints(0, 1), lens, 1)
    with pytest.raises(quire.ValidationError, match="kv_last_page_len"):
        quire.get_seq_lens(ints(0, 1), lens, 16)
    call = BY_NAME["xqa_batch_decode_with_kv_cache"]
    tensors = call.make()
    tensors["seq_lens"] = tensors["seq_lens"].to(kind)
    with pytest.raises(quire.ValidationError, match="seq_lens"):
        call(tensors)


# Scales

BAD = [math.nan, math.inf, -math.inf, 1e39]


def _planned(**options: object) -> tuple[quire.BatchDecodeWithPagedKVCacheWrapper, Tensors]:
    tensors = BY_NAME["BatchDecodeWithPagedKVCacheWrapper"].make()
    wrapper = quire.BatchDecodeWithPagedKVCacheWrapper(workspace())
    tables = (tensors["kv_indptr"], tensors["kv_indices"], tensors["kv_last_page_len"])
    wrapper.plan(*tables, HEADS, KV_HEADS, DIM, PAGE, q_data_type=torch.float32, **options)
    return wrapper, tensors


@pytest.mark.parametrize("scale", ["q_scale", "k_scale", "v_scale"])
@pytest.mark.parametrize("value", [*BAD, "tensor"])
def test_scales_of_run_that_are_no_float32_are_refused(scale: str, value: object) -> None:
    wrapper, t = _planned()
    number = torch.tensor(math.nan) if value == "tensor" else value
    with pytest.raises(quire.ValidationError, match=scale):
        wrapper.run(t["q"], (t["k_cache"], t["v_cache"]), **{scale: number})


@pytest.mark.parametrize("value", [*BAD, 2**2000])
def test_scales_of_plan_that_are_no_float32_are_refused(value: float) -> None:
    for name in ("sm_scale", "logits_soft_cap"):
        with pytest.raises(quire.ValidationError, match=name):
            _planned(**{name: value})


def test_scales_that_overflow_together_are_refused() -> None:
    wrapper, t = _planned(sm_scale=1e30)
    with pytest.raises(quire.ValidationError, match="scale"):
        wrapper.run(t["q"], (t["k_cache"], t["v_cache"]), q_scale=1e30)
    with pytest.raises(quire.ValidationError, match="scale"):
        wrapper.run(t["q"], (t["k_cache"], t["v_cache"]), q_scale=1e30, k_scale=1e30)


@pytest.mark.parametrize("value", [*BAD, 2**2000])
@pytest.mark.parametrize("scale", ["bmm1_scale", "bmm2_scale"])
def test_scales_of_xqa_that_are_no_float32_are_refused(scale: str, value: float) -> None:
    t = BY_NAME["xqa_batch_decode_with_kv_cache"].make()
    names = ("query", "workspace_buffer", "block_tables", "seq_lens")
    with pytest.raises(quire.ValidationError, match=scale):
        quire.xqa_batch_decode_with_kv_cache(
            kv_cache=(t["k_cache"], t["v_cache"]), max_seq_len=12, **{scale: value}, **{n: t[n] for n in names}
        )


@pytest.mark.parametrize("scale", ["q_scale", "k_scale", "v_scale", "sm_scale"])
def test_scales_of_single_calls_that_are_no_float32_are_refused(scale: str) -> None:
    t = BY_NAME["single_decode_with_kv_cache"].make()
    for value in (*BAD, 2**2000):
        with pytest.raises(quire.ValidationError, match=scale):
            quire.single_decode_with_kv_cache(t["q"], t["k"], t["v"], **{scale: value})
        if scale in ("k_scale", "v_scale", "sm_scale"):
            with pytest.raises(quire.ValidationError, match=scale):
                quire.single_prefill_with_kv_cache(t["q"][None], t["k"], t["v"], **{scale: value})


# All or nothing


def _levels(call: Call) -> tuple[quire.MultiLevelCascadeAttentionWrapper, Tensors, list[list[Tensor]]]:
    t = call.make()
    arrays = [[t[name + "_shared"], t[name]] for name in ("qo_indptr", "kv_indptr", "kv_indices", "kv_last_page_len")]
    wrapper = quire.MultiLevelCascadeAttentionWrapper(2, workspace())
    wrapper.plan(*arrays, HEADS, KV_HEADS, DIM, PAGE, q_data_type=torch.float32)
    return wrapper, t, arrays


def test_a_plan_of_levels_that_fails_changes_nothing() -> None:
    wrapper, t, (qo_indptr, kv_indptr, kv_indices, _) = _levels(BY_NAME["MultiLevelCascadeAttentionWrapper"])
    want = wrapper.run(t["q"], (t["k_cache"], t["v_cache"]))
    with pytest.raises(quire.ValidationError):  # the first level is fine, and another one than planned
        wrapper.plan(
            qo_indptr, kv_indptr, [ints(4), kv_indices[1]], [ints(2), ints(PAGE + 1, 2)], HEADS, KV_HEADS, DIM, PAGE,
            q_data_type=torch.float32,
        )  # fmt: skip
    assert torch.equal(wrapper.run(t["q"], (t["k_cache"], t["v_cache"])), want)


def test_a_merge_in_place_that_fails_changes_nothing() -> None:
    """v and s are one state: a result that can be written into one of them only is not written."""
    for frozen in ("v", "s"):
        t = BY_NAME["merge_state_in_place"].make()
        with torch.inference_mode():
            t[frozen] = t[frozen].clone()
        kept = {n: tensor.clone() for n, tensor in t.items()}
        want = want_of(BY_NAME["merge_state_in_place"])
        try:
            quire.merge_state_in_place(t["v"], t["s"], t["v_other"], t["s_other"], mask=t["mask"])
        except quire.QuireError:
            assert all(torch.equal(tensor, kept[n]) for n, tensor in t.items())
        else:
            assert_same((t["v"], t["s"]), want)


BAD_FIRST_PLANS = {
    "a page that is none": {"indices": ints(0, -1)},
    "a last page that is too long": {"last_page_len": ints(PAGE + 1)},
    "more pages than the buffer holds": {"indptr": ints(0, 9), "indices": ints(*range(9))},
    "another batch size": {"indptr": ints(0, 1, 2), "last_page_len": ints(1, 1)},
    "no such type": {"q_data_type": torch.int32},
}


@pytest.mark.parametrize("fault", BAD_FIRST_PLANS)
def test_a_first_plan_for_graphs_that_fails_fixes_nothing(fault: str) -> None:
    wrapper = quire.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(workspace(), ints(0, 0), ints(*[0] * 8), ints(0))

    def plan(**changes: object) -> None:
        arrays = {"indptr": ints(0, 2), "indices": ints(0, 1), "last_page_len": ints(1), "q_data_type": torch.float32}
        given = {**arrays, **changes}
        tables = (given.pop("indptr"), given.pop("indices"), given.pop("last_page_len"))
        wrapper.plan(*tables, HEADS, KV_HEADS, DIM, PAGE, **given)

    with pytest.raises(quire.QuireError):
        plan(**BAD_FIRST_PLANS[fault])
    wrapper.reset_workspace_buffer(workspace())
    plan(indptr=ints(0, 8), indices=ints(*range(8)))
    cache = torch.randn(8, 2, PAGE, KV_HEADS, DIM)
    assert wrapper.run(torch.randn(1, HEADS, DIM), cache).isfinite().all()


# Appending


def _append(**changes: Tensor) -> None:
    call = BY_NAME["append_paged_kv_cache"]
    tensors = {**call.make(), **changes}
    kept = tensors["k_cache"].clone(), tensors["v_cache"].clone()
    try:
        call(tensors)
    finally:
        assert torch.equal(tensors["k_cache"], kept[0]) and torch.equal(tensors["v_cache"], kept[1])


_CACHES = ("k_cache", "v_cache")
BAD_APPENDS: dict[str, tuple[dict[str, Callable[[], Tensor]], str]] = {
    "no page numbers": ({"kv_indices": lambda: ints()}, "kv_indices"),
    "too few page numbers": ({"kv_indices": lambda: ints(4, 0, 2, 1)}, "kv_indices"),
    "offsets far beyond them": ({"kv_indptr": lambda: ints(0, 3, 4_000_000)}, "kv_ind"),
    "a negative offset": ({"kv_indptr": lambda: ints(-2_000_000, 3, 5)}, "kv_indptr"),
    "offsets that fall": ({"kv_indptr": lambda: ints(0, 5, 3)}, "kv_indptr"),
    "offsets that fall by more than 2^31": ({"kv_indptr": lambda: ints(0, 3, -HUGE)}, "kv_indptr"),
    "a first offset that is not 0": ({"kv_indptr": lambda: ints(1, 3, 5)}, "kv_indptr"),
    "a page beyond the cache": ({"kv_indices": lambda: ints(4, 0, 5, 1, 3)}, "kv_indices"),
    "a page far beyond the cache": ({"kv_indices": lambda: ints(4, 0, 2, 1, HUGE)}, "kv_indices"),
    "a negative page": ({"kv_indices": lambda: ints(4, 0, -1, 1, 3)}, "kv_indices"),
    "a request that is none": ({"batch_indices": lambda: ints(0, 1, 2)}, "batch_indices"),
    "a request far beyond the batch": ({"batch_indices": lambda: ints(0, 1, HUGE)}, "batch_indices"),
    "values of one head": (
        {"v_cache": lambda: torch.zeros(5, PAGE, 1, DIM), "append_value": lambda: torch.zeros(3, 1, DIM)},
        "head",
    ),
    "keys of one head": (
        {"k_cache": lambda: torch.zeros(5, PAGE, 1, DIM), "append_key": lambda: torch.zeros(3, 1, DIM)},
        "head",
    ),
    "shorter value pages": ({"v_cache": lambda: torch.zeros(5, 2, KV_HEADS, DIM)}, "page"),
    "shorter key pages": ({"k_cache": lambda: torch.zeros(5, 2, KV_HEADS, DIM)}, "page"),
    "pages of no tokens": ({n: lambda: torch.zeros(5, 0, KV_HEADS, DIM) for n in _CACHES}, "page_size"),
    "pages of no heads": ({n: lambda: torch.zeros(5, PAGE, 0, DIM) for n in _CACHES}, "num_kv_heads"),
    "heads of no width": ({n: lambda: torch.zeros(5, PAGE, KV_HEADS, 0) for n in _CACHES}, "head_dim"),
    "fewer value pages": ({"v_cache": lambda: torch.zeros(4, PAGE, KV_HEADS, DIM)}, "page"),
}


@pytest.mark.parametrize("case", BAD_APPENDS)
@isolated(together=BAD_APPENDS)
def test_appends_outside_the_cache_are_refused(case: str) -> None:
    """On the host all tables are looked at before anything is written."""
    changes, name = BAD_APPENDS[case]
    with pytest.raises(quire.ValidationError, match=name):
        _append(**{n: make() for n, make in changes.items()})


@isolated()
def test_appends_of_16_million_pages_that_do_not_exist_are_refused() -> None:
    ones = torch.ones(1, 2, 64)
    cache = (torch.zeros(4, 4, 2, 64), torch.zeros(4, 4, 2, 64))
    with pytest.raises(quire.ValidationError, match="kv_ind"):
        quire.append_paged_kv_cache(
            ones, ones, ints(0), ints(15_999_996), cache, ints(), ints(0, 4_000_000), ints(4)
        )  # fmt: skip


# Errors are ours, and say what to do


def _decode_plan(**changes: object) -> None:
    options: dict[str, object] = {
        "indptr": ints(0, 1), "indices": ints(0), "last_page_len": ints(1), "num_qo_heads": HEADS,
        "num_kv_heads": KV_HEADS, "head_dim": DIM, "page_size": PAGE, "q_data_type": torch.float32,
    }  # fmt: skip
    quire.BatchDecodeWithPagedKVCacheWrapper(workspace()).plan(**{**options, **changes})


def _call(name: str, **changes: object) -> None:
    BY_NAME[name]({**BY_NAME[name].make(), **changes})


def _segments(indptr: object) -> None:
    quire.segment_packbits(torch.ones(5, dtype=torch.bool), indptr)


FOREIGN: dict[str, tuple[Callable[[], None], str]] = {
    "a tensor for a number": (lambda: _decode_plan(num_qo_heads=torch.tensor([1, 2])), "num_qo_heads"),
    "a tensor of floats for a number": (lambda: _decode_plan(page_size=torch.tensor(1.5)), "page_size"),
    "a list for a name of a dtype": (lambda: _decode_plan(q_data_type=["float32"]), "q_data_type"),
    "a list for a mode": (lambda: _decode_plan(pos_encoding_mode=["NONE"]), "pos_encoding_mode"),
    "a list for a layout": (lambda: quire.BatchDecodeWithPagedKVCacheWrapper(workspace(), ["NHD"]), "kv_layout"),
    "a number for a backend": (
        lambda: quire.single_decode_with_kv_cache(*BY_NAME["single_decode_with_kv_cache"].make().values(), backend=3),
        "backend",
    ),
    "a list for a backend": (
        lambda: quire.single_decode_with_kv_cache(
            *BY_NAME["single_decode_with_kv_cache"].make().values(), backend=["cpu"]
        ),
        "backend",
    ),
    "sparse offsets": (lambda: _decode_plan(indptr=ints(0, 1).to_sparse()), "indptr"),
    "offsets without data": (lambda: _decode_plan(indptr=ints(0, 1).to("meta")), "indptr"),
    "pages without data": (lambda: _decode_plan(indices=ints(0).to("meta")), "indices"),
    "an offset that is not 0 without requests": (
        lambda: _decode_plan(indptr=ints(5), indices=ints(), last_page_len=ints()),
        "indptr",
    ),
    "a workspace without data": (
        lambda: quire.BatchDecodeWithPagedKVCacheWrapper(workspace().to("meta")),
        "float_workspace_buffer",
    ),
    "a list of segments": (lambda: _segments(["a"]), "indptr"),
    "segments as a plain list": (lambda: _segments([0.5, 3]), "indptr"),
    "an order that is a list": (lambda: quire.packbits(torch.ones(5, dtype=torch.bool), ["big"]), "bitorder"),
    "no pages to append to": (
        lambda: _call(
            "append_paged_kv_cache",
            k_cache=torch.zeros(0, PAGE, KV_HEADS, DIM),
            v_cache=torch.zeros(0, PAGE, KV_HEADS, DIM),
        ),
        "kv_indices|cache",
    ),
    "a string for a scale": (lambda: _call_scale("big"), "v_scale"),
    "a cache of strings": (lambda: _call("xqa_batch_decode_with_kv_cache", k_cache="a", v_cache="b"), "kv_cache"),
    "q that is None": (lambda: _call("BatchDecodeWithPagedKVCacheWrapper", q=None), "q"),
    "q that is a list": (lambda: _call("single_prefill_with_kv_cache", q=[1.0]), "q"),
    "too large q_len_per_req": (lambda: _decode_plan(q_len_per_req=1 << 30), "q_len_per_req"),
    "a huge nnz": (lambda: quire.get_batch_indices_positions(ints(0, 1), ints(1), 1 << 40), "nnz"),
    "nnz as a tensor": (lambda: quire.get_batch_indices_positions(ints(0, 1), ints(1), ints(1, 2)), "nnz"),
    "levels that are no number": (lambda: quire.MultiLevelCascadeAttentionWrapper("two", workspace()), "num_levels"),
    "arrays that are a number": (lambda: _cascade_plan(3), "qo_indptr_arr"),
    "a thousand million tokens": (lambda: quire.get_batch_indices_positions(ints(0, 1), ints(1), 2**31 - 2), "nnz"),
    "levels without end": (lambda: quire.MultiLevelCascadeAttentionWrapper(2**31 - 1, workspace()), "num_levels"),
    "suffixes of other lengths": (
        lambda: _call("batch_decode_with_shared_prefix_padded_kv_cache", v_unique=torch.zeros(2, 2, KV_HEADS, DIM)),
        "v_unique",
    ),
    "suffixes of another batch": (
        lambda: _call("batch_decode_with_shared_prefix_padded_kv_cache", v_unique=torch.zeros(0, 3, KV_HEADS, DIM)),
        "v_unique",
    ),
    "a window that is too wide": (lambda: _decode_plan(window_left=1 << 40), "window_left"),
    "a tensor for a size of splits": (lambda: _decode_plan(fixed_split_size=torch.zeros(3)), "fixed_split_size"),
    "a float for a size of splits": (lambda: _decode_plan(fixed_split_size=0.0), "fixed_split_size"),
    "no states of a dtype that none has": (
        lambda: quire.merge_states(torch.zeros(0, 1, 1, 64).to(torch.float8_e4m3fn), torch.zeros(0, 1, 1)),
        "v: expected dtype",
    ),
    "values in shorter pages for no requests": (
        lambda: _call(
            "xqa_batch_decode_with_kv_cache",
            query=torch.zeros(0, HEADS, DIM),
            seq_lens=ints(),
            block_tables=ints().reshape(0, 3),
            v_cache=torch.zeros(5, PAGE - 1, KV_HEADS, DIM),
        ),
        "values.*page_size",
    ),
}


def test_merged_states_of_no_width_still_have_a_lse() -> None:
    """Or are refused; their lse is never what memory held."""
    t = BY_NAME["merge_states"].make()
    want = quire.merge_states(t["v"], t["s"])[1]
    assert_right_or_refused(lambda: quire.merge_states(t["v"][..., :0], t["s"])[1:], (want,))
    a = BY_NAME["merge_state"].make()
    want = quire.merge_state(*a.values())[1]
    narrow = (a["v_a"][..., :0], a["s_a"], a["v_b"][..., :0], a["s_b"])
    assert_right_or_refused(lambda: quire.merge_state(*narrow)[1:], (want,))


def _call_scale(value: object) -> None:
    wrapper, t = _planned()
    wrapper.run(t["q"], (t["k_cache"], t["v_cache"]), v_scale=value)


def _cascade_plan(arrays: object) -> None:
    wrapper = quire.MultiLevelCascadeAttentionWrapper(2, workspace())
    wrapper.plan(arrays, arrays, arrays, arrays, HEADS, KV_HEADS, DIM, PAGE)


@pytest.mark.parametrize("case", FOREIGN)
@isolated(together=FOREIGN)
def test_bad_arguments_are_named(case: str) -> None:
    """Not one is met by an exception of torch's or Python's own."""
    call, name = FOREIGN[case]
    with pytest.raises(quire.QuireError, match=name):
        call()


def test_an_error_about_head_dim_says_what_to_do() -> None:
    """Kernels of another device have nothing to say about it."""
    with pytest.raises(quire.QuireError) as caught:
        _decode_plan(head_dim=75)
    message = str(caught.value)
    assert "75" in message and "80" in message and "pad" in message
    assert "GPU" not in message and "fa3" not in message
