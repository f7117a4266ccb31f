// What a CTA does next, as every warp of it works out for itself: no warp waits for another to hear about it.
#pragma once
#include "quire/core/schedule.h"

namespace quire {

// A row tile and what the kernel needs to know about its request.
struct PlannedTile {
  Tile tile;
  int32_t kv_first;  // ragged: the request's first row of k; paged: its first entry of kv_indices
  int32_t kv_len;
  int32_t qo_begin;
  int32_t qo_len;
};

// The next 32 row tiles, one a lane: a CTA's pieces are neighbours, so one round of loads serves many of them. Up to 32
// tiles in all are fetched before the share that says where to begin is known.
class TileWindow {
 public:
  QUIRE_DEVICE TileWindow(const AttentionParams& p, int lane) : p_(p), lane_(lane) {
    if (p.shares == nullptr) {
      num_tiles_ = 1, first_ = static_cast<int>(blockIdx.x) / p.num_kv_heads;
    } else {
      num_tiles_ = p.num_tiles, first_ = 0;
    }
    load(num_tiles_ <= 32 ? 0 : p.shares[blockIdx.x].tile);
  }

  // All lanes of a warp together; `index` is the same in all.
  QUIRE_DEVICE PlannedTile get(int index) {
    int at = index - first_ - base_;
    if (at < 0) at += num_tiles_;
    if (at >= 32) load(index - first_), at = 0;
    PlannedTile out;
    const int* from = reinterpret_cast<const int*>(&mine_);
    int* to = reinterpret_cast<int*>(&out);
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(PlannedTile) / 4); ++i) to[i] = __shfl_sync(0xffffffffu, from[i], at);
    return out;
  }

 private:
  QUIRE_DEVICE void load(int base) {
    base_ = base;
    int index = base + lane_;
    if (index >= num_tiles_) index = min(index - num_tiles_, num_tiles_ - 1);
    const int4* tile = reinterpret_cast<const int4*>(p_.tiles + first_ + index);
    const int4 a = tile[0], b = tile[1];
    mine_.tile = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
    mine_.kv_first = p_.kv_indptr[a.x];
    mine_.kv_len = p_.kv_len[a.x];
    mine_.qo_begin = p_.qo_indptr[a.x];
    mine_.qo_len = p_.qo_indptr[a.x + 1] - mine_.qo_begin;
  }

  const AttentionParams& p_;
  int lane_, num_tiles_, first_, base_;
  PlannedTile mine_;
};

// Where a CTA stands in its share; when tiles are whole, its share is one of them.
struct Walk {
  int tile, kv_head, offset, left;

  QUIRE_DEVICE explicit Walk(const AttentionParams& p) {
    const int cta = static_cast<int>(blockIdx.x);
    if (p.shares == nullptr) {
      tile = cta / p.num_kv_heads, kv_head = cta - tile * p.num_kv_heads, offset = 0, left = INT32_MAX;
    } else {
      const int4 share = *reinterpret_cast<const int4*>(p.shares + cta);
      kv_head = share.x, tile = share.y, offset = share.z, left = share.w;
    }
  }

  QUIRE_DEVICE int units(const Tile& t) const { return min(left, tile_units(t) - offset); }

  QUIRE_DEVICE void next(const AttentionParams& p, int units) {
    left = p.shares == nullptr ? 0 : left - units;
    offset = 0;
    if (++tile == p.num_tiles) tile = 0, ++kv_head;
  }
};

// A piece and its request. It lives in shared memory, one copy a warp: registers are short in the main loop.
struct DecodeJob {
  Piece piece;
  int32_t kv_len;
  int32_t qo_begin, qo_len;
  int32_t row_end;  // one past the request's last packed row

  struct Place {
    int64_t token;
    int32_t head;
  };

  DecodeJob() = default;
  // The piece that the walk stands at, its group apart.
  QUIRE_DEVICE DecodeJob(const AttentionParams& p, TileWindow& window, const Walk& walk) {
    const PlannedTile planned = window.get(walk.tile);
    piece.tile = planned.tile;
    piece.kv_head = walk.kv_head;
    kv_len = planned.kv_len, qo_begin = planned.qo_begin, qo_len = planned.qo_len;
    row_end = qo_len * static_cast<int>(p.group.divisor);
  }

  // Completes the piece: its divisions take a while, so the loads of q go first. The walk moves on.
  QUIRE_DEVICE void complete(const AttentionParams& p, Walk& walk) {
    const int units = walk.units(piece.tile), cta = static_cast<int>(blockIdx.x);
    piece =
        p.shares == nullptr ? whole_piece(p, cta) : share_piece(p, cta, piece.tile, walk.kv_head, walk.offset, units);
    walk.next(p, units);
  }

  // Where a packed row is in q, o and lse.
  QUIRE_DEVICE Place place(const FastDivisor& group, int row) const {
    const int group_size = static_cast<int>(group.divisor), qo_idx = group.div(row);
    return {qo_begin + static_cast<int64_t>(qo_idx), piece.kv_head * group_size + row - qo_idx * group_size};
  }
};

}  // namespace quire
