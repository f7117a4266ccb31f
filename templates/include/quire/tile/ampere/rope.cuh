// Rotates queries and keys that a GPU kernel holds: words of two neighbouring 16-bit dims, in registers or shared
// memory. Products and sums are float32; results are rounded once.
#pragma once
#include "quire/core/convert.h"
#include "quire/core/rope.h"
#include "quire/ptx/math.cuh"
#include "quire/ptx/copy.cuh"
#include "quire/tile/shared/smem.cuh"

namespace quire {

// The frequencies of kCount pairs; the first pair has an even number.
template <int kCount>
struct Frequencies {
  uint64_t at[kCount];

  QUIRE_DEVICE explicit Frequencies(const uint64_t* from) {
#pragma unroll
    for (int i = 0; i < kCount; i += 2) {
      // Not __ldg: the compiler would move that load out of loops over KV tiles, where registers are short.
      asm volatile("ld.global.nc.v2.b64 {%0, %1}, [%2];" : "=l"(at[i]), "=l"(at[i + 1]) : "l"(from + i));
    }
  }
};

// The rotation by an angle, within 2^-20. No integer is converted to float: conversions are as slow as cosines.
QUIRE_DEVICE Rotation fast_rotation(int32_t angle) {
  // 1.5 and the angle in turns: the exponent of 1 before the highest bits of the angle.
  const float turns = __uint_as_float(__funnelshift_r(static_cast<uint32_t>(angle) + 0x80000000u, 0x7f, 9));
  const float radians = (turns - 1.5f) * 6.283185307179586f;
  return {ptx::cos(radians), ptx::sin(radians)};
}

constexpr int kTurnStep = 8;  // tokens

// Rotations of kCount pairs for tokens at distances of kTurnStep. Only the first one takes sine and cosine, of which an
// SM computes few per clock; each other rotation follows from the one before. The error grows by 2^-20 a step.
template <int kCount>
struct Turning {
  Rotation at[kCount], step[kCount];

  QUIRE_DEVICE Turning(const Rotation* first, const Rotation* steps) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) at[i] = first[i], step[i] = steps[i];
  }
  // steps: rotations of kTurnStep tokens in shared memory, from a multiple of two on; null: they are computed.
  QUIRE_DEVICE Turning(int position, const uint64_t* frequencies, const Rotation* steps) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      at[i] = fast_rotation(rope_angle(position, frequencies[i]));
      step[i] = steps == nullptr ? fast_rotation(rope_angle(kTurnStep, frequencies[i])) : steps[i];
    }
  }
  QUIRE_DEVICE void advance() {
#pragma unroll
    for (int i = 0; i < kCount; ++i) rotate(at[i].cos, at[i].sin, step[i]);
  }
};

// Rotations for a lane's first key of a block of keys, in kGroups groups of kCount pairs, kApart apart. They are
// computed from `steps` alone (see Turning).
struct KeyRotations {
  const uint64_t* frequencies;
  const Rotation* steps;

  QUIRE_DEVICE void take(const uint64_t* from, const Rotation* in_shared) { frequencies = from, steps = in_shared; }
  QUIRE_DEVICE void begin(int, int) {}
  template <int kCount>
  QUIRE_DEVICE Turning<kCount> at(int, int pair, int position) const {
    const Frequencies<kCount> f(frequencies + pair);
    return {position, f.at, steps == nullptr ? nullptr : steps + pair};
  }
  template <int kCount>
  QUIRE_DEVICE void end(int, int, const Turning<kCount>&) {}
};

// KeyRotations that are computed from those of the preceding block of keys, kBlockStep earlier, without sine and
// cosine. Every kRenewed keys they are computed anew, so that errors stay small.
template <int kGroups, int kBlockStep>
struct RunningKeyRotations {
  static constexpr int kRenewed = 1024;
  const uint64_t* frequencies;
  const Rotation *steps, *to_next;  // to_next: from a lane's last key of a block to its first one of the next block
  Rotation held[kGroups][2];
  int expected;

  QUIRE_DEVICE void take(const uint64_t* from, const Rotation* in_shared) {
    frequencies = from, steps = in_shared, to_next = in_shared + 8 * kGroups, expected = -1;
  }
  QUIRE_DEVICE void begin(int key, int lane) {
    if (key != expected || key % kRenewed < kBlockStep) {
#pragma unroll
      for (int k = 0; k < kGroups; ++k) {
        const Frequencies<2> f(frequencies + 8 * k + 2 * (lane & 3));
#pragma unroll
        for (int i = 0; i < 2; ++i) held[k][i] = fast_rotation(rope_angle(key + lane / 4, f.at[i]));
      }
    }
    expected = key + kBlockStep;
  }
  template <int kCount>
  QUIRE_DEVICE Turning<kCount> at(int k, int pair, int) const {
    return {held[k], steps + pair};
  }
  template <int kCount>
  QUIRE_DEVICE void end(int k, int pair, const Turning<kCount>& last) {
    Turning<kCount> next(last.at, to_next + pair);
    next.advance();
#pragma unroll
    for (int i = 0; i < kCount; ++i) held[k][i] = next.at[i];
  }
};

// Rotates two dims and the two dims that they are paired with.
template <class T>
QUIRE_DEVICE void rotate_words(uint32_t& first, uint32_t& second, const Rotation* by) {
  float x[2], y[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    x[i] = to_float(T{static_cast<uint16_t>(first >> 16 * i)}),
    y[i] = to_float(T{static_cast<uint16_t>(second >> 16 * i)});
    rotate(x[i], y[i], by[i]);
  }
  first = ptx::pack(T{}, x[0], x[1]), second = ptx::pack(T{}, y[0], y[1]);
}

// Rotates them for a position; `at`: the frequencies of both pairs.
template <class T>
QUIRE_DEVICE void rotate_words(uint32_t& first, uint32_t& second, int position, const uint64_t* at) {
  const Rotation by[2] = {fast_rotation(rope_angle(position, at[0])), fast_rotation(rope_angle(position, at[1]))};
  rotate_words<T>(first, second, by);
}

// Rotates all rows of a tile of 16-bit numbers in place, with kThreads threads. position_of(row) gives a row's
// position.
template <class T, int kThreads, class Tile, class PositionOf>
QUIRE_DEVICE void rotate_tile(Tile tile, const uint64_t* frequencies, int thread, PositionOf&& position_of) {
  constexpr int kPairs = Tile::kCols / 16;  // of chunks, eight dims each
  using Split = RowSplit<kThreads, kPairs>;
  const Split split(thread);
#pragma unroll 1
  for (int c = split.lane; c < kPairs; c += Split::kLanes) {
    const Frequencies<8> at(frequencies + 8 * c);
#pragma unroll 1
    for (int row = split.row; row < Tile::kRows; row += Split::kRowsAtOnce) {
      uint32_t first[4], second[4];
      ptx::ld_shared_16(tile.chunk(row, c), first);
      ptx::ld_shared_16(tile.chunk(row, c + kPairs), second);
#pragma unroll
      for (int i = 0; i < 4; ++i) rotate_words<T>(first[i], second[i], position_of(row), at.at + 2 * i);
      ptx::st_shared_16(tile.chunk(row, c), first);
      ptx::st_shared_16(tile.chunk(row, c + kPairs), second);
    }
  }
}

}  // namespace quire
