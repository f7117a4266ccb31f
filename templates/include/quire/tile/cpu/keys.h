// Finds the keys and values of a request, and copies them widened to float.
#pragma once
#include "quire/core/mask.h"
#include "quire/core/params.h"
#include "quire/core/schedule.h"
#include "quire/tile/cpu/vector.h"

namespace quire::cpu {

// The keys of a KV tile. The last tile of close to 2^31 keys would end beyond an int.
template <int kTileKv>
QUIRE_CPU KeyRange tile_keys(int kv) {
  return {kv * kTileKv, static_cast<int>(min<uint32_t>(static_cast<uint32_t>(kv + 1) * kTileKv, INT32_MAX))};
}

// The keys or the values of a request and KV head.
template <class T>
struct RowsOfHead {
  const T* first;                     // of this request (ragged) or of page 0
  int64_t page_stride, token_stride;  // page stride 0 where keys are rows

  const T* at(int64_t page, int64_t token) const { return first + page * page_stride + token * token_stride; }
};
template <>
struct RowsOfHead<e2m1x2_t> {
  RowsOfHead<uint8_t> numbers;
  RowsOfHead<e4m3_t> scales;

  ScaledRow at(int64_t page, int64_t token) const {
    return {reinterpret_cast<const e2m1x2_t*>(numbers.at(page, token)), scales.at(page, token), 0};
  }
};

template <class V>
struct Keys {
  using Kv = typename V::Kv;
  using K = typename conditional<V::kTileScales != 0, typename V::Q, Kv>::type;  // kpe of latents with scales
  using KeyRow = typename RowOf<K>::type;
  using ValueRow = typename RowOf<Kv>::type;

  RowsOfHead<K> k;
  RowsOfHead<Kv> v;
  const int32_t* pages;  // this request's page numbers; null: its keys are rows
  const AttentionParams& p;
  int64_t first;  // the request's first row

  Keys(const AttentionParams& p, const RowTile& tile, int kv_head) : p(p) {
    if constexpr (is_same<Kv, e2m1x2_t>::value) {
      const auto& scaled = reinterpret_cast<const AttentionScaledParams&>(p);
      place(k.numbers, p.k, kv_head * p.k_head_stride, p.k_page_stride, p.k_token_stride);
      place(v.numbers, p.v, kv_head * p.v_head_stride, p.v_page_stride, p.v_token_stride);
      place(k.scales, scaled.k_sf, kv_head * scaled.k_sf_head_stride, scaled.k_sf_page_stride,
            scaled.k_sf_token_stride);
      place(v.scales, scaled.v_sf, kv_head * scaled.v_sf_head_stride, scaled.v_sf_page_stride,
            scaled.v_sf_token_stride);
    } else {
      place(k, p.k, kv_head * p.k_head_stride, p.k_page_stride, p.k_token_stride);
      place(v, p.v, kv_head * p.v_head_stride, p.v_page_stride, p.v_token_stride);
    }
    pages = V::kPaged != 0 ? p.kv_indices + tile.kv_first : nullptr;
    if constexpr (V::kPrefix != 0) {
      if (is_in_prefix<V>(tile)) {
        const auto& prefix = reinterpret_cast<const AttentionPrefixParams&>(p);
        place(k, prefix.k_prefix, kv_head * prefix.k_prefix_head_stride, 0, prefix.k_prefix_token_stride);
        place(v, prefix.v_prefix, kv_head * prefix.v_prefix_head_stride, 0, prefix.v_prefix_token_stride);
        pages = nullptr;
      }
    }
    first = pages == nullptr ? tile.kv_first : 0;
  }

  // Sets k_rows[i] and v_rows[i] to the key and value of token keys.begin + i.
  void resolve(KeyRange keys, KeyRow* k_rows, ValueRow* v_rows) const {
    if (V::kPaged == 0 || (V::kPrefix != 0 && pages == nullptr)) {
      run(0, first + keys.begin, keys.end - keys.begin, k_rows, v_rows);
    } else {
      int page = p.page.div(keys.begin), token_in_page = p.page.mod(keys.begin);
      for (int key = keys.begin; key < keys.end;) {
        const int count = min(static_cast<int>(p.page.divisor) - token_in_page, keys.end - key);
        const CachePlace at = cache_place_of<V>(p, pages[page], token_in_page);
        run(at.page, at.row, count, k_rows, v_rows);
        k_rows += count, v_rows += count, key += count;
        ++page, token_in_page = 0;
      }
    }
  }

 private:
  template <class T>
  static void place(RowsOfHead<T>& rows, const void* base, int64_t head, int64_t page_stride, int64_t token_stride) {
    rows = {static_cast<const T*>(base) + head, page_stride, token_stride};
  }

  void run(int64_t page, int64_t token, int count, KeyRow* k_rows, ValueRow* v_rows) const {
    for (int i = 0; i < count; ++i) k_rows[i] = k.at(page, token + i), v_rows[i] = v.at(page, token + i);
  }
};

// Prefetches a row into L2: a read from memory would occupy one of a core's few fill buffers of L1.
template <int kDim, class T>
QUIRE_CPU void prefetch_row(const T* row) {
  constexpr int kLineElements = 64 / sizeof(T), kIntoL2 = 2;
#pragma GCC unroll 16
  for (int i = 0; i < kDim; i += kLineElements) __builtin_prefetch(row + i, 0, kIntoL2);
}

template <int kDim>
QUIRE_CPU void prefetch_row(ScaledRow row) {
  prefetch_row<kDim / 2>(row.numbers), prefetch_row<kDim / kScaledNumbers>(row.scales);
}

// Prefetches a later row of a copy: rows of a strided cache are too far apart for the hardware's prefetcher.
template <int kDim, class Row>
QUIRE_CPU void prefetch_ahead(const Row* rows, int i, int count) {
  constexpr int kAhead = 6;
  if (i + kAhead < count) prefetch_row<kDim>(rows[i + kAhead]);
}

// to[i][:] = rows[i][:] as floats for count rows, with zeros behind them up to whole vectors.
template <int kDim, class Row>
inline void widen_rows(float* to, const Row* rows, int count) {
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
