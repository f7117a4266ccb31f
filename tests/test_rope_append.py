"""The fused prologue: norm, rotation, quantisation and append, in one launch, beside its steps."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import oracle
import quire
from problems import Problem, ints
from quire.engine import rotate
from test_page import bits, halves
from test_rope import heads, table

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
#: Half a unit in the last place, relative, and half the smallest number.
ROUNDING = {E4M3: (2.0**-4, 2.0**-10), E5M2: (2.0**-3, 2.0**-17)}


def assert_quantised(got, exact, scale=1.0):
    """`got`, of 8 bits, is `exact` times `scale`, rounded to nearest, with what is too large made the largest."""
    relative, absolute = ROUNDING[got.dtype]
    want = (exact * scale).clamp(-torch.finfo(got.dtype).max, torch.finfo(got.dtype).max)
    error = (got.cpu().double() - want).abs()
    assert (error <= torch.maximum(want.abs() * relative, torch.tensor(absolute, dtype=torch.float64)) * 1.0001).all()


def assert_is(got, exact, own, scale=1.0):
    """A result in the inputs' dtype, or in 8 bits."""
    if got.dtype in ROUNDING:
        assert_quantised(got, exact, scale)
    else:
        oracle.assert_close(got, exact, own)


class Append:
    """Random tokens that are appended to random requests, and what must come of them."""

    def __init__(
        self, device, dtype, cache_dtype=None, *, lens=(37, 1, 0, 130, 16), new=(5, 1, 0, 40, 16), head_dim=64,
        head_dim_v=64, num_heads=(4, 2), page_size=8, kv_layout="NHD", form="tuple",
    ):  # fmt: skip
        p = Problem((1,) * len(lens), lens, *num_heads, head_dim, head_dim_v, dtype, cache_dtype, device=device)
        self.cache, self.kv_layout, self.dtype = p.paged(page_size, kv_layout, form), kv_layout, dtype
        batch, position = oracle.get_batch_indices_positions(oracle.indptr_of(new), list(lens))
        self.batch_indices, self.positions = ints(batch, device), ints(position, device)
        nnz = sum(new)
        self.q, self.k, self.v = (
            heads(nnz, n, dim, dtype, device)
            for n, dim in ((num_heads[0], head_dim), (num_heads[1], head_dim), (num_heads[1], head_dim_v))
        )
        self.tables = (self.cache.indices, self.cache.indptr)

    def run(self, **options):
        return quire.rope_append_paged_kv_cache(
            self.q,
            self.k,
            self.v,
            self.batch_indices,
            self.positions,
            self.cache.kv,
            *self.tables,
            self.kv_layout,
            **options,
        )

    def turned(self, x, dtype, weight=None, eps=1e-6, rotary_dim=None, interleave=False, scale=1.0, theta=1e4):
        if weight is not None:
            x = oracle.rms_norm(x, weight, eps, dtype)
        angles = oracle.rope_angles(self.positions, rotary_dim or x.shape[-1], scale, theta)
        return oracle.rotate(x, angles.cos(), angles.sin(), interleave, dtype)

    def tokens(self, pages):
        """What the appended tokens are in `pages`, and what else is there."""
        rows = pages.transpose(1, 2) if self.kv_layout == "HND" else pages
        where = [
            (int(self.tables[0][int(self.tables[1][b]) + at // rows.shape[1]]), at % rows.shape[1])
            for b, at in zip(self.batch_indices.tolist(), self.positions.tolist(), strict=True)
        ]
        index = torch.tensor(where, dtype=torch.int64).reshape(-1, 2).to(pages.device).unbind(1)
        rest = rows.float().clone()
        rest[index] = 0
        return rows[index], rest


OPTIONS = [
    {},
    {"interleave": True, "rotary_dim": 32},
    {"rotary_dim": 16, "rope_scale": 3.0, "rope_theta": 5e5},
    {"norm": True},
    {"norm": True, "interleave": True, "eps": 1e-2, "rotary_dim": 48},
]


@pytest.mark.parametrize("kind", ["as tokens", E4M3, E5M2])
@pytest.mark.parametrize(
    ("kv_layout", "form"), [("NHD", "tensor"), ("HND", "tuple"), ("HND", "sliced"), ("NHD", "permuted")]
)
@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "-".join(o) or "plain")
def test_prologue(device, dtype, options, kv_layout, form, kind):
    """Each step in float64; what is not appended to stays as it is."""
    options = dict(options)
    cache_dtype = None if kind == "as tokens" else kind
    call = Append(device, dtype, cache_dtype, kv_layout=kv_layout, form=form)
    weights, scales = {}, {}
    if options.pop("norm", False):
        weights = {n: (torch.rand(64) + 0.5).to(dtype).to(device) for n in ("q_weight", "k_weight")}
    if cache_dtype:
        scales = {"quant_scale_q": 0.5, "quant_scale_k": 3.0, "quant_scale_v": 200.0}
    out = torch.full(call.q.shape, 7.0, device=device).to(cache_dtype or dtype)
    before = [call.tokens(pages)[1] for pages in halves(call.cache.kv)]
    result = call.run(**options, **weights, **scales, out=out)
    assert result is out
    more = {n.removeprefix("rope_"): value for n, value in options.items()}
    for got, x, name in ((result, call.q, "q"), (call.tokens(halves(call.cache.kv)[0])[0], call.k, "k")):
        exact, own = (call.turned(x, kind, weights.get(f"{name}_weight"), **more) for kind in (torch.float64, dtype))
        assert_is(got, exact, own, scales.get(f"quant_scale_{name}", 1.0))
    values = call.tokens(halves(call.cache.kv)[1])[0]
    assert_is(values, call.v.cpu().double(), call.v.cpu(), scales.get("quant_scale_v", 1.0))
    for pages, rest in zip(halves(call.cache.kv), before, strict=True):
        assert torch.equal(bits(call.tokens(pages)[1]), bits(rest))


@pytest.mark.parametrize(
    ("head_dim", "head_dim_v"), [(128, 128), (80, 80), (256, 256), (192, 128), (64, 128), (20, 6), (512, 512), (96, 96)]
)
@pytest.mark.parametrize("view", ["contiguous", "packed", "unaligned"])
def test_prologue_is_its_steps(device, dtype, head_dim, head_dim_v, view):
    """To the last bit, if nothing is normalised or quantised; in place too."""
    one, two = (
        Append(device, dtype, head_dim=head_dim, head_dim_v=head_dim_v, num_heads=(6, 3), page_size=3) for _ in range(2)
    )
    two.q, two.k, two.v = one.q, one.k, one.v
    q_rope, k_rope = quire.apply_rope_pos_ids(one.q, one.k, one.positions)
    quire.append_paged_kv_cache(
        k_rope, one.v, one.batch_indices, one.positions, one.cache.kv, *one.tables, one.cache.last_page_len
    )
    if view != "contiguous":
        for name in "qkv":
            x = getattr(two, name)
            copy = heads(*x.shape, dtype, device, view)
            setattr(two, name, copy.copy_(x))
    assert torch.equal(two.run(out=two.q), q_rope) and torch.equal(two.q, q_rope)
    for got, want in zip(halves(two.cache.kv), halves(one.cache.kv), strict=True):
        assert torch.equal(bits(got), bits(want))


def test_angles_from_a_table_at_other_positions(device, dtype):
    call = Append(device, dtype)
    cache, pos_ids = table(500, 32, device), torch.randint(0, 500, call.positions.shape).to(device)
    got = call.run(cos_sin_cache=cache, pos_ids=pos_ids)
    want, k_rope = quire.apply_rope_with_cos_sin_cache(pos_ids, call.q, call.k, 64, cache)
    assert torch.equal(got, want)
    assert torch.equal(call.tokens(call.cache.kv[0])[0], k_rope)


def test_tokens_without_a_place_are_left_out(device, dtype):
    """Their queries are rotated all the same."""
    call = Append(device, dtype)
    call.batch_indices[3] = -1
    call.positions[:2] = ints([3000, 3001], device)
    kept = [pages.clone() for pages in call.cache.kv]
    want = quire.apply_rope_pos_ids(call.q, call.k, call.positions)
    assert torch.equal(call.run(), want[0])
    oracle_batch = call.batch_indices.clone()
    oracle_batch[:2] = -1
    for got, x, before in zip(call.cache.kv, (want[1], call.v), kept, strict=True):
        full = oracle.append_paged_kv_cache(x, oracle_batch, call.positions, before, *call.tables, "NHD")
        assert torch.equal(bits(got), bits(full))


@pytest.mark.each_value
@pytest.mark.slow
@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize("cache_dtype", [None, E4M3])
def test_many_tokens_are_appended_as_few_are(device, dtype, cache_dtype, has_norm):
    """On a GPU a CTA appends some of them after others."""
    lens = (9000, 0, 11_000, 1)
    a = Append(device, dtype, cache_dtype, lens=lens, new=lens, page_size=16)
    weight = (torch.rand(64) + 0.5).to(dtype).to(device) if has_norm else None
    out, pages = a.run(q_weight=weight), [half.clone() for half in halves(a.cache.kv)]
    few = []
    for q, k, v, *tables in zip(*(t.split(97) for t in (a.q, a.k, a.v, a.batch_indices, a.positions)), strict=True):
        few.append(
            quire.rope_append_paged_kv_cache(q, k, v, *tables, a.cache.kv, *a.tables, a.kv_layout, q_weight=weight)
        )
    assert torch.equal(out, torch.cat(few))
    for got, want in zip(pages, halves(a.cache.kv), strict=True):
        assert torch.equal(bits(got.float()), bits(want.float()))
    assert_is(out, *(a.turned(a.q.cpu(), d, weight) for d in (torch.float64, dtype)))


@pytest.mark.parametrize(("lens", "num_heads"), [((900, 0, 1100, 1), (4, 2)), ((70, 0, 3, 99), (24, 8))])
def test_few_ctas_append_many_tokens(device, dtype, monkeypatch, lens, num_heads):
    """A CTA looks for its next tokens many times; on a GPU some have no place in the cache."""
    monkeypatch.setattr(rotate, "_resident", lambda *_: 3)
    a = Append(device, dtype, E4M3, lens=lens, new=lens, num_heads=num_heads, page_size=16)
    if device != "cpu":
        a.positions[5::7], a.batch_indices[4::9] = -1, 99
    pos_ids = torch.arange(len(a.positions), device=device)
    out, pages = a.run(pos_ids=pos_ids), [half.clone() for half in halves(a.cache.kv)]
    monkeypatch.undo()
    again = a.run(pos_ids=pos_ids)
    assert torch.equal(out, again)
    for got, want in zip(pages, halves(a.cache.kv), strict=True):
        assert torch.equal(bits(got.float()), bits(want.float()))


def test_nothing_to_append(device, dtype):
    call = Append(device, dtype, new=(0, 0, 0, 0, 0))
    before = [pages.clone() for pages in call.cache.kv]
    assert call.run().shape == (0, 4, 64)
    for got, want in zip(call.cache.kv, before, strict=True):
        assert torch.equal(bits(got), bits(want))


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_prologue(device, dtype, data):
    lens = data.draw(st.lists(st.integers(0, 60), min_size=1, max_size=5))
    new = [data.draw(st.integers(0, n)) for n in lens]
    num_heads = data.draw(st.sampled_from([(1, 1), (4, 1), (5, 5), (9, 3), (32, 8)]))
    call = Append(
        device, dtype, data.draw(st.sampled_from([None, E4M3])), lens=lens, new=new, num_heads=num_heads,
        head_dim=data.draw(st.sampled_from([32, 64, 72, 128])), page_size=data.draw(st.sampled_from([1, 3, 8])),
        kv_layout=data.draw(st.sampled_from(["NHD", "HND"])), form=data.draw(st.sampled_from(["tuple", "sliced"])),
    )  # fmt: skip
    options = {"interleave": data.draw(st.booleans()), "rotary_dim": data.draw(st.sampled_from([None, 2, 16, 32]))}
    weight = (torch.rand(call.q.shape[2]) + 0.5).to(dtype).to(device) if data.draw(st.booleans()) else None
    got = call.run(**options, q_weight=weight, k_weight=weight)
    stored = call.tokens(call.cache.kv[0])[0]
    for result, x in ((got, call.q), (stored, call.k)):
        assert_is(result, *(call.turned(x, kind, weight, **options) for kind in (torch.float64, dtype)))


# FlashInfer's signatures


@pytest.mark.parametrize("quantize_dtype", [E4M3, E5M2])
def test_every_number_is_quantised_as_torch_does(device, dtype, quantize_dtype):
    """Also NaN, infinities and what is too large, which torch clamps only if told to."""
    x = (
        torch.arange(1 << 16, dtype=torch.int32)
        .to(torch.int16)
        .view(torch.bfloat16 if dtype is torch.float32 else dtype)
    )
    x = x.to(dtype).reshape(1024, 1, 64).to(device)
    zeros = torch.zeros(1024, 1, 16, dtype=dtype, device=device)
    cache = table(1, 16, device)
    at = torch.zeros(1024, dtype=torch.int32, device=device)
    for scale in (1.0, 1 / 3):
        _, k_rope, q_nope, k_nope = quire.rope_quantize_fp8(
            zeros, zeros, x, x, cache, at, quantize_dtype=quantize_dtype, quant_scale_q=scale, quant_scale_kv=scale
        )
        top = torch.finfo(quantize_dtype).max
        want = (x.float() * torch.tensor(scale, dtype=torch.float32, device=device)).clamp(-top, top).to(quantize_dtype)
        for got in (q_nope, k_nope):
            assert torch.equal(got.float().nan_to_num(1e9), want.float().nan_to_num(1e9))
        assert not k_rope.float().any()


def split_case(device, dtype, kind, rope_dim=32, nope_dim=96, nnz=19):
    num_heads, num_kv_heads = (8, 1) if kind == "mla" else (8, 2)
    q = torch.randn(nnz, num_heads, rope_dim + nope_dim).to(dtype).to(device)
    k = torch.randn(nnz, num_kv_heads, rope_dim + nope_dim).to(dtype).to(device)
    if kind == "mla":
        k = k[:, 0]
    parts = tuple(x[..., part] for part in (slice(rope_dim), slice(rope_dim, None)) for x in (q, k))
    return q, k, [None if x.shape[-1] == 0 else x for x in parts]


def turned(x, positions, rope_dim, is_neox):
    angles = oracle.rope_angles(positions, rope_dim)
    x = x[:, None] if x.dim() == 2 else x
    return oracle.rotate(x, angles.cos(), angles.sin(), not is_neox)


@pytest.mark.parametrize("kind", ["mla", "gqa"])
@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize("nope_dim", [96, 0, 20])
def test_rope_quantize(device, dtype, kind, is_neox, nope_dim):
    """As FlashInfer's own test calls it: parts of one tensor from parts of another."""
    q, k, parts = split_case(device, dtype, kind, nope_dim=nope_dim)
    positions = torch.randint(0, 300, (19,))
    arguments = (*parts, table(300, 32, device), positions.to(device), is_neox)
    function = quire.mla_rope_quantize_fp8 if kind == "mla" else quire.rope_quantize_fp8
    results = function(*arguments, quant_scale_q=2.0, quant_scale_kv=0.5)
    assert [r.shape for r in results] == [(*x.shape[:-1], n) for n in (32, nope_dim) for x in (q, k)]
    assert {r.dtype for r in results} == {E4M3}
    for x, rope, nope, scale in ((q, *results[::2], 2.0), (k, *results[1::2], 0.5)):
        got = torch.cat((rope.float(), nope.float()), -1).to(E4M3).reshape(19, -1, 32 + nope_dim)
        assert_quantised(got, turned(x, positions, 32, is_neox), scale)
    outs = [torch.zeros(x.shape, device=device).to(E5M2) for x in (q, k)]
    names = ("q_rope_out", "k_rope_out", "q_nope_out", "k_nope_out")
    views = {n: outs[i % 2][..., :32] if i < 2 else outs[i % 2][..., 32:] for i, n in enumerate(names)}
    function(*arguments, **views)
    for x, got in zip((q, k), outs, strict=True):
        assert_quantised(got.reshape(19, -1, 32 + nope_dim), turned(x, positions, 32, is_neox))


@pytest.mark.parametrize("kind", ["mla", "gqa"])
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("nope_dim", [96, 0])
def test_rope_quantize_append(device, dtype, kind, kv_layout, nope_dim):
    nope_dim = nope_dim or (64 if kind == "mla" else 0)
    q, k, parts = split_case(device, dtype, kind, nope_dim=nope_dim)
    v = None if kind == "mla" else torch.randn(19, 2, 32 + nope_dim).to(dtype).to(device)
    call = Append(
        device, dtype, E4M3, lens=(30, 9), new=(10, 9), num_heads=(8, 2), head_dim=32 + nope_dim,
        head_dim_v=32 + nope_dim, page_size=16, kv_layout=kv_layout,
    )  # fmt: skip
    if kind == "mla":  # one cache, as engines keep it: two views
        whole = torch.full((6, 16, 32 + nope_dim), math.nan, device=device).to(E4M3)
        kv = whole[..., :nope_dim], whole[..., nope_dim:]
    else:
        kv = call.cache.kv
    pos_ids = torch.randint(0, 300, (19,)).to(device)
    q_rope, q_nope = quire.rope_quantize_fp8_append_paged_kv_cache(
        *parts, v, table(300, 32, device), pos_ids, kv, *call.tables, call.batch_indices, call.positions,
        quant_scale_q=0.25, quant_scale_kv=4.0, page_size=16, kv_layout=kv_layout,
    )  # fmt: skip
    exact_q, exact_k = (turned(x, pos_ids, 32, True) for x in (q, k))
    assert_quantised(q_rope, exact_q[..., :32], 0.25)
    assert q_nope.shape == (19, 8, nope_dim)
    assert_quantised(q_nope, exact_q[..., 32:], 0.25)
    if kind == "mla":
        call.kv_layout = "NHD"
        got = torch.cat([call.tokens(part[:, :, None])[0].float() for part in kv[::-1]], -1).to(E4M3)
        assert_quantised(got, exact_k, 4.0)
        assert int(whole.float().isnan().sum()) == whole.numel() - got.numel()
    else:
        assert_quantised(call.tokens(kv[0])[0], exact_k, 4.0)
        assert_quantised(call.tokens(kv[1])[0], v.cpu().double(), 4.0)


# Refusals

BAD = {
    "q": [lambda t: t[0], lambda t: t.double(), lambda t: None, lambda t: t.transpose(1, 2)],
    "k": [lambda t: t[:-1], lambda t: t[0], lambda t: t.half(), lambda t: t.to("meta")],
    "v": [lambda t: t[:-1], lambda t: t[:, :1], lambda t: t.half(), lambda t: None],
    "batch_indices": [lambda t: t[:-1], lambda t: t.float(), lambda t: None],
    "positions": [lambda t: t[:-1], lambda t: t.float(), lambda t: None],
    "paged_kv_cache": [
        lambda kv: kv[0], lambda kv: None, lambda kv: (kv[0], kv[1].half()), lambda kv: (kv[0].half(), kv[1].half()),
        lambda kv: (kv[0], kv[1][:, :4]), lambda kv: (kv[0][..., :32], kv[1]),
        lambda kv: (kv[0][:1].expand_as(kv[0]), kv[1]),
    ],
    "kv_indices": [lambda t: t.float(), lambda t: None],
    "kv_indptr": [lambda t: t[:0], lambda t: None, lambda t: t.float()],
    "kv_layout": [lambda _: "XYZ", lambda _: None],
    "pos_ids": [lambda _: torch.zeros(3), lambda _: torch.zeros(2, dtype=torch.int32), lambda _: 3],
    "cos_sin_cache": [lambda _: torch.zeros(99, 64).half(), lambda _: torch.zeros(99, 66), lambda _: torch.zeros(64)],
    "rotary_dim": [lambda _: 3, lambda _: 128, lambda _: "64"],
    "interleave": [lambda _: None, lambda _: 1],
    "rope_scale": [lambda _: 0, lambda _: math.nan],
    "rope_theta": [lambda _: 0.1, lambda _: "x"],
    "q_weight": [lambda _: torch.ones(32).bfloat16(), lambda _: torch.ones(64), lambda _: [1.0]],
    "k_weight": [lambda _: torch.ones(64, 1).bfloat16(), lambda _: 1.0],
    "eps": [lambda _: -1e-6, lambda _: math.nan, lambda _: "0"],
    "quant_scale_q": [lambda _: 2.0, lambda _: math.inf],
    "quant_scale_k": [lambda _: 0.5, lambda _: math.nan],
    "quant_scale_v": [lambda _: 0.5, lambda _: "1"],
    "out": [lambda _: torch.zeros(3, 4, 64), lambda _: torch.zeros(3, 4, 32).bfloat16(), lambda _: 1],
}  # fmt: skip


@pytest.mark.parametrize(("name", "index"), [(n, i) for n, changes in BAD.items() for i in range(len(changes))])
def test_bad_arguments_are_named(name, index):
    call = Append("cpu", torch.bfloat16, lens=(20, 9), new=(2, 1))
    arguments = {
        "q": call.q, "k": call.k, "v": call.v, "batch_indices": call.batch_indices, "positions": call.positions,
        "paged_kv_cache": call.cache.kv, "kv_indices": call.cache.indices, "kv_indptr": call.cache.indptr,
    }  # fmt: skip
    kept = [bits(pages.clone()) for pages in call.cache.kv]
    with pytest.raises(quire.ValidationError, match=f"^{name}"):
        quire.rope_append_paged_kv_cache(**{**arguments, name: BAD[name][index](arguments.get(name))})
    assert all(torch.equal(bits(pages), before) for pages, before in zip(call.cache.kv, kept, strict=True))


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"kv_indices": [0, 99, 1, 2, 3]}, "kv_indices"),
        ({"kv_indices": [0]}, "kv_indices"),
        ({"kv_indptr": [0, 3, 2]}, "kv_indptr"),
        ({"batch_indices": [0, 0, 2]}, "batch_indices"),
    ],
)
def test_tables_never_lead_outside_the_cache(device, dtype, change, name):
    """They are refused on the host; on a device such tokens are left out."""
    call = Append(device, dtype, lens=(20, 9), new=(2, 1), page_size=8)
    guard = [torch.zeros_like(pages) for pages in call.cache.kv]
    tables = {"kv_indices": call.cache.indices, "kv_indptr": call.cache.indptr, "batch_indices": call.batch_indices}
    tables |= {n: ints(values, device) for n, values in change.items()}
    run = lambda: quire.rope_append_paged_kv_cache(  # noqa: E731 - must raise on one device and not on another
        call.q, call.k, call.v, positions=call.positions, paged_kv_cache=tuple(guard), **tables
    )
    if device == "cpu":
        with pytest.raises(quire.ValidationError, match=name):
            run()
        assert not any(pages.any() for pages in guard)
    else:
        run()


def test_results_that_lie_on_inputs_are_refused(device, dtype):
    call = Append(device, dtype, lens=(20, 9), new=(2, 1))
    packed = torch.randn(3, 8, 64).to(dtype).to(device)
    call.q, call.k, call.v = packed[:, :4], packed[:, 4:6], packed[:, 6:]
    for out in (packed[:, 1:5], packed[:, 4:]):
        with pytest.raises(quire.ValidationError, match=r"^out: expected memory of its own"):
            call.run(out=out)
    want = quire.apply_rope_pos_ids(call.q, call.k, call.positions)[0]
    assert torch.equal(call.run(out=call.q), want)
    flat = torch.randn(7, 2, 8, 2, 64).to(dtype).to(device)
    call.cache = type(call.cache)((flat[:6, 0], flat[1:, 0]), *list(vars(call.cache).values())[1:])
    with pytest.raises(quire.ValidationError, match=r"^k_cache: expected memory of its own"):
        call.run()


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"page_size": 8}, "page_size"),
        ({"quantize_dtype": torch.bfloat16}, "quantize_dtype"),
        ({"quantize_dtype": E5M2}, "paged_kv_cache"),
        ({"v": None}, "v"),
        ({"is_neox": 1}, "is_neox"),
        ({"enable_pdl": "yes"}, "enable_pdl"),
        ({"cos_sin_cache": torch.zeros(30, 16)}, "cos_sin_cache"),
        ({"q_nope": None, "q_nope_out": torch.zeros(3, 4, 32).to(E4M3)}, "q_nope_out"),
        ({"k_nope": None}, "paged_kv_cache"),
        ({"quant_scale_kv": math.nan}, "quant_scale_kv"),
    ],
)
def test_bad_arguments_of_split_heads_are_named(change, name):
    call = Append("cpu", torch.bfloat16, E4M3, lens=(20, 9), new=(2, 1), page_size=16)
    arguments = {
        "q_rope": call.q[..., :32], "k_rope": call.k[..., :32], "q_nope": call.q[..., 32:], "k_nope": call.k[..., 32:],
        "v": call.v, "cos_sin_cache": table(30, 32, "cpu"), "pos_ids": call.positions, "paged_kv_cache": call.cache.kv,
        "kv_indices": call.tables[0], "kv_indptr": call.tables[1], "batch_indices": call.batch_indices,
        "positions": call.positions,
    }  # fmt: skip
    quire.rope_quantize_fp8_append_paged_kv_cache(**arguments)
    with pytest.raises(quire.ValidationError, match=f"^{name}"):
        quire.rope_quantize_fp8_append_paged_kv_cache(**{**arguments, **change})
