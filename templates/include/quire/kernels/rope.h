// Rotates the heads of queries and keys by their tokens' positions (RoFormer, arXiv:2104.09864). RotateHeads does no
// more; RotateAppend also divides each head by its root mean square before, quantises to 8 bits, and writes keys and
// values into a paged cache, in one pass over memory. RotatePages reads keys and values out of a paged cache.
//
// All are bound by memory: each number is read and written once. A thread has the same two vectors of kHeads heads of
// a token: the two whose dims turn together, or two that do not turn. A CTA computes the rotations of its tokens once,
// into shared memory, while the heads are on their way. A rotation is read there just before its use: registers that it
// does not take hold more threads, and more threads hide the trips to memory. For the same reason no thread waits for
// parameters: an index that threads compute would send each read of a parameter through memory, so each is chosen among
// constants.
#pragma once
#ifndef __CUDACC__
#pragma GCC optimize("O3")  // a third faster than with the toolchain's -O2
#endif
#include "quire/core/convert.h"
#include "quire/core/pages.h"
#include "quire/core/parallel.h"
#include "quire/core/rope.h"
#ifndef __CUDACC__
#include <math.h>
#endif

namespace quire {

template <int kBytes>
struct WordOf;
template <>
struct WordOf<1> {
  using Type = uint8_t;
};
template <>
struct WordOf<2> {
  using Type = uint16_t;
};
template <>
struct WordOf<4> {
  using Type = uint32_t;
};

enum class RopeWork { kRotate, kAppend, kGather };

// CTAs an SM, which bound the registers of a thread: more of them hide more trips to memory. The prologue of fp16 has
// none to spare of a third.
template <class T>
constexpr int rope_ctas([[maybe_unused]] RopeWork work) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
  return 2;
#else
  if (work == RopeWork::kAppend && is_same<T, fp16_t>::value) return 2;
  return work == RopeWork::kRotate ? 4 : 3;
#endif
}

constexpr int kMaxRotaryPairs = 256;  // whose angles are computed
constexpr int kMaxTablePairs = 512;   // whose angles are in cos_sin_cache
// Pairs of dims of all tokens of a CTA, of which eight have a warp or more each; the first and the last may have less.
constexpr int kMaxRotations = (kParallelThreads / 32 + 2) * kMaxTablePairs;

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
  int32_t is_paged;  // outputs are pages; of RotatePages inputs are
};

struct RopeParams {
  RopeHeads heads[3];          // queries, keys, values
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

template <class Variant, RopeWork kWork>
struct Rope {
  using T = typename Variant::T;
  static constexpr int kThreads = kParallelThreads, kMinCtas = rope_ctas<T>(kWork), kSmemBytes = 0;
  static constexpr int kVec = Variant::kVec;
  static constexpr int kHeads = 2;  // heads of a thread
  static constexpr bool kFused = kWork == RopeWork::kAppend, kGathers = kWork == RopeWork::kGather;

  // kVec numbers in whole words: of an array of 16-bit numbers a compiler keeps each one in a register of its own.
  template <class E>
  struct alignas(kVec * sizeof(E)) Vector {
    using Word = typename WordOf<kVec == 1 ? sizeof(E) : 4>::Type;
    static constexpr int kInWord = sizeof(Word) / sizeof(E);
    Word words[kVec / kInWord];

    QUIRE_HD float get(int i) const {
      using Bits = typename WordOf<sizeof(E)>::Type;
      return to_float(__builtin_bit_cast(
          E, static_cast<Bits>(words[i / kInWord] >> i % kInWord * 8 * static_cast<int>(sizeof(E)))));
    }
    // Of numbers i that were 0.
    QUIRE_HD void set(int i, float x) {
      using Bits = typename WordOf<sizeof(E)>::Type;
      const Word bits = __builtin_bit_cast(Bits, from_float<E>(x));
      words[i / kInWord] |= bits << i % kInWord * 8 * static_cast<int>(sizeof(E));
    }
  };

  QUIRE_HD static int run(const RopeParams& p, unsigned char* = nullptr) {
    const int columns = (groups_of(p.heads[0]) + groups_of(p.heads[1]) + groups_of(p.heads[2])) * p.lanes;
#ifdef __CUDA_ARCH__
    const ItemOfThread item(p.nnz, columns);
    const Group of = group_of(p, item.row, item.column);
    Pair x[kHeads] = {};
    PagePlace place = kGathers ? place_in_pages(p, of) : PagePlace{0, 0};
    if (item.exists && of.lane < units_of(p, of)) load(p, of, place, unit_of(p, of, of.lane), x);
    if (kFused) place = place_in_pages(p, of);
    __shared__ Rotation table[kMaxRotations];
    const int pairs = p.heads[0].rotary_dim / 2;
    for (int i = threadIdx.x; i < item.cta_rows * pairs; i += kThreads) {
      const int token = static_cast<unsigned>(i) / static_cast<unsigned>(pairs), pair = i - token * pairs;
      table[token * pairs + place_in_table(pair, pairs)] = rotation(p, item.cta_row + token, pair);
    }
    __syncthreads();
    if (item.exists) process(p, of, place, x, table + (item.row - item.cta_row) * pairs);
#else
    parallel_rows(p.nnz, columns, [&](int64_t token, int column) {
      const Group of = group_of(p, token, column);
      const PagePlace place = place_in_pages(p, of);
      Rotation table[kMaxTablePairs];
      const int pairs = p.heads[0].rotary_dim / 2;
      for (int i = 0; i < pairs; ++i) table[place_in_table(i, pairs)] = rotation(p, token, i);
      Pair x[kHeads] = {};
      if (of.lane < units_of(p, of)) load(p, of, place, unit_of(p, of, of.lane), x);
      process(p, of, place, x, table);
    });
#endif
    return 0;
  }

 private:
  // Heads `first` to `first` + `count` of a token's queries (part 0), keys (1) or values (2), and which of the threads
  // that have them this is.
  struct Group {
    int part;
    int64_t token;
    int first, count, lane;
  };

  QUIRE_HD static int groups_of(const RopeHeads& heads) { return ceil_div(heads.num_heads, kHeads); }

  QUIRE_HD static Group group_of(const RopeParams& p, int64_t token, int column) {
    const int group = static_cast<unsigned>(column) / static_cast<unsigned>(p.lanes);
    const int k = groups_of(p.heads[0]), v = k + groups_of(p.heads[1]), part = (group >= k) + (group >= v);
    const int first = (group - (group < k ? 0 : group < v ? k : v)) * kHeads;
    return {part, token, first, min(kHeads, of_part(p, part, &RopeHeads::num_heads) - first), column - group * p.lanes};
  }

  template <class X>
  QUIRE_HD static X of_part(const RopeParams& p, int part, X RopeHeads::* field) {
    const X q = p.heads[0].*field, k = p.heads[1].*field, v = p.heads[2].*field;
    return part == 0 ? q : part == 1 ? k : v;
  }

  template <class X>
  QUIRE_HD static X of_rows(const RopeParams& p, int part, HeadRows RopeHeads::* rows, X HeadRows::* field) {
    const X q = p.heads[0].*rows.*field, k = p.heads[1].*rows.*field, v = p.heads[2].*rows.*field;
    return part == 0 ? q : part == 1 ? k : v;
  }

  QUIRE_HD static HeadRows rows_of(const RopeParams& p, int part, HeadRows RopeHeads::* rows) {
    return {of_rows(p, part, rows, &HeadRows::data), of_rows(p, part, rows, &HeadRows::page_stride),
            of_rows(p, part, rows, &HeadRows::token_stride), of_rows(p, part, rows, &HeadRows::head_stride)};
  }

  // Where the token's page is, if its heads come from pages or go to some.
  struct PagePlace {
    int page, token_in_page;
  };
  QUIRE_HD static PagePlace place_in_pages(const RopeParams& p, const Group& of) {
    const bool has_pages = kGathers || (kFused && of_part(p, of.part, &RopeHeads::is_paged));
    if (!has_pages) return {0, 0};
    const Place place = place_of(p, of.token);
    return {static_cast<int>(place.page), place.token_in_page};
  }

  // Two vectors of a head: dims [x, x + kVec) and [y, y + kVec), of the dims that turn or of those that do not.
  struct Unit {
    int x, y, first_dim;
    bool turns, has_y;
  };

  // The two vectors of a head.
  struct Pair {
    Vector<T> x, y;
  };

  QUIRE_HD static int units_of(const RopeParams& p, const Group& of) {
    const int rotary_dim = of_part(p, of.part, &RopeHeads::rotary_dim),
              rest = of_part(p, of.part, &RopeHeads::nope_dim);
    return rotary_dim / (2 * kVec) + (rest + 2 * kVec - 1) / (2 * kVec);
  }

  QUIRE_HD static Unit unit_of(const RopeParams& p, const Group& of, int unit) {
    const int rotary_dim = of_part(p, of.part, &RopeHeads::rotary_dim), turning = rotary_dim / (2 * kVec);
    if (unit >= turning) {
      const int x = (unit - turning) * 2 * kVec;
      return {x, x + kVec, rotary_dim, false, x + kVec < of_part(p, of.part, &RopeHeads::nope_dim)};
    }
    const int x = p.interleave ? unit * 2 * kVec : unit * kVec;
    return {x, p.interleave ? x + kVec : x + rotary_dim / 2, 0, true, true};
  }

  // Where a token's rotations lie: those that neighbouring threads read at a time are neighbours.
  static constexpr int kStep = kVec < 2 ? kVec : 2;  // dims of each vector at a time
  QUIRE_HD static int place_in_table(int pair, int pairs) {
    const int units = pairs / kVec;
    return pair % kVec / kStep * (units * kStep) + pair / kVec * kStep + pair % kStep;
  }

  // x: the vectors of the thread's first unit. turns: the rotations of the token's pairs.
  QUIRE_HD static void process(const RopeParams& p, const Group& of, PagePlace place, Pair* x, const Rotation* turns) {
    const bool is_paged = kFused && of_part(p, of.part, &RopeHeads::is_paged);
    float by[kHeads];
    for (int h = 0; h < kHeads; ++h) by[h] = kFused ? of_part(p, of.part, &RopeHeads::scale) : 1.f;
    if (kFused && of_part(p, of.part, &RopeHeads::weight) != nullptr) normalise(p, of, x, by);
    if (place.page < 0) return;
#pragma unroll 1
    for (int i = of.lane; i < units_of(p, of); i += p.lanes) {
      const Unit unit = unit_of(p, of, i);
      if (i != of.lane) load(p, of, place, unit, x);
      const HeadRows out = rows_of(p, of.part, unit.turns ? &RopeHeads::rope_out : &RopeHeads::nope_out);
      const int64_t row = is_paged ? place.page * out.page_stride + place.token_in_page * out.token_stride
                                   : of.token * out.token_stride;
      write(p, of, unit, x, by, turns + i * kStep, out, row + of.first * out.head_stride);
    }
  }

  // from: where the token lies if inputs are pages.
  QUIRE_HD static void load(const RopeParams& p, const Group& of, PagePlace from, const Unit& unit, Pair* x) {
    if (kGathers && from.page < 0) return;
    const HeadRows in = rows_of(p, of.part, unit.turns ? &RopeHeads::rope : &RopeHeads::nope);
    const T* row = static_cast<const T*>(in.data) + (kGathers ? from.page * in.page_stride : 0) +
                   (kGathers ? from.token_in_page : of.token) * in.token_stride;
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      if (h >= of.count) continue;
      const T* head = row + (of.first + h) * in.head_stride;
      x[h].x = *reinterpret_cast<const Vector<T>*>(head + unit.x);
      x[h].y = unit.has_y ? *reinterpret_cast<const Vector<T>*>(head + unit.y) : Vector<T>{};
    }
  }

  // Multiplies each `by` with the reciprocal of its head's root mean square.
  QUIRE_HD static void normalise(const RopeParams& p, const Group& of, const Pair* first, float* by) {
    float sums[kHeads] = {};
#pragma unroll
    for (int h = 0; h < kHeads; ++h) sums[h] = sum_of_squares(first[h]);
#pragma unroll 1
    for (int i = of.lane + p.lanes; i < units_of(p, of); i += p.lanes) {
      Pair x[kHeads];
      load(p, of, {0, 0}, unit_of(p, of, i), x);
#pragma unroll
      for (int h = 0; h < kHeads; ++h) sums[h] += sum_of_squares(x[h]);
    }
    const bool is_used = of.lane < units_of(p, of);
    const int rotary_dim = of_part(p, of.part, &RopeHeads::rotary_dim),
              rest = of_part(p, of.part, &RopeHeads::nope_dim);
    const float dims = static_cast<float>(rotary_dim + rest);
#pragma unroll
    for (int h = 0; h < kHeads; ++h)
      by[h] *= reciprocal_root(sum_of_lanes(is_used ? sums[h] : 0.f, p.lanes) / dims + p.eps);
  }

  QUIRE_HD static float sum_of_squares(const Pair& of) {
    float sum = 0.f;
    for (int c = 0; c < kVec; ++c) {
      const float a = of.x.get(c), b = of.y.get(c);
      sum += a * a + b * b;
    }
    return sum;
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

  // The rotation of a pair of dims of a token; NaN, as its results, for a token without a position.
  QUIRE_HD static Rotation rotation(const RopeParams& p, int64_t token, int pair) {
    const Position position = position_of(p, token);
    if (!position.is_known) return {__builtin_nanf(""), __builtin_nanf("")};
    if (p.cos_sin_cache == nullptr) return rope_rotation(position.at, p.frequencies[pair]);
    const float* row = p.cos_sin_cache + position.at * p.cos_sin_stride + pair;
    return {row[0], row[p.heads[0].rotary_dim / 2]};
  }

  // Scales, turns and stores the vectors of all heads; the first one's place in the output is `head`.
  QUIRE_HD static void write(const RopeParams& p, const Group& of, const Unit& unit, const Pair* x, const float* by,
                             const Rotation* turns, const HeadRows& out, int64_t head) {
    const HeadType type = kFused ? of_part(p, of.part, &RopeHeads::out_type) : HeadType::kAsInput;
    if (type == HeadType::kAsInput) return write_as<T>(p, of, unit, x, by, turns, out, head);
    type == HeadType::kE4m3 ? write_as<e4m3_t>(p, of, unit, x, by, turns, out, head)
                            : write_as<e5m2_t>(p, of, unit, x, by, turns, out, head);
  }

  // turns: the unit's first; those of the next kStep pairs stand a row of the table further on.
  template <class E>
  QUIRE_HD static void write_as(const RopeParams& p, const Group& of, const Unit& unit, const Pair* x, const float* by,
                                const Rotation* turns, const HeadRows& out, int64_t head) {
    const int row = p.heads[0].rotary_dim / 2 / kVec * kStep;
    const auto at = [&](int c) { return turns[c / kStep * row + c % kStep]; };
    Vector<E> to_x[kHeads] = {}, to_y[kHeads] = {};
#pragma unroll
    for (int c = 0; c < kVec; c += kStep) {
      const bool neighbours = kVec > 1 && p.interleave;
      Rotation first{1.f, 0.f}, second{1.f, 0.f};
      if (unit.turns) first = at(neighbours ? c / 2 : c), second = at(neighbours ? (kVec + c) / 2 : c + kStep - 1);
#pragma unroll
      for (int h = 0; h < kHeads; ++h) {
        float a[kStep], b[kStep];
        for (int i = 0; i < kStep; ++i) a[i] = x[h].x.get(c + i), b[i] = x[h].y.get(c + i);
        if (kFused) scale(p, of.part, unit, c, by[h], a, b);
        if (unit.turns) turn(neighbours, first, second, a, b);
        for (int i = 0; i < kStep; ++i) to_x[h].set(c + i, a[i]), to_y[h].set(c + i, b[i]);
      }
    }
    E* to = static_cast<E*>(out.data) + head;
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      if (h >= of.count) continue;
      *reinterpret_cast<Vector<E>*>(to + h * out.head_stride + unit.x) = to_x[h];
      if (unit.has_y) *reinterpret_cast<Vector<E>*>(to + h * out.head_stride + unit.y) = to_y[h];
    }
  }

  // By the norm, or the scale of what is quantised, and by the norm's weights of dims c on.
  QUIRE_HD static void scale(const RopeParams& p, int part, const Unit& unit, int c, float by, float* a, float* b) {
    for (int i = 0; i < kStep; ++i) a[i] *= by, b[i] *= by;
    const void* weights = of_part(p, part, &RopeHeads::weight);
    if (weights == nullptr) return;
    const T* weight = static_cast<const T*>(weights) + unit.first_dim + c;
    for (int i = 0; i < kStep; ++i) {
      a[i] *= to_float(weight[unit.x + i]);
      if (unit.has_y) b[i] *= to_float(weight[unit.y + i]);
    }
  }

  // neighbours: both dims of a pair are in the same vector.
  QUIRE_HD static void turn(bool neighbours, Rotation first, Rotation second, float* a, float* b) {
    if (neighbours) {
      rotate(a[0], a[kStep - 1], first);
      rotate(b[0], b[kStep - 1], second);
    } else {
      rotate(a[0], b[0], first);
      if (kStep > 1) rotate(a[kStep - 1], b[kStep - 1], second);
    }
  }
};

template <class Variant>
using RotateHeads = Rope<Variant, RopeWork::kRotate>;
template <class Variant>
using RotateAppend = Rope<Variant, RopeWork::kAppend>;
template <class Variant>
using RotatePages = Rope<Variant, RopeWork::kGather>;

}  // namespace quire
