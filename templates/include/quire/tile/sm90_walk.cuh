// Which key tiles of a piece are computed, and which of them need masking: from right to left, so that the tiles that a
// causal mask and kv_len touch come first.
#pragma once
#include "quire/tile/sm90_jobs.cuh"
#include "quire/tile/sm90_mask.cuh"

namespace quire {

// What a custom mask makes of the tiles of a piece; those beyond kMax count as mixed.
struct TileClasses {
  static constexpr int kMax = 1024;
  static constexpr uint8_t kAny = 1, kAll = 2;  // some row sees some key of it; all rows see all keys
  uint8_t at[kMax];
};

// A piece of work as the scheduling warp hands it on.
template <class V, bool kClassified = V::kMask == kMaskCustom>
struct PieceSlot {
  Job job;
  QUIRE_DEVICE uint8_t tile_class(int) const { return TileClasses::kAny; }
  QUIRE_DEVICE void classify(const AttentionParams&, int) {}
};

template <class V>
struct PieceSlot<V, true> {
  Job job;
  TileClasses classes;

  QUIRE_DEVICE uint8_t tile_class(int i) const {
    const int at = i - job.piece.kv_begin;
    return at < TileClasses::kMax ? classes.at[at] : TileClasses::kAny;
  }

  // One warp: a lane looks at one word of one tile, of all rows in turn; a tile is as many neighbouring lanes.
  QUIRE_DEVICE void classify(const AttentionParams& p, int lane) {
    constexpr int kWords = ceil_div(V::kTileKv, 32), kTilesAtOnce = 32 / kWords;
    const Piece& piece = job.piece;
    const int row_last = min(piece.tile.row_begin + V::kTileRows, job.row_end) - 1;
    const int first = p.group.div(piece.tile.row_begin), last = p.group.div(row_last);
    const uint8_t* bits = p.mask + p.mask_indptr[piece.tile.request];
    const Mask<kMaskNone, V::kWindow != 0> window = {job.qo_len, job.kv_len, p.window_left, nullptr};
    const KeyRange seen = window.all(first, last);
    const int end = min(piece.kv_end, piece.kv_begin + TileClasses::kMax);
    for (int tile = piece.kv_begin; tile < end; tile += kTilesAtOnce) {
      const int in_tile = lane % kWords * 32, key = (tile + lane / kWords) * V::kTileKv + in_tile;
      const int count = lane < kWords * kTilesAtOnce ? min(min(32, V::kTileKv - in_tile), job.kv_len - key) : 0;
      const uint32_t whole = count <= 0 ? 0 : 0xffffffffu >> (32 - count);
      uint32_t any = 0, all = whole;
      if (count > 0) {
#pragma unroll 4
        for (int q = first; q <= last; ++q) {
          const uint32_t x = mask_bits(bits, static_cast<int64_t>(q) * job.kv_len + key, count) & whole;
          any |= x, all &= x;
        }
      }
      const uint32_t some = __ballot_sync(0xffffffffu, any != 0), each = __ballot_sync(0xffffffffu, all == whole);
      const int mine = tile + lane;
      if (lane < kTilesAtOnce && mine < end) {
        constexpr uint32_t kTileLanes = kWords == 32 ? 0xffffffffu : (1u << kWords) - 1;
        const bool is_whole = seen.covers({mine * V::kTileKv, (mine + 1) * V::kTileKv});
        const bool sees_any = (some >> (lane * kWords) & kTileLanes) != 0;
        const bool sees_all = is_whole && (each >> (lane * kWords) & kTileLanes) == kTileLanes;
        classes.at[mine - piece.kv_begin] = (sees_any ? TileClasses::kAny : 0) | (sees_all ? TileClasses::kAll : 0);
      }
    }
  }
};

// Goes through a piece's tiles, whole warps at a time. All warps of the CTA take the same path.
template <class V>
class TileWalk {
 public:
  QUIRE_DEVICE explicit TileWalk(const PieceSlot<V>& slot)
      : slot_(slot), begin_(slot.job.piece.kv_begin), tile_(slot.job.piece.kv_end) {
    advance();
  }

  QUIRE_DEVICE bool exists() const { return tile_ >= begin_; }
  QUIRE_DEVICE int tile() const { return tile_; }

  QUIRE_DEVICE void advance() {
    --tile_;
    if constexpr (V::kMask == kMaskCustom) {
      while (tile_ >= begin_ && (slot_.tile_class(tile_) & TileClasses::kAny) == 0) --tile_;
    }
  }

 private:
  const PieceSlot<V>& slot_;
  int begin_, tile_;
};

// The tiles of which 64 rows from `row` on see every key.
template <class V>
class WholeTiles {
 public:
  QUIRE_DEVICE WholeTiles(const AttentionParams& p, const PieceSlot<V>& slot, int row) : slot_(slot), tiles_{0, 0} {
    if constexpr (V::kMask == kMaskCustom) return;
    const int end = slot.job.row_end;
    const int first = p.group.div(min(row, end - 1)), last = p.group.div(min(row + 64, end) - 1);
    const Mask<V::kMask, V::kWindow != 0> mask = {slot.job.qo_len, slot.job.kv_len, p.window_left, nullptr};
    const KeyRange keys = mask.all(first, last);
    tiles_ = {ceil_div(keys.begin, V::kTileKv), keys.end / V::kTileKv};
  }

  QUIRE_DEVICE bool contains(int tile) const {
    if constexpr (V::kMask == kMaskCustom) return (slot_.tile_class(tile) & TileClasses::kAll) != 0;
    return tiles_.contains(tile);
  }

 private:
  const PieceSlot<V>& slot_;
  KeyRange tiles_;
};

}  // namespace quire
