// What a CTA does next, as every warp of it works out for itself: no warp waits for another to hear about it.
#pragma once
#include "quire/core/schedule.h"

namespace quire {

// What a CTA does; when tiles are whole, one of them.
QUIRE_DEVICE Partition partition_of_cta(const AttentionParams& p, int cta) {
  if (p.partitions == nullptr) {
    const int tile = cta / p.num_kv_heads;
    return {cta - tile * p.num_kv_heads, tile, 0, INT32_MAX, 0, 0, 0, 0};
  }
  const int4* partition = reinterpret_cast<const int4*>(p.partitions + cta);
  const int4 at = partition[0], all = partition[1];
  return {at.x, at.y, at.z, at.w, all.x, all.y, all.z, all.w};
}

// Where a CTA stands in its partition.
struct Walk {
  int tile, kv_head, offset, left;
  int num_tiles;

  QUIRE_DEVICE explicit Walk(const Partition& partition)
      : tile(partition.tile),
        kv_head(partition.kv_head),
        offset(partition.offset),
        left(partition.units),
        num_tiles(partition.num_tiles) {}

  QUIRE_DEVICE int units(const RowTile& t) const { return min(left, tile_units(t) - offset); }

  QUIRE_DEVICE void next(const AttentionParams& p, int units) {
    left = p.partitions == nullptr ? 0 : left - units;
    offset = 0;
    if (++tile == num_tiles) tile = 0, ++kv_head;
  }
};

// The next 32 row tiles, in shared memory, a copy for each warp: a CTA's work tiles are neighbours, so one round of
// loads serves many of them. Up to 32 tiles in all are fetched before the partition that says where to begin is known.
class TileWindow {
 public:
  static constexpr int kTiles = 32, kBytes = kTiles * static_cast<int>(sizeof(RowTile));

  // `slots`: kBytes at a multiple of 16, this warp's.
  QUIRE_DEVICE TileWindow(const AttentionParams& p, const Walk& walk, unsigned char* slots, int lane)
      : tiles_(p.tiles), stages_(reinterpret_cast<int4*>(slots)), first_(0) {
    if (p.partitions == nullptr) {
      first_ = walk.tile, tiles_ += first_;
      load(0, 1, lane);
    } else if (p.num_tiles <= kTiles) {
      load(0, p.num_tiles, lane);
    } else {
      load(walk.tile, walk.num_tiles, lane);
    }
  }

  // The tile that the walk stands at; all lanes of a warp together.
  QUIRE_DEVICE RowTile get(const Walk& walk, int lane) {
    int at = walk.tile - first_ - base_;
    if (at < 0) at += walk.num_tiles;
    if (at >= kTiles) load(walk.tile, walk.num_tiles, lane), at = 0;
    return unpack(stages_[at * 3], stages_[at * 3 + 1], stages_[at * 3 + 2]);
  }

 private:
  static_assert(sizeof(RowTile) == 3 * sizeof(int4), "a tile is three words of 16 bytes");

  QUIRE_DEVICE static RowTile unpack(int4 a, int4 b, int4 c) {
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
    stages_[lane * 3] = a, stages_[lane * 3 + 1] = b, stages_[lane * 3 + 2] = c;
    __syncwarp();
  }

  const RowTile* tiles_;
  int4* stages_;
  int first_, base_;
};

// What all partitions of a schedule have in common; see Partition.
struct Cut {
  int32_t work_per_head, units_each, num_longer;
};

// A work and its request. It lives in shared memory, one copy a warp: registers are short in the main loop.
struct DecodeWork {
  WorkTile work;
  int32_t row_end;  // one past the request's last packed row

  struct Place {
    int64_t token;
    int32_t head;
  };

  DecodeWork() = default;
  // A work of a tile, its keys and group apart.
  QUIRE_DEVICE DecodeWork(const AttentionParams& p, const RowTile& tile, int kv_head) {
    work.tile = tile;
    work.kv_head = kv_head;
    row_end = work.tile.qo_len * static_cast<int>(p.group.divisor);
  }

  // Completes the work: its divisions take a while, so the loads of q go first. The walk moves on.
  QUIRE_DEVICE void complete(const AttentionParams& p, const Cut& cut, Walk& walk) {
    const Partition partition = {0, 0, 0, 0, walk.num_tiles, cut.work_per_head, cut.units_each, cut.num_longer};
    const int units = walk.units(work.tile), cta = static_cast<int>(blockIdx.x);
    work = partition_work_tile(p, cta, partition, work.tile, walk.kv_head, walk.offset, units);
    walk.next(p, units);
  }

  // Where a packed row is in q, o and lse.
  QUIRE_DEVICE Place place(const FastDivisor& group, int row) const {
    const int group_size = static_cast<int>(group.divisor), qo_idx = group.div(row);
    return {work.tile.qo_begin + static_cast<int64_t>(qo_idx), work.kv_head * group_size + row - qo_idx * group_size};
  }
};

}  // namespace quire
