// Writes new keys and values into a paged cache: token i of append_key goes to position positions[i] of request
// batch_indices[i]. Bound by memory: each value is read and written once. One item is a pack of keys and the pack of
// values beside it; both are asked for before their page is looked up, which takes three reads one after another.
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

template <bool kFirst, class A, class B>
struct Choose {
  using Type = A;
};
template <class A, class B>
struct Choose<false, A, B> {
  using Type = B;
};

template <class Variant>
struct AppendPaged {
  using T = typename Variant::T;  // an unsigned integer of the element's size: values are moved, not computed with
  static constexpr int kThreads = kParallelThreads, kMinCtas = kParallelCtas, kSmemBytes = 0;
  static constexpr int kVec = Variant::kVec;

  static constexpr int kPackBytes = kVec * static_cast<int>(sizeof(T));

  // In words where it is whole ones: a register each, also of 16 single bytes.
  struct alignas(kPackBytes) Words {
    uint32_t x[max(kPackBytes / 4, 1)];
  };
  struct alignas(kPackBytes) Elements {
    T x[kVec];
  };
  using Pack = typename Choose<kPackBytes % 4 == 0, Words, Elements>::Type;

  QUIRE_HD static int run(const AppendParams& p, unsigned char* = nullptr) {
    const int packs = max(p.head_dim_k, p.head_dim_v) / kVec;
    parallel_rows(p.nnz, p.num_kv_heads * packs, [&](int64_t token, int column) {
      const unsigned head = static_cast<unsigned>(column) / static_cast<unsigned>(packs);
      copy(p, token, head, (column - static_cast<int>(head) * packs) * kVec);
    });
    return 0;
  }

 private:
  QUIRE_HD static void copy(const AppendParams& p, int64_t token, int64_t head, int begin) {
    const bool has_k = begin < p.head_dim_k, has_v = begin < p.head_dim_v;
    Pack k, v;
    if (has_k) k = *pack(p.key, token * p.key_token_stride + head * p.key_head_stride + begin);
    if (has_v) v = *pack(p.value, token * p.value_token_stride + head * p.value_head_stride + begin);
    int64_t page;
    int at;
    if (!find(p, token, page, at)) return;
    if (has_k) *pack(p.k_cache, page * p.k_page_stride + at * p.k_token_stride + head * p.k_head_stride + begin) = k;
    if (has_v) *pack(p.v_cache, page * p.v_page_stride + at * p.v_token_stride + head * p.v_head_stride + begin) = v;
  }

  QUIRE_HD static Pack* pack(void* from, int64_t element) {
    return reinterpret_cast<Pack*>(static_cast<T*>(from) + element);
  }
  QUIRE_HD static const Pack* pack(const void* from, int64_t element) {
    return reinterpret_cast<const Pack*>(static_cast<const T*>(from) + element);
  }

  // The page of a token and its place there; false if it has none: nothing outside a request is ever written.
  QUIRE_HD static bool find(const AppendParams& p, int64_t token, int64_t& page, int& at) {
    const int request = p.batch_indices[token], position = p.positions[token];
    if (request < 0 || request >= p.batch_size || position < 0) return false;
    const int of_request = position / p.page_size, first = p.kv_indptr[request];
    if (of_request >= p.kv_indptr[request + 1] - first) return false;
    page = p.kv_indices[first + of_request], at = position - of_request * p.page_size;
    return page >= 0 && page < p.num_pages;
  }
};

}  // namespace quire
