// Keys and values on their way into shared memory. Each warp copies its own tokens with cp.async and runs ahead of the
// arithmetic by a ring of stages, across the ends of pieces: the memory system never hears that a request has ended.
#pragma once
#include "quire/tile/decode_shape.cuh"
#include "quire/tile/decode_work.cuh"

namespace quire {

template <class V>
class DecodeLoader {
  using Shape = DecodeShape<V>;
  using Kv = typename V::Kv;

 public:
  QUIRE_DEVICE DecodeLoader(const AttentionParams& p, const Walk& walk, int warp, int lane)
      : p_(p), walk_(walk), at_(0), end_(0), warp_(warp), lane_(lane) {}

  // Copies this warp's tokens of the kv tile that was looked up into its rows of `k` and `v`, then looks up the next.
  // The first call has nothing to copy yet.
  QUIRE_DEVICE void issue(TileWindow& window, typename Shape::TileK k, typename Shape::TileV v) {
    if (at_ < end_) copy_tile(k, v);
    seek(window);
  }

 private:
  QUIRE_DEVICE void copy_tile(typename Shape::TileK k, typename Shape::TileV v) {
    const int first = first_token(), token = first + lane_ % Shape::kWarpTokens;
    const char *k_row, *v_row;
    rows_of(token, k_row, v_row);
    copy(k, k_row, kv_len_ - first);
    copy(v, v_row, kv_len_ - first);
    ++at_;
  }

  // Moves on to the next kv tile and begins to look up where its tokens are.
  QUIRE_DEVICE void seek(TileWindow& window) {
    int kv_head = -1;  // of a tile that begins here
    while (at_ == end_) {
      if (walk_.left <= 0) return;
      kv_head = walk_.kv_head;
      enter(window.get(walk_, lane_));
    }
    if constexpr (V::kPaged) {
      const int token = first_token() + lane_ % Shape::kWarpTokens;
      page_ = token < kv_len_ ? p_.kv_indices[kv_first_ + p_.page.div(token)] : 0;
    }
    if constexpr (V::kTileRows <= 32) {  // higher tiles have no registers for it
      if (warp_ == 0 && kv_head >= 0) prefetch_queries(kv_head);
    }
  }

  // The queries go to L2 before the keys are asked for: loads behind those would wait for all
  // of them (B 16, 1024 keys: 20.4 instead of 20.8 us; H200, 2026-11-21).
  QUIRE_DEVICE void prefetch_queries(int kv_head) const {
    constexpr int kBytes = V::kHeadDimQk * static_cast<int>(sizeof(typename V::Q)), kLines = ceil_div(kBytes, 128);
    const int group_size = static_cast<int>(p_.group.divisor);
    const int row_end = min(row_begin_ + V::kTileRows, qo_len_ * group_size);
    for (int i = lane_; i < (row_end - row_begin_) * kLines; i += 32) {
      const int row = row_begin_ + i / kLines, qo_idx = p_.group.div(row);
      const int64_t token = qo_begin_ + static_cast<int64_t>(qo_idx);
      const int head = kv_head * group_size + row - qo_idx * group_size;
      const auto* q = static_cast<const typename V::Q*>(p_.q) + token * p_.q_token_stride + head * p_.q_head_stride;
      ptx::prefetch_l2(reinterpret_cast<const char*>(q) + i % kLines * 128);
    }
  }

  QUIRE_DEVICE int first_token() const { return at_ * Shape::kTileKv + warp_ * Shape::kWarpTokens; }

  QUIRE_DEVICE void enter(const Tile& next) {
    const int units = walk_.units(next);
    at_ = next.kv_begin + walk_.offset;
    end_ = min(at_ + units, next.kv_end);
    kv_first_ = next.kv_first, kv_len_ = next.kv_len;
    row_begin_ = next.row_begin, qo_begin_ = next.qo_begin, qo_len_ = next.qo_len;
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

  // Eight neighbours read 128 bytes of a row; `mine` is the row of token lane % kWarpTokens. Tokens from `count` on
  // become zeros and are not read, whatever is there: 0 * NaN is NaN.
  template <class Tile>
  QUIRE_DEVICE void copy(Tile dst, const char* mine, int count) const {
    constexpr int kLanes = Tile::kChunks > 4 ? 8 : Tile::kChunks > 2 ? 4 : 2;
    constexpr int kRowsAtOnce = 32 / kLanes, kPasses = ceil_div(Tile::kChunks, kLanes);
    const int col = lane_ % kLanes, row_of_warp = warp_ % Shape::kTeam * Shape::kWarpTokens;
#pragma unroll
    for (int i = 0; i < Shape::kWarpTokens; i += kRowsAtOnce) {
      const int row = i + lane_ / kLanes;
      const char* src =
          reinterpret_cast<const char*>(__shfl_sync(0xffffffffu, reinterpret_cast<uint64_t>(mine), row)) + col * 16;
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
  int at_, end_;  // kv tiles of the piece
  int warp_, lane_;
  int kv_first_, kv_len_, page_;
  int row_begin_, qo_begin_, qo_len_;
  const char *k_, *v_;  // token 0 (page 0) of the kv head
};

}  // namespace quire
