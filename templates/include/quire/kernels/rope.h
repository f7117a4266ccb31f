// Rotates the heads of queries and keys by their tokens' positions (RoFormer, arXiv:2104.09864). RotateHeads does no
// more; RotateAppend also divides each head by its root mean square before, quantises to 8 bits, and writes keys and
// values into a paged cache, in one pass over memory.
//
// Both are bound by memory: each number is read and written once. A thread has the same two vectors of kHeads heads of
// a token: the two whose dims turn together, or two that do not turn. The heads share angles, so that angles cost
// little beside the copy. Heads are loaded before the position, the angles and the page are known.
#pragma once
#include "quire/core/convert.h"
#include "quire/core/pages.h"
#include "quire/core/parallel.h"
#include "quire/core/rope.h"
#ifndef __CUDACC__
#include <math.h>
#endif

namespace quire {

constexpr int kMaxRotaryPairs = 256;

// Dims of all heads of all tokens: [token, head, dim], or [page, token in page, head, dim] where they are in pages.
struct HeadRows {
  void* data;
  int64_t page_stride, token_stride, head_stride;
};

enum class HeadType : int32_t { kAsInput, kE4m3, kE5m2 };

struct RopeHeads {
  HeadRows rope, nope;          // inputs: the rotary_dim dims that turn, and those after them
  HeadRows rope_out, nope_out;  // an output may be its input
  const void* weight;           // [rotary_dim + nope_dim] of the RMS norm; null: there is none
  float scale;                  // what is written is multiplied by it; 1 unless quantised
  int32_t num_heads;
  int32_t rotary_dim;  // 0: no dim turns
  int32_t nope_dim;
  HeadType out_type;
  int32_t is_paged;  // outputs are pages
};

struct RopeParams {
  RopeHeads q, k, v;
  const void* pos_ids;         // [nnz] positions; null: request b's token i is at offsets[b] + i
  const int32_t* indptr;       // [num_requests + 1] offsets into the tokens
  const int32_t* offsets;      // [num_requests]
  const float* cos_sin_cache;  // [num_positions, rotary_dim], cosines before sines; null: angles by frequencies
  int64_t cos_sin_stride;
  const int32_t* batch_indices;  // the tables of core/pages.h
  const int32_t* positions;
  const int32_t* kv_indices;
  const int32_t* kv_indptr;
  int64_t nnz;
  int64_t num_indices;
  int32_t batch_size;
  int32_t num_pages;
  int32_t page_size;
  int32_t has_long_pos_ids;  // 64 bits
  int32_t num_requests;
  int32_t num_positions;  // of cos_sin_cache
  int32_t interleave;     // neighbours turn together; else the first half with the second
  int32_t lanes;          // threads of a token's heads; under a norm a power of two up to 32
  float eps;
  uint64_t frequencies[kMaxRotaryPairs];  // turns a token, see core/rope.h
};

template <class Variant, bool kFused>
struct Rope {
  using T = typename Variant::T;
  static constexpr int kThreads = kParallelThreads, kMinCtas = 2, kSmemBytes = 0;
  static constexpr int kVec = Variant::kVec;
  static constexpr int kHeads = 4;  // heads of a thread

  template <class E>
  struct alignas(kVec * sizeof(E)) Vector {
    E x[kVec];
  };

  QUIRE_HD static int run(const RopeParams& p, unsigned char* = nullptr) {
    const int columns = (groups_of(p.q) + groups_of(p.k) + groups_of(p.v)) * p.lanes;
    const uint64_t* frequencies = frequencies_of(p);
#ifdef __CUDA_ARCH__
    int64_t row = -1;  // the one item of the thread
    int at = 0;
    parallel_rows(p.nnz, columns, [&](int64_t token, int column) { row = token, at = column; });
    if (row >= 0) process(p, group_of(p, row, at), frequencies);
#else
    parallel_rows(p.nnz, columns,
                  [&](int64_t token, int column) { process(p, group_of(p, token, column), frequencies); });
#endif
    return 0;
  }

 private:
  // Heads `first` to `first` + `count` of a token, and which of the threads that have them this is.
  struct Group {
    const RopeHeads& heads;
    int64_t token;
    int first, count, lane;
  };

  QUIRE_HD static int groups_of(const RopeHeads& heads) { return ceil_div(heads.num_heads, kHeads); }

  QUIRE_HD static Group group_of(const RopeParams& p, int64_t token, int column) {
    const int group = static_cast<unsigned>(column) / static_cast<unsigned>(p.lanes);
    const int k = groups_of(p.q), v = k + groups_of(p.k);
    const RopeHeads& heads = group < k ? p.q : group < v ? p.k : p.v;
    const int first = (group - (group < k ? 0 : group < v ? k : v)) * kHeads;
    return {heads, token, first, min(kHeads, heads.num_heads - first), column - group * p.lanes};
  }

  // Two vectors of a head: dims [x, x + kVec) and [y, y + kVec) of `in` and `out`, and where they are in the head.
  struct Unit {
    const HeadRows& in;
    const HeadRows& out;
    int x, y, first_dim;
    bool turns, has_y;
  };

  struct Numbers {
    float x[kVec], y[kVec];
  };

  // The device reads frequencies from shared memory: threads that read different parameters wait for each other.
  QUIRE_HD static const uint64_t* frequencies_of(const RopeParams& p) {
#ifdef __CUDA_ARCH__
    __shared__ uint64_t table[kMaxRotaryPairs];
    if (p.cos_sin_cache == nullptr) {
      for (int i = threadIdx.x; i < p.q.rotary_dim / 2; i += kThreads) table[i] = p.frequencies[i];
      __syncthreads();
    }
    return table;
#else
    return p.frequencies;
#endif
  }

  QUIRE_HD static int units_of(const RopeHeads& heads) {
    return heads.rotary_dim / (2 * kVec) + (heads.nope_dim + 2 * kVec - 1) / (2 * kVec);
  }

  QUIRE_HD static Unit unit_of(const RopeParams& p, const RopeHeads& heads, int unit) {
    const int turning = heads.rotary_dim / (2 * kVec);
    if (unit >= turning) {
      const int x = (unit - turning) * 2 * kVec;
      return {heads.nope, heads.nope_out, x, x + kVec, heads.rotary_dim, false, x + kVec < heads.nope_dim};
    }
    const int x = p.interleave ? unit * 2 * kVec : unit * kVec;
    return {heads.rope, heads.rope_out, x, p.interleave ? x + kVec : x + heads.rotary_dim / 2, 0, true, true};
  }

  QUIRE_HD static void process(const RopeParams& p, const Group& of, const uint64_t* frequencies) {
    float by[kHeads];
    for (int h = 0; h < kHeads; ++h) by[h] = kFused ? of.heads.scale : 1.f;
    if (kFused && of.heads.weight != nullptr) normalise(p, of, by);
#pragma unroll 1
    for (int i = of.lane; i < units_of(of.heads); i += p.lanes) {
      const Unit unit = unit_of(p, of.heads, i);
      Vector<T> x[kHeads], y[kHeads];
      load(of, unit, x, y);
      Rotation turns[kVec];
      if (unit.turns) rotations(p, of.token, i * kVec, frequencies, turns);
      const Place place = kFused && of.heads.is_paged ? place_of(p, of.token) : Place{0, 0};
      if (place.page < 0) return;
      const int64_t row = kFused && of.heads.is_paged
                              ? place.page * unit.out.page_stride + place.token_in_page * unit.out.token_stride
                              : of.token * unit.out.token_stride;
#pragma unroll
      for (int h = 0; h < kHeads; ++h) {
        if (h >= of.count) continue;
        Numbers n = numbers(x[h], y[h], by[h]);
        if (kFused && of.heads.weight != nullptr) multiply(of.heads, unit, n);
        if (unit.turns) turn(p, turns, n);
        store(of.heads, unit, row + (of.first + h) * unit.out.head_stride, n);
      }
    }
  }

  QUIRE_HD static void load(const Group& of, const Unit& unit, Vector<T>* x, Vector<T>* y) {
    const T* row = static_cast<const T*>(unit.in.data) + of.token * unit.in.token_stride;
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      if (h >= of.count) continue;
      const T* head = row + (of.first + h) * unit.in.head_stride;
      x[h] = *reinterpret_cast<const Vector<T>*>(head + unit.x);
      y[h] = unit.has_y ? *reinterpret_cast<const Vector<T>*>(head + unit.y) : Vector<T>{};
    }
  }

  // Multiplies each `by` with the reciprocal of its head's root mean square.
  QUIRE_HD static void normalise(const RopeParams& p, const Group& of, float* by) {
    float sums[kHeads] = {};
#pragma unroll 1
    for (int i = of.lane; i < units_of(of.heads); i += p.lanes) {
      const Unit unit = unit_of(p, of.heads, i);
      Vector<T> x[kHeads], y[kHeads];
      load(of, unit, x, y);
#pragma unroll
      for (int h = 0; h < kHeads; ++h) {
        if (h >= of.count) continue;
        for (int c = 0; c < kVec; ++c) {
          const float a = to_float(x[h].x[c]), b = unit.has_y ? to_float(y[h].x[c]) : 0.f;
          sums[h] += a * a + b * b;
        }
      }
    }
    const float dims = static_cast<float>(of.heads.rotary_dim + of.heads.nope_dim);
#pragma unroll
    for (int h = 0; h < kHeads; ++h) by[h] *= reciprocal_root(sum_of_lanes(sums[h], p.lanes) / dims + p.eps);
  }

#ifdef __CUDACC__
  // The sum over the threads of a head, which are neighbours in a warp.
  QUIRE_DEVICE static float sum_of_lanes(float x, int lanes) {
    const unsigned group = (threadIdx.x & 31) / lanes * lanes;
    const unsigned mask = (lanes == 32 ? 0xffffffffu : (1u << lanes) - 1) << group;
    for (int i = lanes / 2; i > 0; i /= 2) x += __shfl_xor_sync(mask, x, i);
    return x;
  }
  QUIRE_DEVICE static float reciprocal_root(float x) {
    float y;
    asm("rsqrt.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
  }
#else
  static float sum_of_lanes(float x, int) { return x; }
  static float reciprocal_root(float x) { return 1.f / sqrtf(x); }
#endif

  struct Position {
    int32_t at;
    bool is_known;
  };

  QUIRE_HD static Position position_of(const RopeParams& p, int64_t token) {
    int64_t at;
    bool is_known = true;
    if (p.pos_ids == nullptr) {
      int low = 0, high = p.num_requests;  // the last request that begins at the token or before it
      while (high - low > 1) {
        const int middle = low + (high - low) / 2;
        (p.indptr[middle] <= token ? low : high) = middle;
      }
      is_known = p.indptr[low] <= token && token < p.indptr[low + 1];
      at = static_cast<int64_t>(p.offsets[low]) + token - p.indptr[low];
    } else {
      at = p.has_long_pos_ids ? static_cast<const int64_t*>(p.pos_ids)[token]
                              : static_cast<const int32_t*>(p.pos_ids)[token];
    }
    const bool is_in_table = p.cos_sin_cache == nullptr || (at >= 0 && at < p.num_positions);
    return {static_cast<int32_t>(at), is_known && is_in_table && at == static_cast<int32_t>(at)};
  }

  // The rotations of pairs `pair` on. Those of a token without a position are NaN, and so are its results.
  QUIRE_HD static void rotations(const RopeParams& p, int64_t token, int pair, const uint64_t* frequencies,
                                 Rotation* turns) {
    const Position position = position_of(p, token);
    if (!position.is_known) {
      for (int c = 0; c < kVec; ++c) turns[c] = {__builtin_nanf(""), __builtin_nanf("")};
    } else if (p.cos_sin_cache == nullptr) {
#pragma unroll
      for (int c = 0; c < kVec; ++c) turns[c] = rope_rotation(position.at, frequencies[pair + c]);
    } else {
      const float* row = p.cos_sin_cache + position.at * p.cos_sin_stride + pair;
      const auto cos = *reinterpret_cast<const Floats*>(row);
      const auto sin = *reinterpret_cast<const Floats*>(row + p.q.rotary_dim / 2);
      for (int c = 0; c < kVec; ++c) turns[c] = {cos.x[c], sin.x[c]};
    }
  }

  struct alignas(min(16, kVec * 4)) Floats {
    float x[kVec];
  };

  QUIRE_HD static Numbers numbers(const Vector<T>& x, const Vector<T>& y, float by) {
    Numbers n;
    for (int c = 0; c < kVec; ++c) n.x[c] = to_float(x.x[c]), n.y[c] = to_float(y.x[c]);
    if (kFused) {
      for (int c = 0; c < kVec; ++c) n.x[c] *= by, n.y[c] *= by;
    }
    return n;
  }

  QUIRE_HD static void multiply(const RopeHeads& heads, const Unit& unit, Numbers& n) {
    const T* weight = static_cast<const T*>(heads.weight) + unit.first_dim;
    const auto x = *reinterpret_cast<const Vector<T>*>(weight + unit.x);
    for (int c = 0; c < kVec; ++c) n.x[c] *= to_float(x.x[c]);
    if (!unit.has_y) return;
    const auto y = *reinterpret_cast<const Vector<T>*>(weight + unit.y);
    for (int c = 0; c < kVec; ++c) n.y[c] *= to_float(y.x[c]);
  }

  QUIRE_HD static void turn(const RopeParams& p, const Rotation* turns, Numbers& n) {
    if (kVec == 1 || !p.interleave) {
#pragma unroll
      for (int c = 0; c < kVec; ++c) rotate(n.x[c], n.y[c], turns[c]);
    } else {
      constexpr int kPairs = kVec / 2;
#pragma unroll
      for (int c = 0; c < kPairs; ++c) {
        rotate(n.x[2 * c], n.x[2 * c + 1], turns[c]);
        rotate(n.y[2 * c], n.y[2 * c + 1], turns[kPairs + c]);
      }
    }
  }

  QUIRE_HD static void store(const RopeHeads& heads, const Unit& unit, int64_t head, const Numbers& n) {
    if (!kFused || heads.out_type == HeadType::kAsInput) return store_as<T>(unit, head, n);
    heads.out_type == HeadType::kE4m3 ? store_as<e4m3_t>(unit, head, n) : store_as<e5m2_t>(unit, head, n);
  }

  template <class E>
  QUIRE_HD static void store_as(const Unit& unit, int64_t head, const Numbers& n) {
    E* to = static_cast<E*>(unit.out.data) + head;
    Vector<E> x, y;
    for (int c = 0; c < kVec; ++c) x.x[c] = from_float<E>(n.x[c]), y.x[c] = from_float<E>(n.y[c]);
    *reinterpret_cast<Vector<E>*>(to + unit.x) = x;
    if (unit.has_y) *reinterpret_cast<Vector<E>*>(to + unit.y) = y;
  }
};

template <class Variant>
using RotateHeads = Rope<Variant, false>;
template <class Variant>
using RotateAppend = Rope<Variant, true>;

}  // namespace quire
