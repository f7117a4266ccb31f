// Gathers the latents (MLA) that sparse attention chooses into rows of 16 or 32 bits, in the order of the choice. The
// tokens may lie in two caches, each with a list for every query, and in rows that no attention kernel reads: with a
// scale of 8 bits for each 64 dims, or with scales behind the rows of a page (LatentCache). Products with scales are
// computed in float32 and rounded once.
//
// The kernel is limited by memory bandwidth: a thread copies kVec dims of a token.
#pragma once
#include "quire/core/convert.h"
#include "quire/core/parallel.h"

namespace quire {

// The numbers of a latent in a cache: T, or e4m3, with a float or a power of two (e8m0) for each scale_dims dims.
enum class LatentRows : int32_t { kAsOutput, kE4m3, kFloatScales, kPowerScales };

// A cache and what is chosen of it. A row has `latent_dims` numbers of a latent and then, from byte rest_at on, the
// other dims in T.
struct LatentCache {
  const void* pages;
  const int32_t* indices;  // [num_rows, top_k], indices_stride apart: page * page_size + row in the page
  const int32_t* lens;     // how many of a row's indices count, for each rows_of_len rows; null: all
  int64_t indices_stride;
  int64_t page_bytes, row_bytes;
  int64_t scales_at, scale_bytes;  // bytes from a page to the scales of its first row, and from a row's to the next's
  FastDivisor page;
  int32_t top_k, num_tokens, rows_of_len;
  int32_t latent_dims, rest_at, scale_dims;
  LatentRows kind;
};

struct GatherLatentsParams {
  LatentCache caches[2];  // the second one may have a top_k of 0
  void* out;              // [num_rows * top_k, dims] of T, token_stride apart; tokens that do not exist are not written
  int32_t* table;         // [num_rows, top_k]: the row of `out`, or -1 for an index that names no token
  int64_t token_stride;
  int32_t num_rows, top_k, dims;  // top_k: of both
  int32_t _to_8;
};

template <class Variant>
struct GatherLatents {
  using T = typename Variant::T;
  static constexpr int kThreads = kParallelThreads, kMinCtas = kParallelCtas, kSmemBytes = 0;
  static constexpr int kVec = Variant::kVec;

  QUIRE_HD static int run(const GatherLatentsParams& p, unsigned char* = nullptr) {
    const int64_t tokens = static_cast<int64_t>(p.num_rows) * p.top_k;
    parallel_rows(tokens, p.dims / kVec, [&](int64_t token, int column) { copy(p, token, column); });
    return 0;
  }

 private:
  template <class E>
  struct alignas(kVec * sizeof(E)) Vector {
    E x[kVec];
  };

  QUIRE_HD static void copy(const GatherLatentsParams& p, int64_t to, int column) {
    const uint32_t item = static_cast<uint32_t>(to), row = item / static_cast<uint32_t>(p.top_k);
    const int place = static_cast<int>(item - row * p.top_k);
    const bool is_second = place >= p.caches[0].top_k;
    const LatentCache& cache = p.caches[is_second ? 1 : 0];
    const int token = token_of(cache, row, is_second ? place - p.caches[0].top_k : place);
    if (column == 0) p.table[to] = token < 0 ? -1 : static_cast<int32_t>(item);
    if (token < 0) return;
    T* out = static_cast<T*>(p.out) + to * p.token_stride + column * kVec;
    *reinterpret_cast<Vector<T>*>(out) = numbers(cache, token, column * kVec);
  }

  // The token that an index names; -1: none.
  QUIRE_HD static int token_of(const LatentCache& cache, uint32_t row, int place) {
    if (cache.lens != nullptr && place >= cache.lens[row / static_cast<uint32_t>(cache.rows_of_len)]) return -1;
    const int token = cache.indices[row * cache.indices_stride + place];
    return token < cache.num_tokens ? max(token, -1) : -1;
  }

  QUIRE_HD static Vector<T> numbers(const LatentCache& cache, int token, int dim) {
    const int page = cache.page.div(token), in_page = token - page * static_cast<int>(cache.page.divisor);
    const auto* begin = static_cast<const unsigned char*>(cache.pages) + page * cache.page_bytes;
    const unsigned char* row = begin + in_page * cache.row_bytes;
    if (dim >= cache.latent_dims) {
      return *reinterpret_cast<const Vector<T>*>(row + cache.rest_at + (dim - cache.latent_dims) * sizeof(T));
    }
    if (cache.kind == LatentRows::kAsOutput) return *reinterpret_cast<const Vector<T>*>(row + dim * sizeof(T));
    const Vector<e4m3_t> in = *reinterpret_cast<const Vector<e4m3_t>*>(row + dim);
    const float by = scale(cache, begin + cache.scales_at + in_page * cache.scale_bytes, dim);
    Vector<T> wide;
#pragma unroll
    for (int i = 0; i < kVec; ++i) wide.x[i] = from_float<T>(to_float(in.x[i]) * by);
    return wide;
  }

  QUIRE_HD static float scale(const LatentCache& cache, const unsigned char* scales, int dim) {
    if (cache.kind == LatentRows::kE4m3) return 1.f;
    const int at = dim / cache.scale_dims;
    if (cache.kind == LatentRows::kFloatScales) return reinterpret_cast<const float*>(scales)[at];
    return power(scales[at]);
  }

  // The number of an e8m0: 2^(bits - 127), of which the least is subnormal; 255 is NaN.
  QUIRE_HD static float power(uint8_t bits) {
    const uint32_t x = bits == 0 ? 0x00400000u : bits == 255 ? 0x7fc00000u : static_cast<uint32_t>(bits) << 23;
    return __builtin_bit_cast(float, x);
  }
};

}  // namespace quire
