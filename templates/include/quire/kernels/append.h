// Writes new keys and values into a paged cache: token i of append_key goes to position positions[i] of request
// batch_indices[i]. The kernel is limited by memory bandwidth: each value is read once and written once. A thread
// copies one vector of keys and the corresponding vector of values. It loads both before it finds their page, because
// finding the page takes three dependent reads.
#pragma once
#include "quire/core/parallel.h"

namespace quire {

// No index array can lead to an address outside the cache or outside the arrays.
struct Place {
  int64_t page;  // -1: the token has no place in the cache
  int token_in_page;
};

// Where token i goes: to position positions[i] of request batch_indices[i], whose pages kv_indices names. A token has
// no place if its request does not exist, its position is beyond the request's pages, the request's pages are beyond
// kv_indices, or its page number names no page of the cache. Params: AppendParams, or a struct with the same tables.
template <class Params>
QUIRE_HD Place place_of(const Params& p, int64_t token) {
  constexpr Place kNowhere = {-1, 0};
  const int request = p.batch_indices[token], position = p.positions[token];
  if (request < 0 || request >= p.batch_size || position < 0) return kNowhere;
  const int page_of_request = position / p.page_size;
  const int64_t begin = p.kv_indptr[request], end = min<int64_t>(p.kv_indptr[request + 1], p.num_indices);
  if (begin < 0 || begin + page_of_request >= end) return kNowhere;
  const int page = p.kv_indices[begin + page_of_request];
  if (page < 0 || page >= p.num_pages) return kNowhere;
  return {page, position - page_of_request * p.page_size};
}

struct AppendParams {
  const void* key;    // [nnz, num_kv_heads, head_dim], by strides
  const void* value;  // the same
  void* k_cache;      // [num_pages, page_size, num_kv_heads, head_dim], by strides
  void* v_cache;
  const int32_t* batch_indices;  // [nnz]; negative: skip the token
  const int32_t* positions;      // [nnz], in the request
  const int32_t* kv_indices;     // [num_indices] page numbers
  const int32_t* kv_indptr;      // [batch_size + 1] offsets into kv_indices
  int64_t nnz;
  int64_t num_indices;
  int64_t key_token_stride, key_head_stride, value_token_stride, value_head_stride;
  int64_t k_page_stride, k_token_stride, k_head_stride, v_page_stride, v_token_stride, v_head_stride;
  int32_t batch_size;
  int32_t num_pages;  // of the cache; valid page numbers are [0, num_pages)
  int32_t num_kv_heads;
  int32_t head_dim_k;
  int32_t head_dim_v;
  int32_t page_size;
};

template <class Variant>
struct AppendPaged {
  using T = typename Variant::T;  // unsigned integer of the element's size: values are moved, not computed with
  static constexpr int kThreads = kParallelThreads, kMinCtas = kParallelCtas, kSmemBytes = 0;
  static constexpr int kVec = Variant::kVec, kVectorBytes = kVec * static_cast<int>(sizeof(T));
  // Words of 32 bits where a vector is a whole number of them: one register a word, also for bytes.
  using Word = typename conditional<kVectorBytes % 4 == 0, uint32_t, T>::type;

  struct alignas(kVectorBytes) Vector {
    Word x[kVectorBytes / sizeof(Word)];
  };

  QUIRE_HD static int run(const AppendParams& p, unsigned char* = nullptr) {
    const int vectors = max(p.head_dim_k, p.head_dim_v) / kVec;
    parallel_rows(p.nnz, p.num_kv_heads * vectors, [&](int64_t token, int column) {
      const unsigned head = static_cast<unsigned>(column) / static_cast<unsigned>(vectors);
      copy(p, token, head, (column - static_cast<int>(head) * vectors) * kVec);
    });
    return 0;
  }

 private:
  QUIRE_HD static void copy(const AppendParams& p, int64_t token, int64_t head, int dim) {
    const bool has_k = dim < p.head_dim_k, has_v = dim < p.head_dim_v;
    Vector k, v;
    if (has_k) k = *vector_at(p.key, token * p.key_token_stride + head * p.key_head_stride + dim);
    if (has_v) v = *vector_at(p.value, token * p.value_token_stride + head * p.value_head_stride + dim);
    const auto [page, at] = place_of(p, token);
    if (page < 0) return;
    if (has_k) *vector_at(p.k_cache, page * p.k_page_stride + at * p.k_token_stride + head * p.k_head_stride + dim) = k;
    if (has_v) *vector_at(p.v_cache, page * p.v_page_stride + at * p.v_token_stride + head * p.v_head_stride + dim) = v;
  }

  QUIRE_HD static Vector* vector_at(void* base, int64_t element) {
    return reinterpret_cast<Vector*>(static_cast<T*>(base) + element);
  }
  QUIRE_HD static const Vector* vector_at(const void* base, int64_t element) {
    return reinterpret_cast<const Vector*>(static_cast<const T*>(base) + element);
  }
};

}  // namespace quire
