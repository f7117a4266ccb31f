// Copies keys and values into the rings of decode. Each warp copies its own tokens with cp.async, and copies run ahead
// of the arithmetic by a ring of stages, across the ends of work tiles: the memory system does not notice that a
// request has ended.
#pragma once
#include "quire/tile/ampere/decode_shape.cuh"

namespace quire {

template <class V>
class DecodeLoader {
  using Shape = DecodeShape<V>;
  using Kv = typename V::Kv;
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
    constexpr int kChunks = kHeadDim * static_cast<int>(sizeof(Kv)) / 16;
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

  const AttentionParams& p_;
  WorkCursor cursor_;
  int tile_, end_;  // KV tiles [tile_, end_) of the work tile at hand are still to be copied
  int warp_, lane_;
  int kv_first_, kv_len_, page_;
  const char *k_, *v_;  // token 0 (page 0) of the KV head
};

}  // namespace quire
