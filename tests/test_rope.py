"""Rotary embeddings: rotating queries and keys, and rotating them on their way into a paged cache."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import oracle
import quire
from problems import ints, poisoned

LLAMA31 = (1.0, 4.0, 8192.0)


def heads(nnz, num_heads, head_dim, dtype, device, view="contiguous"):
    """Random heads: contiguous, or a view of a packed projection, of which the rest is NaN."""
    x = torch.randn(nnz, num_heads, head_dim).to(dtype).to(device)
    if view == "contiguous":
        return x
    odd = 1 if view == "unaligned" else 16
    packed = poisoned((nnz, num_heads + 2, head_dim + odd), dtype, device)
    packed[:, 1:-1, odd:] = x
    return packed[:, 1:-1, odd:]


def truth(x, positions, rotary_dim=None, interleave=False, scale=1.0, theta=1e4, llama31=None):
    """What x becomes, and torch's own answer in its dtype."""
    angles = oracle.rope_angles(positions, rotary_dim or x.shape[-1], scale, theta, llama31)
    return tuple(oracle.rotate(x, angles.cos(), angles.sin(), interleave, dtype) for dtype in (torch.float64, x.dtype))


def check(got, x, positions, **options):
    assert got.dtype == x.dtype and got.device == x.device
    oracle.assert_close(got, *truth(x, positions, **options))


@pytest.mark.parametrize("view", ["contiguous", "packed", "unaligned"])
@pytest.mark.parametrize("interleave", [False, True])
@pytest.mark.parametrize(
    ("head_dim", "rotary_dim"),
    [(64, None), (128, None), (128, 64), (80, 40), (96, 72), (256, 16), (20, 6), (512, None)],
)
def test_rotation(device, dtype, head_dim, rotary_dim, interleave, view):
    positions = torch.tensor([0, 1, 131072, 7, 4095, 131071, 100, 1 << 20, 65537, 3, 2, 9, 5])
    q, k = (heads(13, n, head_dim, dtype, device, view) for n in (5, 2))
    kept = q.clone(), k.clone()
    got = quire.apply_rope_pos_ids(q, k, positions.to(device), rotary_dim, interleave)
    for result, x in zip(got, (q, k), strict=True):
        check(result, x, positions, rotary_dim=rotary_dim, interleave=interleave)
    assert torch.equal(q, kept[0]) and torch.equal(k, kept[1])
    quire.apply_rope_pos_ids_inplace(q, k, positions.to(device), rotary_dim, interleave)
    assert torch.equal(q, got[0]) and torch.equal(k, got[1])


@pytest.mark.parametrize(("nnz", "num_heads", "head_dim"), [(20_000, (5, 2), 64), (2000, (130, 1), 128)])
def test_many_tokens_are_rotated_as_few_are(device, dtype, nnz, num_heads, head_dim):
    """On a GPU a CTA rotates some of them after others, or a part of each."""
    q, k = (heads(nnz, n, head_dim, dtype, device) for n in num_heads)
    positions = torch.arange(nnz, device=device)
    got = quire.apply_rope_pos_ids(q, k, positions)
    few = [quire.apply_rope_pos_ids(*parts) for parts in zip(*(t.split(97) for t in (q, k, positions)), strict=True)]
    for result, *want in zip(got, *few, strict=True):
        assert torch.equal(result, torch.cat(want))
    check(got[0][:, :1], q[:, :1], positions.cpu())


def test_only_the_views_are_written(device, dtype):
    q = heads(5, 3, 64, dtype, device, "packed")
    whole = q._base
    quire.apply_rope_pos_ids_inplace(q, heads(5, 1, 64, dtype, device), ints(range(5), device))
    assert int(whole.isnan().sum()) == whole.numel() - q.numel()


@pytest.mark.parametrize("positions", [[131072] * 3, [-1, -131072, 5], [2**31 - 1, -(2**31), 2**24 + 1]])
def test_far_positions(device, positions):
    """To the last bits of float32, at any position."""
    q, k = (heads(3, n, 64, torch.float32, device) for n in (2, 1))
    got, _ = quire.apply_rope_pos_ids(q, k, torch.tensor(positions, device=device), rope_theta=5e5)
    want, _ = truth(q, torch.tensor(positions), theta=5e5)
    error = float((got.cpu().double() - want).abs().max())
    assert error < 1e-6 if max(positions) < 2**20 else error < 4e-6, error


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    "lens", [(3, 0, 5, 1), (0, 0, 4), (1,) * 300, (700, 1, 2), (0,), ()], ids=lambda n: str(n)[:16]
)
def test_requests(device, dtype, lens, index_dtype):
    """Tokens of request b follow offsets[b], also behind empty requests."""
    offsets = torch.tensor([5 * b - 7 for b in range(len(lens))], dtype=index_dtype, device=device)
    indptr = torch.tensor(oracle.indptr_of(lens), dtype=index_dtype, device=device)
    positions = torch.tensor([5 * b - 7 + i for b, n in enumerate(lens) for i in range(n)], dtype=index_dtype)
    q, k = (heads(sum(lens), n, 32, dtype, device) for n in (3, 1))
    got = quire.apply_rope(q, k, indptr, offsets, interleave=True, rope_scale=2.5, rope_theta=1e5)
    for result, x in zip(got, (q, k), strict=True):
        check(result, x, positions, interleave=True, scale=2.5, theta=1e5)
    by_position = quire.apply_rope_pos_ids(q, k, positions.to(device), None, True, 2.5, 1e5)
    assert all(torch.equal(a, b) for a, b in zip(got, by_position, strict=True))
    quire.apply_rope_inplace(q, k, indptr, offsets, None, True, 2.5, 1e5)
    assert torch.equal(q, got[0]) and torch.equal(k, got[1])


@pytest.mark.parametrize("llama31", [LLAMA31, (0.5, 2.0, 1000.0), (2.0, 8.0, 65536.0)])
@pytest.mark.parametrize("scale", [8.0, 32.0, 0.5])
def test_llama31(device, dtype, scale, llama31):
    low, high, length = llama31
    options = {"rope_scale": scale, "low_freq_factor": low, "high_freq_factor": high, "old_context_len": int(length)}
    q, k = (heads(4, n, 128, dtype, device) for n in (5, 1))
    positions = torch.tensor([9000, 9001, 131071, 131072])
    got = quire.apply_llama31_rope_pos_ids(q, k, positions.to(device), **options)
    for result, x in zip(got, (q, k), strict=True):
        check(result, x, positions, scale=scale, theta=5e5, llama31=llama31)
    starts = (ints([0, 2, 4], device), ints([9000, 131071], device))
    assert torch.equal(quire.apply_llama31_rope(q, k, *starts, **options)[0], got[0])
    again = q.clone(), k.clone()
    quire.apply_llama31_rope_inplace(*again, *starts, **options)
    quire.apply_llama31_rope_pos_ids_inplace(q, k, positions.to(device), **options)
    assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(got, again, (q, k), strict=True))


def table(rows, rotary_dim, device, theta=1e4):
    angles = oracle.rope_angles(torch.arange(rows), rotary_dim, 1.0, theta)
    return torch.cat((angles.cos(), angles.sin()), 1).float().to(device)


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize(("head_size", "rotary_dim"), [(64, 64), (128, 64), (80, 20), (1024, 1024)])
def test_cos_sin_cache(device, dtype, head_size, rotary_dim, is_neox, index_dtype):
    """Angles of a table are those that are computed, up to the rounding of the table."""
    positions = torch.tensor([0, 99, 5, 5, 98], dtype=index_dtype)
    query, key = (torch.randn(5, n * head_size).to(dtype).to(device) for n in (3, 2))
    cache = table(100, rotary_dim, device)
    got = quire.apply_rope_with_cos_sin_cache(positions.to(device), query, key, head_size, cache, is_neox)
    for result, x in zip(got, (query, key), strict=True):
        assert result.shape == x.shape
        check(
            result.unflatten(1, (-1, head_size)), x.unflatten(1, (-1, head_size)), positions, rotary_dim=rotary_dim,
            interleave=not is_neox,
        )  # fmt: skip
    quire.apply_rope_with_cos_sin_cache_inplace(positions.to(device), query, key, head_size, cache, is_neox)
    assert torch.equal(query, got[0]) and torch.equal(key, got[1])


def test_cos_sin_cache_of_a_packed_projection(device, dtype):
    """As engines call it: query and key are columns of one matrix, the table a part of a bigger one."""
    qkv = torch.randn(7, 6 * 64).to(dtype).to(device)
    query, key, value = qkv.clone().split([3 * 64, 2 * 64, 64], 1)
    cache = table(50, 96, device)[:, 16:80]
    positions = torch.arange(7, device=device)
    want = quire.apply_rope_with_cos_sin_cache(positions, query.contiguous(), key.contiguous(), 64, cache.contiguous())
    quire.apply_rope_with_cos_sin_cache_inplace(positions, query, key, 64, cache)
    assert torch.equal(query, want[0]) and torch.equal(key, want[1]) and torch.equal(value, qkv[:, 5 * 64 :])
    three = [t.unflatten(1, (-1, 64)).contiguous() for t in qkv.split([3 * 64, 2 * 64, 64], 1)[:2]]
    rotated = quire.apply_rope_with_cos_sin_cache(positions, *three, 64, cache)
    assert torch.equal(rotated[0].flatten(1), want[0]) and rotated[0].shape == (7, 3, 64)


def test_a_position_that_is_none(device, dtype):
    """It is refused on the host, where it can be looked at; on a device its token alone gets NaN."""
    q, k = (heads(3, n, 64, dtype, device) for n in (2, 1))
    cache = table(10, 64, device)
    calls = [
        lambda: quire.apply_rope_with_cos_sin_cache(ints([0, 10, 9], device), q, k, 64, cache),
        lambda: quire.apply_rope_with_cos_sin_cache(ints([0, -1, 9], device), q, k, 64, cache),
        lambda: quire.apply_rope_pos_ids(q, k, torch.tensor([0, 1 << 40, 9], device=device)),
    ]
    for call in calls:
        if device == "cpu":
            with pytest.raises(quire.ValidationError, match=r"positions|pos_ids"):
                call()
        else:
            for result, x in zip(call(), (q, k), strict=True):
                assert result[1].isnan().all()
                check(result[::2], x[::2], torch.tensor([0, 9]))


def test_tokens_behind_the_last_request(device, dtype):
    q, k = (heads(3, n, 64, dtype, device) for n in (2, 1))
    starts = ints([0, 2], device), ints([4], device)
    if device == "cpu":
        with pytest.raises(quire.ValidationError, match="indptr: expected to end with nnz=3"):
            quire.apply_rope(q, k, *starts)
    else:
        result, _ = quire.apply_rope(q, k, *starts)
        assert result[2].isnan().all()
        check(result[:2], q[:2], torch.tensor([4, 5]))


def test_queries_and_keys_that_lie_on_each_other_are_refused(device, dtype):
    packed = torch.randn(4, 6, 64).to(dtype).to(device)
    positions = ints(range(4), device)
    overlapping = [
        (packed, packed), (packed[:, :4], packed[:, 3:]), (packed[:3], packed[1:]),
        (packed[:2, :, :32], packed[:2, :, 8:40]),
    ]  # fmt: skip
    for q, k in overlapping:
        kept = packed.clone()
        with pytest.raises(quire.ValidationError, match="q: expected memory of its own"):
            quire.apply_rope_pos_ids_inplace(q, k, positions[: q.shape[0]])
        assert torch.equal(packed, kept)
    want = quire.apply_rope_pos_ids(packed[:, :4], packed[:, 4:], positions)
    quire.apply_rope_pos_ids_inplace(packed[:, :4], packed[:, 4:], positions)
    assert torch.equal(packed, torch.cat(want, 1))


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_rotation(device, dtype, data):
    nnz, head_dim = data.draw(st.integers(0, 40)), data.draw(st.sampled_from([2, 8, 16, 48, 64, 72, 128, 200]))
    rotary_dim = data.draw(st.none() | st.integers(1, head_dim // 2).map(lambda n: 2 * n))
    interleave, view = data.draw(st.booleans()), data.draw(st.sampled_from(["contiguous", "packed", "unaligned"]))
    scale, theta = data.draw(st.sampled_from([0.3, 1, 4.5])), data.draw(st.sampled_from([1, 100.0, 1e4, 1e6]))
    positions = torch.tensor(
        data.draw(st.lists(st.integers(-5, 200000), min_size=nnz, max_size=nnz)), dtype=torch.int64
    )
    q, k = (heads(nnz, data.draw(st.integers(1, 9)), head_dim, dtype, device, view) for _ in range(2))
    got = quire.apply_rope_pos_ids(q, k, positions.to(device), rotary_dim, interleave, scale, theta)
    for result, x in zip(got, (q, k), strict=True):
        check(result, x, positions, rotary_dim=rotary_dim, interleave=interleave, scale=scale, theta=theta)


BAD = {
    "q": [lambda t: t[0], lambda t: t.double(), lambda t: None, lambda t: t.transpose(1, 2)],
    "k": [lambda t: t[:-1], lambda t: t[..., :32], lambda t: t.half(), lambda t: [1.0], lambda t: t.to("meta")],
    "pos_ids": [lambda t: t[:-1], lambda t: t.float(), lambda t: None, lambda t: t[:, None], lambda t: t.tolist()],
    "rotary_dim": [lambda _: 3, lambda _: 66, lambda _: 0, lambda _: -2, lambda _: 2.0, lambda _: "64", lambda _: True],
    "interleave": [lambda _: 1, lambda _: None, lambda _: "yes"],
    "rope_scale": [lambda _: 0, lambda _: -1.0, lambda _: math.nan, lambda _: math.inf, lambda _: 1e-5, lambda _: "1"],
    "rope_theta": [lambda _: 0, lambda _: 0.5, lambda _: math.nan, lambda _: 1e300, lambda _: [1e4]],
    "low_freq_factor": [lambda _: math.nan, lambda _: "1", lambda _: math.inf],
    "high_freq_factor": [lambda _: 1, lambda _: 0.5, lambda _: math.nan],
    "old_context_len": [lambda _: 0, lambda _: -8, lambda _: math.nan, lambda _: "x"],
}


@pytest.mark.parametrize(("name", "index"), [(n, i) for n, changes in BAD.items() for i in range(len(changes))])
@pytest.mark.parametrize("in_place", [False, True])
def test_bad_arguments_are_named(device, name, index, in_place):
    arguments = {
        "q": heads(3, 2, 64, torch.bfloat16, device), "k": heads(3, 1, 64, torch.bfloat16, device),
        "pos_ids": ints([0, 5, 7], device), "rotary_dim": None, "interleave": False, "rope_scale": 8, "rope_theta": 1e4,
        "low_freq_factor": 1, "high_freq_factor": 4, "old_context_len": 8192,
    }  # fmt: skip
    arguments[name] = BAD[name][index](arguments[name])
    call = quire.apply_llama31_rope_pos_ids_inplace if in_place else quire.apply_llama31_rope_pos_ids
    with pytest.raises(quire.ValidationError, match=f"^{name}"):
        call(**arguments)


BAD_TABLE = {
    "positions": [lambda t: t[:-1], lambda t: t.float(), lambda t: None],
    "query": [lambda t: t[:, :-1], lambda t: t.double(), lambda t: t[0], lambda t: None],
    "key": [lambda t: t[:, :40], lambda t: t.half(), lambda t: t[:-1]],
    "head_size": [lambda _: 0, lambda _: 2.5, lambda _: None, lambda _: "64"],
    "cos_sin_cache": [
        lambda t: t.half(), lambda t: t[0], lambda t: t[:, :63], lambda t: t[:, :0], lambda t: t.t(), lambda t: None,
        lambda t: torch.cat((t, t), 1),
    ],
    "is_neox": [lambda _: 1, lambda _: "yes"],
}  # fmt: skip


@pytest.mark.parametrize(("name", "index"), [(n, i) for n, changes in BAD_TABLE.items() for i in range(len(changes))])
def test_bad_arguments_of_a_table_are_named(device, name, index):
    arguments = {
        "positions": ints([0, 5, 7], device), "query": torch.randn(3, 128, device=device),
        "key": torch.randn(3, 64, device=device), "head_size": 64, "is_neox": True,
        "cos_sin_cache": table(10, 64, device),
    }  # fmt: skip
    arguments[name] = BAD_TABLE[name][index](arguments[name])
    for call in (quire.apply_rope_with_cos_sin_cache, quire.apply_rope_with_cos_sin_cache_inplace):
        with pytest.raises(quire.ValidationError, match=f"^{name}"):
            call(**arguments)
