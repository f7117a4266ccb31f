// Quantises new keys and values to 4 bits with scales (NVFP4) and writes them into a paged cache: token i of append_key
// goes to position positions[i] of request batch_indices[i], or to places[i]: token t of page p has place p * page_size
// + t.
//
// Each kScaledNumbers neighbouring numbers x of a row have a scale s in e4m3, and each number is x / (s * global scale)
// in E2M1. s is the largest |x| / (6 * global scale): 6 is the largest number of E2M1. All of it is rounded to nearest,
// ties to even, the quotient to float32 first; a number beyond the largest becomes that, and a NaN makes the scale a
// NaN. Where s * global scale is 0, or so small that its reciprocal is infinite, numbers become 0. The host computes
// the same bits.
//
// The kernel is limited by memory bandwidth. A thread has the numbers of one scale, of keys and of values.
#pragma once
#include "quire/core/convert.h"
#include "quire/core/parallel.h"
#include "quire/kernels/append.h"

namespace quire {

struct AppendNvfp4Params {
  const void* key;    // [nnz, num_kv_heads, head_dim], by strides
  const void* value;  // the same
  uint8_t* k_cache;   // [num_pages, page_size, num_kv_heads, head_dim / 2], by strides
  uint8_t* v_cache;
  e4m3_t* k_sf;  // [num_pages, page_size, num_kv_heads, head_dim / kScaledNumbers], by strides
  e4m3_t* v_sf;
  const int32_t* batch_indices;  // [nnz]; negative: skip the token; these tables are null with places
  const int32_t* positions;      // [nnz], in the request
  const int32_t* kv_indices;     // [num_indices] page numbers
  const int32_t* kv_indptr;      // [batch_size + 1] offsets into kv_indices
  const int64_t* places;         // [nnz] in the cache; beyond it: skip the token; or null
  const float* k_scale_at;       // the global scale, where the device has it; or null
  const float* v_scale_at;
  int64_t nnz;
  int64_t num_indices;
  int64_t key_token_stride, key_head_stride, value_token_stride, value_head_stride;
  int64_t k_page_stride, k_token_stride, k_head_stride, v_page_stride, v_token_stride, v_head_stride;
  int64_t k_sf_page_stride, k_sf_token_stride, k_sf_head_stride, v_sf_page_stride, v_sf_token_stride, v_sf_head_stride;
  int32_t batch_size;
  int32_t num_pages;  // of the cache; valid page numbers are [0, num_pages)
  int32_t num_kv_heads;
  int32_t head_dim_k;
  int32_t head_dim_v;
  int32_t page_size;
  float k_scale;
  float v_scale;
};

template <class Variant>
struct AppendNvfp4 {
  using T = typename Variant::T;
  static constexpr int kThreads = kParallelThreads, kMinCtas = 2, kSmemBytes = 0;
  static constexpr int kVec = Variant::kVec;  // 1, or as many numbers as 16 bytes have: then all addresses allow it

  QUIRE_HD static int run(const AppendNvfp4Params& p, unsigned char* = nullptr) {
    const int blocks = max(p.head_dim_k, p.head_dim_v) / kScaledNumbers;
    parallel_rows(p.nnz, p.num_kv_heads * blocks, [&](int64_t token, int column) {
      const int head = static_cast<int>(static_cast<unsigned>(column) / static_cast<unsigned>(blocks));
      append(p, token, head, column - head * blocks);
    });
    return 0;
  }

 private:
  struct alignas(kVec * sizeof(T)) Vector {
    T x[kVec];
  };
  struct Numbers {  // as they lie in memory: floats would take twice the registers
    Vector vectors[kScaledNumbers / kVec];

    QUIRE_HD float at(int i) const { return to_float(vectors[i / kVec].x[i % kVec]); }
  };
  struct Codes {
    uint32_t words[kScaledNumbers / 8];
  };
  struct Block {
    Codes codes;
    e4m3_t scale;
  };

  QUIRE_HD static void append(const AppendNvfp4Params& p, int64_t token, int64_t head, int block) {
    const int dim = block * kScaledNumbers;
    const bool has_k = dim < p.head_dim_k, has_v = dim < p.head_dim_v;
    Numbers k, v;
    if (has_k) k = load(p.key, token * p.key_token_stride + head * p.key_head_stride + dim);
    if (has_v) v = load(p.value, token * p.value_token_stride + head * p.value_head_stride + dim);
    const auto [page, at] = p.places == nullptr ? place_of(p, token) : place_in_cache(p, p.places[token]);
    if (page < 0) return;
    if (has_k) {
      const Block x = quantised(k, p.k_scale_at == nullptr ? p.k_scale : *p.k_scale_at);
      store(p.k_cache + page * p.k_page_stride + at * p.k_token_stride + head * p.k_head_stride + dim / 2, x.codes);
      p.k_sf[page * p.k_sf_page_stride + at * p.k_sf_token_stride + head * p.k_sf_head_stride + block] = x.scale;
    }
    if (has_v) {
      const Block x = quantised(v, p.v_scale_at == nullptr ? p.v_scale : *p.v_scale_at);
      store(p.v_cache + page * p.v_page_stride + at * p.v_token_stride + head * p.v_head_stride + dim / 2, x.codes);
      p.v_sf[page * p.v_sf_page_stride + at * p.v_sf_token_stride + head * p.v_sf_head_stride + block] = x.scale;
    }
  }

  QUIRE_HD static Place place_in_cache(const AppendNvfp4Params& p, int64_t place) {
    if (place < 0 || place >= static_cast<int64_t>(p.num_pages) * p.page_size) return {-1, 0};
    const int64_t page = place / p.page_size;
    return {page, static_cast<int>(place - page * p.page_size)};
  }

  QUIRE_HD static Numbers load(const void* base, int64_t element) {
    const Vector* from = reinterpret_cast<const Vector*>(static_cast<const T*>(base) + element);
    Numbers x;
    for (int i = 0; i < kScaledNumbers / kVec; ++i) x.vectors[i] = from[i];
    return x;
  }

  QUIRE_HD static void store(uint8_t* to, const Codes& codes) {
    struct alignas(kVec == 1 ? 1 : 8) Bytes {
      uint8_t x[kScaledNumbers / 2];
    };
    *reinterpret_cast<Bytes*>(to) = __builtin_bit_cast(Bytes, codes);
  }

  QUIRE_HD static Block quantised(const Numbers& x, float global_scale) {
    constexpr float kLargest = 6.0f;
    constexpr int kCodes = 8;  // of a word
    float top = 0.0f;
    for (int i = 0; i < kScaledNumbers; ++i) top = larger(top, __builtin_fabsf(x.at(i)));
    Block block;
    block.scale = from_float<e4m3_t>(top / (kLargest * global_scale));
    const Unit unit(to_float(block.scale) * global_scale);
    for (int i = 0; i < kScaledNumbers; i += kCodes) {
      uint32_t word = 0;
      for (int j = kCodes - 1; j >= 0; --j) word = word * 16 + code_of(x.at(i + j), unit);
      block.codes.words[i / kCodes] = unit.is_regular ? word : 0;
    }
    return block;
  }

  // What the numbers of a block are divided by, twice over.
  struct Unit {
    float twice, reciprocal;
    float most;       // 4 times that, to which numbers are limited: the quotient of an infinity would be a NaN
    bool is_regular;  // whether there is a quotient

    QUIRE_HD explicit Unit(float unit)
        : twice(2.0f * unit),
          reciprocal(0.5f / unit),
          most(__builtin_fminf(4.0f * twice, kLargestFloat)),
          is_regular(unit > 0.0f && reciprocal < __builtin_inff()) {}
  };

  static constexpr float kLargestFloat = 3.402823466e38f;

  QUIRE_HD static uint32_t bits_of(float x) { return __builtin_bit_cast(uint32_t, x); }

  // The larger one; a NaN if one of them is.
  QUIRE_HD static float larger(float a, float b) {
#ifdef __CUDA_ARCH__
    float most;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(most) : "f"(a), "f"(b));
    return most;
#else
    return b > a || b != b ? b : a;
#endif
  }

  // The E2M1 number nearest to x / unit. Its steps are 1/2 up to 2, then 1 up to 4, then 2 up to 6: its code is the sum
  // of these three parts, each rounded. What a part begins with is even, so that ties go to even codes.
  QUIRE_HD static uint32_t code_of(float x, const Unit& unit) {
    constexpr float kWhole = 12582912.0f;  // 1.5 * 2^23: sums are whole numbers, in the last bits
    const float size = __builtin_fminf(__builtin_fabsf(x), unit.most);
    const float near = size * unit.reciprocal;
    const float half = __builtin_fmaf(__builtin_fmaf(-near, unit.twice, size), unit.reciprocal, near);  // its quotient
    float sum = __builtin_fmaf(part_of(half, 0.0f), 4.0f, kWhole);
    sum = __builtin_fmaf(part_of(half, 1.0f), 2.0f, sum);
    sum += part_of(half, 2.0f);
    return (bits_of(sum) - bits_of(kWhole)) + (bits_of(x) >> 31) * 8;
  }

  // half - begin, at least 0 and at most 1.
  QUIRE_HD static float part_of(float half, float begin) {
#ifdef __CUDA_ARCH__
    float part;
    asm("sub.rn.sat.f32 %0, %1, %2;" : "=f"(part) : "f"(half), "f"(begin));
    return part;
#else
    const float part = half - begin;
    return part > 0.0f ? (part < 1.0f ? part : 1.0f) : 0.0f;
#endif
  }
};

}  // namespace quire
