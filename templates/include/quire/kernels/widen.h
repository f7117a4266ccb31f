// Converts (widens) pages of 8-bit keys and values, or of 4-bit ones with scales, to 16 bits, before attention: page
// kv_indices[i] of the cache becomes page i. Pages of 16-bit ones are copied as they are. The kernel is limited by
// memory bandwidth: each number is read once and written once. A thread has one vector of keys and the corresponding
// vector of values, and loads both before it converts either.
#pragma once
#include "quire/core/convert.h"
#include "quire/core/parallel.h"
#ifdef __CUDACC__
#include "quire/ptx/math.cuh"
#endif

namespace quire {

struct WidenParams {
  const void* k;              // [num_pages, page_size, num_kv_heads, head_dim_k], 8, 4 or 16 bits each, by strides
  const void* v;              // the same with head_dim_v
  void* k_out;                // [num_indices, page_size, num_kv_heads, head_dim_k], 16 bits each, dense
  void* v_out;                // the same with head_dim_v
  const int32_t* kv_indices;  // [num_indices]; numbers of no page are passed over
  const e4m3_t* k_sf;         // of 4-bit keys, [num_pages, page_size, num_kv_heads, head_dim_k / kScaledNumbers]
  const e4m3_t* v_sf;
  int64_t k_page_stride, k_token_stride, k_head_stride, v_page_stride, v_token_stride, v_head_stride;  // in bytes
  int64_t k_sf_page_stride, k_sf_token_stride, k_sf_head_stride, v_sf_page_stride, v_sf_token_stride, v_sf_head_stride;
  int32_t num_indices;
  int32_t num_pages;
  int32_t page_size;
  int32_t num_kv_heads;
  int32_t head_dim_k;
  int32_t head_dim_v;
  int32_t kind;  // of the numbers: WidenKind
};

enum WidenKind : int32_t { kWidenE4m3 = 0, kWidenE5m2 = 1, kWidenNvfp4 = 2, kWidenNone = 3 };

template <class Variant>
struct WidenPages {
  using T = typename Variant::T;
  static constexpr int kThreads = kParallelThreads, kMinCtas = kParallelCtas, kSmemBytes = 0;
  static constexpr int kVec = 8;  // numbers; of 4 bits twice as many

  QUIRE_HD static int run(const WidenParams& p, unsigned char* = nullptr) {
    const int in_byte = p.kind == kWidenNvfp4 ? 2 : 1, vectors = max(p.head_dim_k, p.head_dim_v) / (kVec * in_byte);
    parallel_rows(static_cast<int64_t>(p.num_indices) * p.page_size, p.num_kv_heads * vectors,
                  [&](int64_t token, int column) {
                    const int head = static_cast<int>(static_cast<unsigned>(column) / static_cast<unsigned>(vectors));
                    const int vector = column - head * vectors;
                    if (p.kind == kWidenNvfp4) {
                      widen_scaled(p, token, head, vector);
                    } else if (p.kind == kWidenNone) {
                      widen<T>(p, token, head, vector * kVec);
                    } else if (p.kind == kWidenE5m2) {
                      widen<e5m2_t>(p, token, head, vector * kVec);
                    } else {
                      widen<e4m3_t>(p, token, head, vector * kVec);
                    }
                  });
    return 0;
  }

 private:
  struct alignas(kVec) Bytes {
    uint32_t word[2];
  };
  struct alignas(2 * kVec) Numbers {
    uint32_t word[4];
  };
  template <class From>
  using Vector = typename conditional<sizeof(From) == 1, Bytes, Numbers>::type;

  template <class From>
  QUIRE_HD static void widen(const WidenParams& p, int64_t token, int head, int dim) {
    const int index = static_cast<int>(token / static_cast<uint32_t>(p.page_size));
    const int at = static_cast<int>(token - static_cast<int64_t>(index) * p.page_size), page = p.kv_indices[index];
    if (page < 0 || page >= p.num_pages) return;
    const bool has_k = dim < p.head_dim_k, has_v = dim < p.head_dim_v;
    const int first = dim * static_cast<int>(sizeof(From));  // byte
    Vector<From> k, v;
    if (has_k) load(k, p.k, page * p.k_page_stride + at * p.k_token_stride + head * p.k_head_stride + first);
    if (has_v) load(v, p.v, page * p.v_page_stride + at * p.v_token_stride + head * p.v_head_stride + first);
    const int64_t row = token * p.num_kv_heads + head;
    if (has_k) store<From>(p.k_out, row * p.head_dim_k + dim, k);
    if (has_v) store<From>(p.v_out, row * p.head_dim_v + dim, v);
  }

  // One scale, of keys and of values, and the numbers that it is of.
  QUIRE_HD static void widen_scaled(const WidenParams& p, int64_t token, int head, int vector) {
    const int index = static_cast<int>(token / static_cast<uint32_t>(p.page_size)), page = p.kv_indices[index];
    const int at = static_cast<int>(token - static_cast<int64_t>(index) * p.page_size), dim = vector * kScaledNumbers;
    if (page < 0 || page >= p.num_pages) return;
    const bool has_k = dim < p.head_dim_k, has_v = dim < p.head_dim_v;
    Bytes k, v;
    e4m3_t k_sf, v_sf;
    if (has_k) {
      load(k, p.k, page * p.k_page_stride + at * p.k_token_stride + head * p.k_head_stride + vector * kVec);
      k_sf = p.k_sf[page * p.k_sf_page_stride + at * p.k_sf_token_stride + head * p.k_sf_head_stride + vector];
    }
    if (has_v) {
      load(v, p.v, page * p.v_page_stride + at * p.v_token_stride + head * p.v_head_stride + vector * kVec);
      v_sf = p.v_sf[page * p.v_sf_page_stride + at * p.v_sf_token_stride + head * p.v_sf_head_stride + vector];
    }
    const int64_t row = token * p.num_kv_heads + head;
    if (has_k) store_scaled(p.k_out, row * p.head_dim_k + dim, k, to_float(k_sf));
    if (has_v) store_scaled(p.v_out, row * p.head_dim_v + dim, v, to_float(v_sf));
  }

  QUIRE_HD static void store_scaled(void* base, int64_t element, const Bytes& x, float scale) {
    Numbers* to = reinterpret_cast<Numbers*>(static_cast<T*>(base) + element);
    for (int i = 0; i < 2; ++i) {
      Numbers wide;
      for (int j = 0; j < 4; ++j) {
        const uint32_t codes = x.word[i] >> (8 * j);
        wide.word[j] = two_from_floats<T>(e2m1_to_float(codes) * scale, e2m1_to_float(codes >> 4) * scale);
      }
      to[i] = wide;
    }
  }

  template <class Words>
  QUIRE_HD static void load(Words& to, const void* base, int64_t byte) {
    to = *reinterpret_cast<const Words*>(static_cast<const uint8_t*>(base) + byte);
  }

  template <class From>
  QUIRE_HD static void store(void* base, int64_t element, const Numbers& x) {
    *reinterpret_cast<Numbers*>(static_cast<T*>(base) + element) = x;
  }

  template <class From>
  QUIRE_HD static void store(void* base, int64_t element, const Bytes& x) {
    Numbers wide;
    for (int i = 0; i < 2; ++i) widen_four<From>(x.word[i], wide.word[2 * i], wide.word[2 * i + 1]);
    *reinterpret_cast<Numbers*>(static_cast<T*>(base) + element) = wide;
  }

  template <class From>
  QUIRE_HD static void widen_four(uint32_t x, uint32_t& low, uint32_t& high) {
#ifdef __CUDA_ARCH__
    ptx::widen(From{}, x, low, high);
    low = ptx::widened_to(T{}, low), high = ptx::widened_to(T{}, high);
#else
    low = widen_one<From>(x) | widen_one<From>(x >> 8) << 16;
    high = widen_one<From>(x >> 16) | widen_one<From>(x >> 24) << 16;
#endif
  }

  // On the host.
  template <class From>
  QUIRE_HD static uint32_t widen_one(uint32_t x) {
    return from_float<T>(to_float(From{static_cast<uint8_t>(x)})).bits;
  }
};

}  // namespace quire
