"""FlashInfer's calls of cuDNN by Quire's kernels, against the oracle."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import quire
from problems import PagedCache, Problem, block_tables, ints, poisoned, workspace
from test_xqa import KV_LENS

QO_LENS, PREFILL_KV_LENS = (3, 0, 1, 20), (40, 5, 7, 65)
LN2 = math.log(2)


def decode_arguments(p: Problem, cache: PagedCache, **more: object) -> dict[str, object]:
    """Those of the call that a problem describes; `more` overrides them."""
    arguments: dict[str, object] = {
        "q": p.q, "k_cache": cache.kv[0], "v_cache": cache.kv[1],
        "scale": p.head_dim**-0.5 if p.sm_scale is None else p.sm_scale, "workspace_buffer": workspace(p.device),
        "max_sequence_kv": max(p.kv_lens), "actual_seq_lens_kv": ints(p.kv_lens, p.device),
        "block_tables": block_tables(cache), "q_len_per_req": p.qo_lens[0], "window_left": p.window_left,
    }  # fmt: skip
    return {**arguments, **more}


def decode(p: Problem, cache: PagedCache, **more: object) -> object:
    return quire.cudnn_batch_decode_with_kv_cache(**decode_arguments(p, cache, **more))


def decodes(device: str, dtype: torch.dtype, q_len: int = 1, **more: object) -> Problem:
    return Problem((q_len,) * len(KV_LENS), KV_LENS, dtype=dtype, device=device, causal=q_len > 1, **more)


@pytest.mark.parametrize("signature", ["tuple", "permuted", "sliced"])
@pytest.mark.parametrize("q_len", [1, 3])
def test_decode(device, backend, dtype, q_len, signature):
    p = decodes(device, dtype, q_len, window_left=40, sm_scale=0.2)
    cache = p.paged(16, "HND", signature)
    pair = cache.kv.unbind(1) if isinstance(cache.kv, Tensor) else cache.kv
    out, lse = poisoned(p.q.shape, dtype, device), poisoned(p.q.shape[:2], torch.float32, device)
    sinks = torch.randn(p.num_qo_heads, device=device)
    options = {"k_cache": pair[0], "v_cache": pair[1], "backend": backend}
    p.check(*decode(p, cache, **options, return_lse=True))
    got = decode(p, cache, **options, out=out, lse=lse, return_lse=True, sinks=sinks)
    assert got[0] is out and got[1] is lse
    p.check(out, lse, sinks=sinks)


def test_lengths_and_offsets_of_decode(device, dtype):
    """Lengths of four dimensions, as cuDNN has them, and offsets that say what is so anyway."""
    p = decodes(device, dtype)
    cache, lens = p.paged(16, "HND", "tuple"), ints(p.kv_lens, device).view(-1, 1, 1, 1)
    row = p.num_qo_heads * p.head_dim
    for number in (len(p.kv_lens), len(p.kv_lens) + 1):
        offsets = torch.arange(number, device=device) * row
        p.check(decode(p, cache, actual_seq_lens_kv=lens, batch_offsets_q=offsets, batch_offsets_o=offsets.int()))
    p.check(decode(p, cache, actual_seq_lens_kv=lens.long(), is_cuda_graph_compatible=True))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs")
def test_decode_in_a_cuda_graph():
    p = decodes("cuda", torch.bfloat16)
    out = torch.empty_like(p.q)
    arguments = decode_arguments(p, p.paged(16, "HND", "tuple"), out=out)
    quire.cudnn_batch_decode_with_kv_cache(**arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        quire.cudnn_batch_decode_with_kv_cache(**arguments)
    out.fill_(math.nan)
    graph.replay()
    p.check(out)


WRONG_DECODE = {
    "actual_seq_lens_kv": {"actual_seq_lens_kv": None},
    "actual_seq_lens_kv: expected .batch_size.": {"actual_seq_lens_kv": torch.ones(6, 1).int()},
    "actual_seq_lens_kv: expected 0..300 .max_sequence_kv=300": {"actual_seq_lens_kv": torch.full((6,), 301).int()},
    "max_sequence_kv": {"max_sequence_kv": 0},
    "block_tables": {"block_tables": None},
    "block_tables: expected .batch_size=6, pages.": {"block_tables": torch.zeros(5, 30).int()},
    "k_cache: expected .num_pages, num_kv_heads, page_size, head_dim_qk.": {"k_cache": torch.zeros(9, 2, 64)},
    "v_cache: expected .num_pages=": {"v_cache": torch.zeros(1, 2, 16, 64)},
    "q: expected .batch_size . q_len_per_req=12,": {"q_len_per_req": 2},
    "q_len_per_req": {"q_len_per_req": 0},
    "scale: expected a positive": {"scale": -1.0},
    "batch_offsets_q: expected requests one after": {"batch_offsets_q": torch.arange(6) * 2 * 4 * 64},
    "batch_offsets_q: expected dtype": {"batch_offsets_q": torch.arange(6.0) * 4 * 64},
    "batch_offsets_o: expected .batch_size . 1=7": {"batch_offsets_o": torch.arange(5) * 4 * 64},
    "batch_offsets_k: not supported by this call, as block_tables says": {"batch_offsets_k": torch.arange(6)},
    "batch_offsets_v: not supported": {"batch_offsets_v": torch.arange(6)},
    "is_cuda_graph_compatible: expected a bool": {"is_cuda_graph_compatible": 1},
    "return_lse: expected a bool": {"return_lse": 1},
    "window_left": {"window_left": "all"},
    "out: expected": {"out": torch.zeros(5, 4, 64)},
    "lse: expected": {"lse": torch.zeros(5, 4), "return_lse": True},
    "sinks: expected": {"sinks": torch.zeros(3)},
}


@pytest.mark.parametrize("message", WRONG_DECODE)
def test_wrong_arguments_of_decode(message):
    p = decodes("cpu", torch.float32)
    with pytest.raises(quire.ValidationError, match=f"^{message}"):
        decode(p, p.paged(16, "HND", "tuple"), **WRONG_DECODE[message])


def prefills(device: str, dtype: torch.dtype, **more: object) -> Problem:
    return Problem(QO_LENS, PREFILL_KV_LENS, dtype=dtype, device=device, **more)


def arguments(p: Problem, kind: str) -> dict[str, object]:
    """The keys and values of a problem, in pages or as they are."""
    if kind == "ragged":
        return {"k_cache": p.k, "v_cache": p.v}
    cache = p.paged(16, "HND", kind)
    k, v = cache.kv.unbind(1) if isinstance(cache.kv, Tensor) else cache.kv
    return {"k_cache": k, "v_cache": v, "block_tables": block_tables(cache)}


def prefill(p: Problem, kind: str, **more: object) -> tuple[Tensor, Tensor | None]:
    """The call that a problem describes; `more` overrides its arguments."""
    right: dict[str, object] = {
        "q": p.q, "scale": p.head_dim**-0.5 if p.sm_scale is None else p.sm_scale,
        "workspace_buffer": workspace(p.device), "max_token_per_sequence": max(p.qo_lens, default=1),
        "max_sequence_kv": max(p.kv_lens, default=1), "actual_seq_lens_q": ints(p.qo_lens, p.device).view(-1, 1, 1, 1),
        "actual_seq_lens_kv": ints(p.kv_lens, p.device).view(-1, 1, 1, 1), "causal": p.causal, "return_lse": True,
        **arguments(p, kind),
    }  # fmt: skip
    return quire.prefill.cudnn_batch_prefill_with_kv_cache(**{**right, **more})


def packed(lse: Tensor) -> Tensor:
    """The rows of queries in an lse [batch_size, max_token_per_sequence, num_qo_heads], the rest of which is -inf."""
    rows = torch.cat([one[:n] for one, n in zip(lse, QO_LENS, strict=True)])
    assert all((one[n:] == -math.inf).all() for one, n in zip(lse, QO_LENS, strict=True))
    return rows


KINDS = ("ragged", "tuple", "permuted", "sliced")


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_prefill(device, backend, dtype, kind, causal):
    p = prefills(device, dtype, causal=causal, sm_scale=0.2)
    o, lse = prefill(p, kind, backend=backend)
    p.check(o, packed(lse))
    out, statistics = poisoned(p.q.shape, dtype, device), poisoned((4, 20, 4), torch.float32, device)
    got = prefill(p, kind, backend=backend, out=out, lse=statistics, lse_base="ln")
    assert got[0] is out and got[1] is statistics
    p.check(out, packed(statistics) / LN2)
    o, nothing = prefill(p, kind, backend=backend, return_lse=False)
    assert nothing is None
    p.check(o)


@pytest.mark.one_type
@pytest.mark.parametrize("units", ["elements", "tokens"])
@pytest.mark.parametrize("kind", ["ragged", "tuple"])
def test_offsets(device, dtype, kind, units):
    """They repeat what lengths say, or say it in their place; those of statistics say where their rows are."""
    p = prefills(device, dtype, causal=True, head_dim_vo=32)
    qo, kv, size = ints(p.qo_indptr, device), ints(p.kv_indptr, device).long(), units == "elements"
    offsets = {"q": qo * (4 * 64 if size else 1), "o": qo * (4 * 32 if size else 1), "stats": qo * (4 if size else 1)}
    if kind == "ragged":
        offsets |= {"k": kv * (2 * 64 if size else 1), "v": kv * (2 * 32 if size else 1)}
    given = {f"batch_offsets_{name}": tensor for name, tensor in offsets.items()} | {"batch_offsets_units": units}
    lens = {} if size else {"actual_seq_lens_q": None}
    if kind == "ragged" and not size:
        lens["actual_seq_lens_kv"] = None
    o, lse = prefill(p, kind, **given, **lens)
    assert lse.shape == (4, 20, 4) and (lse.flatten(0, 1)[24:] == -math.inf).all()
    p.check(o, lse.flatten(0, 1)[:24])
    rows = poisoned((24, 4), torch.float32, device)
    o, lse = prefill(p, kind, **given, lse=rows)
    assert lse is rows
    p.check(o, rows)


@pytest.mark.slow
@pytest.mark.parametrize("o_dtype", [None, torch.float16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("kind", ["ragged", "tuple"])
def test_eight_bits_and_their_scales(device, kind, o_dtype):
    e4m3 = torch.float8_e4m3fn
    p = prefills(device, torch.bfloat16, kv_dtype=e4m3, k_scale=0.5, v_scale=2.0)
    queries, factor = p.q.to(e4m3), lambda x: torch.full((1, 1, 1, 1), x, device=device)
    p.q = queries.bfloat16()
    scales = {"q_scale": factor(0.25), "k_scale": factor(p.k_scale), "v_scale": factor(p.v_scale)}
    o, lse = prefill(p, kind, q=queries, scale=4 * p.head_dim**-0.5, o_data_type=o_dtype, **scales)
    assert o.dtype == (o_dtype or torch.bfloat16)
    if o_dtype is None:
        p.check(o, packed(lse))
    rounded = 0.07 if o_dtype is e4m3 else 0.01
    torch.testing.assert_close(o.double().cpu(), p.expected().o, atol=rounded, rtol=rounded)


def test_no_requests(device, dtype):
    p = Problem((), (), dtype=dtype, device=device)
    o, lse = prefill(p, "ragged", max_token_per_sequence=3, max_sequence_kv=3, actual_seq_lens_q=ints([], device),
                     actual_seq_lens_kv=ints([], device))  # fmt: skip
    assert o.shape == (0, 4, 64) and lse.shape == (0, 3, 4)


WRONG_PREFILL = {
    "actual_seq_lens_q: expected it, or batch_offsets_q": {"actual_seq_lens_q": None},
    "actual_seq_lens_kv: expected it, or batch_offsets_k with batch_offsets_units='tokens'": {
        "actual_seq_lens_kv": None, "batch_offsets_k": torch.tensor([0, 40, 45, 52, 117]),
    },
    "max_token_per_sequence: expected an lse of at most": {"max_token_per_sequence": 2**30},
    "actual_seq_lens_q: expected 0..19 .max_token_per_sequence=19": {"max_token_per_sequence": 19},
    "actual_seq_lens_kv: expected 0..64 .max_sequence_kv=64": {"max_sequence_kv": 64},
    "actual_seq_lens_kv: expected .batch_size=4., got .3.": {"actual_seq_lens_kv": torch.ones(3).int()},
    "actual_seq_lens_kv: expected no negative": {"actual_seq_lens_kv": torch.tensor([40, -5, 7, 65])},
    "actual_seq_lens_q: expected dtype": {"actual_seq_lens_q": torch.ones(4)},
    "q: expected .nnz_qo=24,": {"q": torch.zeros(25, 4, 64)},
    "k_cache: expected .nnz_kv=117,": {"k_cache": torch.zeros(116, 2, 64)},
    "v_cache: expected .nnz_kv=117, num_kv_heads=2": {"v_cache": torch.zeros(117, 1, 64)},
    "v_cache: expected the dtype of k_cache": {"v_cache": torch.zeros(117, 2, 64).half()},
    "batch_offsets_units: expected 'elements'": {"batch_offsets_units": "rows"},
    "batch_offsets_q: expected requests one after the other": {"batch_offsets_q": torch.tensor([0, 3, 3, 4, 24])},
    "batch_offsets_v: expected .batch_size . 1=5": {"batch_offsets_v": torch.zeros(4).int()},
    "batch_offsets_stats: expected requests": {"batch_offsets_stats": torch.zeros(5).int()},
    "lse_base: expected 'log2' or 'ln', got 'e'": {"lse_base": "e"},
    "lse: expected .batch_size=4, max_token_per_sequence=20, num_qo_heads=4": {"lse": torch.zeros(24, 4)},
    "lse: expected dtype": {"lse": torch.zeros(4, 20, 4).double()},
    "out: expected o_data_type=torch.float16": {"out": torch.zeros(24, 4, 64), "o_data_type": torch.float16},
    "o_data_type: ": {"o_data_type": "f17"},
    "scale: expected a positive": {"scale": 0.0},
    "causal: expected a bool": {"causal": 1},
    "return_lse: expected a bool": {"return_lse": 1},
    "is_cuda_graph_compatible: expected a bool": {"is_cuda_graph_compatible": 1},
    "q_scale: expected a number or a tensor of one": {"q_scale": torch.ones(2)},
    "backend: ": {"backend": "fa9"},
}  # fmt: skip


@pytest.mark.parametrize("message", WRONG_PREFILL)
def test_wrong_arguments_of_prefill(message):
    with pytest.raises(quire.ValidationError, match=f"^{message}"):
        prefill(prefills("cpu", torch.float32), "ragged", **WRONG_PREFILL[message])


@pytest.mark.parametrize(("message", "options"), [
    ("block_tables: expected .batch_size=4", {"block_tables": torch.zeros(3, 30).int()}),
    ("actual_seq_lens_kv: expected 0..64 .max_sequence_kv=64, and", {"max_sequence_kv": 64}),
    ("batch_offsets_k: not supported by this call, as block_tables says", {"batch_offsets_k": torch.zeros(5).int()}),
    ("k_cache: expected .num_pages,", {"k_cache": torch.zeros(117, 2, 64)}),
])  # fmt: skip
def test_wrong_arguments_of_prefill_on_pages(message, options):
    with pytest.raises(quire.ValidationError, match=f"^{message}"):
        prefill(prefills("cpu", torch.float32), "tuple", **options)


@pytest.mark.parametrize("unit", ["tokens", "elements"])
def test_offsets_in_elements_of_ragged_keys(device, dtype, unit):
    """FlashInfer's backend of cuDNN counts elements, also where values and results begin."""
    p, qk, vo = Problem((3, 1, 20), (40, 5, 65), dtype=dtype, device=device, causal=True), 64, 32
    p.v = p.v[..., :vo].contiguous()
    qo, kv = ints(p.qo_indptr, device), ints(p.kv_indptr, device)
    h, hk, lens = p.num_qo_heads, p.num_kv_heads, {"seq_lens": ints(p.kv_lens, device)}
    lens["seq_lens_q"] = ints(p.qo_lens, device)
    rows = (
        {"qo": h * qk, "kv": hk * qk, "v": hk * vo, "o": h * vo}
        if unit == "elements"
        else dict.fromkeys(["qo", "kv", "v", "o"], 1)
    )
    wrapper = quire.BatchPrefillWithRaggedKVCacheWrapper(workspace(device), backend="cudnn")

    def plan(**more):
        given = {"v_indptr": kv * rows["v"], "o_indptr": qo * rows["o"], **lens, **more}
        wrapper.plan(
            qo * rows["qo"], kv * rows["kv"], h, hk, qk, head_dim_vo=vo, causal=True, q_data_type=dtype,
            max_token_per_sequence=20, max_sequence_kv=65, **given,
        )  # fmt: skip

    plan()
    plain = quire.BatchPrefillWithRaggedKVCacheWrapper(workspace(device))
    plain.plan(qo, kv, h, hk, qk, head_dim_vo=vo, causal=True, q_data_type=dtype)
    assert torch.equal(wrapper.run(p.q, p.k, p.v), plain.run(p.q, p.k, p.v))
    for name in ("v_indptr", "o_indptr"):
        with pytest.raises(quire.ValidationError, match=f"^{name}: expected requests one after the other"):
            plan(**{name: kv + 1})


def test_offsets_in_elements_of_pages(device, dtype):
    """Pages are then HND, whatever the constructor was told; a plan in tokens goes by the constructor again."""
    p = Problem((3, 1, 20), (40, 5, 65), dtype=dtype, device=device, causal=True)
    wrapper = quire.BatchPrefillWithPagedKVCacheWrapper(workspace(device), "NHD", backend="cudnn")
    row = p.num_qo_heads * p.head_dim
    for layout, factor in (("HND", row), ("NHD", 1), ("HND", row)):
        cache = p.paged(16, layout)
        wrapper.plan(
            ints(p.qo_indptr, device) * factor, cache.indptr, cache.indices, cache.last_page_len, p.num_qo_heads,
            p.num_kv_heads, p.head_dim, 16, causal=True, q_data_type=dtype, seq_lens=ints(p.kv_lens, device),
            seq_lens_q=ints(p.qo_lens, device).view(-1, 1, 1, 1), max_token_per_sequence=20, max_sequence_kv=65,
        )  # fmt: skip
        p.check(wrapper.run(p.q, cache.kv))


def test_where_flashinfer_has_them():
    assert quire.cudnn.__all__ == ["cudnn_batch_decode_with_kv_cache", "cudnn_batch_prefill_with_kv_cache"]
    assert quire.cudnn_batch_decode_with_kv_cache is quire.decode.cudnn_batch_decode_with_kv_cache
    assert quire.prefill.cudnn_batch_prefill_with_kv_cache is quire.cudnn.cudnn_batch_prefill_with_kv_cache
