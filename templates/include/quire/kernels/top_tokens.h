// The top_k tokens with the largest scores of each row, in ascending order: exact, and the same each time. Of equal
// scores the earlier tokens are taken; NaN counts as -inf.
//
// A score becomes an integer that ascends with it. Its least value among the chosen ones is found a byte at a time,
// highest first: the tokens that agree in the bytes found so far are counted by their next byte. Then each warp, or the
// only thread on the host, writes the chosen ones of its part of the row. A CTA reads a row six times, from the L2 if
// it is there.
#pragma once
#include "quire/core/convert.h"
#include "quire/core/parallel.h"

namespace quire {

struct TopTokensParams {
  const void* scores;    // [num_rows, num_tokens] of T, scores_stride apart
  const int32_t* lens;   // [num_rows] tokens of a row; null: num_tokens
  const int32_t* pages;  // [num_rows, any] page numbers, pages_stride apart: tokens are named by them; or null
  int32_t* tokens;       // [num_rows, top_k]; -1 where a row has fewer tokens
  int64_t scores_stride, pages_stride;
  FastDivisor page;  // page_size
  int32_t num_rows, num_tokens, top_k;
};

template <class Variant>
struct TopTokens {
  using T = typename Variant::T;
  static constexpr int kThreads = kParallelThreads, kMinCtas = min(4, kParallelCtas);
  // A count for each value of a byte, by lane, so that the lanes of a warp count at different addresses; then what one
  // thread tells all others, and what warps have counted.
  static constexpr int kValues = 256, kWarps = kThreads / 32;
  static constexpr int kSmemBytes = kValues * 32 * 4 + 4 * 4 + kWarps * 2 * 4;

  QUIRE_HD static int run(const TopTokensParams& p, unsigned char* smem = nullptr) {
#ifdef __CUDA_ARCH__
    TopTokens(p, blockIdx.x, reinterpret_cast<uint32_t*>(smem)).choose();
#else
    static_cast<void>(smem);
    parallel_rows(p.num_rows, 1, [&](int64_t row, int) {
      uint32_t counts[kValues];
      TopTokens(p, row, counts).choose();
    });
#endif
    return 0;
  }

 private:
  const TopTokensParams& p_;
  const T* scores_;
  const int32_t* pages_;
  int32_t* tokens_;
  int count_;  // tokens of the row
  uint32_t* counts_;

  QUIRE_HD TopTokens(const TopTokensParams& p, int64_t row, uint32_t* counts)
      : p_(p),
        scores_(static_cast<const T*>(p.scores) + row * p.scores_stride),
        pages_(p.pages == nullptr ? nullptr : p.pages + row * p.pages_stride),
        tokens_(p.tokens + row * p.top_k),
        count_(p.lens == nullptr ? p.num_tokens : max(0, min(p.lens[row], p.num_tokens))),
        counts_(counts) {}

  // Ascends with the score, from -inf and NaN on. Both zeros are equal.
  QUIRE_HD uint32_t key(int token) const {
    const uint32_t bits = __builtin_bit_cast(uint32_t, to_float(scores_[token])), size = bits & 0x7fffffffu;
    if (size > 0x7f800000u) return 0x007fffffu;
    return size == 0 ? 0x80000000u : bits >> 31 != 0 ? ~bits : bits | 0x80000000u;
  }

  // The number that a token goes by; -1 if its page has none.
  QUIRE_HD int32_t name_of(int token) const {
    if (pages_ == nullptr) return token;
    const int index = p_.page.div(token);
    const int64_t page = pages_[index], size = p_.page.divisor, name = page * size + (token - index * size);
    return page < 0 || name > INT32_MAX ? -1 : static_cast<int32_t>(name);
  }

  QUIRE_HD void choose() const {
    const int chosen = min(count_, p_.top_k);
    for (int i = thread() + chosen; i < p_.top_k; i += threads()) tokens_[i] = -1;
    if (count_ <= p_.top_k) {
      for (int i = thread(); i < chosen; i += threads()) tokens_[i] = name_of(i);
      return;
    }
    uint32_t least = 0;
    int left = p_.top_k;  // tokens to choose among those that agree with `least` in the bytes found
    for (int shift = 24; shift >= 0; shift -= 8) count_bytes(least, shift), find_byte(least, left, shift);
    write(least, left);
  }

#ifdef __CUDA_ARCH__
  QUIRE_HD static int thread() { return threadIdx.x; }
  QUIRE_HD static int threads() { return kThreads; }
  QUIRE_HD static int lane() { return threadIdx.x % 32; }
  QUIRE_HD static int warp() { return threadIdx.x / 32; }

  QUIRE_HD void count_bytes(uint32_t least, int shift) const {
    __syncthreads();
    for (int i = threadIdx.x; i < kValues * 32; i += kThreads) counts_[i] = 0;
    __syncthreads();
    const uint32_t found = shift == 24 ? 0u : 0xffffffffu << (shift + 8);
#pragma unroll 8
    for (int i = threadIdx.x; i < count_; i += kThreads) {
      const uint32_t x = key(i);
      if ((x & found) == least) atomicAdd(counts_ + (x >> shift & 0xff) * 32 + lane(), 1u);
    }
    __syncthreads();
  }

  // The largest byte such that it and larger ones have at least `left` tokens.
  QUIRE_HD void find_byte(uint32_t& least, int& left, int shift) const {
    uint32_t own = 0;  // tokens with the byte of this thread
#pragma unroll
    for (int i = 0; i < 32; ++i) own += counts_[threadIdx.x * 32 + (i + lane()) % 32];
    __syncthreads();
    counts_[threadIdx.x] = own;
    __syncthreads();
    // Tokens with larger bytes: those of this warp's, and of the warps behind.
    uint32_t above = 0;
    for (int i = (warp() + 1) * 32 + lane(); i < kValues; i += 32) above += counts_[i];
#pragma unroll
    for (int step = 16; step > 0; step /= 2) above += __shfl_xor_sync(0xffffffffu, above, step);
    uint32_t sum = own;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const uint32_t next = __shfl_down_sync(0xffffffffu, sum, step);
      if (lane() + step < 32) sum += next;
    }
    above += sum - own;
    uint32_t* told = counts_ + kValues * 32;
    if (above < static_cast<uint32_t>(left) && above + own >= static_cast<uint32_t>(left)) {
      told[0] = threadIdx.x, told[1] = left - above;
    }
    __syncthreads();
    least |= told[0] << shift, left = told[1];
  }

  // Writes the tokens above `least`, and the first `ties` of those that are equal to it.
  QUIRE_HD void write(uint32_t least, int ties) const {
    const int size = static_cast<int>(round_up(ceil_div(count_, kWarps), 32));
    const int begin = min(count_, warp() * size), end = min(count_, begin + size);
    uint32_t above = 0, equal = 0;
#pragma unroll 8
    for (int i = begin + lane(); i < end; i += 32) {
      const uint32_t x = key(i);
      above += x > least, equal += x == least;
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
      above += __shfl_xor_sync(0xffffffffu, above, step), equal += __shfl_xor_sync(0xffffffffu, equal, step);
    }
    uint32_t* of_warps = counts_ + kValues * 32 + 4;
    if (lane() == 0) of_warps[warp() * 2] = above, of_warps[warp() * 2 + 1] = equal;
    __syncthreads();
    int at = 0, equal_before = 0;
    for (int i = 0; i < warp(); ++i) at += of_warps[i * 2], equal_before += of_warps[i * 2 + 1];
    at += min(equal_before, ties);
    const uint32_t earlier = (1u << lane()) - 1;
#pragma unroll 4
    for (int first = begin; first < end; first += 32) {
      const int token = first + lane();
      const uint32_t x = token < end ? key(token) : 0u;
      const bool is_above = token < end && x > least, is_equal = token < end && x == least;
      const uint32_t equals = __ballot_sync(0xffffffffu, is_equal);
      const bool is_chosen = is_above || (is_equal && equal_before + __popc(equals & earlier) < ties);
      const uint32_t chosen = __ballot_sync(0xffffffffu, is_chosen);
      if (is_chosen) tokens_[at + __popc(chosen & earlier)] = name_of(token);
      at += __popc(chosen), equal_before += __popc(equals);
    }
  }
#else
  QUIRE_HD static int thread() { return 0; }
  QUIRE_HD static int threads() { return 1; }

  QUIRE_HD void count_bytes(uint32_t least, int shift) const {
    for (int i = 0; i < kValues; ++i) counts_[i] = 0;
    const uint32_t found = shift == 24 ? 0u : 0xffffffffu << (shift + 8);
    for (int i = 0; i < count_; ++i) {
      const uint32_t x = key(i);
      if ((x & found) == least) ++counts_[x >> shift & 0xff];
    }
  }

  QUIRE_HD void find_byte(uint32_t& least, int& left, int shift) const {
    int byte = kValues - 1;
    for (; static_cast<int>(counts_[byte]) < left; --byte) left -= static_cast<int>(counts_[byte]);
    least |= static_cast<uint32_t>(byte) << shift;
  }

  QUIRE_HD void write(uint32_t least, int ties) const {
    int32_t* to = tokens_;
    for (int i = 0; i < count_; ++i) {
      const uint32_t x = key(i);
      if (x > least || (x == least && ties-- > 0)) *to++ = name_of(i);
    }
  }
#endif
};

}  // namespace quire
