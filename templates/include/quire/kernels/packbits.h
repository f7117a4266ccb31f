// Packs booleans into bits, eight per byte. Each segment begins with a new byte. An item is two output bytes, made from
// sixteen booleans. A thread reads the booleans as aligned words, and shifts these if the booleans begin inside a word.
// The segments of a chunk of items are searched for once.
#pragma once
#ifndef __CUDACC__
#pragma GCC optimize("O3")  // a third faster than with the toolchain's -O2
#endif
#include "quire/core/parallel.h"

namespace quire {

struct PackbitsParams {
  const uint8_t* x;              // [n] bytes, 0 or not
  uint8_t* y;                    // [bytes]
  const int64_t* segment_begin;  // [num_segments + 1] first element of each segment; null: x is one segment
  const int64_t* byte_begin;     // [num_segments + 1] first byte of each segment
  int64_t n;
  int64_t num_bytes;
  int32_t num_segments;
  int32_t little;  // 1: bit 0 of a byte is its first element; 0: its last
};

template <class Variant>
struct Packbits {
  static constexpr int kThreads = kParallelThreads, kMinCtas = min(6, kParallelCtas), kSmemBytes = 0;
  static constexpr int kItems = 2;  // items that a thread loads before it stores the first
  static constexpr int kChunk = kThreads * kItems;

  QUIRE_HD static int run(const PackbitsParams& p, unsigned char* = nullptr) {
    const int64_t items = ceil_div(p.num_bytes, int64_t{2});
    parallel_chunks(items, kChunk, [&](int64_t begin, int64_t end, int lane, int lanes) {
      const int first = segment_of(p, 2 * begin, 0, p.num_segments - 1);
      const int last = segment_of(p, 2 * end - 1, first, p.num_segments - 1);
      for (int64_t i = begin + lane; i < end; i += kItems * lanes) {
        Bools x[kItems];
#pragma unroll
        for (int j = 0; j < kItems; ++j) {
          if (i + j * lanes < end) x[j] = read(p, 2 * (i + j * lanes), first, last);
        }
#pragma unroll
        for (int j = 0; j < kItems; ++j) {
          if (i + j * lanes < end) write(p, 2 * (i + j * lanes), x[j]);
        }
      }
    });
    return 0;
  }

 private:
  // Sixteen booleans, for two output bytes; the first is the lowest byte. Beyond the end of a segment they are 0.
  struct alignas(16) Bools {
    uint64_t eight[2];
  };

  // The segment of [low, high] that holds output byte i: the last one that begins at or before i and is not empty.
  QUIRE_HD static int segment_of(const PackbitsParams& p, int64_t i, int low, int high) {
    return last_begin(p.byte_begin, i, low, high);
  }

  QUIRE_HD static Bools read(const PackbitsParams& p, int64_t byte, int first, int last) {
    int64_t begin = 8 * byte, end = p.n;
    if (p.segment_begin != nullptr) {
      const int segment = segment_of(p, byte, first, last);
      begin = p.segment_begin[segment] + 8 * (byte - p.byte_begin[segment]), end = p.segment_begin[segment + 1];
      if (end - begin <= 8 && byte + 1 < p.num_bytes) {  // the second byte is the next segment's
        const int next = segment_of(p, byte + 1, segment, last);
        return {{read_eight(p, begin, end), read_eight(p, p.segment_begin[next], p.segment_begin[next + 1])}};
      }
    }
    if (end - begin >= 16 && has_aligned_words(p, begin)) return read_words(p, begin);
    return {{read_eight(p, begin, end), read_eight(p, begin + 8, end)}};
  }

  // The first eight booleans of [begin, end), read one by one.
  QUIRE_HD static uint64_t read_eight(const PackbitsParams& p, int64_t begin, int64_t end) {
    uint64_t eight = 0;
    for (int j = 0; j < 8 && begin + j < end; ++j) eight |= static_cast<uint64_t>(p.x[begin + j]) << (8 * j);
    return eight;
  }

  // Whether the aligned words that hold x[begin, begin + 16) hold nothing outside x.
  QUIRE_HD static bool has_aligned_words(const PackbitsParams& p, int64_t begin) {
#ifdef __CUDA_ARCH__
    const int64_t before = static_cast<int64_t>(reinterpret_cast<uintptr_t>(p.x + begin) % 8);
    return before == 0 || (before <= begin && begin - before + 24 <= p.n);
#else
    return true;
#endif
  }

  QUIRE_HD static Bools read_words(const PackbitsParams& p, int64_t begin) {
    Bools x;
#ifdef __CUDA_ARCH__
    const uint8_t* from = p.x + begin;
    const int before = static_cast<int>(reinterpret_cast<uintptr_t>(from) % 16), shift = 8 * (before % 8);
    if (before == 0) return *reinterpret_cast<const Bools*>(from);
    const uint64_t* word = reinterpret_cast<const uint64_t*>(from - before % 8);
    x.eight[0] = word[0], x.eight[1] = word[1];
    if (shift != 0) {
      x.eight[0] = x.eight[0] >> shift | x.eight[1] << (64 - shift);
      x.eight[1] = x.eight[1] >> shift | word[2] << (64 - shift);
    }
#else
    __builtin_memcpy(&x, p.x + begin, sizeof x);
#endif
    return x;
  }

  QUIRE_HD static void write(const PackbitsParams& p, int64_t byte, const Bools& x) {
    const uint32_t low = pack_eight(p, x.eight[0]), high = pack_eight(p, x.eight[1]);
    if (byte + 1 < p.num_bytes) {
      *reinterpret_cast<uint16_t*>(p.y + byte) = static_cast<uint16_t>(low | high << 8);
    } else {
      p.y[byte] = static_cast<uint8_t>(low);
    }
  }

  QUIRE_HD static uint32_t pack_eight(const PackbitsParams& p, uint64_t eight) {
    const uint32_t low = pack_four(p, static_cast<uint32_t>(eight)),
                   high = pack_four(p, static_cast<uint32_t>(eight >> 32));
    return p.little ? low | high << 4 : low << 4 | high;
  }

  // The highest bit of each byte becomes 1 if the byte is not 0. A multiplication gathers the four bits.
  QUIRE_HD static uint32_t pack_four(const PackbitsParams& p, uint32_t x) {
    const uint32_t set = ((((x & 0x7f7f7f7fu) + 0x7f7f7f7fu) | x) & 0x80808080u) >> 7;
    return (set * (p.little ? 0x10204080u : 0x80402010u)) >> 28 & 15;
  }
};

}  // namespace quire
