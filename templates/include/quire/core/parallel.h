// Loops over independent items, for host and device: on the threads of a grid, or on OpenMP threads.
#pragma once
#include "quire/core/types.h"

namespace quire {

constexpr int kParallelThreads = 256;

// CTAs of kParallelThreads threads that an SM holds at once.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ == 800 || __CUDA_ARCH__ == 900 || \
    (__CUDA_ARCH__ >= 1000 && __CUDA_ARCH__ < 1200)
constexpr int kParallelCtas = 2048 / kParallelThreads;
#else
constexpr int kParallelCtas = (__CUDA_ARCH__ == 750 ? 1024 : 1536) / kParallelThreads;
#endif

// Calls body(row, column) for each row in [0, rows) and column in [0, columns). On a GPU each thread does one item,
// because the registers of a loop would reduce the number of threads in flight. A CTA works on as many whole rows as it
// has threads for, or on a part of one row (row_grid() in engine/launch.py). The divisions are of CTA and thread
// numbers, in 32 bits: two 64-bit divisions an item would cost more than a merge does.
template <class Body>
QUIRE_HD void parallel_rows(int64_t rows, int columns, Body&& body) {
#ifdef __CUDA_ARCH__
  if (columns < kParallelThreads) {
    const unsigned rows_at_once = kParallelThreads / columns, row_of_thread = threadIdx.x / columns;
    const int64_t row = static_cast<int64_t>(blockIdx.x) * rows_at_once + row_of_thread;
    if (row_of_thread < rows_at_once && row < rows) body(row, static_cast<int>(threadIdx.x - row_of_thread * columns));
  } else {
    const unsigned parts = ceil_div(columns, kParallelThreads), row = blockIdx.x / parts;
    const int column = (blockIdx.x - row * parts) * kParallelThreads + threadIdx.x;
    if (column < columns) body(static_cast<int64_t>(row), column);
  }
#else
#pragma omp parallel for schedule(static)
  for (int64_t row = 0; row < rows; ++row) {
    for (int column = 0; column < columns; ++column) body(row, column);
  }
#endif
}

#ifdef __CUDACC__
// The item of a thread, for kernels whose threads share data of a row. Items are dealt out in order, so that a CTA may
// begin and end within a row. Its rows begin at cta_row.
struct ItemOfThread {
  int64_t row, cta_row;
  int column, cta_rows;
  bool exists;

  QUIRE_DEVICE ItemOfThread(int64_t rows, int columns) {
    const int64_t begin = static_cast<int64_t>(blockIdx.x) * kParallelThreads;
    cta_row = begin < 1ll << 32 ? static_cast<uint32_t>(begin) / static_cast<uint32_t>(columns) : begin / columns;
    const unsigned first = static_cast<unsigned>(begin - cta_row * columns), at = first + threadIdx.x;
    const unsigned down = at / static_cast<unsigned>(columns);
    row = cta_row + down, column = static_cast<int>(at - down * columns), exists = row < rows;
    if (!exists) row = rows - 1;
    const unsigned last = (first + kParallelThreads - 1) / static_cast<unsigned>(columns);
    cta_rows = static_cast<int>(min<int64_t>(last + 1, rows - cta_row));
  }
};
#endif

// The last i of [low, high] with begins[i] <= at, which `low` has.
template <class T>
QUIRE_HD int last_begin(const T* begins, T at, int low, int high) {
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (begins[middle] <= at) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

// Calls body(begin, end, lane, lanes) for each run of `size` items of [0, n). Lane l of a run does items begin + l,
// begin + l + lanes, ...
template <class Body>
QUIRE_HD void parallel_chunks(int64_t n, int size, Body&& body) {
#ifdef __CUDA_ARCH__
  const int64_t begin = static_cast<int64_t>(blockIdx.x) * size;
  body(begin, min<int64_t>(n, begin + size), static_cast<int>(threadIdx.x), kParallelThreads);
#else
#pragma omp parallel for schedule(static)
  for (int64_t begin = 0; begin < n; begin += size) body(begin, min<int64_t>(n, begin + size), 0, 1);
#endif
}

}  // namespace quire
