// Scores pages for the queries of a KV head as in Quest: the score is the maximum over the query heads of sum(max(q *
// low, q * high)), where low and high are the smallest and the largest value of the page's keys in each dim. No logit
// of the page exceeds it. The kernel is limited by memory bandwidth: a thread reads the bounds of one page and KV head.
// A score becomes a sort key that is unique among the pages of a request, so that the selection of the largest is
// deterministic: of two pages with equal scores the earlier one has the larger key.
#pragma once
#include "quire/core/convert.h"
#include "quire/core/parallel.h"

namespace quire {

struct PageScoresParams {
  const float* q;        // [batch_size, num_kv_heads, group_size, head_dim]
  const void* bounds;    // [num_pages, num_kv_heads, 2, head_dim], low first
  const int32_t* pages;  // [batch_size, num_columns], page_stride apart
  const int32_t* lens;   // [batch_size] tokens
  int64_t* keys;         // [batch_size, num_kv_heads, num_columns]
  int64_t page_stride;
  int32_t batch_size;
  int32_t num_kv_heads;
  int32_t group_size;
  int32_t head_dim;
  int32_t num_columns;
  int32_t page_size;
  int32_t num_pages;
};

template <class Variant>
struct PageScores {
  using T = typename Variant::T;
  static constexpr int kThreads = kParallelThreads, kMinCtas = min(4, kParallelCtas), kSmemBytes = 0;
  static constexpr int kVec = Variant::kVec;
  static constexpr int kHeads = 4;  // query heads that share what is read of a page

  struct alignas(kVec * sizeof(T)) Vector {
    T x[kVec];
  };

  QUIRE_HD static int run(const PageScoresParams& p, unsigned char* = nullptr) {
    const int64_t rows = static_cast<int64_t>(p.batch_size) * p.num_kv_heads;
    parallel_rows(rows, p.num_columns, [&](int64_t row, int column) {
      const int request = static_cast<int>(row / p.num_kv_heads), head = static_cast<int>(row % p.num_kv_heads);
      const int last = (max(1, p.lens[request]) - 1) / p.page_size;  // which is selected in any case
      int64_t key = -0x7fffffffffffffff - 1;
      if (column < last) {
        const int64_t page = p.pages[request * p.page_stride + column];
        const bool exists = page >= 0 && page < p.num_pages;  // others are chosen last, and not read
        key = key_of(exists ? score(p, row, page * p.num_kv_heads + head) : -3.4e38f, column);
      }
      p.keys[row * p.num_columns + column] = key;
    });
    return 0;
  }

 private:
  QUIRE_HD static float score(const PageScoresParams& p, int64_t row, int64_t bound) {
    const T* low = static_cast<const T*>(p.bounds) + bound * 2 * p.head_dim;
    const float* q = p.q + row * p.group_size * p.head_dim;
    float best = 0.f;
    for (int head = 0; head < p.group_size; head += kHeads) {
      float sums[kHeads] = {};
      const int heads = min(kHeads, p.group_size - head);
      for (int dim = 0; dim < p.head_dim; dim += kVec) {
        add(sums, heads, q + head * p.head_dim + dim, p.head_dim, low + dim);
      }
#pragma unroll
      for (int i = 0; i < kHeads; ++i) {
        if (i < heads) best = head + i == 0 ? sums[i] : max(best, sums[i]);
      }
    }
    return best;
  }

  // kVec dims of `heads` query heads.
  QUIRE_HD static void add(float (&sums)[kHeads], int heads, const float* q, int head_dim, const T* from) {
    const Vector low = *reinterpret_cast<const Vector*>(from);
    const Vector high = *reinterpret_cast<const Vector*>(from + head_dim);
#pragma unroll
    for (int i = 0; i < kHeads; ++i) {
      if (i >= heads) continue;
#pragma unroll
      for (int j = 0; j < kVec; ++j) {
        const float x = q[i * head_dim + j];
        sums[i] += max(x * to_float(low.x[j]), x * to_float(high.x[j]));
      }
    }
  }

  // Ascends with the score, and descends with the page's place.
  QUIRE_HD static int64_t key_of(float score, int place) {
    const int32_t bits = __builtin_bit_cast(int32_t, score), ascending = bits < 0 ? -(bits & 0x7fffffff) : bits;
    return static_cast<int64_t>(ascending) * (int64_t{1} << 32) + (0x7fffffff - place);
  }
};

}  // namespace quire
