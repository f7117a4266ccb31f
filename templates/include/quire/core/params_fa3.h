// The parameters of the fa3 kernels: those of every attention kernel, and tensor maps for TMA. AttentionFa3Params in
// quire/kernels/params.py mirrors them.
#pragma once
#include "quire/core/params.h"

namespace quire {

// A CUtensorMap, made by cuTensorMapEncodeTiled: opaque here, so that no driver header is parsed.
struct alignas(64) TensorMap {
  uint64_t opaque[16];
};

// All maps: 16-bit elements, 128-byte swizzle, zeros out of bounds, element strides 1. Dimensions innermost first, with
// their strides in elements; a box is what one copy moves.
struct AttentionFa3Params {
  AttentionParams base;
  // q [head_dim_qk; group_size, q_head_stride; nnz_qo, q_token_stride; num_kv_heads, group_size * q_head_stride],
  // box [64; group_size; kTileRows / group_size; 1]. Not read unless group_size divides kTileRows.
  TensorMap tensor_q;
  // Ragged: k [head_dim_qk; nnz_kv, k_token_stride; num_kv_heads, k_head_stride; 1, any], box [64; kTileKv; 1; 1].
  // Paged: k [head_dim_qk; page_size, k_token_stride; num_kv_heads, k_head_stride; num_pages, k_page_stride],
  // box [64; gcd(page_size, kTileKv); 1; 1]. Not read where pages are gathered.
  TensorMap tensor_k;
  TensorMap tensor_v;  // the same of v, with head_dim_vo
  // The tile counter for whole row tiles; 0 between launches. If null, CTA c computes row tiles c, c + grid, ...
  uint32_t* tile_counter;
  // For whole row tiles: a divisor of num_kv_heads. As many KV heads are computed at a time, to stay in L2.
  int32_t heads_per_l2_group;
  // Custom masks: [work units of one KV head] bits kBlockVisible and kBlockFull; see RowTile::work_begin.
  const uint8_t* block_mask;
};

// The offsets of a struct with a base are what they are without one; the build proves that ctypes agrees.
#pragma nv_diag_suppress 1427

// With kPrefix: the maps of k_prefix and v_prefix, like those of ragged keys and values.
struct AttentionFa3PrefixParams : AttentionFa3Params {
  TensorMap tensor_k_prefix, tensor_v_prefix;
  const void* k_prefix;
  const void* v_prefix;
  int64_t k_prefix_token_stride, k_prefix_head_stride;
  int64_t v_prefix_token_stride, v_prefix_head_stride;
  unsigned char to_64[16];
};

}  // namespace quire
