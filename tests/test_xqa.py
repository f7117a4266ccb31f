"""Decode from a page table and lengths in one call, against the oracle."""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

import oracle
import quire
from calls import capture, no_synchronisation
from problems import FORMS, NOWHERE, PagedCache, Problem, block_tables, equal_queries, ints, poisoned, workspace

KV_LENS = (37, 1, 0, 300, 128, 129)
LAYOUTS = ("NHD", "HND")
FP8 = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}


def batch(dtype, device, kv_lens=KV_LENS, q_len=1, **more):
    """q_len queries per request, causal if they are several."""
    return equal_queries(q_len, kv_lens, dtype=dtype, device=device, **more)


def arguments(p: Problem, cache: PagedCache, backend: str) -> dict[str, object]:
    """What describes a problem in one call."""
    scale = 1.0 / math.sqrt(p.head_dim) if p.sm_scale is None else p.sm_scale
    return {
        "query": p.q,
        "kv_cache": cache.kv,
        "workspace_buffer": workspace(p.device),
        "block_tables": block_tables(cache),
        "seq_lens": ints(p.kv_lens, p.device),
        "max_seq_len": max([*p.kv_lens, 1]),
        "bmm1_scale": scale * p.k_scale,
        "bmm2_scale": p.v_scale,
        "window_left": p.window_left,
        "kv_layout": cache.kv_layout,
        "q_len_per_req": p.qo_lens[0] if p.qo_lens else 1,
        "backend": backend,
    }


def call(p: Problem, cache: PagedCache, backend: str, **more: object) -> Tensor:
    """The call that a problem describes; `more` overrides its arguments."""
    return quire.xqa_batch_decode_with_kv_cache(**{**arguments(p, cache, backend), **more})


def check(p: Problem, cache: PagedCache, backend: str, *, oracle_options=None, **more: object) -> Tensor:
    """Calls with an `out` of NaN and compares."""
    out = poisoned((p.q.shape[0], p.num_qo_heads, p.v.shape[2]), p.dtype, p.device)
    got = call(p, cache, backend, out=out, **more)
    assert got is out
    p.check(got, **(oracle_options or {}))
    return got


@dataclass(frozen=True)
class Draft:
    """Which new tokens each new token sees: bool [batch_size, q_len, q_len]."""

    sees: Tensor

    @classmethod
    def chain(cls, batch_size: int, q_len: int) -> Draft:
        """Each sees itself and those before it."""
        return cls(torch.ones(q_len, q_len).tril().bool().expand(batch_size, -1, -1))

    @classmethod
    def tree(cls, batch_size: int, q_len: int, seed: int = 0) -> Draft:
        """Each token has a random earlier one for a parent, and sees its ancestors and itself."""
        source = torch.Generator().manual_seed(seed)
        sees = torch.eye(q_len).bool().repeat(batch_size, 1, 1)
        for b in range(batch_size):
            for i in range(1, q_len):
                parent = int(torch.randint(-1, i, (1,), generator=source))
                if parent >= 0:
                    sees[b, i] |= sees[b, parent]
        return cls(sees)

    @classmethod
    def noise(cls, batch_size: int, q_len: int, seed: int = 0) -> Draft:
        """Any bits, later tokens and rows of none among them."""
        source = torch.Generator().manual_seed(seed)
        return cls(torch.rand(batch_size, q_len, q_len, generator=source) < 0.5)

    def words(self, device: str, padding: bool = True) -> Tensor:
        """uint16 [batch_size, q_len, ceil(q_len / 32) * 2]; what lies beyond q_len is `padding`."""
        batch_size, rows, q_len = self.sees.shape
        bits = torch.full((batch_size, rows, -(-q_len // 32) * 32), padding)
        bits[..., :q_len] = self.sees
        weights = 1 << torch.arange(16)
        words = (bits.view(batch_size, rows, -1, 16) * weights).sum(dim=3)
        return words.to(torch.uint16).to(device)

    def mask(self, kv_lens) -> Tensor:
        """The oracle's flat mask: all keys before the draft, and its bits."""
        parts = []
        q_len = self.sees.shape[1]
        for sees, n in zip(self.sees, kv_lens, strict=True):
            whole = torch.cat([torch.ones(q_len, n).bool(), sees], dim=1)
            parts.append(whole[:, q_len:] if n >= q_len else whole[:, whole.shape[1] - n :])
        return torch.cat([part.flatten() for part in parts])


def with_draft(p: Problem, draft: Draft) -> Problem:
    """The same tensors under a tree mask."""
    p.causal, p.mask = False, draft.mask(p.kv_lens)
    return p


def check_draft(p: Problem, draft: Draft, backend: str, **more: object) -> None:
    """The kernel equals the oracle, or says that it has no tree masks."""
    cache = p.paged(16)
    more["mask"] = draft.words(p.device)
    if backend == "quire:fa3":
        with pytest.raises(quire.UnsupportedError, match="a tree mask is for"):
            call(p, cache, backend, **more)
    else:
        check(with_draft(p, draft), cache, backend, **more)


def test_signature():
    """Names, order and defaults of the manual's page; `backend`, `variant` and its operands are ours."""
    parameters = inspect.signature(quire.decode.xqa_batch_decode_with_kv_cache).parameters
    page = {
        **dict.fromkeys(
            ("query", "kv_cache", "workspace_buffer", "block_tables", "seq_lens", "max_seq_len"),
            inspect.Parameter.empty,
        ),
        "bmm1_scale": 1.0,
        "bmm2_scale": 1.0,
        "window_left": -1,
        "out": None,
        "sinks": None,
        "kv_layout": "NHD",
        "enable_pdl": None,
        "q_len_per_req": 1,
        "o_scale": 1.0,
        "mask": None,
        "kv_cache_sf": None,
        "q_cu_seq_lens": None,
    }
    own = inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD
    ours = {name: p.default for name, p in parameters.items() if p.kind not in own}
    assert list(ours.items()) == list(page.items())
    assert quire.xqa_batch_decode_with_kv_cache is quire.decode.xqa_batch_decode_with_kv_cache


@pytest.mark.parametrize("kv_layout", LAYOUTS)
@pytest.mark.parametrize("page_size", [1, 3, 16, 32, 64, 128])
def test_page_sizes(device, backend, dtype, page_size, kv_layout):
    p = batch(dtype, device)
    check(p, p.paged(page_size, kv_layout), backend)


@pytest.mark.parametrize("signature", FORMS)
@pytest.mark.parametrize("kv_layout", LAYOUTS)
def test_cache_forms(device, backend, dtype, kv_layout, signature):
    p = batch(dtype, device)
    check(p, p.paged(16, kv_layout, signature), backend)


def test_layouts_are_bitwise_equal(device, backend, dtype):
    p = batch(dtype, device, q_len=2)
    nhd, hnd = (call(p, p.paged(16, layout), backend) for layout in LAYOUTS)
    assert torch.equal(nhd, hnd)


@pytest.mark.parametrize("kv_layout", LAYOUTS)
def test_one_plane_is_keys_and_values(device, backend, dtype, kv_layout):
    p = batch(dtype, device)
    p.v = p.k
    cache = p.paged(16, kv_layout)
    check(p, replace(cache, kv=cache.kv[0].unsqueeze(1)), backend)


def test_rest_of_the_surface_by_position(device, dtype):
    """As the page writes the call, with nothing by name."""
    p = batch(dtype, device, window_left=40, v_scale=0.5)
    cache = p.paged(16)
    sinks = torch.linspace(-2.0, 3.0, p.num_qo_heads).to(device)
    out = poisoned(p.q.shape, dtype, device)
    got = quire.decode.xqa_batch_decode_with_kv_cache(
        p.q, cache.kv, workspace(device), block_tables(cache), ints(p.kv_lens, device).view(torch.uint32), 300,
        1.0 / math.sqrt(p.head_dim), 0.5, 40, out, sinks, "NHD", False, 1, 1.0, None, None,
    )  # fmt: skip
    assert got is out
    p.check(got, sinks=sinks)


@pytest.mark.parametrize("seq_dtype", [torch.int32, torch.uint32, torch.int64])
@pytest.mark.parametrize("on_host", [False, True])
def test_seq_lens(device, backend, dtype, seq_dtype, on_host):
    p = batch(dtype, device)
    cache = p.paged(16)
    lens = torch.tensor(p.kv_lens, dtype=torch.int64).to(seq_dtype)
    table = block_tables(cache)
    check(
        p, cache, backend, seq_lens=lens if on_host else lens.to(device), block_tables=table.cpu() if on_host else table
    )


@pytest.mark.parametrize("view", ["wide", "transposed", "int64"])
def test_block_tables_of_any_form(device, backend, dtype, view):
    p = batch(dtype, device)
    cache = p.paged(16)
    table = block_tables(cache)
    if view == "wide":
        table = torch.cat([torch.full_like(table, NOWHERE), table, torch.full_like(table, NOWHERE)], dim=1)
        table = table[:, table.shape[1] // 3 : 2 * table.shape[1] // 3]
    elif view == "transposed":
        table = table.t().contiguous().t()
    else:
        table = table.long()
    check(p, cache, backend, block_tables=table)


@pytest.mark.parametrize("window_left", [-1, 0, 7, 127, 1000])
def test_windows(device, backend, dtype, window_left):
    p = batch(dtype, device, window_left=window_left)
    check(p, p.paged(16), backend)


@pytest.mark.parametrize("shape", [(4,), (2, 2), (4, 1)])
def test_sinks(device, backend, dtype, shape):
    """A number a head, in whatever shape holds so many."""
    p = batch(dtype, device)
    sinks = torch.linspace(-2.0, 3.0, 4).to(device)
    check(p, p.paged(16), backend, sinks=sinks.view(shape), oracle_options={"sinks": sinks})


@pytest.mark.parametrize(
    "signature", [float, int, torch.tensor, lambda x: torch.tensor([x])], ids=["float", "int", "0-d", "1-d"]
)
def test_scales(device, backend, dtype, signature):
    """A number or a tensor of one element, on the host or on the device."""
    p = batch(dtype, device, sm_scale=1.0, v_scale=2.0)
    p.q = p.q / 8
    for place in {"cpu", device} if signature not in (float, int) else {"cpu"}:
        scales = [signature(x) for x in (1.0, 2.0)]
        if place != "cpu":
            scales = [x.to(place) for x in scales]
        check(p, p.paged(16), backend, bmm1_scale=scales[0], bmm2_scale=scales[1])


def test_scales_are_1_if_not_given(device, backend, dtype):
    """bmm1_scale is all of the softmax scale: 1 / sqrt(head_dim) is not implied."""
    p = batch(dtype, device, sm_scale=1.0)
    p.q = p.q / 8
    cache = p.paged(16)
    got = quire.xqa_batch_decode_with_kv_cache(
        p.q, cache.kv, workspace(device), block_tables(cache), ints(p.kv_lens, device), 300, backend=backend
    )
    p.check(got)
    assert got.shape == p.q.shape
    assert got.is_contiguous()


@pytest.mark.parametrize("kv_dtype", FP8, ids=FP8.values())
@pytest.mark.parametrize("q_len", [1, 4])
def test_fp8_keys_and_values(device, backend, dtype, kv_dtype, q_len):
    p = batch(dtype, device, (37, 8, 300), q_len, kv_dtype=kv_dtype, k_scale=0.05, v_scale=1.75)
    check(p, p.paged(16), backend)


def test_fp8_output(device, dtype):
    """The kernel's result rounded once more, what is too large held at the largest number; o_scale changes nothing."""
    p = batch(dtype, device, q_len=2, kv_dtype=torch.float8_e4m3fn)
    cache = p.paged(16)
    for v_scale in (1.0, 2000.0):
        wide = call(p, cache, "auto", bmm2_scale=v_scale)
        out = torch.empty(p.q.shape, dtype=torch.float8_e4m3fn, device=device)
        assert call(p, cache, "auto", bmm2_scale=v_scale, out=out, o_scale=0.25) is out
        assert torch.equal(out.float(), wide.clamp(-448, 448).to(out.dtype).float())
    assert float(out.float().abs().max()) == 448


@pytest.mark.parametrize("q_len", [2, 3, 8])
def test_several_queries_are_causal(device, backend, dtype, q_len):
    p = batch(dtype, device, (37, q_len, 300), q_len, window_left=33)
    check(p, p.paged(16), backend)


@pytest.mark.parametrize("q_len", [1, 2, 7, 31, 32, 33, 64, 70])
def test_draft_chains(device, backend, dtype, q_len):
    """The bits of a causal mask give what a causal mask gives."""
    kv_lens = (q_len, q_len + 1, q_len + 31, 300)
    p = batch(dtype, device, kv_lens, q_len, num_qo_heads=2)
    check(p, p.paged(16), backend)
    check_draft(p, Draft.chain(len(kv_lens), q_len), backend)


@pytest.mark.parametrize("q_len", [2, 7, 31, 32, 33, 64, 70])
def test_draft_trees(device, backend, dtype, q_len):
    kv_lens = (q_len, 2 * q_len, 300, 127 + q_len)
    p = batch(dtype, device, kv_lens, q_len)
    check_draft(p, Draft.tree(len(kv_lens), q_len), backend)


@pytest.mark.parametrize("q_len", [4, 40])
def test_any_draft_bits(device, backend, dtype, q_len):
    """Tokens that see later ones, tokens that see nothing of the draft, and requests shorter than it."""
    kv_lens = (q_len, q_len - 3, 1, 0, 300)
    p = batch(dtype, device, kv_lens, q_len)
    check_draft(p, Draft.noise(len(kv_lens), q_len), backend)


@pytest.mark.one_type
@pytest.mark.parametrize("window_left", [0, 5, 40])
@pytest.mark.slow
def test_drafts_in_windows(device, backend, dtype, window_left):
    """A query stands at its own place, so the window cuts draft and prefix alike."""
    p = batch(dtype, device, (300, 9, 64, 8), 8, window_left=window_left)
    check_draft(p, Draft.tree(4, 8), backend)


def test_hidden_draft_tokens_do_not_leak():
    """On the CPU, where a hidden key never enters arithmetic: NaN in a token that only itself sees."""
    for dtype, num_qo_heads in ((torch.float32, 4), (torch.bfloat16, 32)):  # few rows, and a panel of them
        p = batch(dtype, "cpu", (300, 40), 6, num_qo_heads=num_qo_heads)
        draft = Draft.chain(2, 6).sees.clone()
        draft[:, :, 2] = torch.eye(6).bool()[2]
        for end in (300, 340):
            p.k[end - 4], p.v[end - 4] = math.nan, math.nan
        got = call(p, p.paged(16), "quire:cpu", mask=Draft(draft).words("cpu"))
        rows = torch.isnan(got).flatten(1).any(dim=1)
        assert rows.nonzero().flatten().tolist() == [2, 8]


@pytest.mark.slow
def test_drafts_with_sinks_and_fp8(device, dtype):
    p = batch(dtype, device, (300, 9, 64), 8, kv_dtype=torch.float8_e4m3fn, k_scale=0.1, v_scale=3.0)
    sinks = torch.linspace(-2.0, 3.0, p.num_qo_heads).to(device)
    check_draft(p, Draft.tree(3, 8), "auto", sinks=sinks, oracle_options={"sinks": sinks})


def test_drafts_of_unaligned_words(device, dtype):
    """A mask that begins at an odd word of 16 bits, and one with strides."""
    p = batch(dtype, device, (300, 9), 4)
    draft = Draft.tree(2, 4)
    words = draft.words("cpu")
    odd = torch.zeros(words.numel() + 1, dtype=torch.int32).to(torch.uint16)[1:].view(words.shape)
    odd.copy_(words)
    wide = torch.zeros(2, 4, 6, dtype=torch.int32).to(torch.uint16)[..., 1:3]
    wide.copy_(words)
    cache = p.paged(16)
    want = call(p, cache, "auto", mask=words.to(device))
    for view in (odd, wide):
        assert torch.equal(call(p, cache, "auto", mask=view.to(device)), want)
    check(with_draft(p, draft), cache, "auto", mask=words.to(device))


@pytest.mark.parametrize("group_size", [1, 3, 8])
@pytest.mark.parametrize("head_dim", [32, 80, 128, 256])
def test_head_dims_and_groups(device, backend, head_dim, group_size):
    dtype = torch.float16 if head_dim % 32 == 0 else torch.bfloat16
    p = batch(dtype, device, head_dim=head_dim, num_qo_heads=2 * group_size)
    check(p, p.paged(16), backend)


def test_no_requests(device, dtype):
    p = batch(dtype, device, ())
    assert call(p, p.paged(16), "auto").shape == (0, p.num_qo_heads, p.head_dim)


def test_requests_without_tokens(device, backend, dtype):
    """Padding of a batch: zeros, whatever the block table says."""
    p = batch(dtype, device, (0, 0, 5, 0))
    got = check(p, p.paged(16), backend)
    assert not got[[0, 1, 3]].any()


def test_workspace_may_hold_anything(device, dtype):
    p = batch(dtype, device, (5000, 3), num_kv_heads=1, num_qo_heads=8)
    for fill in (0, 0xFF, 0x5A):
        buffer = torch.full((64 << 20,), fill, dtype=torch.uint8, device=device)
        check(p, p.paged(16), "auto", workspace_buffer=buffer)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_call(device, backend, dtype, data):
    q_len = data.draw(st.sampled_from([1, 1, 2, 5, 17]))
    num_kv_heads, group = data.draw(st.integers(1, 3)), data.draw(st.sampled_from([1, 2, 5]))
    kv_lens = tuple(data.draw(st.lists(st.integers(0, 400), min_size=1, max_size=6)))
    p = batch(
        dtype,
        device,
        kv_lens,
        q_len,
        num_qo_heads=num_kv_heads * group,
        num_kv_heads=num_kv_heads,
        window_left=data.draw(st.sampled_from([-1, -1, 0, 33])),
        seed=data.draw(st.integers(0, 1 << 30)),
    )
    page_size = data.draw(st.sampled_from([1, 3, 16, 32]))
    cache = p.paged(page_size, data.draw(st.sampled_from(LAYOUTS)), data.draw(st.sampled_from(FORMS)))
    more: dict[str, object] = {}
    if backend != "quire:fa3" and data.draw(st.booleans()):
        draft = Draft.noise(len(kv_lens), q_len, seed=p.seed)
        with_draft(p, draft)
        more["mask"] = draft.words(device)
    check(p, cache, backend, **more)


# What is refused


def fp16(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.float16)


WRONG = {
    "kv_cache_sf": (
        {"kv_cache_sf": fp16(1)},
        quire.ValidationError,
        "kv_cache_sf: expected None with keys and values of torch.float16",
    ),
    "query dims": ({"query": fp16(2, 1, 4, 64)}, quire.ValidationError, r"query: expected \[batch_size \* q_len"),
    "query rows": ({"query": fp16(3, 4, 64)}, quire.ValidationError, "query: .*got .3, 4, 64"),
    "q_len": ({"q_len_per_req": 2}, quire.ValidationError, r"query: .*q_len_per_req=4"),
    "q_len type": ({"q_len_per_req": 0}, quire.ValidationError, "q_len_per_req: expected a positive integer"),
    "heads": ({"query": fp16(2, 3, 64)}, quire.ValidationError, "num_qo_heads: expected a multiple"),
    "cache dims": (
        {"kv_cache": fp16(8, 16, 2, 64)},
        quire.ValidationError,
        "kv_cache: expected a 5-D tensor or a pair",
    ),
    "cache planes": ({"kv_cache": fp16(8, 3, 16, 2, 64)}, quire.ValidationError, r"kv_cache: .*1 or 2"),
    "cache dtypes": (
        {"kv_cache": (fp16(8, 16, 2, 64), fp16(8, 16, 2, 64).float())},
        quire.ValidationError,
        "kv_cache: expected values of the keys' torch.float16",
    ),
    "cache heads": (
        {"kv_cache": (fp16(8, 16, 2, 64), fp16(8, 16, 4, 64))},
        quire.ValidationError,
        "values.*num_kv_heads=2",
    ),
    "layout": ({"kv_layout": "HDN"}, quire.ValidationError, "kv_layout: expected 'NHD' or 'HND'"),
    "table dims": ({"block_tables": ints([0, 1], "cpu")}, quire.ValidationError, "block_tables: expected"),
    "table dtype": ({"block_tables": fp16(2, 3)}, quire.ValidationError, "block_tables: expected dtype torch.int32"),
    "page number": (
        {"block_tables": ints([[0, 99], [2, 3]], "cpu")},
        quire.ValidationError,
        "page numbers below num_pages=8, got 99",
    ),
    "negative page": ({"block_tables": ints([[0, -5], [2, 3]], "cpu")}, quire.ValidationError, "from 0 on, got -5"),
    "seq_lens shape": ({"seq_lens": ints([20], "cpu")}, quire.ValidationError, "seq_lens: expected .batch_size=2"),
    "seq_lens dtype": ({"seq_lens": fp16(2)}, quire.ValidationError, "seq_lens: expected dtype"),
    "too long": (
        {"seq_lens": ints([20, 33], "cpu")},
        quire.ValidationError,
        r"seq_lens: expected 0\.\.32 .*got 20\.\.33",
    ),
    "negative": ({"seq_lens": ints([20, -1], "cpu")}, quire.ValidationError, r"seq_lens: .*got -1\.\.20"),
    "max_seq_len": ({"max_seq_len": 19}, quire.ValidationError, r"seq_lens: expected 0\.\.19 \(max_seq_len=19"),
    "max_seq_len type": ({"max_seq_len": None}, quire.ValidationError, "max_seq_len: expected a positive integer"),
    "bmm1_scale": ({"bmm1_scale": 0.0}, quire.ValidationError, "bmm1_scale: expected a positive number, got 0.0"),
    "bmm1_scale size": ({"bmm1_scale": torch.ones(2)}, quire.ValidationError, "bmm1_scale: .*one element"),
    "bmm2_scale": ({"bmm2_scale": math.nan}, quire.ValidationError, "bmm2_scale: expected a finite number"),
    "window": ({"window_left": -2}, quire.ValidationError, "window_left: expected -1"),
    "sinks": ({"sinks": torch.zeros(3)}, quire.ValidationError, "sinks: expected .*num_qo_heads=4"),
    "sinks dtype": ({"sinks": fp16(4)}, quire.ValidationError, "sinks: expected a contiguous float32"),
    "out shape": ({"out": fp16(2, 1, 4, 64)}, quire.ValidationError, "out: expected"),
    "out dtype": ({"out": torch.zeros(2, 4, 64, dtype=torch.float8_e5m2)}, quire.UnsupportedError, "o dtype e5m2"),
    "o_scale": ({"o_scale": 2.0}, quire.ValidationError, "o_scale: expected 1 where out is not float8_e4m3fn, got 2.0"),
    "enable_pdl": ({"enable_pdl": 1}, quire.ValidationError, "enable_pdl: expected a bool"),
    "mask dtype": ({"mask": torch.zeros(2, 1, 2)}, quire.ValidationError, "mask: expected dtype torch.uint16"),
    "mask shape": (
        {"mask": torch.zeros(2, 1, 1, dtype=torch.uint16)},
        quire.ValidationError,
        r"mask: expected \[batch_size=2, q_len_per_req=1, .*=2\]",
    ),
    "workspace": ({"workspace_buffer": None}, quire.ValidationError, "workspace_buffer: expected a torch.Tensor"),
    "q dtype": ({"query": fp16(2, 4, 64).double()}, quire.ValidationError, "float64"),
    "kv dtype": (
        {"query": fp16(2, 4, 64).bfloat16()},
        quire.UnsupportedError,
        "kv dtype fp16 differs from q dtype bf16",
    ),
    "backend": ({"backend": "fa4"}, quire.ValidationError, "backend: expected one of"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments(case):
    change, error, message = WRONG[case]
    right: dict[str, object] = {
        "query": fp16(2, 4, 64),
        "kv_cache": fp16(8, 2, 16, 2, 64),
        "workspace_buffer": workspace("cpu"),
        "block_tables": ints([[0, 1], [2, 3]], "cpu"),
        "seq_lens": ints([20, 5], "cpu"),
        "max_seq_len": 100,
    }
    assert not quire.xqa_batch_decode_with_kv_cache(**right).any()
    with pytest.raises(error, match=message):
        quire.xqa_batch_decode_with_kv_cache(**{**right, **change})


# On a GPU


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("q_len", [1, 4])
def test_one_graph_for_all_lengths(q_len):
    """Captured where each request has 16 keys, replayed with other lengths, pages and scales, up to 65536."""
    device, dtype, longest = "cuda:0", torch.bfloat16, 65536
    draft = Draft.tree(3, q_len)
    mask = draft.words(device) if q_len > 1 else None
    scales = [torch.ones(1, device=device), torch.ones((), device=device, dtype=torch.bfloat16)]
    widest = batch(dtype, device, (longest, 1000, 7), q_len)
    kv = tuple(torch.zeros_like(t) for t in widest.paged(16).kv)
    table = torch.zeros(3, longest // 16 + 2, dtype=torch.int32, device=device)
    lens = torch.full((3,), 16, dtype=torch.int32, device=device)
    q, out = torch.zeros_like(widest.q), torch.zeros_like(widest.q)
    buffer = workspace(device)

    def attend() -> None:
        quire.xqa_batch_decode_with_kv_cache(
            q, kv, buffer, table, lens, longest, *scales, out=out, q_len_per_req=q_len, mask=mask
        )

    attend()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attend()
    for kv_lens in [(16, 16, 16), (longest, 1000, 7), (q_len, 5000, 0), (300, 17, 64)]:
        p = batch(dtype, device, kv_lens, q_len)
        cache = p.paged(16)
        for to, source in zip(kv, cache.kv, strict=True):
            to.fill_(math.nan)[: source.shape[0]] = source
        rows = block_tables(cache)
        table.fill_(NOWHERE)[:, : rows.shape[1]] = rows
        lens.copy_(ints(kv_lens, device))
        p.sm_scale, p.v_scale = 0.01 * kv_lens[0] ** 0.25, 0.5 * len(kv_lens)
        for scale, value in zip(scales, (p.sm_scale, p.v_scale), strict=True):
            scale.fill_(value)
        q.copy_(p.q)
        out.fill_(math.nan)
        graph.replay()
        (with_draft(p, draft) if q_len > 1 else p).check(out)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_capture_refuses_what_it_cannot_hold():
    """Lengths and tables on the host."""
    p = batch(torch.bfloat16, "cuda:0")
    right = arguments(p, p.paged(16), "auto")
    want = quire.xqa_batch_decode_with_kv_cache(**right)
    for name, value in [("seq_lens", ints(p.kv_lens, "cpu")), ("block_tables", right["block_tables"].cpu())]:
        wrong = {**right, name: value}
        with capture(), pytest.raises(quire.PlanError, match=f"{name}: expected .* in the capture"):
            quire.xqa_batch_decode_with_kv_cache(**wrong)
    assert torch.equal(quire.xqa_batch_decode_with_kv_cache(**right), want)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_the_host_waits_for_nothing():
    p = batch(torch.bfloat16, "cuda:0", q_len=2)
    everything = arguments(p, p.paged(16), "auto")
    for name in ("bmm1_scale", "bmm2_scale"):
        everything[name] = torch.tensor([everything[name]], device="cuda:0")
    want = quire.xqa_batch_decode_with_kv_cache(**everything)
    with no_synchronisation():
        got = quire.xqa_batch_decode_with_kv_cache(**everything)
    assert torch.equal(got, want)


def test_the_drafts_of_these_tests():
    """What `mask` and `words` say is the same: bit j of row i in word j / 16."""
    draft = Draft.noise(2, 40)
    words = draft.words("cpu", padding=False)
    assert words.shape == (2, 40, 4)
    for b, i, j in [(0, 0, 0), (1, 39, 39), (0, 17, 31), (1, 5, 32)]:
        assert bool((int(words[b, i, j // 16]) >> (j % 16)) & 1) == bool(draft.sees[b, i, j])
    flat = oracle.split_mask(draft.mask((40, 45)), [0, 40, 80], [0, 40, 85])
    assert torch.equal(flat[0], draft.sees[0])
    assert torch.equal(flat[1][:, 5:], draft.sees[1])
    assert flat[1][:, :5].all()
