// Who does what: the one schedule of prefill, append and decode on every backend.
//
// Work is (request, row tile, kv head, kv tile range). When there are plenty of tiles, each CTA does one whole tile,
// the longest first. When there are few, all work units in order are cut into one contiguous share per CTA (stream-K),
// so a CTA leaves at most two partial results: a head (a tile that an earlier CTA began) and a tail (a tile that a
// later CTA ends). The workspace therefore has 2 * num_ctas slots whatever the lengths are. With fixed splits, tiles
// are cut at multiples of fixed_split_size in advance, so a request's result does not depend on its neighbours. The
// last CTA to arrive at a group of partial results merges them in order: the result does not depend on timing.
#pragma once
#include "quire/core/params.h"

namespace quire {

// The partial results of one row tile and kv head, in order.
struct PartialGroup {
  int32_t first_slot;   // slot of part 0
  int32_t next_slot;    // slot of part 1
  int32_t slot_stride;  // from part 1 on
  int32_t num_parts;    // 1: the tile is whole, nothing to merge
  int32_t counter;      // index into AttentionParams::arrivals

  QUIRE_HD int slot(int part) const { return part == 0 ? first_slot : next_slot + (part - 1) * slot_stride; }
};

// What a CTA does at a time: a run of kv tiles of one row tile and kv head.
struct Piece {
  Tile tile;
  int32_t kv_head;
  int32_t kv_begin, kv_end;  // kv tiles
  int32_t part;              // which part of `group` this is
  PartialGroup group;
};

QUIRE_HD int tile_units(const Tile& tile) { return max(1, tile.kv_end - tile.kv_begin); }

// First work unit of a share: cuts total units into num_ctas runs whose lengths differ by at most one.
QUIRE_HD int64_t share_begin(int64_t total_units, int num_ctas, int cta) { return total_units * cta / num_ctas; }

// The CTA whose share holds `unit`: the largest c with share_begin(c) <= unit.
QUIRE_HD int share_of(int64_t total_units, int num_ctas, int64_t unit) {
  return static_cast<int>(((unit + 1) * num_ctas - 1) / total_units);
}

QUIRE_HD Piece whole_piece(const AttentionParams& p, int cta) {
  Piece piece;
  const int tile = cta / p.num_kv_heads;
  piece.tile = p.tiles[tile];
  piece.kv_head = cta - tile * p.num_kv_heads;
  piece.kv_begin = piece.tile.kv_begin;
  piece.kv_end = piece.tile.kv_end;
  piece.part = piece.tile.part;
  const int slot = piece.kv_head * p.slots_per_head + piece.tile.slot;
  piece.group = {slot, slot + 1, 1, piece.tile.num_parts, slot};
  return piece;
}

QUIRE_HD Piece share_piece(const AttentionParams& p, int cta, const Tile& tile, int kv_head, int offset, int units) {
  Piece piece;
  piece.tile = tile;
  piece.kv_head = kv_head;
  piece.kv_begin = tile.kv_begin + offset;
  piece.kv_end = min(piece.kv_begin + units, tile.kv_end);
  const int size = tile_units(tile);
  if (units == size) {
    piece.part = 0;
    piece.group = {0, 0, 0, 1, 0};
    return piece;
  }
  const int64_t total = static_cast<int64_t>(p.work_per_head) * p.num_kv_heads;
  const int64_t begin = static_cast<int64_t>(p.work_per_head) * kv_head + tile.work_begin;
  const int first = offset == 0 ? cta : share_of(total, p.num_ctas, begin);
  const int last = share_of(total, p.num_ctas, begin + size - 1);
  piece.part = cta - first;
  piece.group = {2 * first + 1, 2 * first + 2, 2, last - first + 1, first};  // slot 2c: head of CTA c, 2c + 1: its tail
  return piece;
}

// Walks the pieces of one CTA, in order.
struct PieceCursor {
  Share left;  // what is still to do; units counts down to 0

  PieceCursor() = default;
  QUIRE_HD PieceCursor(const AttentionParams& p, int cta) {
    left = {0, 0, 0, 1};
    if (p.shares != nullptr) left = p.shares[cta];
  }

  // False when nothing is left.
  QUIRE_HD bool next(const AttentionParams& p, int cta, Piece& piece) {
    if (left.units <= 0) return false;
    if (p.shares == nullptr) {
      piece = whole_piece(p, cta);
      left.units = 0;
      return true;
    }
    const Tile tile = p.tiles[left.tile];
    const int units = min(left.units, tile_units(tile) - left.offset);
    piece = share_piece(p, cta, tile, left.kv_head, left.offset, units);
    left.units -= units;
    left.offset = 0;
    if (++left.tile == p.num_tiles) left.tile = 0, ++left.kv_head;
    return true;
  }
};

// Calls body(const Piece&) for each piece of CTA `cta`, in order. There is one call of body, because kernels inline it.
template <class Body>
QUIRE_HD void for_each_piece(const AttentionParams& p, int cta, Body&& body) {
  PieceCursor cursor(p, cta);
  Piece piece;
  while (cursor.next(p, cta, piece)) body(piece);
}

}  // namespace quire
