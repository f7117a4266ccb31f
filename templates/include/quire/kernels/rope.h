// Rotates the heads of queries and keys by their tokens' positions (RoFormer, arXiv:2104.09864). RotateHeads does no
// more; RotateAppend also divides each head by its root mean square before, quantises to 8 bits, and writes keys and
// values into a paged cache, in one pass over memory. RotatePages reads keys and values out of a paged cache.
//
// All are limited by memory: each number is read and written once. A thread has the same two vectors of kHeads heads of
// a token: two whose dims are rotated as pairs, or two that are not rotated. CTAs are persistent. A thread copies its
// vectors of the next tokens to shared memory while it computes, so that the memory is never idle. The CTA finds the
// rotations and the page of a token once, and ahead of time, too. A page takes three dependent reads, which queue
// behind the data, so the pages of kTurns turns are found at a time.
#pragma once
#ifndef __CUDACC__
#pragma GCC optimize("O3")  // a third faster than with the toolchain's -O2
#endif
#include "quire/core/convert.h"
#include "quire/core/parallel.h"
#include "quire/core/rope.h"
#include "quire/kernels/append.h"
#ifdef __CUDACC__
#include "quire/ptx/copy.cuh"
#else
#include <math.h>
#endif

namespace quire {

template <int kBytes>
using WordOf =
    typename conditional<kBytes == 1, uint8_t, typename conditional<kBytes == 2, uint16_t, uint32_t>::type>::type;

enum class RopeWork { kRotate, kAppend, kNormAppend, kGather };

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr int kRopeCtas = 2;  // of kParallelThreads on an SM, which limits the registers of a thread
#else
constexpr int kRopeCtas = 3;
#endif
constexpr int kMaxRotaryPairs = 256;  // whose angles are computed
constexpr int kMaxTablePairs = 512;   // whose angles are in cos_sin_cache

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
  int32_t first_group;  // of the groups of kHeads heads of a token, queries before keys before values
  int32_t rotary_dim;   // 0: no dim turns
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
  const int32_t* batch_indices;  // the tables of kernels/append.h
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
  int32_t num_positions;   // of cos_sin_cache
  int32_t interleave;      // neighbours turn together; else the first half with the second
  FastDivisor columns;     // threads of a token
  FastDivisor lanes;       // of them, those that have the same heads; under a norm a power of two up to 32
  FastDivisor pairs;       // rotary_dim / 2 of queries
  int32_t tokens_of_turn;  // of all CTAs at a time
  int32_t tokens;          // of a CTA at a time
  int32_t ctas;            // of a token that has more threads than a CTA has
  int32_t vectors_at;      // bytes of shared memory ahead of vectors: two stages of rotations and tokens
  float eps;
  uint64_t frequencies[kMaxRotaryPairs];  // turns a token, see core/rope.h
};

template <class Variant, RopeWork kWork>
struct Rope {
  using T = typename Variant::T;
  static constexpr int kThreads = kParallelThreads, kMinCtas = kRopeCtas, kSmemBytes = 0;
  static constexpr int kVec = Variant::kVec, kStep = min(kVec, 2);  // dims of a vector, and of each at a time
  static constexpr int kHeads = 4, kTurns = 8;                      // heads of a thread; turns found at a time
  static constexpr bool kNorms = kWork == RopeWork::kNormAppend, kFused = kNorms || kWork == RopeWork::kAppend;
  static constexpr bool kGathers = kWork == RopeWork::kGather;
#ifdef __CUDA_ARCH__
  static constexpr bool kHasOneUnit = !kNorms;  // a thread; under a norm those of a head are in one warp
#else
  static constexpr bool kHasOneUnit = false;
#endif

  // kVec numbers in whole words: a compiler would keep each number of an array of 16-bit numbers in its own register.
  template <class E>
  struct alignas(kVec * sizeof(E)) Vector {
    using Word = WordOf<kVec == 1 ? sizeof(E) : 4>;
    static constexpr int kInWord = sizeof(Word) / sizeof(E);
    Word words[kVec / kInWord];

    QUIRE_HD float get(int i) const {
      using Bits = WordOf<sizeof(E)>;
      return to_float(__builtin_bit_cast(
          E, static_cast<Bits>(words[i / kInWord] >> i % kInWord * 8 * static_cast<int>(sizeof(E)))));
    }
    // Numbers i on, kStep of them, that were 0.
    QUIRE_HD void set(int i, const float (&x)[kStep]) {
      if constexpr (kInWord == 1) {
        for (int c = 0; c < kStep; ++c) words[i + c] = __builtin_bit_cast(Word, from_float<E>(x[c]));
      } else {
        words[i / kInWord] |= static_cast<Word>(two_from_floats<E>(x[0], x[kStep - 1]))
                              << i % kInWord * 8 * static_cast<int>(sizeof(E));
      }
    }
  };

  QUIRE_HD static int run(const RopeParams& p, [[maybe_unused]] unsigned char* smem = nullptr) {
#ifdef __CUDA_ARCH__
    run_cta(p, smem);
#else
    parallel_rows(p.nnz, 1, [&](int64_t token, int) {
      const PagePlace place = place_in_pages(p, token);
      const Position position = position_of(p, token);
      alignas(Rotations) Rotation table[kMaxTablePairs];
      const int pairs = static_cast<int>(p.pairs.divisor);
      for (int i = 0; i < pairs; ++i) table[place_in_table(i, pairs)] = rotation(p, position, i);
      for (int column = 0; column < static_cast<int>(p.columns.divisor); ++column) {
        const Group of(p, column);
        Vector<T> vectors[2 * kHeads];
        load(p, of, token, place, Unit(p, of, of.lane), {vectors, 1});
        process(p, of, token, place, {vectors, 1}, table);
      }
    });
#endif
    return 0;
  }

 private:
  // Rotations that are used at a time.
  struct alignas(kStep * sizeof(Rotation)) Rotations {
    Rotation at[kStep];
  };

  // Where a thread has the two vectors of its heads.
  struct Vectors {
    Vector<T>* first;
    int step;

    QUIRE_HD Vector<T>& x(int h) const { return first[2 * h * step]; }
    QUIRE_HD Vector<T>& y(int h) const { return first[(2 * h + 1) * step]; }
  };

  // Where the token's page is, if any heads come from pages or go to some.
  struct PagePlace {
    int page, token_in_page;
  };
  QUIRE_HD static PagePlace place_in_pages(const RopeParams& p, int64_t token) {
    if (kWork == RopeWork::kRotate || p.batch_indices == nullptr) return {0, 0};
    const Place place = place_of(p, token);
    return {static_cast<int>(place.page), place.token_in_page};
  }

  struct Position {
    int32_t at;
    bool is_known;
  };

#ifdef __CUDACC__
  struct alignas(16) Token {
    PagePlace place;
    Position position;
  };

  // A CTA works on p.tokens tokens at a time, or on a part of one. The tokens that all CTAs work on at a time are
  // neighbours, so that memory is read in order. Shared memory has two stages of everything: rotations, the vectors of
  // each thread, and tokens of kTurns turns.
  QUIRE_DEVICE static void run_cta(const RopeParams& p, unsigned char* smem) {
    const int pairs = static_cast<int>(p.pairs.divisor), threads = static_cast<int>(blockDim.x);
    const unsigned ctas = static_cast<unsigned>(p.ctas), group = blockIdx.x / ctas;
    const int at = static_cast<int>((blockIdx.x - group * ctas) * blockDim.x + threadIdx.x), row = p.columns.div(at);
    const Group of(p, row < p.tokens ? at - row * static_cast<int>(p.columns.divisor) : 0);
    auto* tables = reinterpret_cast<Rotation*>(smem);
    auto* found = reinterpret_cast<Token*>(tables + 2 * p.tokens * pairs);
    auto* vectors = reinterpret_cast<Vector<T>*>(smem + p.vectors_at) + threadIdx.x;
    int64_t next = static_cast<int64_t>(group) * p.tokens;
#pragma unroll 1
    for (int turn = 0;; ++turn, next += p.tokens_of_turn) {
      const int stage = turn & 1, other = stage ^ 1;
      const int tokens = static_cast<int>(min<int64_t>(p.tokens, p.nnz - next));
      Token* now = found + turn % (2 * kTurns) * p.tokens;
      const bool finds = turn % kTurns == 0;
      if (kGathers && finds) {
        find_tokens(p, next, now);
        __syncthreads();
      }
      if (row < tokens && of.lane < of.units(p))
        load(p, of, next + row, kGathers ? now[row].place : PagePlace{}, Unit(p, of, of.lane),
             {vectors + stage * 2 * kHeads * threads, threads});
      ptx::cp_async_commit();
      const Token* known = kGathers || !finds ? now : nullptr;
      Ahead ahead(p, next, known, tokens, static_cast<int>(threadIdx.x));
      if (!kGathers && finds) find_tokens(p, next, now);
      ptx::cp_async_wait<1>();  // for those of the turn before
      const int64_t done = next - p.tokens_of_turn + row;
      if (turn > 0 && row < p.tokens && done < p.nnz)
        process(p, of, done, found[(turn - 1) % (2 * kTurns) * p.tokens + row].place,
                {vectors + other * 2 * kHeads * threads, threads}, tables + (other * p.tokens + row) * pairs);
      if (tokens <= 0) return;
      for (int i = static_cast<int>(threadIdx.x);;) {
        ahead.store(tables + stage * p.tokens * pairs);
        i += threads;
        if (i >= tokens * pairs) break;
        ahead = Ahead(p, next, known, tokens, i);
      }
      __syncthreads();  // the next rotations and tokens are there, and these have been read
    }
  }

  // Rotation i of a CTA's tokens, on its way while the thread works on those before.
  struct Ahead {
    Rotation rotation;
    int at;  // in the table; negative: there is none

    // known: null if the tokens are being found only now.
    QUIRE_DEVICE Ahead(const RopeParams& p, int64_t begin, const Token* known, int tokens, int i) : at(-1) {
      const int token = p.pairs.div(i), pairs = static_cast<int>(p.pairs.divisor), pair = i - token * pairs;
      if (token >= tokens) return;
      const Position position = known == nullptr ? position_of(p, begin + token) : known[token].position;
      at = token * pairs + place_in_table(pair, pairs), rotation = Rope::rotation(p, position, pair);
    }
    QUIRE_DEVICE void store(Rotation* table) const {
      if (at >= 0) table[at] = rotation;
    }
  };

  // Finds the positions and the pages of the tokens of kTurns turns, from token `begin` on. The last threads do this,
  // because the first ones compute most rotations.
  QUIRE_DEVICE static void find_tokens(const RopeParams& p, int64_t begin, Token* tokens) {
    const int threads = static_cast<int>(blockDim.x);
    for (int i = threads - 1 - static_cast<int>(threadIdx.x); i < kTurns * p.tokens; i += threads) {
      const int turn = i / p.tokens;
      const int64_t token = begin + turn * static_cast<int64_t>(p.tokens_of_turn) + (i - turn * p.tokens);
      if (token < p.nnz) tokens[i] = {place_in_pages(p, token), position_of(p, token)};
    }
  }
#endif

  // Heads `first` to `first` + `count` of a token's queries (part 0), keys (1) or values (2), and which of the threads
  // that have them this is.
  struct Group {
    int part, first, count, lane;

    QUIRE_HD Group(const RopeParams& p, int column) {
      const int group = p.lanes.div(column);
      lane = column - group * static_cast<int>(p.lanes.divisor);
      part = (group >= p.heads[1].first_group) + (group >= p.heads[2].first_group);
      first = (group - heads(p).first_group) * kHeads, count = min(kHeads, heads(p).num_heads - first);
    }
    QUIRE_HD const RopeHeads& heads(const RopeParams& p) const { return p.heads[part]; }
    QUIRE_HD unsigned turning(const RopeParams& p) const { return static_cast<unsigned>(heads(p).rotary_dim) / kUnit; }
    QUIRE_HD int units(const RopeParams& p) const {
      return static_cast<int>(turning(p) + (static_cast<unsigned>(heads(p).nope_dim) + kUnit - 1) / kUnit);
    }
  };

  static constexpr unsigned kUnit = 2 * kVec;  // dims of both vectors of a head

  // Two vectors of a head: dims [x, x + kVec) and [y, y + kVec), of the dims that turn or of those that do not.
  struct Unit {
    int x, y;
    bool turns, has_y;

    QUIRE_HD Unit(const RopeParams& p, const Group& of, int unit) {
      const int turning = static_cast<int>(of.turning(p)), width = static_cast<int>(kUnit);
      turns = unit < turning;
      const bool is_whole = !turns || p.interleave != 0;
      x = (turns ? unit : unit - turning) * (is_whole ? width : kVec);
      y = is_whole ? x + kVec : x + turning * kVec;
      has_y = turns || y < of.heads(p).nope_dim;
    }
  };

  // Where a token's rotations lie: those that neighbouring threads read at a time are neighbours.
  QUIRE_HD static int place_in_table(int pair, int pairs) {
    const int units = pairs / kVec;
    return pair % kVec / kStep * (units * kStep) + pair / kVec * kStep + pair % kStep;
  }

  // vectors: the vectors of the thread's first unit. turns: the rotations of the token's pairs.
  QUIRE_HD static void process(const RopeParams& p, const Group& of, int64_t token, PagePlace place, Vectors vectors,
                               const Rotation* turns) {
    if ((kGathers || (kFused && of.heads(p).is_paged)) && place.page < 0) return;
    float by[kHeads];
    for (int h = 0; h < kHeads; ++h) by[h] = kFused ? of.heads(p).scale : 1.f;
    if (kNorms && of.heads(p).weight != nullptr) normalise(p, of, token, vectors, by);
#pragma unroll 1
    for (int i = of.lane; i < of.units(p);) {
      write_unit(p, of, token, place, i, vectors, by, turns + i * kStep);
      i += static_cast<int>(p.lanes.divisor);
      if (kHasOneUnit || i >= of.units(p)) return;
      load(p, of, token, place, Unit(p, of, i), vectors);
#ifdef __CUDA_ARCH__
      ptx::cp_async_wait_all();
#endif
    }
  }

  QUIRE_HD static void write_unit(const RopeParams& p, Group of, int64_t token, PagePlace place, int i, Vectors vectors,
                                  const float* by, const Rotation* turns) {
    const Unit unit(p, of, i);
    const HeadRows& out = unit.turns ? of.heads(p).rope_out : of.heads(p).nope_out;
    const int64_t row = kFused && of.heads(p).is_paged
                            ? place.page * out.page_stride + place.token_in_page * out.token_stride
                            : token * out.token_stride;
    const int bytes = kFused && of.heads(p).out_type != HeadType::kAsInput ? 1 : static_cast<int>(sizeof(T));
    write(p, of, unit, vectors, by, turns,
          {static_cast<unsigned char*>(out.data) + (row + of.first * out.head_stride + unit.x) * bytes,
           (unit.y - unit.x) * bytes, out.head_stride * bytes});
  }

  // The token's first head in the inputs. from: where the token lies if inputs are pages.
  QUIRE_HD static const T* input(const RopeParams& p, const Group& of, int64_t token, PagePlace from,
                                 const HeadRows& in) {
    const int64_t row =
        kGathers ? from.page * in.page_stride + from.token_in_page * in.token_stride : token * in.token_stride;
    return static_cast<const T*>(in.data) + row + of.first * in.head_stride;
  }

  // Starts to read the two vectors of each head.
  QUIRE_HD static void load(const RopeParams& p, const Group& of, int64_t token, PagePlace from, const Unit& unit,
                            Vectors vectors) {
    if (kGathers && from.page < 0) return;
    const HeadRows& in = unit.turns ? of.heads(p).rope : of.heads(p).nope;
    const T* head = input(p, of, token, from, in);
#pragma unroll
    for (int h = 0; h < kHeads; ++h, head += in.head_stride) {
      if (h < of.count) copy(vectors.x(h), head + unit.x);
      if (h < of.count && unit.has_y) copy(vectors.y(h), head + unit.y);
    }
  }

  QUIRE_HD static void copy(Vector<T>& to, const T* from) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    if constexpr (sizeof(Vector<T>) == 16) return ptx::cp_async_16(ptx::smem_address(&to), from);
#endif
    to = *reinterpret_cast<const Vector<T>*>(from);
  }

  // Multiplies each `by` with the reciprocal of its head's root mean square.
  QUIRE_HD static void normalise(const RopeParams& p, const Group& of, int64_t token, Vectors vectors, float* by) {
    const int lanes = static_cast<int>(p.lanes.divisor), units = of.units(p);
    const bool has_y = Unit(p, of, of.lane).has_y;
    float sums[kHeads];
#pragma unroll
    for (int h = 0; h < kHeads; ++h)
      sums[h] = of.lane < units ? sum_of_squares(vectors.x(h), has_y ? vectors.y(h) : Vector<T>{}) : 0.f;
    for (int i = of.lane + lanes; i < units; i += lanes) add_squares(p, of, token, Unit(p, of, i), sums);
    sum_over_lanes(sums, lanes);
    const float of_dim = 1.f / static_cast<float>(of.heads(p).rotary_dim + of.heads(p).nope_dim);
#pragma unroll
    for (int h = 0; h < kHeads; ++h) by[h] *= reciprocal_root(sums[h] * of_dim + p.eps);
  }

  // Adds the squares of another unit.
  QUIRE_HD static void add_squares(const RopeParams& p, const Group& of, int64_t token, const Unit& unit, float* sums) {
    const HeadRows& in = unit.turns ? of.heads(p).rope : of.heads(p).nope;
    const T* head = input(p, of, token, {}, in);
#pragma unroll
    for (int h = 0; h < kHeads; ++h, head += in.head_stride) {
      if (h >= of.count) break;
      sums[h] += sum_of_squares(*reinterpret_cast<const Vector<T>*>(head + unit.x),
                                unit.has_y ? *reinterpret_cast<const Vector<T>*>(head + unit.y) : Vector<T>{});
    }
  }

  QUIRE_HD static float sum_of_squares(const Vector<T>& x, const Vector<T>& y) {
    float sum = 0.f;
#pragma unroll
    for (int c = 0; c < kVec; ++c) {
      sum = fused_multiply_add(x.get(c), x.get(c), sum);
      sum = fused_multiply_add(y.get(c), y.get(c), sum);
    }
    return sum;
  }

#ifdef __CUDACC__
  // Sums over the threads of a head, which are neighbours in a warp.
  QUIRE_DEVICE static void sum_over_lanes(float (&sums)[kHeads], int lanes) {
    const unsigned group = threadIdx.x & 31 & ~(lanes - 1);
    const unsigned mask = (lanes == 32 ? 0xffffffffu : (1u << lanes) - 1) << group;
#pragma unroll 1
    for (int i = lanes / 2; i > 0; i /= 2) {
#pragma unroll
      for (int h = 0; h < kHeads; ++h) sums[h] += __shfl_xor_sync(mask, sums[h], i);
    }
  }
  QUIRE_DEVICE static float reciprocal_root(float x) {
    float y;
    asm("rsqrt.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
  }
#else
  static void sum_over_lanes(float (&)[kHeads], int) {}
  static float reciprocal_root(float x) { return 1.f / sqrtf(x); }
#endif

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

  // The rotation of a pair of dims; NaN, as its results, for a token without a position.
  QUIRE_HD static Rotation rotation(const RopeParams& p, Position position, int pair) {
    if (!position.is_known) return {__builtin_nanf(""), __builtin_nanf("")};
    if (p.cos_sin_cache == nullptr) return rope_rotation(position.at, p.frequencies[pair]);
    const float* row = p.cos_sin_cache + position.at * p.cos_sin_stride + pair;
    return {row[0], row[p.pairs.divisor]};
  }

  // Where results go, in bytes: x of the first head, y behind it, and the next head behind that.
  struct Target {
    unsigned char* x;
    int64_t y, head;
  };

  // Scales, turns and stores the vectors of all heads.
  QUIRE_HD static void write(const RopeParams& p, const Group& of, const Unit& unit, Vectors vectors, const float* by,
                             const Rotation* turns, const Target& to) {
    const HeadType type = kFused ? of.heads(p).out_type : HeadType::kAsInput;
    if (type == HeadType::kAsInput) return write_as<T>(p, of, unit, vectors, by, turns, to);
    type == HeadType::kE4m3 ? write_as<e4m3_t>(p, of, unit, vectors, by, turns, to)
                            : write_as<e5m2_t>(p, of, unit, vectors, by, turns, to);
  }

  template <class E>
  QUIRE_HD static void write_as(const RopeParams& p, const Group& of, const Unit& unit, Vectors vectors,
                                const float* by, const Rotation* turns, const Target& to) {
    if (kNorms && of.heads(p).weight != nullptr) {
      write_scaled<E, kNorms>(p, of, unit, vectors, by, turns, to);
    } else {
      write_scaled<E, false>(p, of, unit, vectors, by, turns, to);
    }
  }

  enum class Turn { kNone, kHalves, kNeighbours };

  template <class E, bool kHasNorm>
  QUIRE_HD static void write_scaled(const RopeParams& p, const Group& of, const Unit& unit, Vectors vectors,
                                    const float* by, const Rotation* turns, const Target& to) {
    if (!unit.turns) {
      write_turned<E, kHasNorm, Turn::kNone>(p, of, unit, vectors, by, turns, to);
    } else if (kVec > 1 && p.interleave != 0) {
      write_turned<E, kHasNorm, Turn::kNeighbours>(p, of, unit, vectors, by, turns, to);
    } else {
      write_turned<E, kHasNorm, Turn::kHalves>(p, of, unit, vectors, by, turns, to);
    }
  }

  // turns: the rotations of the unit's first pairs. Those of the next kStep pairs are one row of the table further on.
  template <class E, bool kHasNorm, Turn kTurn>
  QUIRE_HD static void write_turned(const RopeParams& p, const Group& of, const Unit& unit, Vectors vectors,
                                    const float* by, const Rotation* turns, Target to) {
    int here = 0;
    keep_here(here);
    Rotations by_step[kVec / kStep] = {};
#pragma unroll
    for (int h = 0; h < kHeads; ++h, to.x += to.head) {
      if (kHasNorm) keep_here(here);  // read again for each head: registers are short
#pragma unroll
      for (int i = 0; kTurn != Turn::kNone && (h == 0 || kHasNorm) && i < kVec / kStep; ++i)
        by_step[i] = *reinterpret_cast<const Rotations*>(turns + here + i * (p.pairs.divisor / kVec * kStep));
      const Weights weights = kHasNorm ? weights_of(p, of, unit, here) : Weights{};
      const Vector<T> from_x = vectors.x(here + h), from_y = vectors.y(here + h);
      Vector<E> to_x = {}, to_y = {};
#pragma unroll
      for (int c = 0; c < kVec; c += kStep) {
        float a[kStep], b[kStep];
#pragma unroll
        for (int i = 0; i < kStep; ++i) {
          a[i] = from_x.get(c + i), b[i] = from_y.get(c + i);
          if (kHasNorm || !is_same<E, T>::value) a[i] *= by[h], b[i] *= by[h];
          if (kHasNorm) a[i] *= weights.x.get(c + i), b[i] *= weights.y.get(c + i);
          if (kTurn == Turn::kHalves) rotate(a[i], b[i], by_step[c / kStep].at[i]);
        }
        if (kTurn == Turn::kNeighbours) {
          const int pair_a = c / 2, pair_b = (kVec + c) / 2;
          rotate(a[0], a[kStep - 1], by_step[pair_a / kStep].at[pair_a % kStep]);
          rotate(b[0], b[kStep - 1], by_step[pair_b / kStep].at[pair_b % kStep]);
        }
        to_x.set(c, a), to_y.set(c, b);
      }
      if (h < of.count) *reinterpret_cast<Vector<E>*>(to.x) = to_x;
      if (h < of.count && unit.has_y) *reinterpret_cast<Vector<E>*>(to.x + to.y) = to_y;
    }
  }

  // An index that passes through here keeps a compiler from reading, ahead of a branch, what all paths after it need.
  QUIRE_HD static void keep_here([[maybe_unused]] int& x) {
#ifdef __CUDA_ARCH__
    asm volatile("" : "+r"(x));
#endif
  }

  struct Weights {
    Vector<T> x, y;
  };

  // The norm's weights of the unit's dims.
  QUIRE_HD static Weights weights_of(const RopeParams& p, const Group& of, const Unit& unit, int here) {
    const T* weight = static_cast<const T*>(of.heads(p).weight) + here + (unit.turns ? 0 : of.heads(p).rotary_dim);
    return {*reinterpret_cast<const Vector<T>*>(weight + unit.x),
            *reinterpret_cast<const Vector<T>*>(weight + (unit.has_y ? unit.y : unit.x))};
  }
};

template <class Variant>
using RotateHeads = Rope<Variant, RopeWork::kRotate>;
template <class Variant>
using RotateAppend = Rope<Variant, RopeWork::kAppend>;
template <class Variant>
using NormRotateAppend = Rope<Variant, RopeWork::kNormAppend>;
template <class Variant>
using RotatePages = Rope<Variant, RopeWork::kGather>;

}  // namespace quire
