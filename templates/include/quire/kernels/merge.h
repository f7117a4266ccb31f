// Merges attention states (o, lse) of disjoint key sets: o = sum_i o_i 2^(lse_i - m) / sum_i 2^(lse_i - m), with m the
// largest lse. Bound by memory: every state is read once, the result written once. One item is kVec consecutive values
// of one (token, head); lse values are re-read from cache.
#pragma once
#ifndef __CUDACC__
#include <math.h>
#endif
#include "quire/core/convert.h"
#include "quire/core/parallel.h"

namespace quire {

struct MergeParams {
  // State i of (token, head) stands at v + token * v_token_stride + i * v_state_stride + head * head_dim, and its lse
  // likewise. With two separate states, v_state_stride is the distance of the second tensor from the first.
  const void* v;        // [num_tokens, num_states, num_heads, head_dim]
  const float* s;       // [num_tokens, num_states, num_heads], base 2
  const void* v_other;  // second state when given apart, else null
  const float* s_other;
  void* v_out;          // [num_tokens, num_heads, head_dim]; may be v when in place
  float* s_out;         // [num_tokens, num_heads]; never s: other threads of the row still read that
  const uint8_t* mask;  // [num_tokens]: 0 leaves a token as it is; null: all
  int64_t num_tokens;
  int32_t num_states;
  int32_t num_heads;
  int32_t head_dim;
};

template <class Variant>
struct MergeStates {
  using T = typename Variant::T;
  static constexpr int kThreads = kParallelThreads, kMinCtas = 1, kSmemBytes = 0;
  static constexpr int kVec = Variant::kVec;
  static constexpr int kLoads = 4;  // states in flight

  struct alignas(kVec * sizeof(T)) Pack {
    T x[kVec];
  };

  QUIRE_HD static int run(const MergeParams& p, unsigned char* = nullptr) {
    const int packs = p.head_dim / kVec;
    parallel_for(p.num_tokens * p.num_heads * packs, [&](int64_t i) {
      const int64_t row = i / packs;
      const int64_t token = row / p.num_heads;
      if (p.mask == nullptr || p.mask[token] != 0) merge(p, row, token, static_cast<int>(i - row * packs));
    });
    return 0;
  }

 private:
  QUIRE_HD static int64_t state_row(const MergeParams& p, int64_t row, int64_t token, int state) {
    return (token * (p.num_states - 1) + state) * p.num_heads + row;  // (token * S + state) * H + head
  }

  QUIRE_HD static float lse(const MergeParams& p, int64_t row, int64_t token, int i) {
    if (p.s_other != nullptr) return (i == 0 ? p.s : p.s_other)[row];
    return p.s[state_row(p, row, token, i)];
  }

  QUIRE_HD static Pack load(const MergeParams& p, int64_t row, int64_t token, int i, int pack) {
    const int64_t packs = p.head_dim / kVec;
    if (p.v_other != nullptr) return static_cast<const Pack*>(i == 0 ? p.v : p.v_other)[row * packs + pack];
    return static_cast<const Pack*>(p.v)[state_row(p, row, token, i) * packs + pack];
  }

  QUIRE_HD static void merge(const MergeParams& p, int64_t row, int64_t token, int pack) {
    float m = -kInfinity;
    for (int i = 0; i < p.num_states; ++i) m = max(m, lse(p, row, token, i));
    float sum = 0.f, acc[kVec] = {};
    for (int first = 0; first < p.num_states; first += kLoads) {
      Pack loaded[kLoads];
#pragma unroll
      for (int j = 0; j < kLoads; ++j) {
        if (first + j < p.num_states) loaded[j] = load(p, row, token, first + j, pack);
      }
#pragma unroll
      for (int j = 0; j < kLoads; ++j) {
        if (first + j >= p.num_states) continue;
        const float s = lse(p, row, token, first + j);
        if (s == -kInfinity) continue;  // no keys: its values, whatever they are, do not count
        const float weight = exp2(s, m);
        sum += weight;
        for (int c = 0; c < kVec; ++c) acc[c] += weight * to_float(loaded[j].x[c]);
      }
    }
    store(p, row, pack, acc, sum, m);
  }

  QUIRE_HD static void store(const MergeParams& p, int64_t row, int pack, const float (&acc)[kVec], float sum,
                             float m) {
    Pack out;
    const float scale = sum > 0.f ? 1.f / sum : 0.f;
    for (int c = 0; c < kVec; ++c) out.x[c] = from_float<T>(acc[c] * scale);
    static_cast<Pack*>(p.v_out)[row * (p.head_dim / kVec) + pack] = out;
    if (pack == 0 && p.s_out != nullptr) p.s_out[row] = sum > 0.f ? m + log2(sum) : -kInfinity;
  }

  static constexpr float kInfinity = __builtin_huge_valf();
  QUIRE_HD static float exp2(float s, float m) { return s == m ? 1.f : exp2f(s - m); }
  QUIRE_HD static float log2(float x) { return log2f(x); }
};

}  // namespace quire
