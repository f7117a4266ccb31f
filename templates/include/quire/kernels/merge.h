// Merges attention states (o, lse) of disjoint sets of keys: o = sum_i o_i 2^(lse_i - m) / sum_i 2^(lse_i - m), where m
// is the largest lse. The kernel is limited by memory bandwidth: every state is read once, and the result is written
// once. A thread merges kVec consecutive values of one (token, head). It loads kStates states at a time, so that no
// load of a value waits for an lse. There is a special kernel for two states: it needs half the registers, so twice as
// many threads fit on an SM.
#pragma once
#ifdef __CUDACC__
#include "quire/ptx/math.cuh"
#else
#include <math.h>
#endif
#include "quire/core/convert.h"
#include "quire/core/parallel.h"

namespace quire {

struct MergeParams {
  // State i of (token, head) is token * v_token_bytes + i * v_state_bytes behind v, and head * head_dim values further.
  // Its lse is token * s_token_bytes + i * s_state_bytes behind s, and `head` floats further.
  const void* v;
  const float* s;       // base 2
  void* v_out;          // [num_tokens, num_heads, head_dim]; may be v when in place
  float* s_out;         // [num_tokens, num_heads]; never s, which other threads of the row still read
  const uint8_t* mask;  // [num_tokens]: 0 leaves a token as it is; null: all tokens are merged
  int64_t num_tokens;
  int64_t v_token_bytes, v_state_bytes, s_token_bytes, s_state_bytes;
  int32_t num_states;
  int32_t num_heads;
  int32_t head_dim;
  float v_scale;  // multiplies the merged v: each v times it may be beyond the range of the type
};

// kStates: states loaded at a time. kExact: there are exactly kStates. kCtas: CTAs that share an SM.
template <class Variant, int kStates, bool kExact, int kCtas>
struct Merge {
  using T = typename Variant::T;
  static constexpr int kThreads = kParallelThreads, kMinCtas = min(kCtas, kParallelCtas), kSmemBytes = 0;
  static constexpr int kVec = Variant::kVec;

  struct alignas(kVec * sizeof(T)) Vector {
    T x[kVec];
  };

  QUIRE_HD static int run(const MergeParams& p, unsigned char* = nullptr) {
    parallel_rows(p.num_tokens, p.num_heads * (p.head_dim / kVec), [&](int64_t token, int column) {
      if (p.mask == nullptr || p.mask[token] != 0) merge(p, token, column);
    });
    return 0;
  }

 private:
  // kStates states of one token and head. Those beyond the last one have lse -infinity: no keys.
  struct States {
    Vector v[kStates];
    float s[kStates];
  };

  // The states so far, relative to the largest lse, m.
  struct Merged {
    float acc[kVec] = {}, sum = 0.f, m = -kInfinity;
  };

  // Merges vector `column` of a token: that of head column / (head_dim / kVec).
  QUIRE_HD static void merge(const MergeParams& p, int64_t token, int column) {
    const unsigned vectors = p.head_dim / kVec, head = static_cast<unsigned>(column) / vectors;
    const char* v =
        static_cast<const char*>(p.v) + token * p.v_token_bytes + column * static_cast<int64_t>(sizeof(Vector));
    const char* s = reinterpret_cast<const char*>(p.s + head) + token * p.s_token_bytes;
    Merged merged;
    for (int left = kExact ? kStates : p.num_states; left > 0; left -= kStates) {
      States states;
#pragma unroll
      for (int j = 0; j < kStates; ++j) {
        states.s[j] = -kInfinity;
        if (j >= left) continue;
        states.v[j] = *reinterpret_cast<const Vector*>(v + j * p.v_state_bytes);
        states.s[j] = *reinterpret_cast<const float*>(s + j * p.s_state_bytes);
      }
      add(merged, states);
      v += kStates * p.v_state_bytes, s += kStates * p.s_state_bytes;
    }
    store(p, token * static_cast<int64_t>(p.num_heads) + head, column - head * vectors, merged);
  }

  QUIRE_HD static void add(Merged& to, const States& states) {
    const float before = to.m;
#pragma unroll
    for (int j = 0; j < kStates; ++j) to.m = max(to.m, states.s[j]);
    if (!kExact && to.m > before && before > -kInfinity) {
      const float scale = exp2(before - to.m);
      to.sum *= scale;
      for (int c = 0; c < kVec; ++c) to.acc[c] *= scale;
    }
#pragma unroll
    for (int j = 0; j < kStates; ++j) {
      if (states.s[j] == -kInfinity) continue;  // no keys: the state's values may be anything
      const float weight = states.s[j] == to.m ? 1.f : exp2(states.s[j] - to.m);
      to.sum += weight;
      for (int c = 0; c < kVec; ++c) to.acc[c] += weight * to_float(states.v[j].x[c]);
    }
  }

  QUIRE_HD static void store(const MergeParams& p, int64_t row, int vector, const Merged& merged) {
    Vector out;
    const float scale = merged.sum > 0.f ? reciprocal(merged.sum) * p.v_scale : 0.f;
    for (int c = 0; c < kVec; ++c) out.x[c] = from_float<T>(merged.acc[c] * scale);
    static_cast<Vector*>(p.v_out)[row * (p.head_dim / kVec) + vector] = out;
    if (vector == 0) p.s_out[row] = merged.sum > 0.f ? merged.m + log2(merged.sum) : -kInfinity;
  }

  static constexpr float kInfinity = __builtin_huge_valf();
#ifdef __CUDACC__
  QUIRE_DEVICE static float exp2(float x) { return ptx::ex2(x); }
  QUIRE_DEVICE static float log2(float x) { return ptx::lg2(x); }
  QUIRE_DEVICE static float reciprocal(float x) { return ptx::rcp(x); }  // of at least 1: the largest weight is 1
#else
  static float exp2(float x) { return exp2f(x); }
  static float log2(float x) { return log2f(x); }
  static float reciprocal(float x) { return 1.f / x; }
#endif
};

template <class Variant>
using MergeStates = Merge<Variant, 4, false, sizeof(typename Variant::T) * Variant::kVec <= 16 ? 5 : 4>;
template <class Variant>
using MergePair = Merge<Variant, 2, true, 8>;

}  // namespace quire
