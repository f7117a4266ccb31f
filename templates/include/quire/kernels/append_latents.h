// Appends latents of multi-head latent attention (MLA) to a paged cache. It rotates queries and the RoPE part of keys
// in place, and writes that part and the latent into the cache, as 8-bit numbers or unchanged. FlashMLA's rows have a
// scale for some dims of a latent: a float in the row, or a power of two of 8 bits behind the rows of the page.
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
  void* cache;                 // [num_pages, page_size] rows of a latent, its scales if they are there, and k_pe
  const int64_t* cache_rows;   // [nnz] page * page_size + token in page; negative: the token goes nowhere
  const float* kv_scale;       // [1], by which numbers of 8 bits without scales are divided
  const void* pos_ids;         // [nnz]
  const float* cos_sin_cache;  // [num_positions, rope_dim], cosines before sines; null: nothing turns
  int64_t nnz, q_token_stride, q_head_stride, k_token_stride, ckv_token_stride, cos_sin_stride;
  int64_t page_bytes, row_bytes;
  int64_t scales_at, scale_bytes;  // bytes from a page to its first row's scales, and on to the next row's
  int32_t k_pe_at;                 // in a row, in bytes
  int32_t scale_dims, has_powers;  // dims with a common scale, 0: there are none; whether scales are powers of two
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

  // The token's row of the cache, and its scales; null if it goes nowhere.
  struct Row {
    unsigned char *numbers, *scales;
  };
  QUIRE_HD static Row row_of(const AppendLatentsParams& p, int64_t token) {
    const int64_t at = p.cache_rows[token];
    if (at < 0 || at >= static_cast<int64_t>(p.num_pages) * p.page_size) return {nullptr, nullptr};
    const int64_t page =
        at < 1ll << 32 ? static_cast<uint32_t>(at) / static_cast<uint32_t>(p.page_size) : at / p.page_size;
    unsigned char* begin = static_cast<unsigned char*>(p.cache) + page * p.page_bytes;
    const int64_t in_page = at - page * p.page_size;
    return {begin + in_page * p.row_bytes, begin + p.scales_at + in_page * p.scale_bytes};
  }

  QUIRE_HD static void append_latent(const AppendLatentsParams& p, int64_t token, int thread) {
    const T* latent = static_cast<const T*>(p.ckv) + token * p.ckv_token_stride;
    // With scales the lanes of a warp stay together, also beyond the latent's last dim.
    const int end = p.scale_dims != 0 ? static_cast<int>(round_up(p.latent_dim, kLatentThreads * kVec)) : p.latent_dim;
#pragma unroll 1
    for (int dim = thread * kVec; dim < end; dim += kLatentThreads * kVec) {
      const bool exists = dim < p.latent_dim;
      Vector<T> in = {};
      if (exists) in = *reinterpret_cast<const Vector<T>*>(latent + dim);
      const Row row = row_of(p, token);
      if (row.numbers == nullptr) return;
      float x[kVec];
      for (int c = 0; c < kVec; ++c) x[c] = to_float(in.x[c]);
      float by = *p.kv_scale;
      if (p.scale_dims != 0) by = tile_scale(p, x, latent, dim);
      if (!exists) continue;
      if (p.scale_dims != 0 && dim % p.scale_dims == 0) write_scale(p, row.scales, dim / p.scale_dims, by);
      write(p.latent_type, x, by, row.numbers, dim);
    }
  }

  // What the largest number of the tile of dim `dim` is divided by to become the largest e4m3, or a power of two above
  // that, as FlashMLA rounds it. x: this thread's numbers; those of the tile's other threads are in their registers,
  // which are neighbours.
  QUIRE_HD static float tile_scale(const AppendLatentsParams& p, const float (&x)[kVec],
                                   [[maybe_unused]] const T* latent, [[maybe_unused]] int dim) {
    constexpr float kLargest = 448.f, kLeast = 1.17549435e-38f, kLeastPower = 1e-4f;
    float top = 0.f;
    const auto raise = [&](float value) { top = max(value < 0.f ? -value : value, top); };  // NaN raises nothing
#ifdef __CUDA_ARCH__
    for (int c = 0; c < kVec; ++c) raise(x[c]);
    for (int i = p.scale_dims / kVec / 2; i > 0; i /= 2) raise(__shfl_xor_sync(0xffffffffu, top, i));
#else
    static_cast<void>(x);
    for (int d = dim / p.scale_dims * p.scale_dims, end = min(d + p.scale_dims, p.latent_dim); d < end; ++d)
      raise(to_float(latent[d]));
#endif
    if (p.has_powers == 0) return max(top / kLargest, kLeast);
    const uint32_t bits = __builtin_bit_cast(uint32_t, max(top / kLargest, kLeastPower));
    return __builtin_bit_cast(float, min<uint32_t>((bits + 0x7fffffu) >> 23, 254u) << 23);
  }

  // Of tile i. Behind the last of the powers is a byte of no use, which becomes 0.
  QUIRE_HD static void write_scale(const AppendLatentsParams& p, unsigned char* scales, int i, float scale) {
    if (p.has_powers == 0) {
      reinterpret_cast<float*>(scales)[i] = scale;
      return;
    }
    scales[i] = static_cast<unsigned char>(__builtin_bit_cast(uint32_t, scale) >> 23);
    if ((i + 1) * p.scale_dims >= p.latent_dim) scales[i + 1] = 0;
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
      turn<1>(p, token, unit, k, 1, row_of(p, token).numbers);
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
