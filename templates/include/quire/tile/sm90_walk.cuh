// Which key tiles of a piece are computed, and which of them need masking: from right to left, so that the tiles that a
// causal mask and kv_len touch come first.
#pragma once
#include "quire/tile/sm90_jobs.cuh"
#include "quire/ptx/wgmma.cuh"
#include "quire/tile/sm90_mask.cuh"

namespace quire {

// What a custom mask makes of the tiles of a piece, a bit each: whether some row sees some key of it, and whether all
// rows see all keys. Tiles beyond kMax count as mixed.
struct TileClasses {
  static constexpr int kMax = 1024;
  uint32_t any[kMax / 32], all[kMax / 32];
};

// A piece of work as the scheduling warp hands it on.
template <class V, bool kClassified = V::kMask == kMaskCustom>
struct PieceSlot {
  Job job;
  QUIRE_DEVICE void classify(const AttentionParams&, int) {}
};

template <class V>
struct PieceSlot<V, true> {
  Job job;
  TileClasses classes;

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
    uint32_t word_any = 0, word_all = 0;
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
      const int at = tile - piece.kv_begin;
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const bool is_any = __any_sync(0xffffffffu, any[i]), is_all = __all_sync(0xffffffffu, all[i]);
        const uint32_t bit = tile + i < end ? 1u << (at + i) % 32 : 0;
        word_any |= is_any ? bit : 0, word_all |= is_all ? bit : 0;
      }
      if ((at + kAtOnce) % 32 == 0 || tile + kAtOnce >= end) {
        if (lane == 0) classes.any[at / 32] = word_any, classes.all[at / 32] = word_all;
        word_any = word_all = 0;
      }
    }
  }

 private:
  static constexpr int kAtOnce = 4;
  static_assert(32 % kAtOnce == 0, "what is looked at together goes into one word");

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
template <class V, bool kClassified = V::kMask == kMaskCustom>
class TileWalk {
 public:
  QUIRE_DEVICE explicit TileWalk(const PieceSlot<V>& slot)
      : begin_(slot.job.piece.kv_begin), tile_(slot.job.piece.kv_end - 1) {}

  QUIRE_DEVICE bool exists() const { return tile_ >= begin_; }
  QUIRE_DEVICE int tile() const { return tile_; }
  QUIRE_DEVICE void advance() { --tile_; }

 private:
  int begin_, tile_;
};

// Leaves out tiles that no row sees. A word of classes lasts for 32 tiles: reading each tile's from shared memory would
// stand in the way of its products.
template <class V>
class TileWalk<V, true> {
 public:
  QUIRE_DEVICE explicit TileWalk(const PieceSlot<V>& slot)
      : slot_(slot), begin_(ptx::uniform(slot.job.piece.kv_begin)) {
    const int last = ptx::uniform(slot.job.piece.kv_end) - begin_ - 1;
    word_ = last >> 5;  // -1 where there is no tile
    read();
    any_ &= 0xffffffffu >> (31 - (last & 31));
    advance();
  }

  QUIRE_DEVICE bool exists() const { return word_ >= 0; }
  QUIRE_DEVICE int tile() const { return begin_ + word_ * 32 + bit_; }
  QUIRE_DEVICE bool is_whole() const { return (all_ >> bit_) & 1; }

  QUIRE_DEVICE void advance() {
    while (any_ == 0 && word_ >= 0) --word_, read();
    bit_ = 31 - __clz(any_);
    any_ ^= 1u << (bit_ & 31);
  }

 private:
  QUIRE_DEVICE void read() {
    const bool is_known = static_cast<uint32_t>(word_) < TileClasses::kMax / 32;
    any_ = is_known ? ptx::uniform(slot_.classes.any[word_]) : word_ < 0 ? 0 : 0xffffffffu;
    all_ = is_known ? ptx::uniform(slot_.classes.all[word_]) : 0;
  }

  const PieceSlot<V>& slot_;
  int begin_, word_, bit_;
  uint32_t any_, all_;  // of this word; `any_` loses the tiles that were walked
};

// The tiles of which 64 rows from `row` on see every key.
template <class V>
class WholeTiles {
 public:
  QUIRE_DEVICE WholeTiles(const AttentionParams& p, const PieceSlot<V>& slot, int row) : tiles_{0, 0} {
    if constexpr (V::kMask == kMaskCustom) return;
    const int end = slot.job.row_end;
    const int first = p.group.div(min(row, end - 1)), last = p.group.div(min(row + 64, end) - 1);
    const Mask<V::kMask, V::kWindow != 0> mask = {slot.job.qo_len, slot.job.kv_len, p.window_left, nullptr};
    const KeyRange keys = mask.all(first, last);
    tiles_ = {ptx::uniform(ceil_div(keys.begin, V::kTileKv)), ptx::uniform(keys.end / V::kTileKv)};
  }

  QUIRE_DEVICE bool contains(const TileWalk<V>& walk) const {
    if constexpr (V::kMask == kMaskCustom)
      return walk.is_whole();
    else
      return tiles_.contains(walk.tile());
  }

 private:
  KeyRange tiles_;
};

}  // namespace quire
