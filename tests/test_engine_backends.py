"""Backends by name in vLLM and SGLang, over stubs of the engines' classes; `make engines` runs the engines' own files.

The stubs have the signatures that the engines call, so that a method which does not take them fails here.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist

import oracle
import quire
from oracle import attention, latent_attention
from quire.compat import engines
from quire.compat import flashinfer as overlay
from quire.compat.flashinfer import fallback
from quire.jit import config
from rank_processes import Processes

HEADS, KV_HEADS, DIM, PAGE = 8, 2, 64, 16


def modules(names: dict[str, dict[str, Any]]) -> dict[str, ModuleType]:
    """Stub modules with these names, and the packages around them."""
    made: dict[str, ModuleType] = {}
    for path, contents in names.items():
        parts = path.split(".")
        for i in range(1, len(parts) + 1):
            made.setdefault(".".join(parts[:i]), ModuleType(".".join(parts[:i])))
        vars(made[path]).update(contents)
    return made


# --- vLLM ------------------------------------------------------------------------------------------------------------


class Capability(tuple):  # type: ignore[type-arg]
    def __new__(cls, major: int, minor: int) -> Capability:
        return super().__new__(cls, (major, minor))


class AttentionType(str, Enum):
    DECODER, ENCODER, ENCODER_ONLY, ENCODER_DECODER = "decoder", "encoder", "encoder_only", "encoder_decoder"


class FlashAttentionBackend:
    """What vLLM asks of a class of backends (0.33)."""

    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "fp8"]

    @staticmethod
    def get_name() -> str:
        return "FLASH_ATTN"

    @staticmethod
    def get_impl_cls() -> type:
        return FlashAttentionImpl

    @staticmethod
    def get_builder_cls() -> type:
        return FlashAttentionMetadataBuilder

    @classmethod
    def get_supported_kernel_block_sizes(cls, kv_cache_spec: Any = None) -> list[Any]:
        return [16]

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        return 128

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return False

    @classmethod
    def supports_kv_cache_dtype(cls, kv_cache_dtype: str | None) -> bool:
        return False

    @classmethod
    def supports_per_head_quant_scales(cls) -> bool:
        return False

    @classmethod
    def supports_mm_prefix(cls) -> bool:
        return True

    @classmethod
    def supports_rswa(cls) -> bool:
        return True

    @classmethod
    def supports_sink(cls) -> bool:
        return False

    @classmethod
    def supports_compute_capability(cls, capability: Capability) -> bool:
        return False

    @classmethod
    def supports_combination(
        cls, head_size: int, dtype: Any, kv_cache_dtype: Any, block_size: Any, use_mla: bool, has_sink: bool,
        use_sparse: bool, use_mm_prefix: bool, device_capability: Any,
    ) -> str | None:  # fmt: skip
        return "no"


class FlashAttentionMetadataBuilder:
    _cudagraph_support = "never"

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        self.aot_schedule, self.fa4_hd256, self.max_num_splits = True, True, 32

    def _get_scheduler_metadata(
        self, *, aot_schedule: bool, batch_size: int, cu_query_lens: Any, max_query_len: int, seqlens: Any,
        max_seq_len: int, causal: Any, max_num_splits: int,
    ) -> Any:  # fmt: skip
        raise AssertionError("a schedule of FlashAttention-3")


class FlashAttentionImpl:
    supports_dcp = True
    dcp_world_size, dcp_rank = 1, 0  # vLLM sets them when it makes an object

    def __init__(
        self, num_heads: int, head_size: int, scale: float, num_kv_heads: int, alibi_slopes: Any,
        sliding_window: int | None, kv_cache_dtype: str, logits_soft_cap: float | None = None,
        attn_type: Any = AttentionType.DECODER, kv_sharing_target_layer_name: str | None = None, sinks: Any = None,
    ) -> None:  # fmt: skip
        assert kv_cache_dtype == "auto" and sinks is None, "vLLM asks for FlashAttention-3"
        self.num_heads, self.head_size, self.scale, self.num_kv_heads = num_heads, head_size, scale, num_kv_heads
        self.sliding_window = (-1, -1) if sliding_window is None else (sliding_window - 1, 0)
        if attn_type == AttentionType.ENCODER_ONLY and sliding_window is not None:
            self.sliding_window = (sliding_window - 1, sliding_window - 1)
        self.alibi_slopes = None if alibi_slopes is None else torch.tensor(alibi_slopes)
        self.logits_soft_cap, self.attn_type = logits_soft_cap or 0, attn_type
        self.supports_quant_query_input = True

    def forward(
        self, layer: Any, query: Any, key: Any, value: Any, kv_cache: Any, attn_metadata: Any, output: Any,
        output_scale: Any = None, output_block_scale: Any = None,
    ) -> Any:  # fmt: skip
        raise AssertionError("FlashAttention")


class MLABackend(FlashAttentionBackend):
    @classmethod
    def is_mla(cls) -> bool:
        return True


class MLACommonImpl:
    def __init__(self, num_heads: int, head_size: int, scale: float, *args: Any, **mla_args: Any) -> None:
        self.scale, self.kv_lora_rank, self.qk_rope_head_dim = scale, 512, 64
        self.need_to_return_lse_for_decode, self.given = mla_args.pop("lse", False), mla_args
        self.dcp_world_size, self.dcp_rank = 1, 0


class FlashAttnMLAImpl(MLACommonImpl):
    supports_dcp = True

    def __init__(
        self, num_heads: int, head_size: int, scale: float, num_kv_heads: int, alibi_slopes: Any, sliding_window: Any,
        kv_cache_dtype: str, logits_soft_cap: Any, attn_type: Any, kv_sharing_target_layer_name: Any, **mla_args: Any,
    ) -> None:  # fmt: skip
        raise AssertionError("FlashAttention asks for a GPU of its own")

    def forward_mqa(self, q: Any, kv_c_and_k_pe_cache: Any, attn_metadata: Any, layer: Any) -> Any:
        raise AssertionError("FlashAttention")


class FlashAttnMLAMetadataBuilder:
    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: Any) -> None:
        self.fa_aot_schedule = True

    def _schedule_decode(
        self, num_reqs: Any, cu_query_lens: Any, max_query_len: Any, seqlens: Any, max_seq_len: Any, causal: Any,
        max_num_splits: Any,
    ) -> Any:  # fmt: skip
        raise AssertionError("a schedule of FlashAttention-3")


class FlashAttnPrefillBackend:
    def __init__(
        self, num_heads: int, scale: float, kv_lora_rank: int, qk_nope_head_dim: int, qk_rope_head_dim: int,
        v_head_dim: int, vllm_config: Any,
    ) -> None:  # fmt: skip
        self.requires_v_padding, self.flash_attn_varlen_func = True, None

    def supports_quant_output(self, quant_key: Any) -> bool:
        return True


BASES = {
    "QuireAttentionBackend": FlashAttentionBackend, "QuireAttentionMetadataBuilder": FlashAttentionMetadataBuilder,
    "QuireAttentionImpl": FlashAttentionImpl, "QuireMLABackend": MLABackend,
    "QuireMLAMetadataBuilder": FlashAttnMLAMetadataBuilder, "QuireMLAImpl": FlashAttnMLAImpl,
    "QuireMLAPrefillBackend": FlashAttnPrefillBackend,
}  # fmt: skip


class GroupCoordinator:
    """vLLM's group of decode context parallelism."""

    @property
    def device_group(self) -> Any:
        return dist.group.WORLD

    def all_gather(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        assert x.is_contiguous()
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x)
        return torch.cat(parts, dim)


@pytest.fixture
def vllm() -> Iterator[ModuleType]:
    with vllm_of_stubs() as module:
        yield module


@contextmanager
def vllm_of_stubs() -> Iterator[ModuleType]:
    stubs = modules(
        {
            "vllm.distributed.parallel_state": {"get_dcp_group": GroupCoordinator},
            "vllm.platforms.interface": {"DeviceCapability": Capability},
            "vllm.v1.attention.backend": {
                "AttentionCGSupport": SimpleNamespace(ALWAYS="always"), "AttentionType": AttentionType,
                "MultipleOf": lambda n: ("multiple of", n),
            },
            "vllm.v1.attention.backends.flash_attn": {
                "FlashAttentionBackend": FlashAttentionBackend, "FlashAttentionImpl": FlashAttentionImpl,
                "FlashAttentionMetadataBuilder": FlashAttentionMetadataBuilder,
            },
            "vllm.v1.attention.backends.mla.flashattn_mla": {
                "FlashAttnMLABackend": MLABackend, "FlashAttnMLAImpl": FlashAttnMLAImpl,
                "FlashAttnMLAMetadataBuilder": FlashAttnMLAMetadataBuilder,
            },
            "vllm.v1.attention.backends.mla.prefill.flash_attn": {"FlashAttnPrefillBackend": FlashAttnPrefillBackend},
        }
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        for name, module in stubs.items():
            patch.setitem(sys.modules, name, module)
        yield importlib.import_module("quire.compat.engines.vllm")
        sys.modules.pop("quire.compat.engines.vllm")
    fallback.stop("vllm")


class Batch:
    """Requests of n tokens, of which the last are new, in vLLM's pages of keys and values."""

    def __init__(self, batch: list[tuple[int, int]], dtype: torch.dtype = torch.float32) -> None:
        torch.manual_seed(0)
        self.lens, self.new, self.total = *zip(*batch, strict=True), sum(new for _, new in batch)
        start = torch.tensor([0, *self.new]).cumsum(0).int()
        self.cache = torch.randn(12, KV_HEADS, PAGE, 2 * DIM, dtype=dtype)
        self.table = torch.randperm(12).view(3, 4).int()[: len(batch)]
        self.q, self.k, self.v = (torch.randn(self.total, h, DIM, dtype=dtype) for h in (HEADS, KV_HEADS, KV_HEADS))
        self.metadata = SimpleNamespace(
            num_actual_tokens=self.total, query_start_loc=start, max_query_len=max(self.new), causal=True,
            max_num_splits=0, seq_lens=torch.tensor(self.lens).int(), max_seq_len=max(self.lens),
            block_table=self.table,
        )  # fmt: skip

    def run(self, impl: Any, cache: torch.Tensor | None = None, scale: float = 1.0) -> torch.Tensor:
        """By a layer; rows beyond the batch are the caller's."""
        scale_ = torch.tensor(scale)
        layer = SimpleNamespace(_k_scale=scale_, _v_scale=scale_, _q_scale=None)
        more = torch.full((2, HEADS, DIM), 7.0, dtype=self.q.dtype)
        out = torch.cat([torch.full_like(self.q, torch.nan), more])
        padded = [torch.cat([t, torch.full_like(t[:2], torch.nan)]) for t in (self.q, self.k, self.v)]
        result = impl.forward(layer, *padded, self.cache if cache is None else cache, self.metadata, out)
        assert result is out and torch.equal(out[-2:], more)
        return out[:-2]

    def want(self, cache: torch.Tensor | None = None, is_encoder: bool = False, **scoring: Any) -> torch.Tensor:
        """By the oracle."""
        out, at = [], 0
        cache = self.cache if cache is None else cache
        for row, m, n in zip(self.table, self.lens, self.new, strict=True):
            both = cache[row.long()].transpose(1, 2).flatten(0, 1)[:m]
            rows = slice(at, at + n)
            keys = (self.k[rows], self.v[rows]) if is_encoder else both.tensor_split(2, -1)
            kv = [0, len(keys[0])]
            out.append(attention(self.q[rows], *keys, [0, n], kv, **{"causal": not is_encoder} | scoring)[0])
            at += n
        return torch.cat(out)


MIXED = [(17, 1), (40, 1), (60, 20)]


def layer_of(
    vllm: ModuleType, window: int | None = None, kv: str = "auto", cap: float | None = None, **more: Any
) -> Any:
    return vllm.QuireAttentionImpl(HEADS, DIM, DIM**-0.5, KV_HEADS, more.pop("slopes", None), window, kv, cap, **more)


def test_methods_take_what_vllm_passes(vllm: ModuleType) -> None:
    """Each method that a class replaces takes the arguments of the one that it replaces."""
    for name, base in BASES.items():
        cls = getattr(vllm, name)
        assert issubclass(cls, base)
        replaced = [method for method in vars(cls) if inspect.isroutine(getattr(base, method, None))]
        assert replaced
        for method in replaced:
            theirs = inspect.signature(getattr(base, method)).parameters
            ours = inspect.signature(getattr(cls, method))
            keywords = [n for n, p in theirs.items() if p.kind is p.KEYWORD_ONLY]
            positional = [n for n, p in theirs.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
            ours.bind(*positional, **dict.fromkeys(keywords))
            if not any(p.kind is p.VAR_KEYWORD for p in ours.parameters.values()):
                ours.bind(**dict.fromkeys([*positional, *keywords]))


def test_answers_of_vllms_backend(vllm: ModuleType) -> None:
    backend = vllm.QuireAttentionBackend
    assert (backend.get_name(), vllm.QuireMLABackend.get_name()) == ("QUIRE", "QUIRE_MLA")
    assert (
        backend.get_impl_cls() is vllm.QuireAttentionImpl and vllm.QuireMLABackend.get_impl_cls() is vllm.QuireMLAImpl
    )
    assert [n for n in (16, 32, 72, 100, 256, 512) if backend.supports_head_size(n)] == [32, 72, 256]
    assert [d for d in (None, "fp8_e5m2", "bfloat16", "nvfp4") if not backend.supports_kv_cache_dtype(d)] == ["nvfp4"]
    assert backend.supports_sink() and not backend.supports_mm_prefix() and not backend.supports_rswa()
    assert backend.supports_compute_capability(Capability(8, 0)) and not backend.supports_compute_capability((7, 5))
    assert backend.supports_combination(64, None, None, 16, False, True, False, False, None) is None
    assert backend.get_preferred_block_size(16) == 16
    assert backend.get_supported_kernel_block_sizes(None) == [("multiple of", 16)]
    builder = backend.get_builder_cls()(None, [], None, torch.device("cpu"))
    assert not builder.aot_schedule and builder.max_num_splits == 0 and builder._cudagraph_support == "always"
    latents = vllm.QuireMLABackend.get_builder_cls()(None, [], None, None)
    assert not latents.fa_aot_schedule and latents._schedule_decode(1, 2, 3, 4, 5, 6, 7) is None
    assert vllm.QuireAttentionImpl.supports_dcp and vllm.QuireMLAImpl.supports_dcp


@pytest.mark.parametrize(
    ("given", "scoring"),
    [
        ({}, {}),
        ({"window": 16, "cap": 20.0}, {"window_left": 15, "soft_cap": 20.0}),
        ({"window": 16, "sinks": torch.arange(8.0)}, {"window_left": 15, "sinks": torch.arange(8.0)}),
        ({"slopes": [2.0**-i for i in range(1, 9)]}, {"pos_encoding_mode": "ALIBI"}),
    ],
    ids=["plain", "window and cap", "window and sinks", "ALiBi"],
)
def test_a_layer_of_vllm(vllm: ModuleType, given: dict[str, Any], scoring: dict[str, Any]) -> None:
    """Decodes and a chunk of a prefill in one batch."""
    batch, layer = Batch(MIXED), layer_of(vllm, **given)
    assert not layer.supports_quant_query_input
    torch.testing.assert_close(batch.run(layer).double(), batch.want(**scoring), atol=2e-5, rtol=0)
    assert engines.report().split()[1] == "QuireAttentionImpl.forward"


@pytest.mark.parametrize("kv", ["fp8", "fp8_e5m2"])
def test_a_cache_of_8_bits(vllm: ModuleType, kv: str) -> None:
    batch = Batch(MIXED, torch.bfloat16)
    cache = batch.cache.to(torch.float8_e4m3fn if kv == "fp8" else torch.float8_e5m2)
    out = batch.run(layer_of(vllm, kv=kv), cache.view(torch.uint8), scale=0.5)
    want = batch.want(cache.float() * 0.5)
    assert (out - want).abs().max() < 0.02


def test_an_encoder(vllm: ModuleType) -> None:
    """It sees both ways, and has no cache."""
    batch = Batch([(9, 9), (20, 20)])
    layer = layer_of(vllm, attn_type=AttentionType.ENCODER_ONLY)
    torch.testing.assert_close(batch.run(layer).double(), batch.want(is_encoder=True), atol=1e-5, rtol=0)


def test_without_a_causal_mask_windows_are_symmetric(vllm: ModuleType) -> None:
    batch = Batch([(30, 30), (40, 40)])
    batch.metadata.causal = False
    out, at = batch.run(layer_of(vllm, window=5)), 0
    for row, n in zip(batch.table, batch.lens, strict=True):
        k, v = batch.cache[row.long()].transpose(1, 2).flatten(0, 1)[:n].tensor_split(2, -1)
        place = torch.arange(n)
        mask = (place[:, None] - place).abs() <= 4
        want = attention(batch.q[at : at + n], k, v, [0, n], [0, n], mask=mask.flatten())[0]
        torch.testing.assert_close(out[at : at + n].double(), want, atol=1e-5, rtol=0)
        at += n


def test_what_vllms_layer_refuses(vllm: ModuleType) -> None:
    batch, layer = Batch(MIXED), layer_of(vllm)
    out = torch.ones_like(batch.q)
    assert not layer.forward(None, batch.q, batch.k, batch.v, batch.cache, None, out).any(), "a run for memory"
    with pytest.raises(NotImplementedError, match="output_scale"):
        layer.forward(None, batch.q, batch.k, batch.v, batch.cache, batch.metadata, out, torch.ones(1))
    batch.metadata.causal = torch.ones(3).int()
    with pytest.raises(quire.UnsupportedError, match="causal: expected one answer"):
        batch.run(layer)


def check_layer_over_ranks(with_sinks: bool) -> None:
    """Tokens before the new ones are dealt to ranks, which have all new ones and a part of the heads."""
    rank, size, dim = dist.get_rank(), dist.get_world_size(), 64
    lens, new = (17, 40, 60, 3), (1, 1, 20, 3)  # the last one has no token before the new ones; the first 16
    q, (k, v) = torch.randn(sum(new), 4 * size, dim), torch.randn(2, sum(lens), 1, dim)
    sinks = torch.randn(4 * size) if with_sinks else None
    ends, new_ends = oracle.indptr_of(lens), oracle.indptr_of(new)
    cache = torch.full((4 * 4, 1, PAGE, 2 * dim), torch.nan)
    fresh, before = [], [n - m for n, m in zip(lens, new, strict=True)]
    for i, (begin, n) in enumerate(zip(ends, before, strict=False)):
        mine = begin + torch.arange(n)[rank::size]
        for at, keys in enumerate(mine.split(PAGE)):
            cache[4 * i + at, 0, : len(keys)] = torch.cat([k[keys, 0], v[keys, 0]], -1)
        fresh.append(torch.arange(begin + n, ends[i + 1]))
    rows = torch.cat(fresh)
    metadata = SimpleNamespace(
        num_actual_tokens=len(rows), query_start_loc=torch.tensor(new_ends).int(), max_query_len=20, causal=True,
        max_num_splits=0, seq_lens=torch.tensor(lens).int(), max_seq_len=60,
        block_table=torch.arange(16).view(4, 4).int(),
        dcp_context_kv_lens=torch.tensor([len(range(rank, n, size)) for n in before]).int(), max_dcp_context_kv_len=40,
    )  # fmt: skip
    heads = slice(4 * rank, 4 * rank + 4)
    with vllm_of_stubs() as vllm:
        layer = vllm.QuireAttentionImpl(
            4, dim, dim**-0.5, 1, None, None, "auto", None, sinks=None if sinks is None else sinks[heads]
        )
        layer.dcp_world_size, layer.dcp_rank = size, rank
        out = torch.full((len(rows), 4, dim), torch.nan)
        layer.forward(None, q[:, heads], k[rows], v[rows], cache, metadata, out)
        windowed = vllm.QuireAttentionImpl(4, dim, dim**-0.5, 1, None, 8, "auto")
        windowed.dcp_world_size = size
        with pytest.raises(quire.UnsupportedError, match="sliding_window"):
            windowed.forward(None, q[:, heads], k[rows], v[rows], cache, metadata, out)
    want = attention(q, k, v, new_ends, ends, causal=True, sinks=sinks)[0]
    torch.testing.assert_close(out.double(), want[:, heads], atol=2e-5, rtol=0)


@pytest.mark.parametrize("with_sinks", [False, True])
def test_a_layer_over_ranks(with_sinks: bool) -> None:
    processes = Processes(2)
    processes.run(check_layer_over_ranks, with_sinks)
    processes.close()


@pytest.mark.parametrize("is_pair", [True, False])
def test_latents_of_vllm(vllm: ModuleType, is_pair: bool) -> None:
    batch = Batch(MIXED)
    args = (HEADS, 576, 0.1, 1, None, None, "auto", None, AttentionType.DECODER, None)
    layer = vllm.QuireMLAImpl(*args, lse=is_pair, q_lora_rank=1)
    assert layer.given == {"q_lora_rank": 1}
    cache, q = torch.randn(12, PAGE, 576), torch.randn(batch.total, HEADS, 576)
    m = batch.metadata
    m.decode, m.dcp_tot_seq_lens = m, None
    out, lse = layer.forward_mqa(tuple(q.split([512, 64], -1)) if is_pair else q, cache, m, None)
    assert (lse.shape == q.shape[:2]) if is_pair else lse is None
    at = 0
    for row, kv, n in zip(batch.table, batch.lens, batch.new, strict=True):
        rows = cache[row.long()].flatten(0, 1)[:kv]
        (nope, rope), (ckv, kpe) = (t.split([512, 64], -1) for t in (q[at : at + n], rows))
        want = latent_attention(nope, rope, ckv, kpe, [0, n], [0, kv], sm_scale=0.1, causal=True)[0]
        torch.testing.assert_close(out[at : at + n].double(), want, atol=1e-4, rtol=0)
        at += n


def test_latents_on_two_ranks(vllm: ModuleType) -> None:
    """Decode context parallelism: each rank has every second token, and queries of drafts see what is before them."""
    batch, q, cache = Batch(MIXED), torch.randn(22, HEADS, 576), torch.randn(3, 64, 576)
    args = (HEADS, 576, 0.1, 1, None, None, "auto", None, AttentionType.DECODER, None)
    m, total, parts = batch.metadata, batch.metadata.seq_lens, []
    m.decode, m.dcp_tot_seq_lens = m, total
    for rank in range(2):
        layer = vllm.QuireMLAImpl(*args, lse=True)
        layer.dcp_world_size, layer.dcp_rank = 2, rank
        pages = torch.zeros(3, 32, 576)
        pages[:] = cache[:, rank::2]
        m.seq_lens, m.block_table = (total - rank + 1) // 2, torch.arange(3).int()[:, None]
        parts.append(layer.forward_mqa(q, pages, m, None))
    lse = torch.stack([lse for _, lse in parts])
    weights = (lse - lse.logsumexp(0)).exp().nan_to_num(0.0)[..., None]
    out, at = (torch.stack([o for o, _ in parts]) * weights).sum(0), 0
    for row, kv, n in zip(cache, batch.lens, batch.new, strict=True):
        (nope, rope), (ckv, kpe) = (t.split([512, 64], -1) for t in (q[at : at + n], row[:kv]))
        want = latent_attention(nope, rope, ckv, kpe, [0, n], [0, kv], sm_scale=0.1, causal=True)[0]
        torch.testing.assert_close(out[at : at + n].double(), want, atol=1e-4, rtol=0)
        at += n


@pytest.mark.parametrize(("at", "value"), [(4, [0.5]), (5, 128), (6, "fp8"), (7, 30.0), (8, AttentionType.ENCODER)])
def test_what_latents_refuse(vllm: ModuleType, at: int, value: Any) -> None:
    args = [HEADS, 576, 0.1, 1, None, None, "auto", None, AttentionType.DECODER, None]
    args[at] = value
    with pytest.raises(NotImplementedError, match="expected"):
        vllm.QuireMLAImpl(*args)


def test_prefill_of_latents(vllm: ModuleType) -> None:
    backend = vllm.QuireMLAPrefillBackend(8, 0.1, 512, 128, 64, 128, None)
    assert backend.flash_attn_varlen_func.__module__ == "quire.compat.flash_attn_interface"
    assert not backend.requires_v_padding and not backend.supports_quant_output(None) and backend.is_available()
    dims = SimpleNamespace(qk_nope_head_dim=192, qk_rope_head_dim=64, v_head_dim=256)
    assert backend.supports_mla_dimensions(dims)
    dims.v_head_dim = 512
    assert not backend.supports_mla_dimensions(dims) and backend.get_name() == "QUIRE"


# --- SGLang ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def hooks(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The hooks that were registered with stubs of SGLang's modules."""
    registered: list[Any] = []
    backends = {name: lambda runner, name=name: (name, runner) for name in ("fa3", "flashinfer")}
    stubs = modules(
        {
            "sglang.srt.arg_groups.choices": {
                "ATTENTION_BACKEND_CHOICES": ["fa3"], "DRAFT_ATTENTION_BACKEND_CHOICES": ["fa3"],
                "DETERMINISTIC_ATTENTION_BACKEND_CHOICES": ["fa3"],
            },
            "sglang.srt.plugins.hook_registry": {
                "HookType": SimpleNamespace(BEFORE="before"),
                "HookRegistry": SimpleNamespace(register=lambda *args: registered.append(args)),
            },
            "sglang.srt.utils.common": {"get_device_capability": lambda: (9, 0)},
            engines.SGLANG_REGISTRY: {
                "ATTENTION_BACKENDS": backends,
                "register_attention_backend": lambda name: lambda make: backends.setdefault(name, make),
            },
        }
    )  # fmt: skip
    for name, module in stubs.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(fallback, "_capabilities", lambda: [(9, 0)])
    for name in ("QUIRE_FLASH_ATTN", "QUIRE_FLASHINFER"):
        monkeypatch.setenv(name, "")
    yield registered
    engines._later.calls.clear()
    engines.uninstall()
    overlay.deactivate()


def test_the_name_in_sglangs_options(hooks: list[Any]) -> None:
    engines.sglang_plugin()
    engines.sglang_plugin()
    choices = sys.modules["sglang.srt.arg_groups.choices"]
    assert choices.ATTENTION_BACKEND_CHOICES == choices.DRAFT_ATTENTION_BACKEND_CHOICES == ["fa3", "quire"]
    assert hooks == [("sglang.srt.server_args.ServerArgs.resolve_once", engines.resolve_sglang, "before")]
    assert sys.modules[engines.SGLANG_REGISTRY].ATTENTION_BACKENDS["quire"] is engines.create_sglang


@pytest.mark.parametrize(("capability", "served"), [((9, 0), "fa3"), ((12, 0), "flashinfer")])
def test_what_the_name_becomes(
    hooks: list[Any], monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], served: str
) -> None:
    """It is a name that SGLang knows in all processes of the server, which replace its functions."""
    del hooks
    monkeypatch.setattr(sys.modules["sglang.srt.utils.common"], "get_device_capability", lambda: capability)
    arguments = SimpleNamespace(
        attention_backend=None, prefill_attention_backend="triton", decode_attention_backend="quire",
        speculative_draft_attention_backend="quire",
    )  # fmt: skip
    assert engines.resolve_sglang(arguments) is None
    assert vars(arguments) == {
        "attention_backend": None, "prefill_attention_backend": "triton", "decode_attention_backend": served,
        "speculative_draft_attention_backend": served,
    }  # fmt: skip
    assert config.flash_attn_overlay() == config.flashinfer_overlay() == "on"
    assert engines.create_sglang("runner") == (served, "runner")


def test_other_names_stay(hooks: list[Any]) -> None:
    del hooks
    arguments = SimpleNamespace(attention_backend="fa3", prefill_attention_backend=None)
    engines.resolve_sglang(arguments)
    assert vars(arguments) == {"attention_backend": "fa3", "prefill_attention_backend": None}
    assert config.flash_attn_overlay() == ""
