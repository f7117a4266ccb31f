// Which KV tiles of a work tile are computed, and which of them need masking. KV tiles are computed from right to left,
// so that the tiles which a causal mask or kv_len cuts come first.
#pragma once
#include "quire/tile/hopper/scheduler.cuh"
#include "quire/ptx/wgmma.cuh"
#include "quire/tile/shared/logits.cuh"

namespace quire {

// A work tile as the scheduling warp passes it to the other warps.
template <class V, bool kHasBlockMask = has_block_mask<V>()>
struct WorkStage : CurrentWork {
  QUIRE_DEVICE void read_block_mask(const AttentionFa3Params&, int) {}
  QUIRE_DEVICE const uint8_t* bits() const { return nullptr; }
  QUIRE_DEVICE int num_kv_tiles() const { return work.kv_end - work.kv_begin; }
};

// A work tile under a block mask, with the mask bits of its request and two bits for each KV tile. The scheduling warp
// alone reads the block mask of the first kWords * 32 KV tiles, because each of the other warps would wait for memory.
template <class V>
struct WorkStage<V, true> : CurrentWork {
  static constexpr int kWords = 32;
  const uint8_t* mask_bits;
  const uint8_t* block_mask;
  uint32_t visible[kWords], full[kWords];
  int num_visible;  // KV tiles; of more than kWords * 32 at least as many as there are

  QUIRE_DEVICE const uint8_t* bits() const { return mask_bits; }
  QUIRE_DEVICE int num_kv_tiles() const { return num_visible; }  // that are computed

  // Called by one warp.
  QUIRE_DEVICE void read_block_mask(const AttentionFa3Params& p, int lane) {
    const uint8_t* of_head = p.block_mask;
    if constexpr (V::kScoreMask != 0) of_head = block_mask_of<V>(ExpressionOf<V>(p.base), work.kv_head);
    const uint8_t* first = of_head + work.tile.work_begin + (work.kv_begin - work.tile.kv_begin);
    const int tiles = work.kv_end - work.kv_begin, words = min(ceil_div(tiles, 32), kWords);
    int count = max(0, tiles - 32 * kWords);
    if (lane == 0) block_mask = first;
    if constexpr (V::kMask == kMaskCustom) {
      if (lane == 0) mask_bits = p.base.mask + p.base.mask_indptr[work.tile.request];
    }
#pragma unroll 4
    for (int i = 0; i < words; ++i) {
      uint32_t visible_bits, full_bits;
      vote(first, i, visible_bits, full_bits, lane);
      if (lane == 0) visible[i] = visible_bits, full[i] = full_bits;
      count += __popc(visible_bits);
    }
    if (lane == 0) num_visible = count;
    __syncwarp();
  }

  // Reads the block mask of 32 KV tiles, from KV tile 32 * i of the work tile on. Called by all lanes of a warp
  // together.
  QUIRE_DEVICE void vote(const uint8_t* first, int i, uint32_t& visible_bits, uint32_t& full_bits, int lane) const {
    const int at = 32 * i + lane;
    const int found = at < work.kv_end - work.kv_begin ? __ldg(first + at) : 0;
    visible_bits = __ballot_sync(0xffffffffu, found & kBlockVisible);
    full_bits = __ballot_sync(0xffffffffu, found & kBlockFull);
  }
};

// Goes through the KV tiles of a work tile. All lanes of a warp call it together, and all warps of the CTA take the
// same path.
template <class V, bool kHasBlockMask = has_block_mask<V>()>
class KvTileWalk {
 public:
  QUIRE_DEVICE explicit KvTileWalk(const WorkStage<V>& stage)
      : begin_(stage.work.kv_begin), tile_(stage.work.kv_end - 1) {}

  QUIRE_DEVICE bool exists() const { return tile_ >= begin_; }
  QUIRE_DEVICE int tile() const { return tile_; }
  QUIRE_DEVICE void advance() { --tile_; }

 private:
  int begin_, tile_;
};

// Goes through the KV tiles that some row sees. A word of the block mask serves 32 KV tiles, because reading shared
// memory for each KV tile would delay its products.
template <class V>
class KvTileWalk<V, true> {
 public:
  QUIRE_DEVICE explicit KvTileWalk(const WorkStage<V>& stage)
      : stage_(stage), begin_(ptx::uniform(stage.work.kv_begin)) {
    const int last = ptx::uniform(stage.work.kv_end) - begin_ - 1;
    word_ = last >> 5;  // -1 where there is no tile
    read();
    advance();
  }

  QUIRE_DEVICE bool exists() const { return word_ >= 0; }
  QUIRE_DEVICE int tile() const { return begin_ + word_ * 32 + bit_; }
  QUIRE_DEVICE bool is_full() const { return (full_ >> bit_) & 1; }

  QUIRE_DEVICE void advance() {
    while (visible_ == 0 && word_ >= 0) --word_, read();
    bit_ = 31 - __clz(visible_);
    visible_ ^= 1u << (bit_ & 31);
  }

 private:
  QUIRE_DEVICE void read() {
    visible_ = full_ = 0;
    if (word_ < 0) return;
    if (word_ < WorkStage<V>::kWords) {
      visible_ = stage_.visible[word_], full_ = stage_.full[word_];
    } else {
      stage_.vote(stage_.block_mask, word_, visible_, full_, ptx::lane_id());
    }
    visible_ = ptx::uniform(visible_), full_ = ptx::uniform(full_);
  }

  const WorkStage<V>& stage_;
  int begin_, word_, bit_;
  uint32_t visible_, full_;  // bits of this word; those of visited KV tiles are removed from `visible_`
};

// The KV tiles of which the 64 rows from `row` on see every key, and which need no masking.
template <class V>
class UnmaskedTiles {
 public:
  QUIRE_DEVICE UnmaskedTiles(const AttentionParams& p, const WorkStage<V>& stage, int row) : tiles_{0, 0} {
    if constexpr (has_block_mask<V>()) return;
    const int end = stage.work.row_end;
    const int first = p.group.div(min(row, end - 1)), last = p.group.div(min(row + 64, end) - 1);
    const Mask<V::kMask, V::kWindow != 0> mask = {stage.work.tile.qo_len, stage.work.tile.kv_len, p.window_left,
                                                  nullptr};
    const KeyRange keys = mask.all(first, last);
    tiles_ = {ptx::uniform(ceil_div(keys.begin, V::kTileKv)), ptx::uniform(keys.end / V::kTileKv)};
  }

  QUIRE_DEVICE bool contains(const KvTileWalk<V>& walk) const {
    if constexpr (has_block_mask<V>())
      return walk.is_full();
    else
      return tiles_.contains(walk.tile());
  }

 private:
  KeyRange tiles_;
};

}  // namespace quire
