"""vLLM's backends QUIRE and QUIRE_MLA: its backends of FlashAttention, with Quire's functions.

Only vLLM imports this module, when one of the names is chosen. Metadata, writes to the cache, and most answers to vLLM
are inherited; forward() calls Quire, and no schedule is made ahead of it. What Quire's functions lack is not promised:
the masks of images in PrefixLM models, and R-SWA. Under decode context parallelism the ranks' results are exchanged in
one message, by quire.distributed.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backend import AttentionCGSupport, AttentionType, MultipleOf
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.mla.flashattn_mla import (
    FlashAttnMLABackend,
    FlashAttnMLAImpl,
    FlashAttnMLAMetadataBuilder,
)
from vllm.v1.attention.backends.mla.prefill.flash_attn import FlashAttnPrefillBackend

from quire.cache import merge_state_v2
from quire.compat.flash_attn_interface import flash_attn_varlen_func
from quire.compat.flashinfer import fallback
from quire.distributed import merge_over_ranks
from quire.engine.wrapper import Pair
from quire.errors import UnsupportedError

__all__ = [
    "QuireAttentionBackend", "QuireAttentionImpl", "QuireAttentionMetadataBuilder", "QuireMLABackend", "QuireMLAImpl",
    "QuireMLAMetadataBuilder", "QuireMLAPrefillBackend",
]  # fmt: skip

_LEAST_CAPABILITY = DeviceCapability(8, 0)
_DIMS = range(32, 257, 8)  #: of heads over pages
_OF_8_BITS = {
    "fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2,
}  # fmt: skip

fallback.start("vllm")  # so that quire.compat.engines.report() counts calls


class _OnGpus:
    """What both backends say of GPUs."""

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        """From Ampere on; `quire matrix` says on which Quire has run."""
        return bool(capability >= _LEAST_CAPABILITY)

    @classmethod
    def supports_combination(cls, *args: Any, **kwargs: Any) -> str | None:
        """No combination of what is supported is refused."""
        del args, kwargs
        return None


class QuireAttentionBackend(_OnGpus, FlashAttentionBackend):  # type: ignore[misc]
    """Attention of many heads over vLLM's pages."""

    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "float16", "bfloat16", *_OF_8_BITS]

    @staticmethod
    def get_name() -> str:
        """The name by which it is chosen."""
        return "QUIRE"

    @staticmethod
    def get_impl_cls() -> type[QuireAttentionImpl]:
        """What runs in each layer."""
        return QuireAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[QuireAttentionMetadataBuilder]:
        """What describes each batch."""
        return QuireAttentionMetadataBuilder

    @classmethod
    def get_supported_kernel_block_sizes(cls, kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        """Pages of any size; vLLM's own kernels that write them take multiples of 16."""
        del kv_cache_spec
        return [MultipleOf(16)]

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        """vLLM's."""
        return default_block_size

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        """Heads that kernels take over pages."""
        return head_size in _DIMS

    @classmethod
    def supports_kv_cache_dtype(cls, kv_cache_dtype: str | None) -> bool:
        """Caches of 16 bits, and both kinds of 8."""
        return kv_cache_dtype is None or kv_cache_dtype in cls.supported_kv_cache_dtypes

    @classmethod
    def supports_per_head_quant_scales(cls) -> bool:
        """Scales are read by request and head."""
        return True

    @classmethod
    def supports_mm_prefix(cls) -> bool:
        """Images that see both ways have a backend of their own in vLLM."""
        return False

    @classmethod
    def supports_rswa(cls) -> bool:
        """A prefix beside a window needs a mask function."""
        return False

    @classmethod
    def supports_sink(cls) -> bool:
        """On all GPUs."""
        return True


class QuireAttentionMetadataBuilder(FlashAttentionMetadataBuilder):  # type: ignore[misc]
    """Batches as vLLM describes them to FlashAttention, without a schedule: Quire's is made on the GPU."""

    _cudagraph_support = AttentionCGSupport.ALWAYS

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.aot_schedule, self.fa4_hd256, self.max_num_splits = False, False, 0

    def _get_scheduler_metadata(self, **kwargs: Any) -> None:
        del kwargs


class QuireAttentionImpl(FlashAttentionImpl):  # type: ignore[misc]
    """A layer of attention."""

    supports_dcp = True

    def __init__(
        self, num_heads: int, head_size: int, scale: float, num_kv_heads: int, alibi_slopes: list[float] | None,
        sliding_window: int | None, kv_cache_dtype: str, logits_soft_cap: float | None = None,
        attn_type: Any = AttentionType.DECODER, kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        super().__init__(
            num_heads, head_size, scale, num_kv_heads, alibi_slopes, sliding_window, "auto", logits_soft_cap, attn_type,
            kv_sharing_target_layer_name, None,
        )  # fmt: skip
        # These would ask for FlashAttention-3.
        self.kv_cache_dtype, self.sinks = kv_cache_dtype, sinks
        self.supports_quant_query_input = False  # queries of 16 bits are multiplied as they are

    def forward(
        self, layer: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
        kv_cache: torch.Tensor, attn_metadata: Any, output: torch.Tensor, output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Attention of all queries of a batch.

        query: [num_tokens, num_heads, head_size]; key, value: [num_tokens, num_kv_heads, head_size], read by encoders
        alone. kv_cache: [num_blocks, num_kv_heads, block_size, 2 * head_size]. output: where results are written.
        """
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("output_scale: Quire's results have 16 bits.")
        if attn_metadata is None:  # vLLM measures memory
            return output.fill_(0)
        if isinstance(attn_metadata.causal, torch.Tensor):
            raise UnsupportedError("causal: expected one answer for all requests, got a tensor.")
        n, starts = attn_metadata.num_actual_tokens, attn_metadata.query_start_loc
        given: dict[str, Any] = {
            "cu_seqlens_q": starts, "max_seqlen_q": attn_metadata.max_query_len, "softmax_scale": self.scale,
            "alibi_slopes": self.alibi_slopes, "softcap": self.logits_soft_cap, "s_aux": self.sinks,
            "num_splits": attn_metadata.max_num_splits, "out": output[:n],
        }  # fmt: skip
        if self.attn_type in (AttentionType.ENCODER_ONLY, AttentionType.ENCODER):
            flash_attn_varlen_func(
                query[:n], key[:n], value[:n], cu_seqlens_k=starts, max_seqlen_k=attn_metadata.max_query_len,
                window_size=self.sliding_window, **given,
            )  # fmt: skip
            return output
        keys, values = kv_cache.transpose(1, 2).tensor_split(2, dim=-1)
        if self.kv_cache_dtype in _OF_8_BITS:
            keys, values = (cache.view(_OF_8_BITS[self.kv_cache_dtype]) for cache in (keys, values))
            shape = starts.shape[0] - 1, self.num_kv_heads
            given |= {"k_descale": layer._k_scale.expand(shape), "v_descale": layer._v_scale.expand(shape)}
        if self.dcp_world_size > 1:
            self._over_ranks(query[:n], (key[:n], value[:n]), (keys, values), attn_metadata, given)
            return output
        flash_attn_varlen_func(
            query[:n], keys, values, seqused_k=attn_metadata.seq_lens, max_seqlen_k=attn_metadata.max_seq_len,
            block_table=attn_metadata.block_table, causal=attn_metadata.causal,
            window_size=_window(self.sliding_window, attn_metadata.causal), **given,
        )  # fmt: skip
        return output

    def _over_ranks(
        self, query: torch.Tensor, new: Pair, cached: Pair, metadata: Any, given: dict[str, Any]
    ) -> None:  # fmt: skip
        """Decode context parallelism: the tokens before the new ones lie over ranks, which have the new ones all.

        Queries of the heads of all ranks see this rank's tokens, in one exchange each rank gets its own heads, and what
        those see of the new tokens is merged with it.
        """
        from vllm.distributed.parallel_state import get_dcp_group  # only a release that has it comes here

        if self.sliding_window != (-1, -1) or self.alibi_slopes is not None:
            raise UnsupportedError("sliding_window, alibi_slopes: expected none with decode context parallelism.")
        group, out = get_dcp_group(), given.pop("out")
        sinks, scales = given.pop("s_aux"), {name: given.pop(name, None) for name in ("k_descale", "v_descale")}
        o, lse = flash_attn_varlen_func(
            group.all_gather(query.contiguous(), dim=1), cached[0], cached[1], seqused_k=metadata.dcp_context_kv_lens,
            max_seqlen_k=metadata.max_dcp_context_kv_len, block_table=metadata.block_table, causal=False,
            return_softmax_lse=True, **scales, **given,
        )  # fmt: skip
        o, lse = merge_over_ranks(o, lse.t().contiguous(), group.device_group, natural_lse=True)
        own, own_lse = flash_attn_varlen_func(
            query, new[0], new[1], cu_seqlens_k=given["cu_seqlens_q"], max_seqlen_k=given["max_seqlen_q"],
            causal=metadata.causal, s_aux=sinks, return_softmax_lse=True, **given,
        )  # fmt: skip
        merge_state_v2(own, own_lse.t().contiguous(), o, lse, out)


def _window(window: tuple[int, int], causal: bool) -> tuple[int, int]:
    """Without a causal mask a window reaches as far to the right as to the left."""
    return (window[0], window[0]) if window[0] >= 0 and not causal else window


# --- latents ---------------------------------------------------------------------------------------------------------


class QuireMLABackend(_OnGpus, FlashAttnMLABackend):  # type: ignore[misc]
    """Attention over latents, of DeepSeek's models."""

    @staticmethod
    def get_name() -> str:
        """The name by which it is chosen."""
        return "QUIRE_MLA"

    @staticmethod
    def get_impl_cls() -> type[QuireMLAImpl]:
        """What runs in each layer."""
        return QuireMLAImpl

    @staticmethod
    def get_builder_cls() -> type[QuireMLAMetadataBuilder]:
        """What describes each batch."""
        return QuireMLAMetadataBuilder


class QuireMLAMetadataBuilder(FlashAttnMLAMetadataBuilder):  # type: ignore[misc]
    """Batches as vLLM describes them to FlashAttention, without a schedule."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.fa_aot_schedule = False

    def _schedule_decode(self, *args: Any, **kwargs: Any) -> None:
        del args, kwargs


class QuireMLAImpl(FlashAttnMLAImpl):  # type: ignore[misc]
    """A layer of attention over latents; its prefill is that of --attention-config mla_prefill_backend."""

    supports_dcp = True

    def __init__(
        self, num_heads: int, head_size: int, scale: float, num_kv_heads: int, alibi_slopes: list[float] | None,
        sliding_window: int | None, kv_cache_dtype: str, logits_soft_cap: float | None, attn_type: str,
        kv_sharing_target_layer_name: str | None, **mla_args: Any,
    ) -> None:  # fmt: skip
        for name, value in (("alibi_slopes", alibi_slopes), ("sliding_window", sliding_window)):
            if value:
                raise NotImplementedError(f"{name}: expected None, as kernels of latents have none, got {value!r}.")
        if logits_soft_cap or attn_type != AttentionType.DECODER or kv_cache_dtype in _OF_8_BITS:
            raise NotImplementedError(
                f"QUIRE_MLA: expected a decoder without soft cap over a cache of 16 bits, got {attn_type}, "
                f"logits_soft_cap={logits_soft_cap}, kv_cache_dtype={kv_cache_dtype!r}."
            )
        super(FlashAttnMLAImpl, self).__init__(  # FlashAttention's own asks for a GPU of its own
            num_heads, head_size, scale, num_kv_heads, alibi_slopes, sliding_window, kv_cache_dtype, logits_soft_cap,
            attn_type, kv_sharing_target_layer_name, **mla_args,
        )  # fmt: skip

    def forward_mqa(
        self, q: torch.Tensor | tuple[torch.Tensor, torch.Tensor], kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: Any, layer: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
        """Attention of decodes, and of prefills short enough to be treated as such.

        q: queries [num_tokens, num_heads, 512] and their part with RoPE [num_tokens, num_heads, 64], or both in one
        tensor. kv_c_and_k_pe_cache: [num_blocks, block_size, 576]. Returns the result and, if vLLM wants it, the lse
        [num_tokens, num_heads].
        """
        del layer
        sizes = [self.kv_lora_rank, self.qk_rope_head_dim]
        nope, rope = q if isinstance(q, tuple) else torch.split(q, sizes, dim=-1)
        latents, keys = torch.split(kv_c_and_k_pe_cache, sizes, dim=-1)
        decode = attn_metadata.decode
        result = flash_attn_varlen_func(
            rope, keys.unsqueeze(-2), latents.unsqueeze(-2), q_v=nope, cu_seqlens_q=decode.query_start_loc,
            max_seqlen_q=decode.max_query_len, max_seqlen_k=decode.max_seq_len, seqused_k=decode.seq_lens,
            block_table=decode.block_table, softmax_scale=self.scale, causal=True,
            return_softmax_lse=self.need_to_return_lse_for_decode, num_splits=decode.max_num_splits,
            cp_world_size=self.dcp_world_size, cp_rank=self.dcp_rank, cp_tot_seqused_k=decode.dcp_tot_seq_lens,
        )  # fmt: skip
        return (result[0], result[1].transpose(0, 1)) if self.need_to_return_lse_for_decode else (result, None)


class QuireMLAPrefillBackend(FlashAttnPrefillBackend):  # type: ignore[misc]
    """Prefill of DeepSeek's models: keys of nope + rope dims, values of their own."""

    @staticmethod
    def get_name() -> str:
        """The name by which --attention-config chooses it."""
        return "QUIRE"

    @classmethod
    def is_available(cls) -> bool:
        """Always."""
        return True

    @classmethod
    def supports_mla_dimensions(cls, mla_dimensions: Any) -> bool:
        """Heads that kernels take, which are padded where need be."""
        dims = mla_dimensions.qk_nope_head_dim + mla_dimensions.qk_rope_head_dim, mla_dimensions.v_head_dim
        return bool(max(dims) <= _DIMS[-1])

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.flash_attn_varlen_func = flash_attn_varlen_func
        self.requires_v_padding = False

    def supports_quant_output(self, quant_key: Any) -> bool:
        """Results have 16 bits."""
        del quant_key
        return False
