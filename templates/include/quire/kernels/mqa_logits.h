// The scores of an indexer (DeepSeek's sparse attention): for each query and key, the sum over heads of
// relu(q . k) * weight, times the scale of the key. Queries and keys are e4m3, with one head of keys.
//
// Decode is limited by reading the keys, prefill by the tensor cores. Keys are the rows of the products and heads their
// columns. A warp has 16 keys at a time: its lanes copy 64 bytes each, through a ring of their own in shared memory,
// and the queries of up to 64 heads stay in registers. Numbers become fp16 on their way to the tensor cores, whose
// products of fp16 are added up in float32 exactly, while products of 8 bits are added up with about 14 bits. All dims
// of a head may come in any order, if it is the same for queries and keys: lane l % 4 has bytes 16 * (l % 4) to + 15,
// and those 64 bytes further.
#pragma once
#include "quire/core/convert.h"
#include "quire/core/parallel.h"
#ifdef __CUDACC__
#include "quire/ptx/copy.cuh"
#include "quire/ptx/math.cuh"
#include "quire/ptx/warp.cuh"
#endif

namespace quire {

struct MqaLogitsParams {
  const void* q;          // [num_rows, num_heads, head_dim] e4m3, by strides
  const void* keys;       // pages [num_pages, page_size, head_dim] e4m3, key_page_bytes apart
  const void* scales;     // [num_pages, page_size] float, scale_page_bytes apart
  const float* weights;   // [num_rows, num_heads], weights_stride apart
  const int32_t* pages;   // [num_requests, any] page numbers, pages_stride apart; null: all keys are in page 0
  const int32_t* begins;  // [num_rows] the first key of a row; null: 0
  const int32_t* ends;    // [num_rows], or, with lengths_are_shared, [num_requests] the end of the last row's keys
  float* logits;          // [num_rows, width], logits_stride apart
  int64_t q_row_bytes, q_head_bytes, key_page_bytes, scale_page_bytes;
  int64_t weights_stride, pages_stride, logits_stride;
  FastDivisor page;     // page_size
  FastDivisor request;  // rows of a request
  FastDivisor parts;    // that the columns of a row are divided into
  int32_t num_rows, num_heads, head_dim, num_pages, width;
  int32_t num_keys;            // that a row has at most
  int32_t part_columns;        // of a part
  int32_t lengths_are_shared;  // a row of a request sees one key less than the next row
  int32_t is_shifted;          // column 0 is of the row's first key, not of key 0
  int32_t is_clean;            // columns of no key of the row become -inf
};

template <class Variant>
struct MqaLogits {
  // Whether a lane has the registers to hold its part of 16 keys, whose place is then free for others at once.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 890
  static constexpr bool kHoldsKeys = false;
#else
  static constexpr bool kHoldsKeys = true;
#endif
  static constexpr int kBlocks = kHoldsKeys ? 4 * Variant::kVec : 4;  // of 8 heads, at a time
  static constexpr int kHeads = 8 * kBlocks;
  static constexpr int kMostDims = 128;
  static constexpr int kThreads = kParallelThreads, kMinCtas = 1;
  static constexpr int kKeys = 16, kWarps = kThreads / 32, kStages = 2;
  static constexpr int kStageBytes = kKeys * (kMostDims + 4);
  static constexpr int kSmemBytes = kWarps * kStages * kStageBytes;

#ifdef __CUDA_ARCH__
  QUIRE_DEVICE static int run(const MqaLogitsParams& p, unsigned char* smem) {
    const int row = p.parts.div(static_cast<int>(blockIdx.x));
    const int part = static_cast<int>(blockIdx.x) - row * static_cast<int>(p.parts.divisor);
    const Row keys = keys_of(p, row);
    const int begin = part * p.part_columns, end = min(p.width, begin + p.part_columns);
    const int first = max(begin, keys.begin - keys.shift), last = min(end, keys.end - keys.shift);
    float* logits = p.logits + row * p.logits_stride;
    if (p.is_clean != 0) {
      for (int i = begin + static_cast<int>(threadIdx.x); i < end; i += kThreads) {
        if (i < first || i >= last) logits[i] = __int_as_float(0xff800000);
      }
    }
    if (first >= last) return 0;
    for (int head = 0; head < p.num_heads; head += kHeads) {
      MqaLogits(p, row, keys.shift, head, smem).score(logits, first, last, head > 0);
    }
    return 0;
  }
#else
  QUIRE_HD static int run(const MqaLogitsParams& p, unsigned char* = nullptr) {
    parallel_rows(p.num_rows, 1, [&](int64_t row, int) { score_row(p, static_cast<int>(row)); });
    return 0;
  }
#endif

 private:
  // Keys [begin, end), of which key k has column k - shift.
  struct Row {
    int begin, end, shift;
  };

  QUIRE_HD static Row keys_of(const MqaLogitsParams& p, int row) {
    const int request = p.request.div(row), later = (request + 1) * static_cast<int>(p.request.divisor) - 1 - row;
    const int begin = p.begins == nullptr ? 0 : max(0, min(p.begins[row], p.num_keys));
    const int end = p.lengths_are_shared != 0 ? p.ends[request] - later : p.ends[row];
    return {begin, min(end, p.num_keys), p.is_shifted != 0 ? begin : 0};
  }

  // Where a key lies: bytes before it, and before its scale; below 0 if its page does not exist.
  struct Place {
    int64_t key, scale;
  };

  QUIRE_HD static Place place_of(const MqaLogitsParams& p, const int32_t* pages, int key) {
    const int index = p.page.div(key), in_page = key - index * static_cast<int>(p.page.divisor);
    const int page = pages == nullptr ? index : pages[index];
    if (page < 0 || page >= p.num_pages) return {-1, -1};
    return {page * p.key_page_bytes + static_cast<int64_t>(in_page) * p.head_dim,
            page * p.scale_page_bytes + static_cast<int64_t>(in_page) * 4};
  }

  QUIRE_HD static const int32_t* pages_of(const MqaLogitsParams& p, int row) {
    return p.pages == nullptr ? nullptr : p.pages + p.request.div(row) * p.pages_stride;
  }

#ifdef __CUDA_ARCH__
  const MqaLogitsParams& p_;
  const int32_t* pages_;
  int shift_;
  uint32_t ring_;
  uint32_t q_[kBlocks][8][2];  // of head 8 * block + lane / 4, of kHeads: four dims of each step of 16
  float weights_[kBlocks][2];  // of heads 8 * block + 2 * (lane % 4) and + 1

  QUIRE_DEVICE MqaLogits(const MqaLogitsParams& p, int row, int shift, int first_head, unsigned char* smem)
      : p_(p),
        pages_(pages_of(p, row)),
        shift_(shift),
        ring_(ptx::smem_address(smem) + threadIdx.x / 32 * (kStages * kStageBytes)) {
    const int lane = threadIdx.x % 32;
    const auto* q = static_cast<const unsigned char*>(p.q) + row * p.q_row_bytes;
    const float* weights = p.weights + row * p.weights_stride;
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      const int head = first_head + block * 8 + lane / 4;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int byte = half * 64 + lane % 4 * 16;
        const bool exists = head < p.num_heads && byte < p.head_dim;
        const uint4 none = {0, 0, 0, 0};
        const uint4 x = exists ? __ldg(reinterpret_cast<const uint4*>(q + head * p.q_head_bytes + byte)) : none;
        const uint32_t words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          ptx::widen(e4m3_t{}, words[i], q_[block][half * 4 + i][0], q_[block][half * 4 + i][1]);
        }
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int of = first_head + block * 8 + lane % 4 * 2 + i;
        weights_[block][i] = of < p.num_heads ? __ldg(weights + of) : 0.f;
      }
    }
  }

  // Columns [first, last), 16 of each warp in turn. has_sums: the scores of other heads are there, to be added to.
  QUIRE_DEVICE void score(float* logits, int first, int last, bool has_sums) const {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int at = first + warp * kKeys;
#pragma unroll
    for (int i = 0; i < kStages; ++i) copy(at + i * (kWarps * kKeys), last, i);
    int stage = 0;
#pragma unroll 1
    for (; at < last; at += kWarps * kKeys, stage = (stage + 1) % kStages) {
      ptx::cp_async_wait<kStages - 1>();
      __syncwarp();
      const float scale[2] = {ptx::ld_shared(scale_at(stage, lane / 4)), ptx::ld_shared(scale_at(stage, lane / 4 + 8))};
      float sum[2];
      if constexpr (kHoldsKeys) {
        uint4 keys[2][2];
#pragma unroll
        for (int i = 0; i < 4; ++i) keys[i / 2][i % 2] = ptx::ld_shared_16(key_at(stage, i / 2, i % 2));
        __syncwarp();
        copy(at + kStages * (kWarps * kKeys), last, stage);
        multiply(sum, [&](int h, int half) { return keys[h][half]; });
      } else {
        multiply(sum, [&](int h, int half) { return ptx::ld_shared_16(key_at(stage, h, half)); });
        __syncwarp();
        copy(at + kStages * (kWarps * kKeys), last, stage);
      }
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        sum[h] += __shfl_xor_sync(0xffffffffu, sum[h], 1);
        sum[h] += __shfl_xor_sync(0xffffffffu, sum[h], 2);
        const int column = at + lane / 4 + 8 * h;
        if (lane % 4 == 0 && column < last) logits[column] = fmaf(sum[h], scale[h], has_sums ? logits[column] : 0.f);
      }
    }
    ptx::cp_async_wait_all();
  }

  // This lane's part of 16 keys' sums over heads, of keys lane / 4 and lane / 4 + 8. load(h, half): its bytes of them.
  template <class Load>
  QUIRE_DEVICE void multiply(float (&sum)[2], const Load& load) const {
    float s[kBlocks][4];
#pragma unroll
    for (int i = 0; i < kBlocks * 4; ++i) s[i / 4][i % 4] = 0.f;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint4 low = load(0, half), high = load(1, half);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        uint32_t a[4];
        ptx::widen(e4m3_t{}, word(low, i), a[0], a[2]);
        ptx::widen(e4m3_t{}, word(high, i), a[1], a[3]);
#pragma unroll
        for (int block = 0; block < kBlocks; ++block) {
          const uint32_t (&q)[2] = q_[block][half * 4 + i];
          ptx::mma_m16n8k16(fp16_t{}, s[block], a, q[0], q[1]);
        }
      }
    }
    sum[0] = sum[1] = 0.f;
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
      for (int i = 0; i < 4; ++i) sum[i / 2] = fmaf(fmaxf(s[block][i], 0.f), weights_[block][i % 2], sum[i / 2]);
    }
  }

  QUIRE_DEVICE static uint32_t word(const uint4& x, int i) { return i == 0 ? x.x : i == 1 ? x.y : i == 2 ? x.z : x.w; }

  // Of this lane's 16 bytes of key lane / 4 + 8 * h.
  QUIRE_DEVICE uint32_t key_at(int stage, int h, int half) const {
    return ring_ + stage * kStageBytes + (h * 2 + half) * 512 + threadIdx.x % 32 * 16;
  }
  QUIRE_DEVICE uint32_t scale_at(int stage, int key) const {
    return ring_ + stage * kStageBytes + kKeys * kMostDims + key * 4;
  }

  // Starts to copy 16 keys, from the one of `column` on; zeros in the place of those from `last` on.
  QUIRE_DEVICE void copy(int column, int last, int stage) const {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int own = column + lane / 4 + 8 * h;
      Place place = {-1, -1};
      if (own < last) place = place_of(p_, pages_, own + shift_);
      const auto* from = static_cast<const unsigned char*>(p_.keys) + max<int64_t>(place.key, 0);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int byte = half * 64 + lane % 4 * 16;
        const bool exists = place.key >= 0 && byte < p_.head_dim;
        ptx::cp_async_16(key_at(stage, h, half), from + (exists ? byte : 0), exists ? 16 : 0);
      }
      if (lane % 4 == 0) {
        const auto* scale = static_cast<const unsigned char*>(p_.scales) + max<int64_t>(place.scale, 0);
        ptx::cp_async_small<4>(scale_at(stage, lane / 4 + 8 * h), scale, place.scale >= 0 ? 4 : 0);
      }
    }
    ptx::cp_async_commit();
  }
#else
  static void score_row(const MqaLogitsParams& p, int row) {
    const Row keys = keys_of(p, row);
    const int first = max(0, keys.begin - keys.shift), last = min(p.width, keys.end - keys.shift);
    float* logits = p.logits + row * p.logits_stride;
    if (p.is_clean != 0) {
      for (int i = 0; i < p.width; ++i) {
        if (i < first || i >= last) logits[i] = -__builtin_inff();
      }
    }
    if (first >= last) return;
    const int32_t* pages = pages_of(p, row);
    float q[kHeads * kMostDims];
    for (int head = 0; head < p.num_heads; head += kHeads) {
      const int heads = min(kHeads, p.num_heads - head);
      for (int i = 0; i < heads; ++i) widen(q + i * p.head_dim, query(p, row, head + i), p);
      const float* weights = p.weights + row * p.weights_stride + head;
      for (int column = first; column < last; ++column) {
        const Place place = place_of(p, pages, column + keys.shift);
        const float own = place.key < 0 ? 0.f : score_key(p, q, weights, heads, place);
        logits[column] = head > 0 ? logits[column] + own : own;
      }
    }
  }

  static const char* query(const MqaLogitsParams& p, int row, int head) {
    return static_cast<const char*>(p.q) + row * p.q_row_bytes + head * p.q_head_bytes;
  }

  static void widen(float* to, const char* from, const MqaLogitsParams& p) {
    const auto* numbers = reinterpret_cast<const e4m3_t*>(from);
    for (int d = 0; d < p.head_dim; ++d) to[d] = to_float(numbers[d]);
  }

  static float score_key(const MqaLogitsParams& p, const float* q, const float* weights, int heads, Place place) {
    float key[kMostDims], sum = 0.f;
    widen(key, static_cast<const char*>(p.keys) + place.key, p);
    for (int head = 0; head < heads; ++head) {
      float s = 0.f;
      for (int d = 0; d < p.head_dim; ++d) s += q[head * p.head_dim + d] * key[d];
      sum += (s > 0.f ? s : 0.f) * weights[head];
    }
    float scale;
    __builtin_memcpy(&scale, static_cast<const char*>(p.scales) + place.scale, sizeof(scale));
    return sum * scale;
  }
#endif
};

}  // namespace quire
