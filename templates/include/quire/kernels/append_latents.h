// Appends latents of multi-head latent attention (MLA) to a paged cache. It rotates queries and the RoPE part of keys
// in place, and writes that part and the latent into the cache, as 8-bit numbers or unchanged. Rows of 656 bytes have a
// scale for each kTileDims dims of a latent.
//
// The kernel is limited by memory bandwidth: each number is read once and written once. The first threads of a token
// each have a vector of its latent. Each of the others has two vectors whose dims are rotated as pairs, of two query
// heads or, for the last threads, of the key. The code is small, because a CTA must fetch its instructions before it
// starts, and fetching more of them would take longer than its work.
#pragma once
#include "quire/core/convert.h"
#include "quire/core/parallel.h"
#include "quire/core/params.h"
#include "quire/core/rope.h"

namespace quire {

enum class LatentType : int32_t { kAsInput, kE4m3, kE5m2 };

struct AppendLatentsParams {
  void* q_pe;                  // [nnz, num_heads, rope_dim] by strides; null: no heads
  void* k_pe;                  // [nnz, rope_dim] by stride
  const void* ckv;             // [nnz, latent_dim] by stride
  void* cache;                 // [num_pages, page_size] rows of a latent, its scales if it has any, and k_pe
  const int64_t* cache_rows;   // [nnz] page * page_size + token in page; negative: the token goes nowhere
  const float* kv_scale;       // [1], by which numbers of 8 bits without scales are divided
  const void* pos_ids;         // [nnz]
  const float* cos_sin_cache;  // [num_positions, rope_dim], cosines before sines; null: nothing turns
  int64_t nnz, q_token_stride, q_head_stride, k_token_stride, ckv_token_stride, cos_sin_stride;
  int64_t page_bytes, row_bytes;
  int32_t scales_at, k_pe_at;  // in a row, in bytes; scales_at 0: there are none
  int32_t num_heads, rope_dim, latent_dim;
  int32_t num_pages, page_size;
  int32_t has_long_pos_ids;  // 64 bits
  int32_t num_positions;
  int32_t interleave;  // neighbours turn together; else the first half with the second
  LatentType latent_type, k_pe_type;
};

template <class Variant>
struct AppendLatents {
  using T = typename Variant::T;
  static constexpr int kThreads = kParallelThreads, kMinCtas = 4, kSmemBytes = 0;
  static constexpr int kVec = Variant::kVec;
  static constexpr int kLatentThreads = 64, kWarp = 32;  // of a token; those of heads are whole warps too
  static constexpr int kHeads = 2;                       // queries' heads of a thread

  QUIRE_HD static int run(const AppendLatentsParams& p, unsigned char* = nullptr) {
#ifdef __CUDA_ARCH__
    const ItemOfThread item(p.nnz, kLatentThreads + static_cast<int>(round_up(threads_of_heads(p), kWarp)));
    if (!item.exists) return 0;
    if (item.column < kLatentThreads) {
      append_latent(p, item.row, item.column);
    } else {
      turn_heads(p, item.row, item.column - kLatentThreads);
    }
#else
    parallel_rows(p.nnz, 1, [&](int64_t token, int) {
      for (int i = 0; i < kLatentThreads; ++i) append_latent(p, token, i);
      for (int i = 0; i < threads_of_heads(p); ++i) turn_heads(p, token, i);
    });
#endif
    return 0;
  }

 private:
  template <class E>
  struct alignas(kVec * sizeof(E)) Vector {
    E x[kVec];
  };
  struct alignas(min(kVec, 4) * 4) Floats {
    float x[kVec];
  };
  // Of a head: dims [first, first + kVec) and [second, second + kVec), which hold pairs [pair, pair + kVec).
  struct Unit {
    int first, second, pair;
  };

  QUIRE_HD static int units(const AppendLatentsParams& p) { return p.rope_dim / (2 * kVec); }
  QUIRE_HD static int groups_of_queries(const AppendLatentsParams& p) { return ceil_div(p.num_heads, kHeads); }
  QUIRE_HD static int threads_of_heads(const AppendLatentsParams& p) { return (groups_of_queries(p) + 1) * units(p); }

  // The token's row of the cache; null if it goes nowhere.
  QUIRE_HD static unsigned char* row_of(const AppendLatentsParams& p, int64_t token) {
    const int64_t at = p.cache_rows[token];
    if (at < 0 || at >= static_cast<int64_t>(p.num_pages) * p.page_size) return nullptr;
    const int64_t page =
        at < 1ll << 32 ? static_cast<uint32_t>(at) / static_cast<uint32_t>(p.page_size) : at / p.page_size;
    return static_cast<unsigned char*>(p.cache) + page * p.page_bytes + (at - page * p.page_size) * p.row_bytes;
  }

  QUIRE_HD static void append_latent(const AppendLatentsParams& p, int64_t token, int thread) {
    const T* latent = static_cast<const T*>(p.ckv) + token * p.ckv_token_stride;
#pragma unroll 1
    for (int dim = thread * kVec; dim < p.latent_dim; dim += kLatentThreads * kVec) {
      const Vector<T> in = *reinterpret_cast<const Vector<T>*>(latent + dim);
      unsigned char* row = row_of(p, token);
      if (row == nullptr) return;
      float x[kVec];
      for (int c = 0; c < kVec; ++c) x[c] = to_float(in.x[c]);
      float by = *p.kv_scale;
      if (p.scales_at != 0) {
        by = tile_scale(x, latent, dim);
        if (dim % kTileDims == 0) *reinterpret_cast<float*>(row + p.scales_at + dim / kTileDims * 4) = by;
      }
      write(p.latent_type, x, by, row, dim);
    }
  }

  // What the largest number of the tile of dim `dim` is divided by to become the largest e4m3. x: this thread's
  // numbers; those of the tile's other threads are in their registers, which are neighbours.
  QUIRE_HD static float tile_scale(const float (&x)[kVec], [[maybe_unused]] const T* latent, [[maybe_unused]] int dim) {
    constexpr float kLargest = 448.f, kLeast = 1.17549435e-38f;
    float top = 0.f;
    const auto raise = [&](float value) { top = max(value < 0.f ? -value : value, top); };  // NaN raises nothing
#ifdef __CUDA_ARCH__
    for (int c = 0; c < kVec; ++c) raise(x[c]);
    for (int i = kTileDims / kVec / 2; i > 0; i /= 2) raise(__shfl_xor_sync(0xffffffffu, top, i));
#else
    for (int d = dim / kTileDims * kTileDims, end = d + kTileDims; d < end; ++d) raise(to_float(latent[d]));
#endif
    return max(top / kLargest, kLeast);
  }

  QUIRE_HD static void turn_heads(const AppendLatentsParams& p, int64_t token, int thread) {
    const int group = static_cast<unsigned>(thread) / static_cast<unsigned>(units(p)), pair = thread % units(p) * kVec;
    const Unit unit =
        p.interleave != 0 ? Unit{2 * pair, 2 * pair + kVec, pair} : Unit{pair, pair + p.rope_dim / 2, pair};
    if (group < groups_of_queries(p)) {
      T* q = static_cast<T*>(p.q_pe) + token * p.q_token_stride + group * kHeads * p.q_head_stride;
      turn<kHeads>(p, token, unit, q, min(kHeads, p.num_heads - group * kHeads), nullptr);
    } else if (group == groups_of_queries(p)) {
      T* k = static_cast<T*>(p.k_pe) + token * p.k_token_stride;
      turn<1>(p, token, unit, k, 1, row_of(p, token));
    }
  }

  // `count` of up to kMost heads, the first one at `heads`. row: of the cache that a key goes to; null: none.
  template <int kMost>
  QUIRE_HD static void turn(const AppendLatentsParams& p, int64_t token, Unit unit, T* heads, int count,
                            unsigned char* row) {
    Vector<T> a[kMost] = {}, b[kMost] = {};
#pragma unroll
    for (int h = 0; h < kMost; ++h) {
      if (h >= count) continue;
      a[h] = *reinterpret_cast<const Vector<T>*>(heads + h * p.q_head_stride + unit.first);
      b[h] = *reinterpret_cast<const Vector<T>*>(heads + h * p.q_head_stride + unit.second);
    }
    Floats cos, sin;
    if (p.cos_sin_cache != nullptr) read_angles(p, token, unit.pair, cos, sin);
#pragma unroll
    for (int h = 0; h < kMost; ++h) {
      if (h >= count) continue;
      float x[kVec], y[kVec];
      for (int c = 0; c < kVec; ++c) x[c] = to_float(a[h].x[c]), y[c] = to_float(b[h].x[c]);
      if (p.cos_sin_cache != nullptr) {
        turn_pairs(kVec > 1 && p.interleave != 0, cos, sin, x, y);
        store<T>(heads + h * p.q_head_stride + unit.first, x), store<T>(heads + h * p.q_head_stride + unit.second, y);
      }
      if (kMost > 1 || row == nullptr) continue;
      write(p.k_pe_type, x, *p.kv_scale, row + p.k_pe_at, unit.first);
      write(p.k_pe_type, y, *p.kv_scale, row + p.k_pe_at, unit.second);
    }
  }

  // Of a unit's pairs at the token's position; NaN where it has none.
  QUIRE_HD static void read_angles(const AppendLatentsParams& p, int64_t token, int pair, Floats& cos, Floats& sin) {
    const int64_t at = p.has_long_pos_ids ? static_cast<const int64_t*>(p.pos_ids)[token]
                                          : static_cast<const int32_t*>(p.pos_ids)[token];
    if (at < 0 || at >= p.num_positions) {
      for (int c = 0; c < kVec; ++c) cos.x[c] = sin.x[c] = __builtin_nanf("");
      return;
    }
    const float* row = p.cos_sin_cache + at * p.cos_sin_stride + pair;
    cos = *reinterpret_cast<const Floats*>(row), sin = *reinterpret_cast<const Floats*>(row + p.rope_dim / 2);
  }

  // neighbours: both dims of a pair are in the same vector.
  QUIRE_HD static void turn_pairs(bool neighbours, const Floats& cos, const Floats& sin, float (&x)[kVec],
                                  float (&y)[kVec]) {
    if (neighbours) {
#pragma unroll
      for (int c = 0; c + 1 < kVec; c += 2) {
        rotate(x[c], x[c + 1], {cos.x[c / 2], sin.x[c / 2]});
        rotate(y[c], y[c + 1], {cos.x[(kVec + c) / 2], sin.x[(kVec + c) / 2]});
      }
    } else {
#pragma unroll
      for (int c = 0; c < kVec; ++c) rotate(x[c], y[c], {cos.x[c], sin.x[c]});
    }
  }

  // Numbers `dim` on of what begins at `row`, divided by `by` where they get 8 bits.
  QUIRE_HD static void write(LatentType type, const float (&x)[kVec], float by, unsigned char* row, int dim) {
    if (type == LatentType::kAsInput) return store<T>(reinterpret_cast<T*>(row) + dim, x);
    float y[kVec];
    const float reciprocal = 1.f / by;
    for (int c = 0; c < kVec; ++c) y[c] = divide(x[c], by, reciprocal);
    type == LatentType::kE4m3 ? store<e4m3_t>(reinterpret_cast<e4m3_t*>(row) + dim, y)
                              : store<e5m2_t>(reinterpret_cast<e5m2_t*>(row) + dim, y);
  }

  // x / by, rounded once (Markstein): a separate division for each number would be most of the code.
  QUIRE_HD static float divide(float x, float by, float reciprocal) {
    const float quotient = x * reciprocal, rest = fused_multiply_add(-quotient, by, x);
    return rest == rest ? fused_multiply_add(rest, reciprocal, quotient) : quotient;  // infinite ones leave no rest
  }

  template <class E>
  QUIRE_HD static void store(E* to, const float (&x)[kVec]) {
    Vector<E> out;
    for (int c = 0; c < kVec; ++c) out.x[c] = from_float<E>(x[c]);
    *reinterpret_cast<Vector<E>*>(to) = out;
  }
};

}  // namespace quire
