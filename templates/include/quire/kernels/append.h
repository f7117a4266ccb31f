// Writes new keys and values into a paged cache: token i of append_key goes to position positions[i] of request
// batch_indices[i]. Bound by memory: each value is read and written once.
#pragma once
#include "quire/core/parallel.h"

namespace quire {

struct AppendParams {
  const void* key;    // [nnz, num_kv_heads, head_dim], by strides
  const void* value;  // the same
  void* k_cache;      // [num_pages, page_size, num_kv_heads, head_dim], by strides
  void* v_cache;
  const int32_t* batch_indices;  // [nnz]; negative: skip the token
  const int32_t* positions;      // [nnz], in the request
  const int32_t* kv_indices;
  const int32_t* kv_indptr;  // [batch_size + 1] entries of kv_indices
  int64_t nnz;
  int64_t key_token_stride, key_head_stride, value_token_stride, value_head_stride;
  int64_t k_page_stride, k_token_stride, k_head_stride, v_page_stride, v_token_stride, v_head_stride;
  int32_t batch_size;
  int32_t num_pages;  // pages of the cache: what kv_indices may name
  int32_t num_kv_heads;
  int32_t head_dim_k;
  int32_t head_dim_v;
  int32_t page_size;
};

template <class Variant>
struct AppendPaged {
  using T = typename Variant::T;  // an unsigned integer of the element's size: values are moved, not computed with
  static constexpr int kThreads = kParallelThreads, kMinCtas = 1, kSmemBytes = 0;
  static constexpr int kVec = Variant::kVec;

  struct alignas(kVec * sizeof(T)) Pack {
    T x[kVec];
  };

  QUIRE_HD static int run(const AppendParams& p, unsigned char* = nullptr) {
    const int packs_k = p.head_dim_k / kVec, packs = packs_k + p.head_dim_v / kVec;
    parallel_for(p.nnz * p.num_kv_heads * packs, [&](int64_t i) {
      const int64_t row = i / packs;
      const int pack = static_cast<int>(i - row * packs), head = static_cast<int>(row % p.num_kv_heads);
      copy(p, row / p.num_kv_heads, head, pack, packs_k);
    });
    return 0;
  }

 private:
  QUIRE_HD static void copy(const AppendParams& p, int64_t token, int head, int pack, int packs_k) {
    const int request = p.batch_indices[token], position = p.positions[token];
    if (request < 0 || request >= p.batch_size || position < 0) return;
    const int slot = p.kv_indptr[request] + position / p.page_size;
    if (slot >= p.kv_indptr[request + 1]) return;  // no page was allocated for it: never write outside the request
    const int64_t page = p.kv_indices[slot], at = position % p.page_size;
    if (page < 0 || page >= p.num_pages) return;
    if (pack < packs_k) {
      T* to = static_cast<T*>(p.k_cache) + page * p.k_page_stride + at * p.k_token_stride + head * p.k_head_stride;
      const T* from = static_cast<const T*>(p.key) + token * p.key_token_stride + head * p.key_head_stride;
      reinterpret_cast<Pack*>(to)[pack] = reinterpret_cast<const Pack*>(from)[pack];
    } else {
      T* to = static_cast<T*>(p.v_cache) + page * p.v_page_stride + at * p.v_token_stride + head * p.v_head_stride;
      const T* from = static_cast<const T*>(p.value) + token * p.value_token_stride + head * p.value_head_stride;
      reinterpret_cast<Pack*>(to)[pack - packs_k] = reinterpret_cast<const Pack*>(from)[pack - packs_k];
    }
  }
};

}  // namespace quire
