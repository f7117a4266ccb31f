// Which key tiles of a piece are computed, and which of them need masking: from right to left, so that the tiles that a
// causal mask and kv_len touch come first.
#pragma once
#include "quire/tile/sm90_jobs.cuh"
#include "quire/ptx/wgmma.cuh"
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

  // One warp. A lane looks at a row's bits of kAtOnce tiles, whose loads are all under way together; then the lanes
  // vote.
  QUIRE_DEVICE void classify(const AttentionParams& p, int lane) {
    const Piece& piece = job.piece;
    const int row_last = min(piece.tile.row_begin + V::kTileRows, job.row_end) - 1;
    const int first = p.group.div(piece.tile.row_begin), last = p.group.div(row_last);
    const uint8_t* bits = p.mask + p.mask_indptr[piece.tile.request];
    const Mask<kMaskNone, V::kWindow != 0> window = {job.qo_len, job.kv_len, p.window_left, nullptr};
    const KeyRange seen = window.all(first, last);
    const int end = min(piece.kv_end, piece.kv_begin + TileClasses::kMax);
    for (int tile = piece.kv_begin; tile < end; tile += kAtOnce) {
      bool any[kAtOnce] = {}, all[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) all[i] = seen.covers({(tile + i) * V::kTileKv, (tile + i + 1) * V::kTileKv});
      for (int q = first + lane; q <= last; q += 32) {
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          const int key = min(tile + i, end - 1) * V::kTileKv;  // the last tile again, rather than a branch
          look(bits, static_cast<int64_t>(q) * job.kv_len + key, min(V::kTileKv, job.kv_len - key), any[i], all[i]);
        }
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const uint8_t is_any = __any_sync(0xffffffffu, any[i]) ? TileClasses::kAny : 0;
        const uint8_t is_all = __all_sync(0xffffffffu, all[i]) ? TileClasses::kAll : 0;
        if (lane == 0 && tile + i < end) classes.at[tile + i - piece.kv_begin] = is_any | is_all;
      }
    }
  }

 private:
  static constexpr int kAtOnce = 4;

  // Whether any and all of `count` > 0 bits from `at` on are set, for one row of one tile.
  QUIRE_DEVICE static void look(const uint8_t* bits, int64_t at, int count, bool& any, bool& all) {
    constexpr int kWords = ceil_div(V::kTileKv, 32);
    const uint64_t address = reinterpret_cast<uint64_t>(bits) + static_cast<uint64_t>(at >> 3);
    const uint32_t* word = reinterpret_cast<const uint32_t*>(address & ~uint64_t{3});
    const int shift = static_cast<int>((address & 3) * 8 + (at & 7)), last = (shift + count - 1) >> 5;
    uint32_t x[kWords + 1];
#pragma unroll
    for (int i = 0; i <= kWords; ++i) x[i] = __ldg(word + min(i, last));
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      const int left = count - 32 * i;
      const uint32_t wanted = left <= 0 ? 0 : left >= 32 ? 0xffffffffu : 0xffffffffu >> (32 - left);
      const uint32_t found = __funnelshift_r(x[i], x[i + 1], shift) & wanted;
      any |= found != 0, all &= found == wanted;
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
    tiles_ = {ptx::uniform(ceil_div(keys.begin, V::kTileKv)), ptx::uniform(keys.end / V::kTileKv)};
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
