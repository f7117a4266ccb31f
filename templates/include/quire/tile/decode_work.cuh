// What a CTA does next, as every warp of it works out for itself: no warp waits for another to hear about it.
#pragma once
#include "quire/core/schedule.h"

namespace quire {

// What a CTA does; when tiles are whole, one of them.
QUIRE_DEVICE Share share_of_cta(const AttentionParams& p, int cta) {
  if (p.shares == nullptr) {
    const int tile = cta / p.num_kv_heads;
    return {cta - tile * p.num_kv_heads, tile, 0, INT32_MAX, 0, 0, 0, 0};
  }
  const int4* share = reinterpret_cast<const int4*>(p.shares + cta);
  const int4 at = share[0], all = share[1];
  return {at.x, at.y, at.z, at.w, all.x, all.y, all.z, all.w};
}

// Where a CTA stands in its share.
struct Walk {
  int tile, kv_head, offset, left;
  int num_tiles;

  QUIRE_DEVICE explicit Walk(const Share& share)
      : tile(share.tile), kv_head(share.kv_head), offset(share.offset), left(share.units), num_tiles(share.num_tiles) {}

  QUIRE_DEVICE int units(const Tile& t) const { return min(left, tile_units(t) - offset); }

  QUIRE_DEVICE void next(const AttentionParams& p, int units) {
    left = p.shares == nullptr ? 0 : left - units;
    offset = 0;
    if (++tile == num_tiles) tile = 0, ++kv_head;
  }
};

// The next 32 row tiles, in shared memory, a copy for each warp: a CTA's pieces are neighbours, so one round of loads
// serves many of them. Up to 32 tiles in all are fetched before the share that says where to begin is known.
class TileWindow {
 public:
  static constexpr int kTiles = 32, kBytes = kTiles * static_cast<int>(sizeof(Tile));

  // `slots`: kBytes at a multiple of 16, this warp's.
  QUIRE_DEVICE TileWindow(const AttentionParams& p, const Walk& walk, unsigned char* slots, int lane)
      : tiles_(p.tiles), slots_(reinterpret_cast<int4*>(slots)), first_(0) {
    if (p.shares == nullptr) {
      first_ = walk.tile, tiles_ += first_;
      load(0, 1, lane);
    } else if (p.num_tiles <= kTiles) {
      load(0, p.num_tiles, lane);
    } else {
      load(walk.tile, walk.num_tiles, lane);
    }
  }

  // The tile that the walk stands at; all lanes of a warp together.
  QUIRE_DEVICE Tile get(const Walk& walk, int lane) {
    int at = walk.tile - first_ - base_;
    if (at < 0) at += walk.num_tiles;
    if (at >= kTiles) load(walk.tile, walk.num_tiles, lane), at = 0;
    return unpack(slots_[at * 3], slots_[at * 3 + 1], slots_[at * 3 + 2]);
  }

 private:
  static_assert(sizeof(Tile) == 3 * sizeof(int4), "a tile is three words of 16 bytes");

  QUIRE_DEVICE static Tile unpack(int4 a, int4 b, int4 c) {
    return {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w, c.x, c.y, c.z, c.w};
  }

  // Tiles [base, base + 32) of `count`, after the last of which comes the first.
  QUIRE_DEVICE void load(int base, int count, int lane) {
    base_ = base;
    int index = base + lane;
    if (index >= count) index = max(0, min(index - count, count - 1));
    const int4* from = reinterpret_cast<const int4*>(tiles_ + index);
    const int4 a = from[0], b = from[1], c = from[2];
    __syncwarp();  // every lane is done with the tiles before
    slots_[lane * 3] = a, slots_[lane * 3 + 1] = b, slots_[lane * 3 + 2] = c;
    __syncwarp();
  }

  const Tile* tiles_;
  int4* slots_;
  int first_, base_;
};

// What all shares of a schedule have in common; see Share.
struct Cut {
  int32_t work_per_head, units_each, num_longer;
};

// A piece and its request. It lives in shared memory, one copy a warp: registers are short in the main loop.
struct DecodeJob {
  Piece piece;
  int32_t row_end;  // one past the request's last packed row

  struct Place {
    int64_t token;
    int32_t head;
  };

  DecodeJob() = default;
  // A piece of a tile, its keys and group apart.
  QUIRE_DEVICE DecodeJob(const AttentionParams& p, const Tile& tile, int kv_head) {
    piece.tile = tile;
    piece.kv_head = kv_head;
    row_end = piece.tile.qo_len * static_cast<int>(p.group.divisor);
  }

  // Completes the piece: its divisions take a while, so the loads of q go first. The walk moves on.
  QUIRE_DEVICE void complete(const AttentionParams& p, const Cut& cut, Walk& walk) {
    const Share share = {0, 0, 0, 0, walk.num_tiles, cut.work_per_head, cut.units_each, cut.num_longer};
    const int units = walk.units(piece.tile), cta = static_cast<int>(blockIdx.x);
    piece = share_piece(p, cta, share, piece.tile, walk.kv_head, walk.offset, units);
    walk.next(p, units);
  }

  // Where a packed row is in q, o and lse.
  QUIRE_DEVICE Place place(const FastDivisor& group, int row) const {
    const int group_size = static_cast<int>(group.divisor), qo_idx = group.div(row);
    return {piece.tile.qo_begin + static_cast<int64_t>(qo_idx), piece.kv_head * group_size + row - qo_idx * group_size};
  }
};

}  // namespace quire
