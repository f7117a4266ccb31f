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
  int32_t first_slot;  // slot of part 0
  int32_t next_slot;   // slot of part 1, after which come those of the others
  int32_t num_parts;   // 1: the tile is whole, nothing to merge
  int32_t counter;     // index into AttentionParams::arrivals

  QUIRE_HD int slot(int part) const { return part == 0 ? first_slot : next_slot + part - 1; }
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

// The kv tiles that a tile's rows can see. p: the masks' parameters and the tile's size, as schedulers are given them.
template <class Params>
QUIRE_HD void set_kv_range(const Params& p, Tile& tile) {
  const int row_end = min(tile.row_begin + p.tile_rows, tile.qo_len * p.group_size);
  const int diagonal = tile.kv_len - tile.qo_len;  // key that query 0 stands at
  int begin = 0, end = tile.kv_len;
  if (p.causal) end = min(end, (row_end - 1) / p.group_size + diagonal + 1);
  if (p.window_left >= 0) {
    const int64_t first = static_cast<int64_t>(tile.row_begin / p.group_size) + diagonal - p.window_left;
    begin = static_cast<int>(max<int64_t>(first, 0));
  }
  tile.kv_begin = begin / p.tile_kv;
  tile.kv_end = end <= begin ? tile.kv_begin : ceil_div(end, p.tile_kv);
}

// How many shares: the fewest that are no longer than max_shares would be, because the fewer there are, the fewer
// partial results (B 1, 32768 keys, 8 kv heads: 256 shares 40.1 us, 264 shares 42.3 us). Where tiles are cut at all, a
// share is at least two units: merging costs more than a unit (B 1, 2048 keys: 9.0 instead of 9.8 us). Where one in
// sixteen or less is lost, as many for each tile, so that tiles that are alike end with a share (B 1, 131072 keys: 256
// shares 132.5 us, 264 shares 138.0 us). H200, 2026-11-21.
QUIRE_HD int num_shares(int num_tiles, int work_per_head, int total_units, int max_shares) {
  if (total_units == 0) return 1;
  const int longest = ceil_div(total_units, min(max_shares, total_units));
  const int count = ceil_div(total_units, max(longest, work_per_head > num_tiles ? 2 : 1));
  const int whole = num_tiles * (total_units / work_per_head), even = count / whole * whole;
  return 16 * (count - even) <= count ? even : count;
}

// What all shares of a schedule have in common.
QUIRE_HD Share cut_into_shares(int num_tiles, int work_per_head, int total_units, int max_shares) {
  const int count = num_shares(num_tiles, work_per_head, total_units, max_shares);
  return {0, 0, 0, 0, num_tiles, work_per_head, total_units / count, total_units % count};
}

// All units of a schedule are fewer than 2^31, so that these divisions are short.
QUIRE_HD int share_begin(const Share& all, int cta) { return all.units_each * cta + min(cta, all.num_longer); }

// The CTA whose share holds `unit`.
QUIRE_HD int share_of(const Share& all, int unit) {
  const uint32_t longer = all.units_each + 1, in_longer = all.num_longer * longer;
  const uint32_t u = static_cast<uint32_t>(unit);
  return static_cast<int>(u < in_longer ? u / longer : all.num_longer + (u - in_longer) / all.units_each);
}

// The partial results of a tile that was cut in advance; its parts lie side by side.
QUIRE_HD PartialGroup planned_group(const AttentionParams& p, const Tile& tile, int kv_head) {
  const int slot = kv_head * p.slots_per_head + tile.slot;
  return {slot, slot + 1, tile.num_parts, slot};
}

QUIRE_HD Piece whole_piece(const AttentionParams& p, int cta) {
  Piece piece;
  const int tile = cta / p.num_kv_heads;
  piece.tile = p.tiles[tile];
  piece.kv_head = cta - tile * p.num_kv_heads;
  piece.kv_begin = piece.tile.kv_begin;
  piece.kv_end = piece.tile.kv_end;
  piece.part = piece.tile.part;
  piece.group = planned_group(p, piece.tile, piece.kv_head);
  return piece;
}

// `units` of a tile from `offset` on. `share` says how all work is cut; where it stands does not matter.
QUIRE_HD Piece share_piece(const AttentionParams& p, int cta, const Share& share, const Tile& tile, int kv_head,
                           int offset, int units) {
  Piece piece;
  piece.tile = tile;
  piece.kv_head = kv_head;
  piece.kv_begin = tile.kv_begin + offset;
  piece.kv_end = min(piece.kv_begin + units, tile.kv_end);
  const int size = tile_units(tile);
  if (units == size) {
    piece.part = tile.part;
    piece.group = planned_group(p, tile, kv_head);
    return piece;
  }
  const int begin = share.work_per_head * kv_head + tile.work_begin;
  const int first = offset == 0 ? cta : share_of(share, begin);
  const int last = share_of(share, begin + size - 1);
  piece.part = cta - first;
  // Slot c: head of CTA c; num_ctas + c: its tail.
  piece.group = {p.num_ctas + first, first + 1, last - first + 1, first};
  return piece;
}

// Walks the pieces of one CTA, in order.
struct PieceCursor {
  Share left;  // what is still to do; units counts down to 0
  bool is_whole;

  // Of one whole tile.
  QUIRE_HD static PieceCursor of_tile() { return {{0, 0, 0, 1, 0, 0, 0, 0}, true}; }
  // Of CTA `cta`'s share, or of its tile where tiles are whole.
  QUIRE_HD static PieceCursor of_cta(const AttentionParams& p, int cta) {
    return p.shares == nullptr ? of_tile() : PieceCursor{p.shares[cta], false};
  }

  // False when nothing is left.
  QUIRE_HD bool next(const AttentionParams& p, int cta, Piece& piece) {
    if (left.units <= 0) return false;
    if (is_whole) {
      piece = whole_piece(p, cta);
      left.units = 0;
      return true;
    }
    const Tile tile = p.tiles[left.tile];
    const int units = min(left.units, tile_units(tile) - left.offset);
    piece = share_piece(p, cta, left, tile, left.kv_head, left.offset, units);
    left.units -= units;
    left.offset = 0;
    if (++left.tile == left.num_tiles) left.tile = 0, ++left.kv_head;
    return true;
  }
};

// Calls body(const Piece&) for each piece of CTA `cta`, in order. There is one call of body, because kernels inline it.
template <class Body>
QUIRE_HD void for_each_piece(const AttentionParams& p, int cta, Body&& body) {
  PieceCursor cursor = PieceCursor::of_cta(p, cta);
  Piece piece;
  while (cursor.next(p, cta, piece)) body(piece);
}

}  // namespace quire
