"""What is wrong is said, by name, before anything runs: each public argument with a table of bad values."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

import quire
from calls import decode_wrapper, paged_wrapper, plan_decode, plan_paged, plan_ragged, ragged_wrapper
from problems import Problem, ints, workspace
from quire.distributed import Zigzag
from quire.engine.tensors import cache_view, ragged_view, span_bytes
from quire.errors import PlanError, UnsupportedError, ValidationError
from quire.kernels.features import KVLayout

DTYPE = torch.float16


def problem(device, **more):
    """A small valid problem."""
    return Problem((4, 9), (50, 9), dtype=DTYPE, device=device, causal=True, **more)


def transposed(t):
    """The same values, the last dimension no longer contiguous."""
    return t.transpose(-1, -2).contiguous().transpose(-1, -2)


def refused(call, word, kind=ValidationError):
    """The error is of `kind`, names the argument, and says more than its name."""
    with pytest.raises(kind) as caught:
        call()
    text = str(caught.value)
    assert word in text, f"expected {word!r} to be named in: {text}"
    assert len(text) > len(word) + 10


def i32(*values):
    """Index arrays in the tables below."""
    return torch.tensor(values, dtype=torch.int32)


# plan() of paged prefill: (keyword, bad value, word in the message)
INDEX_TABLE = [
    ("qo_indptr", i32(1, 4, 13), "qo_indptr"),
    ("qo_indptr", i32(0, 14, 13), "qo_indptr"),
    ("qo_indptr", i32(), "qo_indptr"),
    ("qo_indptr", i32(0, 4, 13).reshape(3, 1), "qo_indptr"),
    ("qo_indptr", torch.tensor([0.0, 4.0, 13.0]), "qo_indptr"),
    ("qo_indptr", None, "qo_indptr"),
    ("qo_indptr", "0,4,13", "qo_indptr"),
    ("paged_kv_indptr", i32(0, 7), "paged_kv_indptr"),
    ("paged_kv_indptr", i32(0, 7, 9, 9), "paged_kv_indptr"),
    ("paged_kv_indptr", i32(-2, 7, 9), "paged_kv_indptr"),
    ("paged_kv_indptr", i32(0, 10, 9), "paged_kv_indptr"),
    ("paged_kv_indptr", torch.tensor([0, 1 << 40, 1 << 41]), "paged_kv_indptr"),
    ("paged_kv_indices", i32(0, 1, 2), "paged_kv_indices"),
    ("paged_kv_indices", torch.zeros(3, 3, dtype=torch.int32), "paged_kv_indices"),
    ("paged_kv_indices", torch.zeros(9), "paged_kv_indices"),
    ("paged_kv_indices", None, "paged_kv_indices"),
    ("paged_kv_last_page_len", i32(9, 1), "last_page_len"),
    ("paged_kv_last_page_len", i32(0, 1), "last_page_len"),
    ("paged_kv_last_page_len", i32(-1, 1), "last_page_len"),
    ("paged_kv_last_page_len", i32(2), "last_page_len"),
    ("paged_kv_last_page_len", i32(2, 1, 1), "last_page_len"),
]

SIZE_TABLE = [
    ("num_qo_heads", 0, "num_qo_heads"),
    ("num_qo_heads", -4, "num_qo_heads"),
    ("num_qo_heads", 3, "num_qo_heads"),
    ("num_qo_heads", 4.0, "num_qo_heads"),
    ("num_qo_heads", True, "num_qo_heads"),
    ("num_kv_heads", 0, "num_kv_heads"),
    ("num_kv_heads", 3, "num_kv_heads"),
    ("num_kv_heads", None, "num_kv_heads"),
    ("head_dim_qk", 0, "head_dim_qk"),
    ("head_dim_qk", -64, "head_dim_qk"),
    ("head_dim_qk", "64", "head_dim_qk"),
    ("head_dim_vo", 0, "head_dim_vo"),
    ("page_size", 0, "page_size"),
    ("page_size", -8, "page_size"),
    ("page_size", 2.5, "page_size"),
    ("page_size", None, "page_size"),
]

OPTION_TABLE = [
    ("sm_scale", math.nan, "sm_scale"),
    ("sm_scale", math.inf, "sm_scale"),
    ("sm_scale", "big", "sm_scale"),
    ("window_left", -2, "window_left"),
    ("window_left", 1.5, "window_left"),
    ("window_left", None, "window_left"),
    ("logits_soft_cap", -1.0, "logits_soft_cap"),
    ("logits_soft_cap", math.nan, "logits_soft_cap"),
    ("q_data_type", "float17", "q_data_type"),
    ("q_data_type", torch.int32, "q_data_type"),
    ("q_data_type", 16, "q_data_type"),
    ("kv_data_type", "fp99", "kv_data_type"),
    ("o_data_type", torch.complex64, "o_data_type"),
    ("pos_encoding_mode", "ROPE", "pos_encoding_mode"),
    ("causal", "NONE", "causal"),
    ("fixed_split_size", -7, "fixed_split_size"),
    ("fixed_split_size", 1000, "fixed_split_size"),
    ("rope_theta", 5e5, "rope_theta"),
]

MASK_TABLE = [
    ("custom_mask", torch.ones(280, dtype=torch.bool), "custom_mask"),
    ("custom_mask", torch.ones(282, dtype=torch.bool), "custom_mask"),
    ("custom_mask", torch.ones(281), "custom_mask"),
    ("custom_mask", True, "custom_mask"),
    ("packed_custom_mask", torch.ones(35, dtype=torch.uint8), "packed_custom_mask"),
    ("packed_custom_mask", torch.ones(36), "packed_custom_mask"),
    ("packed_custom_mask", torch.ones(36, 1, dtype=torch.uint8), "packed_custom_mask"),
    ("packed_custom_mask", "mask", "packed_custom_mask"),
]


def row_id(value):
    """Short names for rows of the tables, the same in each process."""
    if isinstance(value, dict):
        value = " ".join(f"{name}={getattr(changed, '__name__', changed)}" for name, changed in value.items())
    return str(value).replace("\n", " ")[:40]


def paged_arguments(p, cache):
    """Valid keywords of plan() of paged prefill."""
    tables = dict(zip(("paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len"), cache.tables(), strict=True))
    return {
        "qo_indptr": ints(p.qo_indptr, p.device),
        **tables,
        "num_qo_heads": p.num_qo_heads,
        "num_kv_heads": p.num_kv_heads,
        "head_dim_qk": p.head_dim,
        "page_size": cache.page_size,
        "q_data_type": DTYPE,
    }


@pytest.mark.parametrize(("name", "value", "word"), INDEX_TABLE + SIZE_TABLE + OPTION_TABLE, ids=row_id)
def test_paged_plan(device, backend, name, value, word):
    p = problem(device)
    cache = p.paged(8)
    wrapper = paged_wrapper(p, cache, backend)
    refused(lambda: wrapper.plan(**{**paged_arguments(p, cache), name: value}), word)


@pytest.mark.parametrize(("name", "value", "word"), MASK_TABLE, ids=row_id)
def test_masks(device, backend, name, value, word):
    """The bits of (4, 50) and (9, 9) are 281: 25 + 11 bytes."""
    p = problem(device)
    cache = p.paged(8)
    wrapper = paged_wrapper(p, cache, backend)
    on_device = value.to(device) if isinstance(value, torch.Tensor) else value
    refused(lambda: wrapper.plan(**{**paged_arguments(p, cache), name: on_device}), word)


@pytest.mark.parametrize("packed", [False, True])
def test_masks_with_gaps(device, backend, packed):
    """A strided mask is read by its strides or refused: never as if it had none."""
    p = problem(device).random_mask()
    bits = p.packed_mask() if packed else p.mask
    name = "packed_custom_mask" if packed else "custom_mask"
    strided = torch.stack([bits, ~bits], 1)[:, 0]
    cache = p.paged(8)
    wrapper = paged_wrapper(p, cache, backend)
    try:
        wrapper.plan(**{**paged_arguments(p, cache), name: strided})
    except ValidationError as error:
        assert name in str(error)
        return
    p.check(wrapper.run(p.q, cache.kv))


@pytest.mark.parametrize(
    ("name", "value", "word"),
    [
        ("qo_indptr", i32(1, 4, 13), "qo_indptr"),
        ("kv_indptr", i32(0, 50), "kv_indptr"),
        ("kv_indptr", i32(0, 60, 59), "kv_indptr"),
        ("kv_indptr", i32(-3, 50, 59), "kv_indptr"),
        ("num_qo_heads", 3, "num_qo_heads"),
        ("num_kv_heads", 0, "num_kv_heads"),
        *OPTION_TABLE,
    ],
    ids=row_id,
)
def test_ragged_plan(device, backend, name, value, word):
    p = problem(device)
    wrapper = ragged_wrapper(p, backend)
    arguments = {
        "qo_indptr": ints(p.qo_indptr, device),
        "kv_indptr": ints(p.kv_indptr, device),
        "num_qo_heads": 4,
        "num_kv_heads": 2,
        "head_dim_qk": 64,
        "q_data_type": DTYPE,
    }
    refused(lambda: wrapper.plan(**{**arguments, name: value}), word)


@pytest.mark.parametrize(
    ("name", "value", "word"),
    [
        ("indptr", i32(0, 7), "last_page_len"),
        ("indptr", i32(-1, 7, 9), "indptr"),
        ("indptr", i32(0, 10, 9), "indptr"),
        ("indptr", i32(), "indptr"),
        ("indices", i32(0, 1), "indices"),
        ("indices", torch.zeros(9), "indices"),
        ("last_page_len", i32(9, 1), "last_page_len"),
        ("last_page_len", i32(0, 1), "last_page_len"),
        ("last_page_len", i32(1), "last_page_len"),
        ("num_qo_heads", 3, "num_qo_heads"),
        ("num_kv_heads", 0, "num_kv_heads"),
        ("head_dim", 0, "head_dim"),
        ("page_size", 0, "page_size"),
        ("page_size", -1, "page_size"),
        ("window_left", -5, "window_left"),
        ("logits_soft_cap", -1.0, "logits_soft_cap"),
        ("q_data_type", "float17", "q_data_type"),
        ("data_type", "float17", "data_type"),
        ("pos_encoding_mode", "SINE", "pos_encoding_mode"),
        ("q_len_per_req", 0, "q_len_per_req"),
        ("fixed_split_size", 1000, "fixed_split_size"),
    ],
    ids=row_id,
)
def test_decode_plan(device, backend, name, value, word):
    p = Problem((1, 1), (50, 9), dtype=DTYPE, device=device)
    cache = p.paged(8)
    wrapper = decode_wrapper(p, cache, backend)
    indptr, indices, last = cache.tables()
    arguments = {
        "indptr": indptr,
        "indices": indices,
        "last_page_len": last,
        "num_qo_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 64,
        "page_size": 8,
        "q_data_type": DTYPE,
    }
    refused(lambda: wrapper.plan(**{**arguments, name: value}), word)


@pytest.mark.parametrize("head_dim", [8, 24, 76, 520, 1024])
def test_head_dims_that_no_kernel_has(device, backend, head_dim):
    """The message is the trace: each kernel with its reason."""
    p = problem(device, head_dim=head_dim)
    cache = p.paged(8)
    refused(lambda: plan_paged(paged_wrapper(p, cache, backend), p, cache), "head_dim", UnsupportedError)
    kernel = "attention_fa2" if backend == "auto" else f"attention_{backend.removeprefix('quire:')}"
    refused(lambda: plan_ragged(ragged_wrapper(p, backend), p), kernel, UnsupportedError)
    refused(lambda: quire.single_prefill_with_kv_cache(p.q[:4], p.k[:50], p.v[:50]), "head_dim", UnsupportedError)


@pytest.mark.parametrize("mode", ["NONE", "ALIBI"])
@pytest.mark.parametrize("name", ["rope_scale", "rope_theta"])
def test_numbers_of_rotary_embeddings_without_them(device, backend, mode, name):
    """Refused by name instead of being ignored."""
    p = problem(device)
    options = {"pos_encoding_mode": mode, name: 2.0}
    cache = p.paged(8)
    refused(lambda: plan_paged(paged_wrapper(p, cache, backend), p, cache, plan=options), name)
    refused(lambda: plan_ragged(ragged_wrapper(p, backend), p, plan=options), name)
    single = Problem((1,), (9,), dtype=DTYPE, device=device)
    refused(lambda: quire.single_decode_with_kv_cache(single.q[0], single.k, single.v, **options), name)
    refused(lambda: quire.single_prefill_with_kv_cache(single.q, single.k, single.v, **options), name)


@pytest.mark.parametrize("name", ["rope_scale", "rope_theta"])
@pytest.mark.parametrize("value", [0, -1.0, math.nan, "ten"])
def test_numbers_of_rotary_embeddings(device, backend, name, value):
    p = problem(device)
    options = {"pos_encoding_mode": "ROPE_LLAMA", name: value}
    refused(lambda: plan_ragged(ragged_wrapper(p, backend), p, plan=options), name)


def test_constructors(device):
    ws = workspace(device)
    for cls in (
        quire.BatchPrefillWithPagedKVCacheWrapper,
        quire.BatchPrefillWithRaggedKVCacheWrapper,
        quire.BatchDecodeWithPagedKVCacheWrapper,
    ):
        for bad in ("nhd", "NDH", None, 0):
            refused(lambda bad=bad, cls=cls: cls(ws, bad), "kv_layout")
        for bad in (None, 128 << 20, "workspace"):
            refused(lambda bad=bad, cls=cls: cls(bad), "float_workspace_buffer")
        refused(lambda cls=cls: cls(ws[::2]), "float_workspace_buffer")
        refused(lambda cls=cls: cls(ws[1:]), "float_workspace_buffer")
        refused(lambda cls=cls: cls(torch.empty(8, dtype=torch.uint8, device="meta")), "float_workspace_buffer")


@pytest.mark.parametrize("bad", ["fa9", "", None, 2])
def test_backends(device, bad):
    p = problem(device)
    refused(
        lambda: plan_ragged(quire.BatchPrefillWithRaggedKVCacheWrapper(workspace(device), backend=bad), p), "backend"
    )


def test_a_backend_of_another_device_is_unsupported(device, backend):
    """The other backends are listed with what they have against the problem."""
    p = problem(device)
    other = "quire:fa2" if backend == "quire:cpu" else "quire:cpu"
    refused(lambda: plan_ragged(ragged_wrapper(p, other), p), other, UnsupportedError)


def test_workspace_that_is_too_small(device, backend):
    """Said at plan(), with the size that is needed."""
    p = Problem((1,), (9000,), num_qo_heads=8, num_kv_heads=1, head_dim=256, dtype=DTYPE, device=device)
    cache = p.paged(8)
    small = torch.empty(256, dtype=torch.uint8, device=device)
    wrapper = quire.BatchPrefillWithPagedKVCacheWrapper(small, backend=backend)
    plan = {"fixed_split_size": 640}  # a multiple of every kernel's kv tile
    refused(lambda: plan_paged(wrapper, p, cache, plan=plan), "float_workspace_buffer")
    decoder = quire.BatchDecodeWithPagedKVCacheWrapper(small, backend=backend)
    refused(lambda: plan_decode(decoder, p, cache, plan=plan), "float_workspace_buffer")
    wrapper.reset_workspace_buffer(workspace(device), torch.empty(8, dtype=torch.uint8, device=device))
    plan_paged(wrapper, p, cache, plan=plan)
    p.check(wrapper.run(p.q, cache.kv))


def test_run_before_plan(device, backend):
    p = problem(device)
    cache = p.paged(8)
    for wrapper, args in [
        (paged_wrapper(p, cache, backend), (p.q, cache.kv)),
        (ragged_wrapper(p, backend), (p.q, p.k, p.v)),
        (decode_wrapper(p, cache, backend), (p.q, cache.kv)),
    ]:
        for call in (wrapper.run, wrapper.run_return_lse, wrapper.forward):
            refused(lambda call=call, args=args: call(*args), "plan()", PlanError)


def test_a_failed_plan_does_not_leave_half_of_itself(device, backend):
    """After a refused plan() the earlier one is still in force, or none is: never a mixture."""
    p = problem(device)
    cache = p.paged(8)
    wrapper = paged_wrapper(p, cache, backend)
    plan_paged(wrapper, p, cache)
    with pytest.raises(ValidationError):
        wrapper.plan(**{**paged_arguments(p, cache), "paged_kv_indices": cache.indices[:-1]})
    p.check(wrapper.run(p.q, cache.kv))


# run(): what does not fit the plan

QUERIES = {
    "rows": lambda q: q[:-1],
    "heads": lambda q: torch.cat([q, q], 1),  # fewer than planned are right
    "head_dim": lambda q: q[..., :32],
    "rank": lambda q: q[0],
    "dtype": lambda q: q.bfloat16(),
    "strides": transposed,
    "none": lambda q: None,
    "list": lambda q: q.tolist(),
}


@pytest.mark.parametrize("name", QUERIES)
def test_queries(device, backend, name):
    p = problem(device)
    cache = p.paged(8)
    bad = QUERIES[name](p.q)
    paged, ragged = paged_wrapper(p, cache, backend), ragged_wrapper(p, backend)
    plan_paged(paged, p, cache)
    plan_ragged(ragged, p)
    refused(lambda: paged.run(bad, cache.kv), "q")
    refused(lambda: ragged.run(bad, p.k, p.v), "q")


CACHES = {
    "one": lambda k, v: (k,),
    "three": lambda k, v: (k, v, v),
    "none": lambda k, v: None,
    "half none": lambda k, v: (k, None),
    "rank": lambda k, v: (k[0], v[0]),
    "page_size": lambda k, v: (k[:, :4], v[:, :4]),
    "heads": lambda k, v: (k[:, :, :1], v[:, :, :1]),
    "head_dim": lambda k, v: (k[..., :32], v[..., :32]),
    "value head_dim": lambda k, v: (k, v[..., :32]),
    "dtype": lambda k, v: (k.bfloat16(), v.bfloat16()),
    "value dtype": lambda k, v: (k, v.float()),
    "key strides": lambda k, v: (transposed(k), v),
    "value strides": lambda k, v: (k, transposed(v)),
    "one page short": lambda k, v: (k[:1], v[:1]),
    "three in one": lambda k, v: torch.stack([k, v, v], 1),
    "other layout": lambda k, v: torch.stack([k, v], 1).transpose(2, 3),
}


@pytest.mark.parametrize("name", CACHES)
def test_caches(device, backend, name):
    p = problem(device)
    cache = p.paged(8)
    bad = CACHES[name](*cache.kv)
    wrapper = paged_wrapper(p, cache, backend)
    # page numbers on the host: only there can "one page short" be seen without waiting for the device
    wrapper.plan(**{**paged_arguments(p, cache), "paged_kv_indices": cache.indices.cpu()})
    word = "paged_kv_indices" if name == "one page short" else "paged_kv_cache"
    refused(lambda: wrapper.run(p.q, bad), word)


KEYS = {
    "rows": (lambda k, v: (k[:-1], v), "k"),
    "value rows": (lambda k, v: (k, v[:-1]), "v"),
    "heads": (lambda k, v: (k[:, :1], v), "k"),
    "value heads": (lambda k, v: (k, v[:, :1]), "v"),
    "head_dim": (lambda k, v: (k[..., :32], v), "k"),
    "value head_dim": (lambda k, v: (k, v[..., :32]), "v"),
    "rank": (lambda k, v: (k[0], v), "k"),
    "dtype": (lambda k, v: (k.bfloat16(), v), "k"),
    "value dtype": (lambda k, v: (k, v.float()), "v"),
    "strides": (lambda k, v: (transposed(k), v), "k"),
    "none": (lambda k, v: (k, None), "v"),
}


@pytest.mark.parametrize("name", KEYS)
def test_ragged_keys_and_values(device, backend, name):
    p = problem(device)
    change, word = KEYS[name]
    wrapper = ragged_wrapper(p, backend)
    plan_ragged(wrapper, p)
    refused(lambda: wrapper.run(p.q, *change(p.k, p.v)), f"{word}:")


def bad_outputs(p):
    """(keyword, value) of outputs that run() must not write to."""
    out, lse = torch.empty_like(p.q), torch.empty(p.q.shape[:2], device=p.device)
    return [
        ("out", out[:-1]),
        ("out", out[:, :2]),
        ("out", out[..., :32]),
        ("out", out[0]),
        ("out", out.float()),
        ("out", transposed(out)),
        ("out", "out"),
        ("lse", lse[:-1]),
        ("lse", lse[:, :2]),
        ("lse", lse.double()),
        ("lse", lse.half()),
        ("lse", lse.t().contiguous().t()),
        ("lse", 0),
        ("sinks", torch.zeros(3, device=p.device)),
        ("sinks", torch.zeros(4, device=p.device, dtype=torch.float16)),
        ("sinks", torch.zeros(8, device=p.device)[::2]),
        ("sinks", [0.0] * 4),
        ("k_scale", torch.ones(2)),
        ("v_scale", "loud"),
        ("window_left", 7),
        ("kv_cache_sf", torch.ones(2)),
    ]


@pytest.mark.parametrize("row", range(len(bad_outputs(Problem((4, 9), (50, 9))))))
def test_what_run_is_given_beside_the_tensors(device, backend, row):
    p = problem(device)
    cache = p.paged(8)
    name, value = bad_outputs(p)[row]
    paged, ragged = paged_wrapper(p, cache, backend), ragged_wrapper(p, backend)
    plan_paged(paged, p, cache)
    plan_ragged(ragged, p)
    refused(lambda: paged.run(p.q, cache.kv, return_lse=True, **{name: value}), name)
    refused(lambda: ragged.run(p.q, p.k, p.v, return_lse=True, **{name: value}), name)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_tensors_on_the_wrong_device():
    """A host pointer never reaches a GPU kernel, nor the other way round."""
    p = problem("cuda:0")
    cache = p.paged(8)
    host = [t.cpu() for t in (p.q, p.k, p.v)]
    paged, ragged = paged_wrapper(p, cache, "quire:fa2"), ragged_wrapper(p, "quire:fa2")
    plan_paged(paged, p, cache)
    plan_ragged(ragged, p)
    refused(lambda: ragged.run(host[0], p.k, p.v), "q")
    refused(lambda: ragged.run(p.q, host[1], p.v), "k:")
    refused(lambda: ragged.run(p.q, p.k, host[2]), "v:")
    refused(lambda: paged.run(p.q, tuple(t.cpu() for t in cache.kv)), "paged_kv_cache")
    refused(lambda: paged.run(p.q, cache.kv, out=torch.empty_like(host[0])), "out")
    refused(lambda: paged.run(p.q, cache.kv, return_lse=True, lse=torch.empty(13, 4)), "lse")
    refused(lambda: paged.run(p.q, cache.kv, sinks=torch.zeros(4)), "sinks")
    refused(lambda: quire.single_prefill_with_kv_cache(p.q[:4], host[1][:50], host[2][:50]), "k")


# Single requests


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"q": lambda t: t[0]}, "q"),
        ({"q": lambda t: t.tolist()}, "q"),
        ({"k": lambda t: t[:-1]}, "v"),
        ({"v": lambda t: t[:-1]}, "v"),
        ({"k": lambda t: t[..., :32]}, "k"),
        ({"v": lambda t: t[:, :1]}, "v"),
        ({"k": lambda t: t.bfloat16()}, "k"),
        ({"k": transposed}, "k"),
        ({"q": lambda t: t[:, :3]}, "num_qo_heads"),
        ({"kv_layout": "XYZ"}, "kv_layout"),
        ({"sm_scale": math.nan}, "sm_scale"),
        ({"window_left": -3}, "window_left"),
        ({"logits_soft_cap": -2.0}, "logits_soft_cap"),
        ({"custom_mask": torch.ones(4, 49, dtype=torch.bool)}, "custom_mask"),
        ({"custom_mask": torch.ones(4, 50)}, "custom_mask"),
        ({"packed_custom_mask": torch.ones(24, dtype=torch.uint8)}, "packed_custom_mask"),
        ({"backend": "fa9"}, "backend"),
        ({"o_dtype": "int3"}, "o_dtype"),
        ({"scale_q": torch.ones(4)}, "scale_q"),
    ],
    ids=row_id,
)
def test_single_prefill(device, change, word):
    p = Problem((4,), (50,), dtype=DTYPE, device=device)
    arguments = {"q": p.q, "k": p.k, "v": p.v}
    for name, value in change.items():
        if callable(value):
            value = value(arguments[name])
        arguments[name] = value.to(device) if isinstance(value, torch.Tensor) else value
    refused(lambda: quire.single_prefill_with_kv_cache(**arguments), word, (ValidationError, UnsupportedError))


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"q": lambda t: t[None]}, "q"),
        ({"k": lambda t: t[0]}, "k"),
        ({"v": lambda t: t[:-1]}, "v"),
        ({"q": lambda t: t[:3]}, "num_qo_heads"),
        ({"kv_layout": "XYZ"}, "kv_layout"),
        ({"sm_scale": math.inf}, "sm_scale"),
        ({"window_left": "all"}, "window_left"),
    ],
    ids=row_id,
)
def test_single_decode(device, change, word):
    p = Problem((1,), (50,), dtype=DTYPE, device=device)
    arguments = {"q": p.q[0], "k": p.k, "v": p.v}
    arguments |= {name: value(arguments[name]) if callable(value) else value for name, value in change.items()}
    refused(lambda: quire.single_decode_with_kv_cache(**arguments), word)


# The rest of the surface


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("v_a", lambda t: t[0]),
        ("v_a", lambda t: t.long()),
        ("v_b", lambda t: t[..., :32]),
        ("v_b", lambda t: t.float()),
        ("s_a", lambda t: t[:-1]),
        ("s_a", lambda t: t.half()),
        ("s_b", lambda t: t[:, :1]),
        ("s_b", lambda t: t.double()),
        ("s_a", lambda t: None),
    ],
)
def test_merge_state(device, name, change):
    v, s = torch.zeros(5, 2, 64, dtype=DTYPE, device=device), torch.zeros(5, 2, device=device)
    arguments = {"v_a": v, "s_a": s, "v_b": v.clone(), "s_b": s.clone()}
    bad = {**arguments, name: change(arguments[name])}
    prefix = "v" if name == "v_a" and bad[name].dim() == 3 else name  # a wrong dtype is found for both at once
    refused(lambda: quire.merge_state(**bad), prefix)
    renamed = dict(zip(("v", "s", "v_other", "s_other"), bad.values(), strict=True))
    refused(lambda: quire.merge_state_in_place(**renamed), name[0])


def test_merge_state_in_place_writes_where_it_was_told(device):
    """A view that would need a copy is refused: the result would be lost."""
    v, s = torch.zeros(5, 4, 64, dtype=DTYPE, device=device), torch.zeros(5, 4, device=device)
    other, other_s = v[:, :2].contiguous(), s[:, :2].contiguous()
    refused(lambda: quire.merge_state_in_place(v[:, :2], other_s.clone(), other, other_s), "v")
    refused(lambda: quire.merge_state_in_place(other.clone(), s[:, :2], other, other_s), "s")
    for mask in (torch.ones(4, dtype=torch.bool), torch.ones(5), "rows"):
        bad = mask.to(device) if isinstance(mask, torch.Tensor) else mask
        refused(lambda bad=bad: quire.merge_state_in_place(other.clone(), other_s.clone(), other, other_s, bad), "mask")


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("v", lambda t: t[0]),
        ("v", lambda t: t.long()),
        ("s", lambda t: t[:, :-1]),
        ("s", lambda t: t.half()),
        ("s", lambda t: t[0]),
    ],
)
def test_merge_states(device, name, change):
    arguments = {"v": torch.zeros(5, 3, 2, 64, dtype=DTYPE, device=device), "s": torch.zeros(5, 3, 2, device=device)}
    refused(lambda: quire.merge_states(**{**arguments, name: change(arguments[name])}), name)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("append_key", lambda t: t[0]),
        ("append_key", lambda t: t.float()),
        ("append_key", lambda t: t[:, :1]),
        ("append_key", transposed),
        ("append_key", lambda t: None),
        ("append_value", lambda t: t[:-1]),
        ("append_value", lambda t: t[..., :32]),
        ("batch_indices", lambda t: t[:-1]),
        ("batch_indices", lambda t: t.float()),
        ("positions", lambda t: t[:-1]),
        ("positions", lambda t: t.tolist()),
        ("paged_kv_cache", lambda kv: kv[0]),
        ("paged_kv_cache", lambda kv: None),
        ("kv_indices", lambda t: t.float()),
        ("kv_indptr", lambda t: None),
        ("kv_indptr", lambda t: t[:0]),
        ("kv_last_page_len", lambda t: t[:-1]),
        ("kv_layout", lambda t: "XYZ"),
    ],
)
def test_append(device, name, change):
    p = problem(device)
    cache = p.paged(8)
    nnz = 3
    arguments = {
        "append_key": p.k[:nnz],
        "append_value": p.v[:nnz],
        "batch_indices": ints([0, 0, 1], device),
        "positions": ints([48, 49, 8], device),
        "paged_kv_cache": cache.kv,
        "kv_indices": cache.indices,
        "kv_indptr": cache.indptr,
        "kv_last_page_len": cache.last_page_len,
        "kv_layout": "NHD",
    }
    refused(lambda: quire.append_paged_kv_cache(**{**arguments, name: change(arguments[name])}), name)


def test_append_outside_of_the_pages_writes_nothing(device):
    """Positions that have no page are left out. Requests and pages that are none are refused on the host, and left out
    on a device, whose tables nobody waits for.
    """
    p = problem(device)
    cache = p.paged(8)
    before = [torch.nan_to_num(t.clone(), nan=-5.0) for t in cache.kv]
    key, value, tables = p.k[:3], p.v[:3], (cache.indices, cache.indptr, cache.last_page_len)
    indices = torch.full_like(cache.indices, 1 << 20)
    quire.append_paged_kv_cache(key, value, ints([0, 0, -7], device), ints([1 << 20, 56, 0], device), cache.kv, *tables)
    for requests, pages, word in (([2, 0, -7], cache.indices, "batch_indices"), ([0, 0, 1], indices, "kv_indices")):
        arguments = (key, value, ints(requests, device), ints([0, 1 << 20, 0], device), cache.kv, pages, *tables[1:])
        if device == "cpu":
            refused(lambda a=arguments: quire.append_paged_kv_cache(*a), word)
        else:
            quire.append_paged_kv_cache(*arguments)
    for got, want in zip(cache.kv, before, strict=True):
        assert torch.equal(torch.nan_to_num(got, nan=-5.0), want)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"seq_lens": i32(5)}, "seq_lens"),
        ({"seq_lens": None}, "seq_lens"),
        ({"append_indptr": None}, "append_indptr"),
        ({"append_indptr": i32(0, 2, 3).reshape(3, 1)}, "append_indptr"),
        ({"append_indptr": i32()}, "append_indptr"),
        ({"nnz": -1}, "nnz"),
        ({"nnz": 2.5}, "nnz"),
        ({"batch_indices": i32(0, 0)}, "batch_indices"),
        ({"batch_indices": torch.zeros(3)}, "batch_indices"),
        ({"positions": i32(0, 0, 0, 0)}, "positions"),
        ({"positions": "out"}, "positions"),
    ],
    ids=row_id,
)
def test_get_batch_indices_positions(device, change, word):
    arguments = {"append_indptr": i32(0, 2, 3), "seq_lens": i32(5, 1), "nnz": 3, **change}
    moved = {n: v.to(device) if isinstance(v, torch.Tensor) else v for n, v in arguments.items()}
    refused(lambda: quire.get_batch_indices_positions(**moved), word)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"kv_indptr": None}, "kv_indptr"),
        ({"kv_indptr": i32(0, 2, 3).reshape(3, 1)}, "kv_indptr"),
        ({"kv_last_page_len": i32(5)}, "kv_last_page_len"),
        ({"kv_last_page_len": [5, 1]}, "kv_last_page_len"),
        ({"page_size": 0}, "page_size"),
        ({"page_size": -8}, "page_size"),
        ({"page_size": None}, "page_size"),
    ],
    ids=row_id,
)
def test_get_seq_lens(device, change, word):
    arguments = {"kv_indptr": i32(0, 2, 3), "kv_last_page_len": i32(5, 1), "page_size": 8, **change}
    moved = {n: v.to(device) if isinstance(v, torch.Tensor) else v for n, v in arguments.items()}
    refused(lambda: quire.get_seq_lens(**moved), word)


def test_bits(device):
    x = torch.ones(9, dtype=torch.bool, device=device)
    refused(lambda: quire.packbits(x.reshape(3, 3)), "x")
    refused(lambda: quire.packbits(x.float()), "x")
    refused(lambda: quire.packbits("11"), "x")
    refused(lambda: quire.packbits(x, "middle"), "bitorder")
    for bad in ([1, 9], [0, 5, 4], [0, 10]):
        refused(lambda bad=bad: quire.segment_packbits(x, ints(bad, device)), "indptr")
    refused(lambda: quire.segment_packbits(x, None), "indptr")


def reach(wrapper, most):
    """The wrapper's kernel finds rows of so many bytes of a tensor."""
    attention = wrapper._attention
    kernel = replace(attention.decision.kernel, max_bytes=lambda key, tensor: most.get(tensor, 0))
    attention.decision = replace(attention.decision, kernel=kernel)


def test_tensors_that_a_kernel_does_not_reach(device, backend):
    """A row that lies further than its numbers go would be another row."""
    p = problem(device)
    cache = p.paged(16)
    wrapper = paged_wrapper(p, cache, backend)
    plan_paged(wrapper, p, cache)
    k_bytes, out_bytes = cache.kv[0].nbytes, p.q.nbytes
    reach(wrapper, {"k": k_bytes - 1})
    refused(lambda: wrapper.run(p.q, cache.kv), "paged_kv_cache (keys)")
    reach(wrapper, {"k": k_bytes, "v": k_bytes, "o": out_bytes - 1})
    refused(lambda: wrapper.run(p.q, cache.kv), "out")
    reach(wrapper, {"k": k_bytes, "v": k_bytes, "o": out_bytes})
    p.check(wrapper.run(p.q, cache.kv))


def test_the_bytes_from_a_view_s_first_element_to_its_last():
    """One layer of a cache that holds all layers lies in as much memory as all of it."""
    layers, pages = 8, 100
    whole = torch.empty(pages, layers, 2, 1, 8, 128, dtype=torch.bfloat16)
    for view in cache_view((whole[:, 3],), KVLayout.NHD, 1):
        last = (pages - 1) * layers * 2 * 8 * 128 + 8 * 128
        assert span_bytes(view.shape, view.stride(), view.dtype) == 2 * last
    for tokens in (7, 0):
        view = ragged_view(torch.empty(tokens, 2, 64, dtype=torch.float16), "k", KVLayout.NHD)
        assert span_bytes(view.shape, view.stride(), view.dtype) == tokens * 2 * 64 * 2


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("spoil", ["grad", "freed", "negated"])
def test_caches_of_one_tensor_are_checked_as_pairs_are(spoil, kv_layout):
    wrapper = quire.BatchDecodeWithPagedKVCacheWrapper(workspace("cpu"), kv_layout)
    wrapper.plan(i32(0, 1), i32(0), i32(3), 4, 2, 64, 16, q_data_type=torch.float32)
    cache = torch.zeros((2, 2, 16, 2, 64) if kv_layout == "NHD" else (2, 2, 2, 16, 64))
    wrapper.run(torch.zeros(1, 4, 64), cache)
    if spoil == "grad":
        cache.requires_grad_()
    elif spoil == "freed":
        cache.untyped_storage().resize_(0)
    else:
        cache = torch._neg_view(cache)
    refused(lambda: wrapper.run(torch.zeros(1, 4, 64), cache), "paged_kv_cache")


def test_what_random_calls_found():
    """A state without head_dim left its lse unwritten; a foreign error, and three calls that did not end."""
    refused(lambda: quire.merge_states(torch.zeros(3, 2, 4, 0), torch.zeros(3, 2, 4)), "v: head_dim")
    q, shared, own = torch.zeros(2, 4, 64), torch.zeros(9, 2, 64), torch.zeros(2, 3, 2, 64)
    padded = quire.batch_decode_with_shared_prefix_padded_kv_cache
    refused(lambda: padded(q, shared, shared, own, own[:, :2]), "v_unique: expected 4 dimensions")
    refused(lambda: quire.MultiLevelCascadeAttentionWrapper(2**31 - 1, workspace("cpu")), "num_levels")
    refused(lambda: quire.get_batch_indices_positions(i32(0, 1), i32(1), 2**31 - 2), "nnz")
    buffers = i32(0, 0), i32(0, 0), i32(0)
    wrapper = quire.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(workspace("cpu"), *buffers)
    wrapper.plan(i32(0, 1), i32(0), i32(3), 4, 2, 64, 16, q_data_type=torch.float32)
    refused(lambda: wrapper.run({}, torch.zeros(1, 2, 16, 2, 64)), "q: expected a torch.Tensor")


HEADS = torch.zeros(2, 2, 64), torch.zeros(2, 2, 64)
PAGES = torch.zeros(2, 2, 16, 16, 64)
SEVERAL = torch.tensor([1, 2])  # which Python takes for no number and no bool

#: Calls with one argument that is no such thing, and the name that the error begins with.
NO_SUCH_THING = {
    "a device": (lambda: quire.BatchAttention(device="junk"), "device"),
    "no device": (lambda: quire.BatchAttention(device=object()), "device"),
    "an estimate": (lambda: quire.estimate(5), "variant"),
    "no head dim": (lambda: quire.is_supported(head_dim=None), "head_dim"),
    "head dims": (lambda: quire.is_supported(head_dim=SEVERAL), "head_dim"),
    "values": (lambda: quire.is_supported(head_dim=64, head_dim_vo="64"), "head_dim_vo"),
    "a target": (lambda: quire.is_supported(head_dim=64, target=5), "target"),
    "a mask": (lambda: quire.is_supported(head_dim=64, mask=1), "mask"),
    "a backend": (lambda: quire.is_supported(head_dim=64, backend=[1]), "backend"),
    "a page size": (lambda: quire.is_supported(head_dim=64, page_size=1.5), "page_size"),
    "rows": (lambda: quire.is_supported(head_dim=64, rows=None), "rows"),
    "lengths": (lambda: Zigzag("junk", 2, 1), "seq_lens"),
    "negative lengths": (lambda: Zigzag(torch.tensor([4, -1]), 2, 1), "seq_lens"),
    "no pages": (lambda: Zigzag(torch.tensor([4]), 2, 0), "page_size"),
    "no ranks": (lambda: Zigzag(torch.tensor([4]), -2, 1), "num_ranks"),
    "heads": (lambda: quire.get_alibi_slopes(2**30), "n_heads"),
    "page bounds": (lambda: quire.page_key_bounds(torch.zeros(2, 2, 4, 1, 32).to(torch.uint32)), "paged_kv_cache"),
    "an output": (lambda: _quantized(q_nope_out=5), "q_nope_out"),
    "another output": (lambda: _quantized(k_nope_out=5), "k_nope_out"),
    "a nested output": (lambda: _quantized(q_nope_out=nested(torch.zeros(2, 8, 8))), "q_nope_out"),
    "a number of a mask": (
        lambda: quire.single_prefill_with_kv_cache_with_jit_module(
            quire.variants.soft_cap, *torch.zeros(3, 4, 2, 32), 1.0, mask_mode=SEVERAL
        ),
        "mask_mode",
    ),
    "no theta": (lambda: quire.apply_rope_pos_ids(*HEADS, i32(0, 7), rope_theta=None), "rope_theta"),
    "no scale of positions": (lambda: quire.apply_rope_pos_ids(*HEADS, i32(0, 7), rope_scale=None), "rope_scale"),
    "no factor": (
        lambda: quire.apply_llama31_rope_pos_ids(*HEADS, i32(0, 7), high_freq_factor=None),
        "high_freq_factor",
    ),
    "no length": (
        lambda: quire.apply_llama31_rope_pos_ids(*HEADS, i32(0, 7), old_context_len=None),
        "old_context_len",
    ),
    "no factor of logits": (
        lambda: quire.xqa_batch_decode_with_kv_cache(
            HEADS[0], PAGES, workspace("cpu"), i32(0, 1)[:, None], i32(3, 4), 16, bmm1_scale=None
        ),
        "bmm1_scale",
    ),
    "no factor of cuDNN's logits": (
        lambda: quire.cudnn_batch_decode_with_kv_cache(
            HEADS[0], PAGES[:, 0], PAGES[:, 1], None, workspace("cpu"), max_sequence_kv=16,
            actual_seq_lens_kv=i32(3, 4), block_tables=i32(0, 1)[:, None],
        ),
        "scale",
    ),
}  # fmt: skip


def nested(tensor):
    with warnings.catch_warnings():  # of torch: nested tensors are a prototype
        warnings.simplefilter("ignore")
        return torch.nested.nested_tensor([tensor])


def _quantized(**options):
    q, k, table = torch.zeros(2, 8, 64), torch.zeros(2, 2, 64), torch.zeros(8, 64)
    return quire.rope.rope_quantize_fp8(
        q, k, None, None, table, torch.tensor([0, 1]), True, torch.float8_e4m3fn, **options
    )


@pytest.mark.parametrize("name", NO_SUCH_THING)
def test_arguments_that_are_no_such_thing(name):
    call, argument = NO_SUCH_THING[name]
    with pytest.raises(ValidationError, match=f"^{argument}: "):
        call()


def test_soft_caps_of_runs_that_are_no_number():
    wrapper = quire.BatchAttention(device="cpu")
    with pytest.raises(ValidationError, match=r"^logits_soft_cap: expected a number or a tensor of one element"):
        wrapper.run(torch.zeros(1, 1, 64), torch.zeros(1, 2, 1, 1, 64), logits_soft_cap=SEVERAL)


@pytest.mark.parametrize(
    ("call", "cure"),
    [
        (
            lambda q, k: quire.single_prefill_with_kv_cache(*(x.transpose(0, 1) for x in (q, k, k))),
            r"q.transpose\(0, 1\)",
        ),
        (lambda q, k: quire.single_prefill_with_kv_cache(q[None], k[None], k[None]), "flash_attn_func takes"),
        (lambda q, k: quire.single_prefill_with_kv_cache(q.numpy(), k, k), r"torch.from_numpy\(q\) makes one"),
        (
            lambda q, k: quire.single_prefill_with_kv_cache(q, k, k, custom_mask=torch.zeros(10, 30)),
            r"Variant\(score=\.\.\.\)",
        ),
    ],
)
def test_what_other_libraries_take_has_a_cure(call: Callable[..., object], cure: str) -> None:
    with pytest.raises(quire.ValidationError, match=cure):
        call(torch.randn(10, 32, 64), torch.randn(30, 8, 64))


def test_rows_that_plan_was_not_told_of_have_a_cure() -> None:
    tables = [torch.tensor(x, dtype=torch.int32) for x in ([0, 1, 2], [0, 1], [5, 5])]
    wrapper = quire.BatchDecodeWithPagedKVCacheWrapper(torch.empty(1 << 20, dtype=torch.uint8))
    wrapper.plan(*tables, 32, 8, 64, 16, q_data_type=torch.float32)
    with pytest.raises(quire.ValidationError, match=r"told of 2 rows: .* q_len_per_req=n"):
        wrapper.run(torch.randn(4, 32, 64), torch.randn(8, 2, 16, 8, 64))


def test_names_that_are_not_there_have_a_cure() -> None:
    for name, cure in (
        ("sampling", "flashinfer.sampling"),
        ("BatchDecodeWithPagedKvCacheWrapper", "mean quire.BatchDecodeWithPagedKVCacheWrapper"),
        ("nothing_like_it", r"dir\(quire\)"),
    ):
        with pytest.raises(AttributeError, match=cure):
            getattr(quire, name)
