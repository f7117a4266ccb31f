// The parameters of a kernel of multi-head latent attention (MLA). AttentionMlaParams in quire/kernels/params.py
// mirrors them.
#pragma once
#include "quire/core/params.h"

namespace quire {

// Keys have one head of head_dim_qk dims: the latent ckv, head_dim_vo dims, which is the value too, and kpe, the rest,
// which RoPE has rotated. Of `base`, q is q_pe [nnz_qo, num_qo_heads, kpe's dims], k is kpe [num_pages, page_size, 1,
// kpe's dims] and v is ckv [num_pages, page_size, 1, head_dim_vo]. Both may be parts of one tensor: strides say so.
// A logit is (q_nope . ckv + q_pe . kpe) * logits_scale. Packed rows are qo position * num_qo_heads + head.
struct AttentionMlaParams {
  AttentionParams base;
  const void* q_nope;  // [nnz_qo, num_qo_heads, head_dim_vo], by strides
  int64_t q_nope_token_stride, q_nope_head_stride;
  // [num_pages, page_size, 1, head_dim_vo / kTileDims] by strides; null but in variants with kTileScales. There a
  // latent has 8 bits a dim and each kTileDims dims are to be multiplied by their scale; kpe is in q's type.
  const float* ckv_scales;
  int64_t ckv_scales_page_stride, ckv_scales_token_stride, ckv_scales_head_stride;
};

constexpr int kTileDims = 128;  // of a latent that have a scale: TILE_DIMS in quire/kernels/operands.py

}  // namespace quire
