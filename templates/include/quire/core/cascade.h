// Cascades: the keys of a row are in several nodes of a tree, one per level. A node of a shared level has the rows of
// all requests below it, which see all of its keys. The nodes of the last level are requests, under the variant's mask.
//
// A row tile has some rows of one node, so row tiles of different levels group the same rows differently. A merge group
// is the rows between two neighbouring edges of row tiles of any level, so it is part of one row tile of each level.
// Every work tile leaves a partial result, with as many rows as its row tile, and arrives at each group that has some
// of its rows. The list of parts gives the begin of a group's rows in each of its partial results, level by level, and
// in the order of keys within a level.
//
// With kPrefix the keys of shared levels are in separate tensors, beside a paged cache or ragged keys.
// RowTile::kv_first of a shared node is then its first row in these tensors.
#pragma once
#include "quire/core/params.h"

namespace quire {

// Mirrored by AttentionPrefixParams in quire/kernels/params.py.
struct AttentionPrefixParams {
  AttentionParams base;
  const void* k_prefix;  // [nnz_prefix, num_kv_heads, head_dim_qk], by strides
  const void* v_prefix;  // the same with head_dim_vo
  int64_t k_prefix_token_stride, k_prefix_head_stride;
  int64_t v_prefix_token_stride, v_prefix_head_stride;
};

// Whether the keys of a row tile lie in k_prefix and v_prefix.
template <class V>
QUIRE_HD bool is_in_prefix(const RowTile& tile) {
  return V::kPrefix != 0 && tile.request < 0;
}

// An entry of a cascade's merge table: one merge group of one KV head. Group i of KV head h is entry i * num_kv_heads +
// h.
struct CascadeGroup : MergeGroup {  // places in the list of parts are counted in int32 from the merge table's begin
  int32_t row;                      // first packed row of the batch: token * group_size + head in group
  int32_t num_shared_parts;         // parts of shared levels, which come first
};

// The first row of a part in partial_o and partial_md. In a cascade the list of parts gives it, which follows the merge
// table `groups`.
template <class Variant>
QUIRE_HD int64_t part_row(const MergeGroup* groups, int parts_begin, int part) {
  if constexpr (Variant::kCascade != 0) return reinterpret_cast<const int32_t*>(groups)[parts_begin + part];
  return static_cast<int64_t>(parts_begin + part) * Variant::kTileRows;
}

// Merge group i of the groups that take rows of this row tile.
QUIRE_HD CascadeGroup& cascade_group(const AttentionParams& p, const RowTile& tile, int i, int kv_head) {
  return reinterpret_cast<CascadeGroup*>(p.groups)[static_cast<int64_t>(tile.group + i) * p.num_kv_heads + kv_head];
}

}  // namespace quire
