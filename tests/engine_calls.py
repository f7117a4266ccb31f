"""The attention calls that vLLM and SGLang make while they serve a model: of their own backends by Quire's name, and of
those that are FlashInfer's.

Tensors have the heads and dims of the model and a few tokens; nothing is computed from what is in them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Any, NamedTuple

import torch

import quire
from quire.cli.presets import Layer, Serving
from quire.compat import deep_gemm, flash_attn_interface, flash_mla
from quire.kernels.attention import MLA_DIMS
from quire.kernels.features import dtype_of, kv_dtype_of

_LATENT, _ROPE = MLA_DIMS[1], MLA_DIMS[0] - MLA_DIMS[1]
_WINDOW, _CAP, _TOPK = 127, 30.0, 2048
_LENGTHS = 1, 2, 3, 5, 8, 13, 21, 40, 64, 100, 250, 600, 4100
Call = Callable[[], Any]


class Batch(NamedTuple):
    """Tokens of requests: new ones, and those that are in the cache before them."""

    new: tuple[int, ...]
    before: tuple[int, ...]

    @property
    def lens(self) -> list[int]:
        return [n + m for n, m in zip(self.new, self.before, strict=True)]


_PROMPTS = [Batch((n,), (0,)) for n in _LENGTHS]
_CHUNKS = [Batch((n,), (40,)) for n in _LENGTHS] + [Batch((1, 70, 4), (39, 0, 9))]
_DECODES = [Batch((1,), (4,)), Batch((1, 1, 1), (299, 0, 16))]


def _drafts(model: Serving) -> list[Batch]:
    return [Batch((model.spec,) * 2, (33, 7))] if model.spec > 1 else []


class Cards(NamedTuple):
    """Tensors of one layer of a model on a device."""

    model: Serving
    layer: Layer
    device: torch.device

    @property
    def is_square(self) -> bool:
        """Whether values have as many dims as keys, as FlashInfer's decode takes them."""
        return self.layer.head_dim_qk == self.layer.head_dim_vo

    @property
    def window_left(self) -> int:
        """Engines have no window in layers of chunks: they make requests of these."""
        return _WINDOW if self.layer.window and not self.layer.chunked else -1

    def heads(self) -> tuple[int, int]:
        model, layer = self.model, self.layer
        return layer.num_qo_heads or model.num_qo_heads, layer.num_kv_heads or model.num_kv_heads

    def types(self) -> tuple[torch.dtype, torch.dtype]:
        q, kv = dtype_of(self.model.dtype, "dtype"), kv_dtype_of(self.model.kv_dtype, "kv_dtype")
        return getattr(torch, q.torch_name), getattr(torch, kv.torch_name)

    def zeros(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Of a CPU, on which nothing computes with them, only integers are: gigabytes would be written."""
        dtype = dtype or self.types()[0]
        new = torch.empty if self.device.type == "cpu" and dtype.is_floating_point else torch.zeros
        return new(shape, dtype=dtype, device=self.device)

    def ints(self, values: Any, *, on_host: bool = False) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device="cpu" if on_host else self.device)

    def q(self, rows: int, dim: int = 0) -> torch.Tensor:
        return self.zeros(rows, self.heads()[0], dim or self.layer.head_dim_qk)

    def new_kv(self, rows: int, num_kv_heads: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        heads = num_kv_heads or self.heads()[1]
        return self.zeros(rows, heads, self.layer.head_dim_qk), self.zeros(rows, heads, self.layer.head_dim_vo)

    def pages(self, batch: Batch) -> list[int]:
        return [-(-n // self.model.page_size) for n in batch.lens]

    def cache(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        shape = sum(self.pages(batch)), self.model.page_size, self.heads()[1]
        dims, kv = (self.layer.head_dim_qk, self.layer.head_dim_vo), self.types()[1]
        return self.zeros(*shape, dims[0], dtype=kv), self.zeros(*shape, dims[1], dtype=kv)

    def latents(self, batch: Batch) -> torch.Tensor:
        return self.zeros(sum(self.pages(batch)), self.model.page_size, _LATENT + _ROPE, dtype=self.types()[1])

    def table(self, batch: Batch) -> torch.Tensor:
        pages, numbers = self.pages(batch), iter(range(10**9))
        rows = [[next(numbers) for _ in range(n)] for n in pages]
        return self.ints([row + [0] * (max(pages) - len(row)) for row in rows])

    def offsets(self, lens: Any, *, on_host: bool = False) -> torch.Tensor:
        return self.ints([0, *accumulate(lens)], on_host=on_host)

    def tables(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """As FlashInfer's plan() takes them."""
        pages, size = self.pages(batch), self.model.page_size
        last = [n - (p - 1) * size if p else 0 for n, p in zip(batch.lens, pages, strict=True)]
        return self.offsets(pages, on_host=True), self.ints([*range(sum(pages))]), self.ints(last, on_host=True)

    def workspace(self) -> torch.Tensor:
        return torch.empty(128 << 20, dtype=torch.uint8, device=self.device)

    def scoring(self) -> dict[str, Any]:
        """As FlashInfer's plan() takes it."""
        q, kv = self.types()
        return {
            "window_left": self.window_left, "logits_soft_cap": _CAP if self.layer.soft_cap else 0.0,
            "pos_encoding_mode": "ALIBI" if self.layer.alibi else "NONE", "q_data_type": q, "kv_data_type": kv,
        }  # fmt: skip

    def flash(self, *, causal: bool = True) -> dict[str, Any]:
        """As FlashAttention's functions take it."""
        slopes = quire.get_alibi_slopes(self.heads()[0], self.device) if self.layer.alibi else None
        left = self.window_left
        return {
            "softmax_scale": self.layer.head_dim_qk**-0.5, "causal": causal,
            "softcap": _CAP if self.layer.soft_cap else 0.0,
            "window_size": (left, 0 if left >= 0 and causal else left), "alibi_slopes": slopes,
        }  # fmt: skip

    @property
    def has_8_bit_queries(self) -> bool:
        """Whether engines round queries for FlashAttention-3, which then gives bfloat16."""
        return self.types() == (torch.bfloat16, torch.float8_e4m3fn)

    def narrow(self, q: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Queries of 8 bits, and the factors of queries, keys and values."""
        one = torch.ones(len(batch.new), self.heads()[1], device=self.device)
        return q.to(torch.float8_e4m3fn), dict.fromkeys(("q_descale", "k_descale", "v_descale"), one)


# --- FlashAttention's dialect ----------------------------------------------------------------------------------------


def _varlen(t: Cards, batch: Batch, *, narrow: bool = False, **more: Any) -> Any:
    """vLLM's call of one layer: all requests of a step, over pages."""
    q, factors = t.narrow(t.q(sum(batch.new)), batch) if narrow else (t.q(sum(batch.new)), {})
    return flash_attn_interface.flash_attn_varlen_func(
        q, *t.cache(batch), cu_seqlens_q=t.offsets(batch.new), max_seqlen_q=max(batch.new),
        seqused_k=t.ints(batch.lens), max_seqlen_k=max(batch.lens), block_table=t.table(batch),
        **{**t.flash(), **factors, **more},
    )  # fmt: skip


def _with_kvcache(t: Cards, batch: Batch, **more: Any) -> Any:
    """SGLang's."""
    q = t.q(sum(batch.new))
    q, factors = t.narrow(q, batch) if t.has_8_bit_queries else (q, {})
    return flash_attn_interface.flash_attn_with_kvcache(
        q, *t.cache(batch), page_table=t.table(batch), cache_seqlens=t.ints(batch.lens),
        cu_seqlens_q=t.offsets(batch.new), cu_seqlens_k_new=t.offsets(batch.lens), max_seqlen_q=max(batch.new),
        **{**t.flash(), **factors, **more},
    )  # fmt: skip


def _prompt(t: Cards, new: tuple[int, ...], keys: tuple[int, ...], *, causal: bool, lse: bool) -> Any:
    """Keys and values of their own, in no cache: those of an encoder, or of latents that were projected."""
    q, (k, v) = t.q(sum(new)), t.new_kv(sum(keys))
    return flash_attn_interface.flash_attn_varlen_func(
        q, k, v, cu_seqlens_q=t.offsets(new), cu_seqlens_k=t.offsets(keys), max_seqlen_q=max(new),
        max_seqlen_k=max(keys), return_softmax_lse=lse, **t.flash(causal=causal),
    )  # fmt: skip


def _cascade(t: Cards, batch: Batch, call: Callable[..., Any]) -> None:
    """A prefix that all requests share, which they see whole, and what is behind it; two results, merged."""
    shared = call(t, Batch((sum(batch.new),), (64,)), causal=False, window_size=(-1, -1), return_softmax_lse=True)
    own = call(t, batch, return_softmax_lse=True)
    quire.merge_state_v2(shared[0], shared[1].mT.contiguous(), own[0], own[1].mT.contiguous())


def _absorbed(t: Cards, batch: Batch, **more: Any) -> Any:
    """Queries that meet latents, in FlashAttention-3's words."""
    latents = t.latents(batch).unsqueeze(-2)
    q, heads = t.zeros(sum(batch.new), t.heads()[0], _ROPE), t.heads()[0]
    return flash_attn_interface.flash_attn_with_kvcache(
        q, latents[..., _LATENT:], latents[..., :_LATENT], qv=t.zeros(sum(batch.new), heads, _LATENT),
        page_table=t.table(batch), cache_seqlens=t.ints(batch.lens), cu_seqlens_q=t.offsets(batch.new),
        max_seqlen_q=max(batch.new), softmax_scale=192**-0.5, causal=True, **more,
    )  # fmt: skip


def _flash_mla(t: Cards, batch: Batch) -> Any:
    one = batch.new[0]
    q = t.zeros(len(batch.new), one, t.heads()[0], _LATENT + _ROPE)
    factors = (
        {} if t.types()[1].itemsize > 1 else dict.fromkeys(("descale_q", "descale_k"), torch.ones(1, device=t.device))
    )
    q = q.to(t.types()[1]) if factors else q
    return flash_mla.flash_mla_with_kvcache(
        q, t.latents(batch).unsqueeze(2), t.table(batch), t.ints(batch.lens), _LATENT, *flash_mla.get_mla_metadata(),
        softmax_scale=192**-0.5, causal=True, **factors,
    )  # fmt: skip


# --- FlashInfer's wrappers -------------------------------------------------------------------------------------------


def _paged(t: Cards, batch: Batch, *, causal: bool = True, lse: bool = False, **more: Any) -> Any:
    wrapper = quire.BatchPrefillWithPagedKVCacheWrapper(t.workspace())
    offsets, (heads, kv_heads) = t.offsets(batch.new, on_host=True), t.heads()
    dims = {"head_dim_vo": t.layer.head_dim_vo}
    wrapper.plan(
        offsets, *t.tables(batch), heads, kv_heads, t.layer.head_dim_qk, t.model.page_size, causal=causal, **dims,
        **{**t.scoring(), **more},
    )  # fmt: skip
    return wrapper.run(t.q(sum(batch.new)), t.cache(batch), return_lse=lse)


def _ragged(t: Cards, new: tuple[int, ...], keys: tuple[int, ...], *, causal: bool) -> Any:
    wrapper = quire.BatchPrefillWithRaggedKVCacheWrapper(t.workspace())
    heads, scoring = t.heads(), t.scoring() | {"kv_data_type": t.types()[0]}
    dims = t.layer.head_dim_qk, t.layer.head_dim_vo
    offsets = t.offsets(new, on_host=True), t.offsets(keys, on_host=True)
    wrapper.plan(*offsets, *heads, *dims, causal=causal, **scoring)
    return wrapper.run_return_lse(t.q(sum(new)), *t.new_kv(sum(keys)))


def _decode(t: Cards, batch: Batch, *, graph: bool = False) -> Any:
    tables = t.tables(batch)
    buffers = [tables[0].to(t.device), tables[1].to(t.device), tables[2].to(t.device)] if graph else []
    names = "paged_kv_indptr_buffer", "paged_kv_indices_buffer", "paged_kv_last_page_len_buffer"
    wrapper = quire.BatchDecodeWithPagedKVCacheWrapper(
        t.workspace(), use_cuda_graph=graph, **dict(zip(names, buffers, strict=False))
    )
    wrapper.plan(*tables, *t.heads(), t.layer.head_dim_qk, t.model.page_size, q_len_per_req=batch.new[0], **t.scoring())
    return wrapper.run(t.q(sum(batch.new)), t.cache(batch))


def _levels(t: Cards, batch: Batch) -> Any:
    """vLLM's cascade in FlashInfer's words."""
    wrapper = quire.MultiLevelCascadeAttentionWrapper(2, t.workspace())
    scoring = t.scoring() | {"window_left": -1}
    shared, own = t.tables(Batch((1,), (2 * t.model.page_size - 1,))), t.tables(batch)
    rows = t.ints([0, sum(batch.new)], on_host=True), t.offsets(batch.new, on_host=True)
    arrays = [list(pair) for pair in zip(shared, own, strict=True)]
    wrapper.plan(list(rows), *arrays, *t.heads(), t.layer.head_dim_qk, t.model.page_size, causal=True, **scoring)
    return wrapper.run(
        t.q(sum(batch.new)), t.cache(Batch(batch.new, tuple(n + 2 * t.model.page_size for n in batch.before)))
    )


def _latents(t: Cards, batch: Batch, *, causal: bool) -> Any:
    wrapper = quire.BatchMLAPagedAttentionWrapper(t.workspace())
    indptr, indices, _ = t.tables(batch)
    offsets, lens = t.offsets(batch.new, on_host=True), t.ints(batch.lens, on_host=True)
    q, kv = t.types()
    wrapper.plan(
        offsets, indptr, indices, lens, t.heads()[0], _LATENT, _ROPE, t.model.page_size, causal, 192**-0.5, q, kv
    )
    latents, heads = t.latents(batch), t.heads()[0]
    parts = t.zeros(sum(batch.new), heads, _LATENT), t.zeros(sum(batch.new), heads, _ROPE)
    return wrapper.run(*parts, latents[..., :_LATENT], latents[..., _LATENT:])


# --- an indexer's choice of tokens (DeepSeek V3.2) -------------------------------------------------------------------


def _indexed_prompt(t: Cards, rows: int) -> None:
    e4m3, heads = torch.float8_e4m3fn, 64
    keys = t.zeros(rows, 128, dtype=e4m3), t.zeros(rows, dtype=torch.float32)
    ends = t.ints([*range(1, rows + 1)])
    scores = deep_gemm.fp8_mqa_logits(
        t.zeros(rows, heads, 128, dtype=e4m3),
        keys,
        t.zeros(rows, heads, dtype=torch.float32),
        torch.zeros_like(ends),
        ends,
    )
    chosen = quire.select_tokens(scores, min(_TOPK, 2048), lens=ends)
    q, kv = t.zeros(rows, t.heads()[0], _LATENT + _ROPE), t.zeros(rows, 1, _LATENT + _ROPE)
    flash_mla.flash_mla_sparse_fwd(q, kv, chosen.unsqueeze(1), 192**-0.5)


def _indexed_decode(t: Cards, batch: Batch) -> None:
    e4m3, size, n = torch.float8_e4m3fn, 64, len(batch.new)
    pages = [-(-m // size) for m in batch.lens]
    table = t.ints([[*range(max(pages))]] * n)
    lens, meta = t.ints([[m] for m in batch.lens]), None
    scores = deep_gemm.fp8_paged_mqa_logits(
        t.zeros(n, 1, 64, 128, dtype=e4m3), t.zeros(max(pages), size, 1, 132, dtype=torch.uint8),
        t.zeros(n, 64, dtype=torch.float32), lens, table, meta, max(pages) * size,
    )  # fmt: skip
    chosen = quire.select_tokens(scores, _TOPK, lens=lens.flatten())  # pages are in order
    q = t.zeros(n, 1, t.heads()[0], _LATENT + _ROPE)
    if t.types()[1].itemsize == 1:  # rows of 656 bytes, with scales
        cache = t.zeros(max(pages), size, 1, 656, dtype=torch.uint8)
        kv_c, k_pe, slots = t.zeros(n, _LATENT), t.zeros(n, _ROPE), torch.arange(n, device=t.device)
        quire.mla.concat_and_cache_mla(
            kv_c, k_pe, cache.squeeze(2), slots, "fp8_ds_mla", torch.ones(1, device=t.device)
        )
    else:
        cache = t.zeros(max(pages), size, 1, _LATENT + _ROPE)
    flash_mla.flash_mla_with_kvcache(
        q, cache, None, None, _LATENT, *flash_mla.get_mla_metadata(), softmax_scale=192**-0.5,
        is_fp8_kvcache=cache.dtype is torch.uint8, indices=chosen.unsqueeze(1),
    )  # fmt: skip


# --- engines ---------------------------------------------------------------------------------------------------------


def vllm(model: Serving, device: torch.device) -> Iterator[tuple[str, Call]]:
    """QUIRE and QUIRE_MLA, FLASHMLA and FLASHINFER, of vLLM 0.33 on Hopper: (name, call)."""

    def decoder(t: Cards) -> Iterator[tuple[str, Call]]:
        for batch in (*_PROMPTS, *_CHUNKS, *_DECODES, *_drafts(model)):
            yield f"QUIRE {batch}", lambda t=t, b=batch: _varlen(t, b)
            if t.has_8_bit_queries:
                yield f"FLASH_ATTN {batch}", lambda t=t, b=batch: _varlen(t, b, narrow=True)
            yield f"FLASHINFER prefill {batch}", lambda t=t, b=batch: _paged(t, b)
        for batch in (*_DECODES, *_drafts(model)) if t.is_square else ():
            yield f"FLASHINFER decode {batch}", lambda t=t, b=batch: _decode(t, b)
        yield from _shared(t, _varlen, levels=True)

    yield from _of_layers(model, device, _varlen, decoder)


def sglang(model: Serving, device: torch.device) -> Iterator[tuple[str, Call]]:
    """`quire` (FlashAttention-3's backend), flashmla and flashinfer, of SGLang 0.5.23 on Hopper: (name, call)."""

    def decoder(t: Cards) -> Iterator[tuple[str, Call]]:
        for batch in (*_PROMPTS, *_CHUNKS, *_DECODES, *_drafts(model)):
            yield f"quire {batch}", lambda t=t, b=batch: _with_kvcache(t, b)
        yield from _of_flashinfer(t)
        yield from _shared(t, _with_kvcache)

    yield from _of_layers(model, device, _with_kvcache, decoder)


def _of_layers(
    model: Serving, device: torch.device, across: Callable[..., object],
    decoder: Callable[[Cards], Iterator[tuple[str, Call]]],
) -> Iterator[tuple[str, Call]]:  # fmt: skip
    """Those of each layer, whose kind decides; across: cross attention, decoder: a layer over its own keys."""
    for layer in model.layers:
        t = Cards(model, layer, device)
        if layer.is_encoder:
            yield from _encoder(t)
        elif model.latent is not None:
            yield from _projected(t)
            yield from _over_latents(t)
        elif layer.is_cross:
            for batch in (*_PROMPTS, *_DECODES):
                yield f"cross attention {batch}", lambda t=t, b=batch: across(t, b, causal=False)
        else:
            yield from decoder(t)


def _encoder(t: Cards) -> Iterator[tuple[str, Call]]:
    for n in _LENGTHS:
        yield f"encoder {n}", lambda n=n: _prompt(t, (n,), (n,), causal=False, lse=False)
        if not t.layer.window:
            yield f"encoder {n}, FlashInfer", lambda n=n: _ragged(t, (n,), (n,), causal=False)


def _projected(t: Cards) -> Iterator[tuple[str, Call]]:
    """Prompts of latents, of which keys and values are made; a chunk sees the cached prefix whole."""
    for n in _LENGTHS:
        yield f"latents' prompt {n}", lambda n=n: _prompt(t, (n,), (n,), causal=True, lse=True)
        yield f"latents' prefix {n}", lambda n=n: _prompt(t, (n,), (96,), causal=False, lse=True)
        yield f"latents' prompt {n}, FlashInfer", lambda n=n: _ragged(t, (n,), (n,), causal=True)
        yield f"latents' prefix {n}, FlashInfer", lambda n=n: _ragged(t, (n,), (96,), causal=False)
    states = [t.zeros(9, t.heads()[0], t.layer.head_dim_vo), t.zeros(9, t.heads()[0], dtype=torch.float32)]
    yield "merge", lambda: quire.merge_state_v2(*states, *states)


def _over_latents(t: Cards) -> Iterator[tuple[str, Call]]:
    for batch in (*_DECODES, *_drafts(t.model)):
        yield f"latents, FlashInfer {batch}", lambda b=batch: _latents(t, b, causal=b.new[0] > 1)
        if t.model.page_size == 64:
            yield f"FLASHMLA {batch}", lambda b=batch: _flash_mla(t, b)
        if t.types()[1].itemsize > 1:
            yield f"QUIRE_MLA {batch}", lambda b=batch: _absorbed(t, b)
    if t.model.sparse:
        for n in (1, 70, 600):
            yield f"indexed prompt {n}", lambda n=n: _indexed_prompt(t, n)
        for batch in _DECODES:
            yield f"indexed decode {batch}", lambda b=batch: _indexed_decode(t, b)


def _of_flashinfer(t: Cards) -> Iterator[tuple[str, Call]]:
    """SGLang's backend of FlashInfer: prompts are ragged, beside a prefix in pages, and states are merged."""
    for n in _LENGTHS:
        if not t.layer.window:
            yield f"flashinfer ragged {n}", lambda n=n: _ragged(t, (n,), (n,), causal=True)
            yield f"flashinfer prefix {n}", lambda n=n: _paged(t, Batch((n,), (40,)), causal=False, lse=True)
        yield f"flashinfer paged {n}", lambda n=n: _paged(t, Batch((n,), (40,)))
    states = [t.zeros(9, t.heads()[0], t.layer.head_dim_vo), t.zeros(9, t.heads()[0], dtype=torch.float32)]
    yield "merge", lambda: quire.merge_state(*states, *states)
    for batch in _DECODES if t.is_square else ():
        yield f"flashinfer decode {batch}", lambda b=batch: _decode(t, b)
    for batch in _drafts(t.model):
        bits = sum(n * m for n, m in zip(batch.new, batch.lens, strict=True))
        mask = torch.ones(bits, dtype=torch.bool, device=t.device)
        yield f"flashinfer verify {batch}", lambda b=batch, m=mask: _paged(t, b, causal=False, custom_mask=m)


def _shared(t: Cards, call: Callable[..., Any], *, levels: bool = False) -> Iterator[tuple[str, Call]]:
    """Prefixes that all requests share, which engines compute once where they see no window."""
    if t.layer.window or t.layer.alibi or not t.is_square:
        return
    for batch in (*_DECODES, *_CHUNKS):
        yield f"cascade {batch}", lambda b=batch: _cascade(t, b, call)
        if levels:
            yield f"FLASHINFER cascade {batch}", lambda b=batch: _levels(t, b)
