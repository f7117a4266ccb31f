// The parameters of attention kernels. AttentionParams is the same for every backend; the structs for latent attention
// (MLA) and for TMA begin with it. The structs of the same names in quire/kernels/params.py mirror them; the rendered
// unit asserts each offset.
#pragma once
#include "quire/core/types.h"

namespace quire {

// One row tile of one request, for every KV head alike. Rows are packed: row = qo position * group_size + head in
// group, so that all query heads of a KV head share its keys and values. A row tile carries what a kernel needs to know
// about its request: one trip to memory instead of two.
struct alignas(16) RowTile {
  int32_t request;
  int32_t row_begin;  // first packed row
  int32_t kv_begin;   // KV tiles [kv_begin, kv_end), in units of Variant::kTileKv; may be empty
  int32_t kv_end;
  int32_t work_begin;  // work units of all earlier row tiles, of one KV head; see tile_units()
  // Fixed splits: number of the partial of KV head 0. KV head h has partial + h * num_parts and group + h. In other
  // schedules partial is -1, num_parts is 1 and group is -1.
  union {
    int32_t partial;
    int32_t row_end;  // in a cascade: one past the last packed row
  };
  union {
    int32_t num_parts;   // parts that the rows' KV tiles are divided into; this row tile is one of them
    int32_t num_groups;  // in a cascade: merge groups that take rows of this row tile
  };
  int32_t group;     // merge group; in a cascade the first one, see core/schedule.h
  int32_t kv_first;  // ragged: the request's first row of k; paged: its first entry of kv_indices
  int32_t kv_len;    // its tokens
  int32_t qo_begin;  // its first row of q
  int32_t qo_len;
};

// What one CTA computes: a run of consecutive work units. The size of the schedule is stored here, because it may
// change between replays of a CUDA graph while parameters do not.
struct alignas(16) Partition {
  int32_t kv_head;
  int32_t tile;
  int32_t offset;  // units of the first row tile that earlier partitions compute
  int32_t units;   // length of the run, which may go on into the next row tiles and KV heads; may be 0
  // Partial and merge group of the first work tile, if an earlier partition begins its row tile (offset > 0). The last
  // work tile has the next partial and group, if a later partition ends its row tile. In a cascade `partial` is the
  // first row of the first work tile's partial.
  int32_t partial;
  union {
    int32_t group;
    int32_t first_tile;  // in a cascade: row tiles [first_tile, num_tiles) are divided among these partitions
  };
  int32_t num_tiles;  // row tiles of the schedule
  // If not 0, the partition has no units: CTAs take whole row tiles from the tile counter, and this number replaces
  // AttentionFa3Params::heads_per_l2_group. For CUDA graphs, in which one plan may divide row tiles and the next one
  // not.
  union {
    int32_t heads_per_l2_group;
    int32_t next;  // in a cascade: the partition that the CTA computes after this one; 0: none
  };
};

// One entry of the merge table: which partials have results of the same rows, and how many of them have arrived.
// Partitions of a row tile and fixed splits have adjacent partials: numbers parts_begin .. parts_end - 1, each of
// kTileRows rows. In a cascade parts_begin .. parts_end - 1 are places in a list of partials (core/schedule.h).
struct alignas(16) MergeGroup {
  int32_t parts_begin, parts_end;
  int32_t num_rows;      // of each part; these are the output's rows
  uint32_t num_arrived;  // 0 between launches: the last CTA resets it. In MLA three counters: tile/hopper/mla_merge.cuh

  QUIRE_HD int num_parts() const { return parts_end - parts_begin; }
};

struct AttentionParams {
  // The operands, as the kernel's row of the catalogue declares them (kernels/features.py): addresses, then strides in
  // elements. The last dimension is contiguous.
  const void* q;  // [nnz_qo, num_qo_heads, head_dim_qk], by strides
  // ragged [nnz_kv, num_kv_heads, head_dim_qk] or pages [num_pages, page_size, num_kv_heads, head_dim_qk]
  const void* k;
  const void* v;  // the same with head_dim_vo
  void* o;        // [nnz_qo, num_qo_heads, head_dim_vo], by strides
  int64_t q_token_stride, q_head_stride;
  int64_t k_page_stride, k_token_stride, k_head_stride;  // page stride 0 when ragged
  int64_t v_page_stride, v_token_stride, v_head_stride;
  int64_t o_token_stride, o_head_stride;

  // What else run() sets.
  float* lse;          // [nnz_qo, num_qo_heads] contiguous; or null
  const float* sinks;  // [num_qo_heads] natural-log logits that join each denominator; or null
  // Device pointers to one number each, which multiply the logits and the output. With paged keys only; or null.
  const float* logits_scale_by;
  const float* o_scale_by;

  // The problem, on the kernel's device.
  const int32_t* kv_indices;   // paged: page numbers
  const uint8_t* mask;         // custom mask, bits little-endian, each request from its own byte on; or null
  const int64_t* mask_indptr;  // [batch_size] first byte of each request's [qo_len, kv_len] bits
  const RowTile* tiles;        // [num_tiles]
  // [num_ctas] when work is partitioned, else null: CTA i has row tile i / num_kv_heads of KV head i % num_kv_heads
  const Partition* partitions;
  MergeGroup* groups;  // the merge table; [0 and more]
  float* partial_o;    // [num_partials, kTileRows, head_dim_vo], not normalised
  float* partial_md;   // [num_partials, kTileRows, 2]: row maximum (base 2, scaled) and denominator

  FastDivisor group;  // group_size = num_qo_heads / num_kv_heads
  FastDivisor page;   // page_size, 1 when ragged
  int32_t num_qo_heads;
  int32_t num_kv_heads;
  int32_t num_tiles;    // row tiles; with partitions at least Partition::num_tiles
  int32_t num_ctas;     // partitions, or row tiles times KV heads
  int32_t window_left;  // keys further left than this many from the diagonal are hidden; -1: none
  float logits_scale;   // makes q . k a logit in base 2: sm_scale * log2(e)
  float tanh_scale;     // soft cap: makes q . k the argument of tanh: sm_scale / cap; a score's: sm_scale
  float logits_cap;     // soft cap in base 2: cap * log2(e)
  float o_scale;        // multiplies the output (v_scale)
  // Multiplies the lse, whose base is 2: 1, or ln(2) for base e. For latents (MLA) a negative one means FlashMLA's lse,
  // in units of its magnitude: that without sinks, and +inf for a row without keys.
  float lse_unit;
  // 1: tiles and partitions were on the device before the preceding launch began, so that they may be read while that
  // launch runs. 0: the preceding kernel may have written them.
  int32_t plan_is_resident;
  // 1: other calls may give a request other rows, and the result of a row must not depend on how many there are: CPUs
  // compute few rows as they do many.
  int32_t rows_vary;
  // RoPE: [head_dim_qk / 2] the frequency of each pair of dims, in turns per token (core/rope.h); else null
  const uint64_t* rope_frequencies;
};

// For keys and values of 4 bits. The last dimensions of k and v are head_dim / 2 bytes, and their strides are bytes.
struct AttentionScaledParams {
  AttentionParams base;
  const e4m3_t* k_sf;  // of k, [num_pages, page_size, num_kv_heads, head_dim_qk / kScaledNumbers], by strides
  const e4m3_t* v_sf;  // the same of v, with head_dim_vo
  int64_t k_sf_page_stride, k_sf_token_stride, k_sf_head_stride;  // page stride 0 when ragged
  int64_t v_sf_page_stride, v_sf_token_stride, v_sf_head_stride;
};

// The factors of q . k and of the output. The scaled q . k is a logit, or the argument of the soft cap's tanh or of a
// score. Scales in device memory exist with paged keys only: 128-row tiles of fa2 have no register left to read them.
template <class Variant>
QUIRE_HD float logits_scale(const AttentionParams& p) {
  const float scale = Variant::kSoftCap != 0 || Variant::kScore != 0 ? p.tanh_scale : p.logits_scale;
  if constexpr (Variant::kPaged == 0) return scale;
  return p.logits_scale_by == nullptr ? scale : scale * *p.logits_scale_by;
}
template <class Params>
QUIRE_HD float output_scale(const Params& p) {
  return p.o_scale_by == nullptr ? p.o_scale : p.o_scale * *p.o_scale_by;
}

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
  // In sparse attention kv_indices are tokens (`page` is 1), and this is the page size of the cache: token t is row
  // t % cache_page of page t / cache_page. Elsewhere 1.
  FastDivisor cache_page;
  int32_t to_end;
};

// Where a token lies in the cache.
struct CachePlace {
  int page, row;
};

// The place of row `row` of what an entry of kv_indices names. Params: of a kernel for latents.
template <class Params>
QUIRE_HD CachePlace cache_place(const Params& p, int entry, int row) {
  const int page = p.cache_page.div(entry);
  return {page, entry - page * static_cast<int>(p.cache_page.divisor) + row};
}

// Whether keys are latents, which kernels of their own take.
template <class V>
constexpr bool kIsLatent = V::kHeadDimVo == 512 && V::kHeadDimQk == 576;

// The same for code that serves latents and other keys, whose entries are pages.
template <class V>
QUIRE_HD CachePlace cache_place_of(const AttentionParams& p, int entry, int row) {
  if constexpr (!kIsLatent<V>) return {entry, row};
  return cache_place(reinterpret_cast<const AttentionMlaParams&>(p), entry, row);
}

constexpr int kTileDims = 128;  // of a latent that have a scale: TILE_DIMS in quire/kernels/features.py

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
#ifdef __CUDACC__
#pragma nv_diag_suppress 1427
#endif

// With kPrefix: the maps of k_prefix and v_prefix, like those of ragged keys and values.
struct AttentionFa3PrefixParams : AttentionFa3Params {
  TensorMap tensor_k_prefix, tensor_v_prefix;
  const void* k_prefix;
  const void* v_prefix;
  int64_t k_prefix_token_stride, k_prefix_head_stride;
  int64_t v_prefix_token_stride, v_prefix_head_stride;
  unsigned char to_64[16];
};

// The kernel for 8-bit queries: the maps are of 8-bit elements, and a row of a box has 128. v has boxes of half a KV
// tile.
struct AttentionFa3Fp8Params : AttentionFa3Params {
  const float* q_scales;  // [num_qo_heads] factors of each head's logits, by stride; or null
  int64_t q_scales_head_stride;
  unsigned char to_64[48];
};

// As in AttentionMlaParams q is q_pe, k is kpe and v is ckv, of `base` and of the tensor maps; tensor_q is not read.
struct AttentionMlaFa3Params : AttentionFa3Params {
  const void* q_nope;  // [nnz_qo, num_qo_heads, head_dim_vo], by strides
  int64_t q_nope_token_stride, q_nope_head_stride;
  int32_t num_pages;       // where tokens are gathered: page numbers below 0 or from here on are of no token
  FastDivisor cache_page;  // as in AttentionMlaParams
  // As in AttentionMlaParams.
  const float* ckv_scales;
  int64_t ckv_scales_page_stride, ckv_scales_token_stride, ckv_scales_head_stride;
};

}  // namespace quire
