// Finds the keys and values of a request, and copies them widened to float.
#pragma once
#include "quire/core/cascade.h"
#include "quire/core/mask.h"
#include "quire/core/params.h"
#include "quire/tile/cpu/vector.h"

namespace quire::cpu {

// The keys of a KV tile. The last tile of close to 2^31 keys would end beyond an int.
template <int kTileKv>
QUIRE_CPU KeyRange tile_keys(int kv) {
  return {kv * kTileKv, static_cast<int>(min<uint32_t>(static_cast<uint32_t>(kv + 1) * kTileKv, INT32_MAX))};
}

template <class V>
struct Keys {
  using Kv = typename V::Kv;
  using K = typename conditional<V::kTileScales != 0, typename V::Q, Kv>::type;  // kpe of latents with scales

  const K* k;  // of this request (ragged) or of page 0, at the kv head
  const Kv* v;
  const int32_t* pages;  // this request's page numbers; null: its keys are rows
  const AttentionParams& p;
  int64_t k_stride, v_stride;  // over tokens

  Keys(const AttentionParams& p, const RowTile& tile, int kv_head) : p(p) {
    k = static_cast<const K*>(p.k) + kv_head * p.k_head_stride;
    v = static_cast<const Kv*>(p.v) + kv_head * p.v_head_stride;
    k_stride = p.k_token_stride, v_stride = p.v_token_stride;
    pages = V::kPaged != 0 ? p.kv_indices + tile.kv_first : nullptr;
    if (is_in_prefix<V>(tile)) {
      const auto& prefix = reinterpret_cast<const AttentionPrefixParams&>(p);
      k = static_cast<const K*>(prefix.k_prefix) + kv_head * prefix.k_prefix_head_stride;
      v = static_cast<const Kv*>(prefix.v_prefix) + kv_head * prefix.v_prefix_head_stride;
      k_stride = prefix.k_prefix_token_stride, v_stride = prefix.v_prefix_token_stride;
      pages = nullptr;
    }
    if (pages == nullptr) k += tile.kv_first * k_stride, v += tile.kv_first * v_stride;
  }

  // Sets k_rows[i] and v_rows[i] to the key and value of token keys.begin + i.
  void resolve(KeyRange keys, const K** k_rows, const Kv** v_rows) const {
    if (V::kPaged == 0 || (V::kPrefix != 0 && pages == nullptr)) {
      run(k + keys.begin * k_stride, v + keys.begin * v_stride, keys.end - keys.begin, k_rows, v_rows);
    } else {
      int page = p.page.div(keys.begin), token_in_page = p.page.mod(keys.begin);
      for (int key = keys.begin; key < keys.end;) {
        const int count = min(static_cast<int>(p.page.divisor) - token_in_page, keys.end - key);
        const CachePlace at = cache_place_of<V>(p, pages[page], token_in_page);
        const int64_t number = at.page;
        run(k + number * p.k_page_stride + at.row * k_stride, v + number * p.v_page_stride + at.row * v_stride, count,
            k_rows, v_rows);
        k_rows += count, v_rows += count, key += count;
        ++page, token_in_page = 0;
      }
    }
  }

 private:
  void run(const K* k_at, const Kv* v_at, int count, const K** k_rows, const Kv** v_rows) const {
    for (int i = 0; i < count; ++i, k_at += k_stride, v_at += v_stride) {
      k_rows[i] = k_at, v_rows[i] = v_at;
    }
  }
};

// Prefetches a row into L2: a read from memory would occupy one of a core's few fill buffers of L1.
template <int kDim, class T>
QUIRE_CPU void prefetch_row(const T* row) {
  constexpr int kLineElements = 64 / sizeof(T), kIntoL2 = 2;
#pragma GCC unroll 16
  for (int i = 0; i < kDim; i += kLineElements) __builtin_prefetch(row + i, 0, kIntoL2);
}

// Prefetches a later row of a copy: rows of a strided cache are too far apart for the hardware's prefetcher.
template <int kDim, class T>
QUIRE_CPU void prefetch_ahead(const T* const* rows, int i, int count) {
  constexpr int kAhead = 6;
  if (i + kAhead < count) prefetch_row<kDim>(rows[i + kAhead]);
}

// to[i][:] = rows[i][:] as floats for count rows, with zeros behind them up to whole vectors.
template <int kDim, class T>
inline void widen_rows(float* to, const T* const* rows, int count) {
  constexpr int kRest = kDim % kLanes, kWhole = kDim - kRest;
  for (int i = 0; i < count; ++i, to += whole_vectors(kDim)) {
    prefetch_ahead<kDim>(rows, i, count);
    for (int d = 0; d < kWhole; d += kLanes) store(to + d, load(rows[i] + d));
    if constexpr (kRest != 0) store(to + kWhole, load_first<kRest>(rows[i] + kWhole));
  }
}

// Whether no float is infinite or NaN. The bits are tested, because GCC 12 folds a vector's x * 0 to 0 without signed
// zeros, although x may be NaN.
inline bool all_finite(const float* x, int64_t count) {
  Ints found = {};
  for (int64_t i = 0; i < count; i += kLanes) found |= (reinterpret_cast<Ints>(load(x + i)) & 0x7f800000) == 0x7f800000;
  return !any_lane(found);
}

}  // namespace quire::cpu
