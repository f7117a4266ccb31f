// Which key tiles of a work are computed, and which of them need masking: from right to left, so that the tiles that a
// causal mask and kv_len touch come first.
#pragma once
#include "quire/tile/sm90_scheduler.cuh"
#include "quire/ptx/wgmma.cuh"
#include "quire/tile/logits.cuh"

namespace quire {

// A work tile as the scheduling warp hands it on.
template <class V, bool kHasBlockMask = V::kMask == kMaskCustom>
struct WorkStage : CurrentWork {
  QUIRE_DEVICE void prefetch_pages(const AttentionFa3Params&, int) {}
  QUIRE_DEVICE const uint8_t* bits() const { return nullptr; }
};

// With its request's bits and the block_mask of its tiles, a bit each. The block_mask of the first kWords * 32 tiles
// lie here, because each of the warps would wait for the others a trip to memory long.
template <class V>
struct WorkStage<V, true> : CurrentWork {
  static constexpr int kWords = 32;
  const uint8_t* mask_bits;
  const uint8_t* block_mask;
  uint32_t seen[kWords], whole[kWords];

  QUIRE_DEVICE const uint8_t* bits() const { return mask_bits; }

  // One warp.
  QUIRE_DEVICE void prefetch_pages(const AttentionFa3Params& p, int lane) {
    const uint8_t* first = p.block_mask + work.tile.work_begin + (work.kv_begin - work.tile.kv_begin);
    const int words = min(ceil_div(work.kv_end - work.kv_begin, 32), kWords);
    if (lane == 0) mask_bits = p.base.mask + p.base.mask_indptr[work.tile.request], block_mask = first;
#pragma unroll 4
    for (int i = 0; i < words; ++i) {
      uint32_t seen_bits, whole_bits;
      vote(first, i, seen_bits, whole_bits, lane);
      if (lane == 0) seen[i] = seen_bits, whole[i] = whole_bits;
    }
  }

  // The block_mask of 32 tiles from tile 32 * i of the work on. Whole warps.
  QUIRE_DEVICE void vote(const uint8_t* first, int i, uint32_t& seen_bits, uint32_t& whole_bits, int lane) const {
    const int at = 32 * i + lane;
    const int found = at < work.kv_end - work.kv_begin ? __ldg(first + at) : 0;
    seen_bits = __ballot_sync(0xffffffffu, found & kBlockVisible);
    whole_bits = __ballot_sync(0xffffffffu, found & kBlockFull);
  }
};

// Goes through a work's tiles, whole warps at a time. All warps of the CTA take the same path.
template <class V, bool kHasBlockMask = V::kMask == kMaskCustom>
class TileWalk {
 public:
  QUIRE_DEVICE explicit TileWalk(const WorkStage<V>& slot) : begin_(slot.work.kv_begin), tile_(slot.work.kv_end - 1) {}

  QUIRE_DEVICE bool exists() const { return tile_ >= begin_; }
  QUIRE_DEVICE int tile() const { return tile_; }
  QUIRE_DEVICE void advance() { --tile_; }

 private:
  int begin_, tile_;
};

// Leaves out tiles that no row sees. A word of block_mask lasts for 32 tiles: reading each tile's from shared memory
// would stand in the way of its products.
template <class V>
class TileWalk<V, true> {
 public:
  QUIRE_DEVICE explicit TileWalk(const WorkStage<V>& slot) : slot_(slot), begin_(ptx::uniform(slot.work.kv_begin)) {
    const int last = ptx::uniform(slot.work.kv_end) - begin_ - 1;
    word_ = last >> 5;  // -1 where there is no tile
    read();
    advance();
  }

  QUIRE_DEVICE bool exists() const { return word_ >= 0; }
  QUIRE_DEVICE int tile() const { return begin_ + word_ * 32 + bit_; }
  QUIRE_DEVICE bool is_whole() const { return (whole_ >> bit_) & 1; }

  QUIRE_DEVICE void advance() {
    while (seen_ == 0 && word_ >= 0) --word_, read();
    bit_ = 31 - __clz(seen_);
    seen_ ^= 1u << (bit_ & 31);
  }

 private:
  QUIRE_DEVICE void read() {
    seen_ = whole_ = 0;
    if (word_ < 0) return;
    if (word_ < WorkStage<V>::kWords) {
      seen_ = slot_.seen[word_], whole_ = slot_.whole[word_];
    } else {
      slot_.vote(slot_.block_mask, word_, seen_, whole_, ptx::lane_id());
    }
    seen_ = ptx::uniform(seen_), whole_ = ptx::uniform(whole_);
  }

  const WorkStage<V>& slot_;
  int begin_, word_, bit_;
  uint32_t seen_, whole_;  // of this word; `seen_` loses the tiles that were walked
};

// The tiles of which 64 rows from `row` on see every key.
template <class V>
class WholeTiles {
 public:
  QUIRE_DEVICE WholeTiles(const AttentionParams& p, const WorkStage<V>& slot, int row) : tiles_{0, 0} {
    if constexpr (V::kMask == kMaskCustom) return;
    const int end = slot.work.row_end;
    const int first = p.group.div(min(row, end - 1)), last = p.group.div(min(row + 64, end) - 1);
    const Mask<V::kMask, V::kWindow != 0> mask = {slot.work.tile.qo_len, slot.work.tile.kv_len, p.window_left, nullptr};
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
