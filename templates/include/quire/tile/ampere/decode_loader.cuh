// What a warp of decode reads ahead of its use: row tiles, keys and values, and biases. Every warp reads for itself, so
// that no warp waits for another.
#pragma once
#include "quire/core/schedule.h"
#include "quire/tile/ampere/decode_shape.cuh"
#include "quire/tile/shared/logits.cuh"

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
  static constexpr int kTiles = kWindowTiles;

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

  // The row tile at the cursor. All lanes of a warp call it together.
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

// Copies keys and values into the rings. Each warp copies its own tokens with cp.async, and copies run ahead of the
// arithmetic by a ring of stages, across the ends of work tiles: the memory system does not notice that a request has
// ended.
template <class V>
class DecodeLoader {
  using Shape = DecodeShape<V>;
  using Kv = typename V::Kv;
  static constexpr bool kHasScales = Shape::kKvBits == 4;
  // KV tiles whose page numbers the lanes of a warp read together, one lane a token.
  static constexpr int kTilesAtOnce = 32 / Shape::kWarpTokens;

 public:
  QUIRE_DEVICE DecodeLoader(const AttentionParams& p, const WorkCursor& cursor, int warp, int lane)
      : p_(p), cursor_(cursor), tile_(0), end_(0), warp_(warp), lane_(lane) {}

  // Copies this warp's tokens of the KV tile at hand into the warp's rows of `k` and `v`, and moves on to the next KV
  // tile. The first call has no KV tile at hand yet. True if the pages of the next KV tile are not known:
  // prefetch_pages() must follow.
  QUIRE_DEVICE bool load(TileWindow<V::kCascade != 0>& window, typename Shape::TileK k, typename Shape::TileV v) {
    if (tile_ < end_) copy_tile(k, v);
    return advance(window);
  }

  // Starts to read the page of this lane's token. The second stage's copies then need no trip to memory.
  QUIRE_DEVICE void prefetch_pages() {
    if constexpr (V::kPaged) {
      const int token = token_of_lane();
      page_ = token < kv_len_ ? p_.kv_indices[kv_first_ + p_.page.div(token)] : 0;
    }
  }

 private:
  QUIRE_DEVICE void copy_tile(typename Shape::TileK k, typename Shape::TileV v) {
    const int count = kv_len_ - (tile_ * V::kTileKv + warp_ * Shape::kWarpTokens);
    const char *k_row, *v_row;
    rows_of(token_of_lane(), k_row, v_row);
    copy<V::kHeadDimQk>(k, k_row, count);
    copy<V::kHeadDimVo>(v, v_row, count);
    if constexpr (kHasScales) {
      const auto& p = reinterpret_cast<const AttentionScaledParams&>(p_);
      copy_scales(k, p.k_sf, p.k_sf_page_stride, p.k_sf_token_stride, p.k_sf_head_stride, count);
      copy_scales(v, p.v_sf, p.v_sf_page_stride, p.v_sf_token_stride, p.v_sf_head_stride, count);
    }
    ++tile_;
  }

  QUIRE_DEVICE bool advance(TileWindow<V::kCascade != 0>& window) {
    if (tile_ < end_) return tile_ % kTilesAtOnce == 0;
    if (!cursor_.exists()) return false;
    start(cursor_.take<V::kCascade != 0>(p_, window.get(cursor_, lane_), V::kTileKv));
    return true;
  }

  // The token whose page number this lane reads.
  QUIRE_DEVICE int token_of_lane() const {
    const int tile = tile_ / kTilesAtOnce * kTilesAtOnce + lane_ / Shape::kWarpTokens;
    return tile * V::kTileKv + warp_ * Shape::kWarpTokens + lane_ % Shape::kWarpTokens;
  }

  // Starts a work tile. One without keys has a KV tile, too, whose tokens become zeros.
  QUIRE_DEVICE void start(const WorkTile& next) {
    tile_ = next.kv_begin, end_ = max(next.kv_end, tile_ + 1);
    kv_first_ = next.tile.kv_first, kv_len_ = next.tile.kv_len;
    if constexpr (kHasScales) kv_head_ = next.kv_head;
    k_ = reinterpret_cast<const char*>(static_cast<const Kv*>(p_.k) + next.kv_head * p_.k_head_stride);
    v_ = reinterpret_cast<const char*>(static_cast<const Kv*>(p_.v) + next.kv_head * p_.v_head_stride);
  }

  // Where this lane's token is. A token that does not exist gets an address that is not read.
  QUIRE_DEVICE void rows_of(int token, const char*& k, const char*& v) const {
    constexpr int kBytes = static_cast<int>(sizeof(Kv));
    if constexpr (V::kPaged) {
      const int token_in_page = p_.page.mod(token);
      k = k_ + (page_ * p_.k_page_stride + token_in_page * p_.k_token_stride) * kBytes;
      v = v_ + (page_ * p_.v_page_stride + token_in_page * p_.v_token_stride) * kBytes;
    } else {
      const int64_t row = kv_first_ + static_cast<int64_t>(min(token, kv_len_ - 1));
      k = k_ + row * p_.k_token_stride * kBytes;
      v = v_ + row * p_.v_token_stride * kBytes;
    }
  }

  // Copies the rows of a warp's tokens; `mine` is the row of this lane's token. Eight neighbouring lanes read 128 bytes
  // of a row. Tokens from `count` on, and dims from kHeadDim on, become zeros and are not read, whatever their memory
  // holds: 0 * NaN is NaN.
  template <int kHeadDim, class Tile>
  QUIRE_DEVICE void copy(Tile dst, const char* mine, int count) const {
    constexpr int kLanes = Tile::kChunks > 4 ? 8 : Tile::kChunks > 2 ? 4 : 2;
    constexpr int kRowsAtOnce = 32 / kLanes, kPasses = ceil_div(Tile::kChunks, kLanes);
    constexpr int kChunks = kHeadDim * Shape::kKvBits / 128;
    const int col = lane_ % kLanes, row_of_warp = warp_ % Shape::kSplitWarps * Shape::kWarpTokens;
#pragma unroll
    for (int i = 0; i < Shape::kWarpTokens; i += kRowsAtOnce) {
      const int row = i + lane_ / kLanes, holder = tile_ % kTilesAtOnce * Shape::kWarpTokens + row;
      const char* src =
          reinterpret_cast<const char*>(__shfl_sync(0xffffffffu, reinterpret_cast<uint64_t>(mine), holder)) + col * 16;
#pragma unroll
      for (int j = 0; j < kPasses; ++j) {
        const int chunk = col + j * kLanes;
        if ((j + 1) * kLanes <= Tile::kChunks || chunk < Tile::kChunks) {
          ptx::cp_async_16(dst.chunk(row_of_warp + row, chunk), src + j * kLanes * 16,
                           row < count && (Tile::kChunks == kChunks || chunk < kChunks) ? 16 : 0);
        }
      }
    }
  }

  // Copies the scales of a warp's tokens, one lane a token where one copy has them all.
  template <class Tile>
  QUIRE_DEVICE void copy_scales(Tile dst, const e4m3_t* scales, int64_t page_stride, int64_t token_stride,
                                int64_t head_stride, int count) const {
    constexpr int kBytes = Tile::kRowScales, kCopy = kBytes % 16 == 0 ? 16 : kBytes % 8 == 0 ? 8 : 4;
    constexpr int kCopies = kBytes / kCopy, kPasses = ceil_div(Shape::kWarpTokens * kCopies, 32);
    const int first = warp_ % Shape::kSplitWarps * Shape::kWarpTokens;
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
      const int item = i * 32 + lane_, row = item / kCopies % Shape::kWarpTokens, part = item % kCopies;
      const int token = tile_ * V::kTileKv + warp_ * Shape::kWarpTokens + row;
      int64_t at = kv_head_ * head_stride + part * kCopy;
      if constexpr (V::kPaged) {
        const int page = __shfl_sync(0xffffffffu, page_, tile_ % kTilesAtOnce * Shape::kWarpTokens + row);
        at += page * page_stride + p_.page.mod(token) * token_stride;
      } else {
        at += (kv_first_ + static_cast<int64_t>(min(token, kv_len_ - 1))) * token_stride;
      }
      if (kPasses * 32 == Shape::kWarpTokens * kCopies || item < Shape::kWarpTokens * kCopies)
        ptx::cp_async_small<kCopy>(dst.scales() + (first + row) * kBytes + part * kCopy, scales + at,
                                   row < count ? kCopy : 0);
    }
  }

  const AttentionParams& p_;
  WorkCursor cursor_;
  int tile_, end_;  // KV tiles [tile_, end_) of the work tile at hand are still to be copied
  int warp_, lane_;
  int kv_first_, kv_len_, page_;
  int kv_head_;         // where there are scales
  const char *k_, *v_;  // token 0 (page 0) of the KV head
};

// The biases of a warp's next block of 16 rows x kN keys are on their way from memory while a block is computed. A bias
// that grows evenly from key to key reads nothing for each key.
template <class V, class Math, int kN, bool kFits, bool kExists_ = kFits && has_bias<V>() && !has_ramps<V, Math>()>
struct BiasAhead {
  static constexpr bool kExists = false;
  QUIRE_DEVICE void clear() {}
};

template <class V, class Math, int kN, bool kFits>
struct BiasAhead<V, Math, kN, kFits, true> {
  static constexpr bool kExists = true;
  Accumulator<1, kN> bias, next;
  int next_key;  // -1: none

  QUIRE_DEVICE void clear() {
    next_key = -1;
    bias.clear(), next.clear();
  }

  QUIRE_DEVICE bool has_next(int key) const { return next_key == key; }
  // The block that was read last becomes the present one.
  QUIRE_DEVICE void advance() { bias = next; }

  // Starts to read a block. has_low_rows: whether some of the lower eight rows exist. Groups of up to eight heads have
  // none.
  QUIRE_DEVICE void read(const LogitsTransform<V, Math>& transform, const LogitsTile<V>& tile, bool has_low_rows) {
    next_key = tile.key;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (i == 1 && !has_low_rows) continue;
      const int qo_idx = tile.qo_idx(i);
#pragma unroll
      for (int n = 0; n < kN / 8; n += 2) {
        const LogitsPlace<V> place = {tile, i, qo_idx, 8 * n};
        const Four<float> x = Math::as_logits(V::template bias<Math>(transform.operands, place));
        float *left = next.at[0][n] + 2 * i, *right = next.at[0][n + 1] + 2 * i;
        left[0] = x.at[0], left[1] = x.at[1], right[0] = x.at[2], right[1] = x.at[3];
      }
    }
  }

  // q . k becomes score(q . k).
  QUIRE_DEVICE void add(Accumulator<1, kN>& s, float scale) const {
#pragma unroll
    for (int n = 0; n < kN / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) s.at[0][n][i] = fmaf(s.at[0][n][i], scale, bias.at[0][n][i]);
    }
  }
};

}  // namespace quire
