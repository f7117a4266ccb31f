// The next row tiles of a CTA. Every warp reads them for itself, so that no warp waits for another.
#pragma once
#include "quire/core/schedule.h"

namespace quire {

// The number of row tiles of the schedule. In a cascade a cursor has only the number of those in its own sequence.
template <bool kCascade>
struct TileCount {
  QUIRE_DEVICE explicit TileCount(const AttentionParams&) {}
  QUIRE_DEVICE int count(const WorkCursor& cursor) const { return cursor.left.num_tiles; }
};
template <>
struct TileCount<true> {
  int num_tiles;
  QUIRE_DEVICE explicit TileCount(const AttentionParams& p) : num_tiles(p.num_tiles) {}
  QUIRE_DEVICE int count(const WorkCursor&) const { return num_tiles; }
};

// The next 32 row tiles, in shared memory, a copy for each warp. A CTA's work tiles are neighbours, so one round of
// loads serves many of them. If the schedule has at most 32 row tiles, they are loaded before the partition is, which
// says where to begin. In a cascade a CTA goes on from shared levels to any row tile of the last level.
template <bool kCascade>
class TileWindow : TileCount<kCascade> {
 public:
  static constexpr int kTiles = 32;

  // `window`: this warp's shared memory.
  QUIRE_DEVICE TileWindow(const AttentionParams& p, const WorkCursor& cursor, RowTile (&window)[kTiles], int lane)
      : TileCount<kCascade>(p), tiles_(p.tiles), window_(window), first_(0) {
    if (p.partitions == nullptr) {
      first_ = cursor.left.tile, tiles_ += first_;
      load(0, 1, lane);
    } else if (p.num_tiles <= kTiles) {
      load(0, p.num_tiles, lane);
    } else {
      load(cursor.left.tile, this->count(cursor), lane);
    }
  }

  // The row tile that the cursor stands at; all lanes of a warp together.
  QUIRE_DEVICE const RowTile& get(const WorkCursor& cursor, int lane) {
    int at = cursor.left.tile - first_ - base_;
    if (at < 0) at = kCascade ? kTiles : at + cursor.left.num_tiles;
    if (at >= kTiles) load(cursor.left.tile, this->count(cursor), lane), at = 0;
    return window_[at];
  }

 private:
  // Row tiles [base, base + 32) of `count`, after the last of which comes the first.
  QUIRE_DEVICE void load(int base, int count, int lane) {
    base_ = base;
    int index = base + lane;
    if (index >= count) index = max(0, min(index - count, count - 1));
    const RowTile tile = tiles_[index];
    __syncwarp();  // every lane is done with the row tiles before
    window_[lane] = tile;
    __syncwarp();
  }

  const RowTile* tiles_;
  RowTile* window_;
  int first_, base_;
};

}  // namespace quire
