// Keys and values on their way into shared memory. Each warp copies its own tokens with cp.async and runs ahead of the
// arithmetic by a ring of stages, across the ends of work tiles: the memory system never hears that a request has
// ended.
#pragma once
#include "quire/tile/decode_shape.cuh"
#include "quire/tile/decode_scheduler.cuh"

namespace quire {

template <class V>
class DecodeLoader {
  using Shape = DecodeShape<V>;
  using Kv = typename V::Kv;
  static constexpr int kLookedUp = 32 / Shape::kWarpTokens;  // kv tiles, side by side, by the lanes of a warp together

 public:
  QUIRE_DEVICE DecodeLoader(const AttentionParams& p, const Walk& walk, int warp, int lane)
      : p_(p), walk_(walk), at_(0), end_(0), warp_(warp), lane_(lane) {}

  // Copies this warp's tokens of a kv tile into its rows of `k` and `v` and moves on to the next. The first call has
  // nothing to copy yet. True if it is to be looked up where the next tile's tokens are.
  QUIRE_DEVICE bool issue(TileWindow& window, typename Shape::TileK k, typename Shape::TileV v) {
    if (at_ < end_) copy_tile(k, v);
    return seek(window);
  }

  // Begins to look up where the next tile's tokens are, and those of its neighbour where there are lanes for both: the
  // second stage's copies then need no trip to memory (B 1, 2048 keys: 7.1 instead of 7.7 us; H200, 2026-11-21).
  QUIRE_DEVICE void prefetch_pages() {
    if constexpr (V::kPaged) {
      const int token = token_of_lane();
      page_ = token < kv_len_ ? p_.kv_indices[kv_first_ + p_.page.div(token)] : 0;
    }
  }

 private:
  QUIRE_DEVICE void copy_tile(typename Shape::TileK k, typename Shape::TileV v) {
    const int count = kv_len_ - (at_ * Shape::kTileKv + warp_ * Shape::kWarpTokens);
    const char *k_row, *v_row;
    rows_of(token_of_lane(), k_row, v_row);
    copy(k, k_row, count);
    copy(v, v_row, count);
    ++at_;
  }

  QUIRE_DEVICE bool seek(TileWindow& window) {
    bool is_new = false;
    while (at_ == end_) {
      if (walk_.left <= 0) return false;
      enter(window.get(walk_, lane_));
      is_new = true;
    }
    return is_new || at_ % kLookedUp == 0;
  }

  // The token that this lane looks up.
  QUIRE_DEVICE int token_of_lane() const {
    const int tile = at_ / kLookedUp * kLookedUp + lane_ / Shape::kWarpTokens;
    return tile * Shape::kTileKv + warp_ * Shape::kWarpTokens + lane_ % Shape::kWarpTokens;
  }

  QUIRE_DEVICE void enter(const RowTile& next) {
    const int units = walk_.units(next);
    at_ = next.kv_begin + walk_.offset;
    end_ = min(at_ + units, next.kv_end);
    kv_first_ = next.kv_first, kv_len_ = next.kv_len;
    k_ = reinterpret_cast<const char*>(static_cast<const Kv*>(p_.k) + walk_.kv_head * p_.k_head_stride);
    v_ = reinterpret_cast<const char*>(static_cast<const Kv*>(p_.v) + walk_.kv_head * p_.v_head_stride);
    walk_.next(p_, units);
  }

  // Where this lane's token is; anywhere valid if it does not exist.
  QUIRE_DEVICE void rows_of(int token, const char*& k, const char*& v) const {
    constexpr int kBytes = static_cast<int>(sizeof(Kv));
    if constexpr (V::kPaged) {
      const int slot = p_.page.mod(token);
      k = k_ + (page_ * p_.k_page_stride + slot * p_.k_token_stride) * kBytes;
      v = v_ + (page_ * p_.v_page_stride + slot * p_.v_token_stride) * kBytes;
    } else {
      const int64_t row = kv_first_ + static_cast<int64_t>(min(token, kv_len_ - 1));
      k = k_ + row * p_.k_token_stride * kBytes;
      v = v_ + row * p_.v_token_stride * kBytes;
    }
  }

  // Eight neighbours read 128 bytes of a row; `mine` is the row of this lane's token. Tokens from `count` on
  // become zeros and are not read, whatever is there: 0 * NaN is NaN.
  template <class Tile>
  QUIRE_DEVICE void copy(Tile dst, const char* mine, int count) const {
    constexpr int kLanes = Tile::kChunks > 4 ? 8 : Tile::kChunks > 2 ? 4 : 2;
    constexpr int kRowsAtOnce = 32 / kLanes, kPasses = ceil_div(Tile::kChunks, kLanes);
    const int col = lane_ % kLanes, row_of_warp = warp_ % Shape::kSplitWarps * Shape::kWarpTokens;
#pragma unroll
    for (int i = 0; i < Shape::kWarpTokens; i += kRowsAtOnce) {
      const int row = i + lane_ / kLanes, holder = at_ % kLookedUp * Shape::kWarpTokens + row;
      const char* src =
          reinterpret_cast<const char*>(__shfl_sync(0xffffffffu, reinterpret_cast<uint64_t>(mine), holder)) + col * 16;
#pragma unroll
      for (int j = 0; j < kPasses; ++j) {
        const int chunk = col + j * kLanes;
        if ((j + 1) * kLanes <= Tile::kChunks || chunk < Tile::kChunks) {
          ptx::cp_async_16(dst.chunk(row_of_warp + row, chunk), src + j * kLanes * 16, row < count ? 16 : 0);
        }
      }
    }
  }

  const AttentionParams& p_;
  Walk walk_;
  int at_, end_;  // kv tiles of the work
  int warp_, lane_;
  int kv_first_, kv_len_, page_;
  const char *k_, *v_;  // token 0 (page 0) of the kv head
};

}  // namespace quire
