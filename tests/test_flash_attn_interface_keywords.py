"""FlashAttention-3's other functions, its signatures and wrong arguments; repeated, compiled and captured calls."""

from __future__ import annotations

import doctest
import inspect
import math

import pytest
import torch
from torch import Tensor

import quire
from calls import capture, no_synchronisation
from interface_batches import KV_LENS, Batch, check, random
from problems import ints
from quire.compat import flash_attn_batch
from quire.compat import flash_attn_interface as fa3
from quire.compat.flash_attn_interface import (
    flash_attn_combine,
    flash_attn_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
)

#: The parameters of FlashAttention-3's functions (hopper/flash_attn_interface.py), in their order.
SIGNATURES = {
    "flash_attn_func": "q k v softmax_scale causal qv q_descale k_descale v_descale window_size attention_chunk "
    "softcap num_splits pack_gqa deterministic sm_margin return_attn_probs",
    "flash_attn_qkvpacked_func": "qkv softmax_scale causal q_descale k_descale v_descale window_size attention_chunk "
    "softcap deterministic num_heads_q sm_margin return_attn_probs",
    "flash_attn_varlen_func": "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k seqused_q seqused_k "
    "softmax_scale causal qv q_descale k_descale v_descale window_size attention_chunk softcap num_splits pack_gqa "
    "deterministic sm_margin return_attn_probs",
    "flash_attn_with_kvcache": "q k_cache v_cache k v qv rotary_cos rotary_sin cache_seqlens cache_batch_idx "
    "cache_leftpad page_table cu_seqlens_q cu_seqlens_k_new max_seqlen_q rotary_seqlens q_descale k_descale v_descale "
    "softmax_scale causal window_size attention_chunk softcap rotary_interleaved scheduler_metadata num_splits "
    "pack_gqa sm_margin return_softmax_lse",
    "flash_attn_combine": "out_partial lse_partial out out_dtype",
    "get_scheduler_metadata": "batch_size max_seqlen_q max_seqlen_k num_heads_q num_heads_kv headdim cache_seqlens "
    "qkv_dtype headdim_v cu_seqlens_q cu_seqlens_k_new cache_leftpad page_size max_seqlen_k_new causal window_size "
    "attention_chunk has_softcap num_splits pack_gqa sm_margin",
    "is_fa_version_supported": "fa_version device",
    "fa_version_unsupported_reason": "fa_version device",
}


def test_combine(device):
    parts, lses = random(3, 2, 5, 4, 64, device=device), random(3, 2, 5, 4, device=device)
    parts[1, 0, 2], lses[1, 0, 2] = math.nan, -math.inf  # no keys there
    lses[:, 1, 3] = -math.inf
    out, lse = flash_attn_combine(parts, lses, out_dtype=torch.bfloat16)
    weights = lses.double().softmax(0).nan_to_num(0)[..., None]
    want = (parts.double().nan_to_num(0) * weights).sum(0)
    assert out.dtype is torch.bfloat16 and torch.allclose(out.double(), want, atol=2e-2)
    assert torch.allclose(lse.double(), lses.double().logsumexp(0))
    given = torch.empty_like(out[0])
    assert flash_attn_combine(parts[:, 0], lses[:, 0], given)[0] is given and torch.equal(given, out[0])


def test_combined_parts_are_the_whole(device, dtype):
    b = Batch(device, dtype, (4, 3), (40, 40))
    q, k, v = b.q[None], b.k[None], b.v[None]
    parts = [flash_attn_func(q, k[:, s], v[:, s], return_attn_probs=True) for s in (slice(0, 33), slice(33, 80))]
    out, _ = flash_attn_combine(*(torch.stack(t) for t in ([o.float() for o, _ in parts], [
        lse.transpose(1, 2) for _, lse in parts])), out_dtype=dtype)  # fmt: skip
    check(out[0], None, b.q, b.k, b.v, (7,), (80,))


def test_metadata_has_no_effect():
    b = Batch("cpu", torch.float32)
    metadata = fa3.get_scheduler_metadata(4, 17, 33, 8, 2, 64, b.lens, num_splits=0, causal=True)
    assert metadata.dtype is torch.int32 and metadata.dim() == 1
    assert torch.equal(b.paged(scheduler_metadata=metadata), b.paged())


def test_versions():
    assert fa3.FA2_AVAILABLE and fa3.FA3_AVAILABLE and int(fa3.__version__.split(".")[0]) == 3
    assert [fa3.is_fa_version_supported(version) for version in (2, 3, 4)] == [True, True, False]
    assert fa3.fa_version_unsupported_reason(3, "cpu") is None and "FA4" in fa3.fa_version_unsupported_reason(4)
    with pytest.raises(quire.ValidationError, match="fa_version"):
        fa3.is_fa_version_supported(5)


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures_are_those_of_flash_attention_3(name):
    parameters = inspect.signature(getattr(fa3, name)).parameters.values()
    assert [p.name for p in parameters if p.kind is not p.VAR_KEYWORD] == SIGNATURES[name].split()


def test_ranks():
    """A rank's own keys count alone where queries see all of them."""
    b = Batch("cpu", torch.float32, (1, 1, 1, 1))
    want = b.paged(causal=True)
    assert torch.equal(b.paged(causal=True, cp_world_size=2, cp_rank=1, cp_tot_seqused_k=b.lens), want)


@pytest.mark.parametrize("world", [2, 3])
def test_causal_ranks(device, world):
    """Keys dealt to ranks in turns: what the ranks find, merged, is attention over all keys."""
    b = Batch(device, torch.float32 if device == "cpu" else torch.float16)
    total, results = b.lens, []
    for rank in range(world):
        its = (
            [keys[rank::world] for keys in torch.split(b.k, list(KV_LENS))],
            [keys[rank::world] for keys in torch.split(b.v, list(KV_LENS))],
        )
        pages = [torch.zeros(4, 40, 2, 64, dtype=b.k.dtype, device=device) for _ in its]
        for page, requests in zip(pages, its, strict=True):
            for i, keys in enumerate(requests):
                page[i, : len(keys)] = keys
        results.append(
            flash_attn_varlen_func(
                b.q, *pages, b.cu_q, max_seqlen_q=17, seqused_k=ints([len(keys) for keys in its[0]], device),
                block_table=ints(range(4), device)[:, None], causal=True, cp_world_size=world, cp_rank=rank,
                cp_tot_seqused_k=total, return_softmax_lse=True,
            )
        )  # fmt: skip
    out, lse = fa3.flash_attn_combine(*(torch.stack([r[i].transpose(0, i) for r in results]) for i in (0, 1)))
    want, want_lse = b.paged(causal=True, return_softmax_lse=True)
    torch.testing.assert_close(out, want, atol=2e-3, rtol=0)
    torch.testing.assert_close(lse.t(), want_lse, atol=2e-3, rtol=0)


def test_layers_of_one_batch_plan_twice(monkeypatch):
    """The second call is recorded, and the others repeat it."""
    plans, made = [], flash_attn_batch.AttentionCall
    monkeypatch.setattr(flash_attn_batch, "AttentionCall", lambda *a, **o: plans.append(a) or made(*a, **o))
    b = Batch("cpu", torch.float32)
    out, q = torch.empty_like(b.q), b.q
    for layer in range(5):
        b.q = q + layer
        b.paged(causal=True, window_size=[-1, -1], out=out, sinks=None)
        b.check(out, causal=True)
    assert len(plans) == 2


def test_compiled_without_a_break():
    b = Batch("cpu", torch.float32)

    def call(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor) -> Tensor:
        return flash_attn_varlen_func(q, k, v, cu_q, cu_k, 17, 33, causal=True)

    args = b.q, b.k, b.v, b.cu_q, b.cu_k
    assert torch.equal(torch.compile(call, fullgraph=True, backend="aot_eager")(*args), call(*args))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("kind", ["plain", "new tokens", "used", "latents", "descales"])
def test_one_graph_for_batches_of_any_lengths(kind):
    """Captured after one call outside, without a synchronisation."""
    device, dtype = "cuda:0", torch.bfloat16
    dims, heads = ((64, 512), (16, 1)) if kind == "latents" else ((64, 64), (8, 2))
    b = Batch(device, dtype, (3, 1, 17, 1), (20, 9, 33, 5), heads, dims)
    lens, cu_q = b.lens.clone(), b.cu_q.clone()
    more = {}
    if kind == "latents":
        more = {"qv": random(22, 16, 512, device=device, dtype=dtype) / 8}
    if kind == "new tokens":
        more = {"cu_seqlens_k_new": cu_q, "k": b.k[:22].clone(), "v": b.v[:22].clone()}
    if kind == "descales":
        more = {"k_descale": torch.full((1,), 0.5, device=device).expand(4, 2)}

    def call() -> Tensor:
        if kind == "used":
            return flash_attn_varlen_func(
                b.q, *b.pages, cu_q, page_table=b.table, seqused_k=lens, seqused_q=cu_q.diff() - 1, causal=True
            )
        return flash_attn_with_kvcache(
            b.q, *b.pages, page_table=b.table, cache_seqlens=lens, cu_seqlens_q=cu_q, max_seqlen_q=17, causal=True,
            **more,
        )  # fmt: skip

    first = lens.clone() - (cu_q.diff() if kind == "new tokens" else 0)
    lens.copy_(first)
    call()
    with no_synchronisation():
        call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    for now in (first, first - torch.tensor([1, 0, 4, 2], device=device).int()):
        lens.copy_(now)
        graph.replay()
        captured = out.clone()
        assert torch.equal(captured, call()) and not captured.isnan().any()
    with capture(), pytest.raises(quire.PlanError, match="captured"):
        flash_attn_varlen_func(b.q, *b.pages, cu_q, page_table=b.table, seqused_k=lens, window_size=(3, 3))


# Wrong arguments

Q, K, R = random(2, 3, 8, 64), random(2, 9, 2, 64), random(6, 8, 64)
CU, CU_K = torch.tensor([0, 3, 6]).int(), torch.tensor([0, 9, 18]).int()
LEN, TABLE = torch.tensor([9, 9]).int(), torch.tensor([[0], [1]]).int()
KEYS = K.flatten(0, 1)
VALID, REFUSED = quire.ValidationError, quire.UnsupportedError


def dense(*args, **options):
    return lambda: flash_attn_func(Q, K, K, *args, **options)


def varlen(**options):
    return lambda: flash_attn_varlen_func(**{"q": R, "k": KEYS, "v": KEYS, "cu_seqlens_q": CU, **options})


def cached(*args, **options):
    return lambda: flash_attn_with_kvcache(Q, K, K, *args, **options)


@pytest.mark.parametrize(
    ("call", "error", "name"),
    [
        (dense(dropout_p=0.1), REFUSED, "dropout_p"),
        (dense(causal=1), VALID, "causal"),
        (dense(window_size=3), VALID, "window_size"),
        (dense(attention_chunk=-1), VALID, "attention_chunk"),
        (dense(num_splits=-1), VALID, "num_splits"),
        (dense(pack_gqa=1), VALID, "pack_gqa"),
        (dense(sm_margin=True), VALID, "sm_margin"),
        (dense(deterministic=0), VALID, "deterministic"),
        (dense(return_attn_probs=1), VALID, "return_lse"),
        (dense(ver=5), VALID, "ver"),
        (dense(sinks=torch.ones(8), s_aux=torch.ones(8)), VALID, "sinks, s_aux"),
        (dense(sinks=torch.ones(7)), VALID, "sinks"),
        (dense(qv=torch.ones(2, 3, 8, 64), window_size=(3, 0)), REFUSED, "qv"),
        (dense(k_descale=torch.ones(2, 3)), VALID, "k_descale"),
        (dense(v_descale=torch.ones(2, 2).half()), VALID, "v_descale"),
        (dense(out=torch.ones(2, 3, 8, 32)), VALID, "out"),
        (dense(out=torch.ones(2, 3, 8, 64).half()), VALID, "out"),
        (dense(score_mod=len), REFUSED, "score_mod"),
        (dense(block_table=TABLE), TypeError, "block_table"),
        (dense(nonsense=1), TypeError, "nonsense"),
        (lambda: flash_attn_qkvpacked_func(K, num_heads_q=2), VALID, "num_heads_q"),
        (lambda: flash_attn_qkvpacked_func(Q, num_heads_q=None), VALID, "num_heads_q"),
        (lambda: flash_attn_varlen_func(R, KEYS, KEYS, 3, CU, 9), VALID, "by name"),
        (varlen(cu_seqlens_k=CU_K, max_seqlen_q=2), VALID, "max_seqlen_q"),
        (varlen(cu_seqlens_k=CU_K[:2]), VALID, "cu_seqlens_k"),
        (varlen(cu_seqlens_k=CU_K, seqused_k=LEN[:1]), VALID, "seqused_k"),
        (varlen(k=K, v=K, block_table=TABLE), VALID, "seqused_k"),
        (varlen(k=K, v=K, block_table=TABLE, page_table=TABLE, seqused_k=LEN), VALID, "block_table, page_table"),
        (varlen(k=K, v=K, page_table=TABLE + 1, seqused_k=LEN), VALID, "page_table: expected page numbers below 2"),
        (varlen(k=K, v=K, block_table=TABLE - 1, seqused_k=LEN), VALID, "block_table: expected page numbers"),
        (varlen(cu_seqlens_k=CU_K, causal=True, cp_world_size=2), VALID, "cp_tot_seqused_k"),
        (varlen(cu_seqlens_k=CU_K, causal=True, cp_world_size=2, cp_tot_seqused_k=CU[1:]), REFUSED, "cp_world_size"),
        (varlen(cu_seqlens_k=CU_K, window_size=(3, 0), cp_world_size=2), REFUSED, "cp_world_size"),
        (varlen(cu_seqlens_k=CU_K, cp_world_size=2, cp_rank=2), VALID, "cp_rank"),
        (varlen(cu_seqlens_k=CU_K, gather_kv_indices=LEN), REFUSED, "gather_kv_indices"),
        (varlen(cu_seqlens_k=CU_K, only_qv=True), REFUSED, "only_qv"),
        (varlen(cu_seqlens_k=CU_K, scheduler_metadata=3), VALID, "scheduler_metadata"),
        (cached(cache_seqlens=10), VALID, "cache_seqlens"),
        (cached(K[:, :1], K[:, :1], cache_seqlens=LEN), VALID, "cache_seqlens"),
        (cached(K[:, :1]), VALID, "k, v"),
        (cached(rotary_cos=K, rotary_sin=K), VALID, "rotary_cos"),
        (cached(cache_batch_idx=LEN), VALID, "cache_batch_idx"),
        (cached(cache_leftpad=LEN + 1), VALID, "cache_leftpad"),
        (cached(page_table=TABLE[:1]), VALID, "page_table"),
        (cached(page_table=TABLE + 1, cache_seqlens=LEN), VALID, "page_table: expected page numbers"),
        (cached(K[0], K[0], cu_seqlens_k_new=CU[:2], cache_seqlens=0), VALID, "cu_seqlens_k_new"),
        (lambda: flash_attn_with_kvcache(R, K, K, cu_seqlens_q=CU, max_seqlen_q=1), VALID, "max_seqlen_q"),
        (lambda: flash_attn_combine(R, R[..., 0].double()), VALID, "out_partial"),
        (lambda: flash_attn_combine(Q, Q[..., 0].double()), VALID, "lse_partial"),
    ],
)
def test_wrong_arguments_are_named(call, error, name):
    with pytest.raises(error, match=name):
        call()


def test_examples_in_docstrings():
    done = doctest.testmod(fa3, extraglobs={"torch": torch}, optionflags=doctest.ELLIPSIS)
    assert done.attempted > 10 and not done.failed
