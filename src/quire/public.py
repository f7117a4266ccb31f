"""The public names, which `import quire` gives under `quire.`: see __init__.py."""

from __future__ import annotations

from quire import (
    aot,
    attention,
    cascade,
    decode,
    errors,
    expression,
    jit,
    mla,
    page,
    pod,
    prefill,
    quantization,
    rope,
    sparse,
    variants,
    viz,
    xqa,
)
from quire.aot import warmup
from quire.attention import BatchAttention, BatchAttentionWithAttentionSinkWrapper
from quire.cascade import (
    BatchDecodeWithSharedPrefixPagedKVCacheWrapper,
    BatchPrefillWithSharedPrefixPagedKVCacheWrapper,
    MultiLevelCascadeAttentionWrapper,
    batch_decode_with_shared_prefix_padded_kv_cache,
    merge_state,
    merge_state_in_place,
    merge_states,
)
from quire.chunked_prefill import BatchPrefillWithPrefixWrapper
from quire.decode import (
    BatchDecodeWithPagedKVCacheWrapper,
    CUDAGraphBatchDecodeWithPagedKVCacheWrapper,
    fast_decode_plan,
    single_decode_with_kv_cache,
    single_decode_with_kv_cache_with_jit_module,
    trtllm_batch_decode_with_kv_cache,
    xqa_batch_decode_with_kv_cache,
)
from quire.errors import (
    CacheError,
    CacheMissError,
    CompileError,
    DriverError,
    PlanError,
    QuireError,
    UnsupportedError,
    ValidationError,
)
from quire.estimates import estimate, is_supported
from quire.flex import flex_attention
from quire.jit import events, record, seal
from quire.jit.events import metrics
from quire.kernels import backends
from quire.kernels.variant import Variant
from quire.mla import BatchMLAPagedAttentionWrapper
from quire.page import append_paged_kv_cache, append_paged_mla_kv_cache, get_batch_indices_positions, get_seq_lens
from quire.page_selection import SelectedPages, batch_decode_with_selected_pages, page_key_bounds, select_pages
from quire.pod import BatchPODWithPagedKVCacheWrapper, PODWithPagedKVCacheWrapper
from quire.prefill import (
    BatchPrefillWithPagedKVCacheWrapper,
    BatchPrefillWithRaggedKVCacheWrapper,
    single_prefill_with_kv_cache,
    single_prefill_with_kv_cache_return_lse,
    single_prefill_with_kv_cache_with_jit_module,
    trtllm_batch_context_with_kv_cache,
)
from quire.quantization import packbits, segment_packbits
from quire.rope import (
    apply_llama31_rope,
    apply_llama31_rope_inplace,
    apply_llama31_rope_pos_ids,
    apply_llama31_rope_pos_ids_inplace,
    apply_rope,
    apply_rope_inplace,
    apply_rope_pos_ids,
    apply_rope_pos_ids_inplace,
    apply_rope_with_cos_sin_cache,
    apply_rope_with_cos_sin_cache_inplace,
    mla_rope_quantize_fp8,
    rope_append_paged_kv_cache,
    rope_quantize_fp8,
    rope_quantize_fp8_append_paged_kv_cache,
)
from quire.sparse import BlockSparseAttentionWrapper, VariableBlockSparseAttentionWrapper
from quire.token_selection import select_tokens
from quire.xqa import xqa_mla

__all__: list[str] = [
    "BatchAttention",
    "BatchAttentionWithAttentionSinkWrapper",
    "BatchDecodeWithPagedKVCacheWrapper",
    "BatchDecodeWithSharedPrefixPagedKVCacheWrapper",
    "BatchMLAPagedAttentionWrapper",
    "BatchPODWithPagedKVCacheWrapper",
    "BatchPrefillWithPagedKVCacheWrapper",
    "BatchPrefillWithPrefixWrapper",
    "BatchPrefillWithRaggedKVCacheWrapper",
    "BatchPrefillWithSharedPrefixPagedKVCacheWrapper",
    "BlockSparseAttentionWrapper",
    "CUDAGraphBatchDecodeWithPagedKVCacheWrapper",
    "CacheError",
    "CacheMissError",
    "CompileError",
    "DriverError",
    "MultiLevelCascadeAttentionWrapper",
    "PODWithPagedKVCacheWrapper",
    "PlanError",
    "QuireError",
    "SelectedPages",
    "UnsupportedError",
    "ValidationError",
    "VariableBlockSparseAttentionWrapper",
    "Variant",
    "aot",
    "append_paged_kv_cache",
    "append_paged_mla_kv_cache",
    "apply_llama31_rope",
    "apply_llama31_rope_inplace",
    "apply_llama31_rope_pos_ids",
    "apply_llama31_rope_pos_ids_inplace",
    "apply_rope",
    "apply_rope_inplace",
    "apply_rope_pos_ids",
    "apply_rope_pos_ids_inplace",
    "apply_rope_with_cos_sin_cache",
    "apply_rope_with_cos_sin_cache_inplace",
    "attention",
    "backends",
    "batch_decode_with_selected_pages",
    "batch_decode_with_shared_prefix_padded_kv_cache",
    "cascade",
    "decode",
    "errors",
    "estimate",
    "events",
    "expression",
    "fast_decode_plan",
    "flex_attention",
    "get_batch_indices_positions",
    "get_seq_lens",
    "is_supported",
    "jit",
    "merge_state",
    "merge_state_in_place",
    "merge_states",
    "metrics",
    "mla",
    "mla_rope_quantize_fp8",
    "packbits",
    "page",
    "page_key_bounds",
    "pod",
    "prefill",
    "quantization",
    "record",
    "rope",
    "rope_append_paged_kv_cache",
    "rope_quantize_fp8",
    "rope_quantize_fp8_append_paged_kv_cache",
    "seal",
    "segment_packbits",
    "select_pages",
    "select_tokens",
    "single_decode_with_kv_cache",
    "single_decode_with_kv_cache_with_jit_module",
    "single_prefill_with_kv_cache",
    "single_prefill_with_kv_cache_return_lse",
    "single_prefill_with_kv_cache_with_jit_module",
    "sparse",
    "trtllm_batch_context_with_kv_cache",
    "trtllm_batch_decode_with_kv_cache",
    "variants",
    "viz",
    "warmup",
    "xqa",
    "xqa_batch_decode_with_kv_cache",
    "xqa_mla",
]
