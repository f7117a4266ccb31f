// Packs booleans into bits, eight to a byte, each segment from a byte of its own on. One item is one output byte.
#pragma once
#include "quire/core/parallel.h"

namespace quire {

struct PackbitsParams {
  const uint8_t* x;              // [n] bytes, 0 or not
  uint8_t* y;                    // [bytes]
  const int64_t* segment_begin;  // [num_segments + 1] first element of each segment
  const int64_t* byte_begin;     // [num_segments + 1] first byte of each segment
  int64_t num_bytes;
  int32_t num_segments;
  int32_t little;  // bit 0 is the first element, else the last
};

template <class Variant>
struct Packbits {
  static constexpr int kThreads = kParallelThreads, kMinCtas = 1, kSmemBytes = 0;

  QUIRE_HD static int run(const PackbitsParams& p, unsigned char* = nullptr) {
    parallel_for(p.num_bytes, [&](int64_t i) { pack(p, i); });
    return 0;
  }

 private:
  // The segment that byte i lies in: the last one that begins at or before it and is not empty.
  QUIRE_HD static int segment_of(const PackbitsParams& p, int64_t i) {
    int low = 0, high = p.num_segments;
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      (p.byte_begin[middle] <= i ? low : high) = middle;
    }
    return low;
  }

  QUIRE_HD static void pack(const PackbitsParams& p, int64_t i) {
    const int segment = segment_of(p, i);
    const int64_t first = p.segment_begin[segment] + 8 * (i - p.byte_begin[segment]);
    const int64_t left = p.segment_begin[segment + 1] - first;
    const int count = left < 8 ? static_cast<int>(left) : 8;
    uint32_t byte = 0;
    for (int j = 0; j < count; ++j) byte |= static_cast<uint32_t>(p.x[first + j] != 0) << (p.little ? j : 7 - j);
    p.y[i] = static_cast<uint8_t>(byte);
  }
};

}  // namespace quire
