// Schedules on the device, from lengths that the host does not know: equally many query rows in each request, keys in
// pages. It runs in one CTA and takes a few microseconds. It may be captured in a CUDA graph whose lengths change. Work
// is always divided into partitions.
#pragma once
#include "quire/core/parallel.h"
#include "quire/core/schedule.h"
#include "quire/ptx/grid.cuh"

namespace quire {

struct ScheduleLengthsParams {
  const int32_t* kv_lens;  // [batch_size]; null: max_kv_len each
  RowTile* tiles;          // [batch_size * row tiles of a request]
  Partition* partitions;   // [max_ctas]
  MergeGroup* groups;      // [max_ctas]
  uint32_t* tile_counter;
  int32_t batch_size;
  int32_t qo_len;
  int32_t max_kv_len;         // longer requests end there: there are no pages beyond
  int32_t pages_per_request;  // entries of kv_indices from one request's first to the next one's
  int32_t num_kv_heads;
  int32_t group_size;
  int32_t tile_rows;
  int32_t tile_kv;
  int32_t mask_mode;
  int32_t window_left;
  int32_t start_cost;  // of a work tile, in sixteenths of a unit; see WorkLine
  int32_t max_ctas;
};

template <class Variant>
struct ScheduleLengths {
  static constexpr int kThreads = kParallelThreads, kMinCtas = 1, kSmemBytes = 0;

  QUIRE_DEVICE static void run(const ScheduleLengthsParams& p, unsigned char*) {
    ptx::wait_for_predecessor();
    ptx::launch_dependents();
    const int work_per_head = write_tiles(p);
    write_partitions(p, work_per_head);
    if (threadIdx.x == 0) *p.tile_counter = 0;
  }

 private:
  QUIRE_DEVICE static int tiles_of_request(const ScheduleLengthsParams& p) {
    return ceil_div(p.qo_len * p.group_size, p.tile_rows);
  }

  // Returns the work units of one KV head.
  QUIRE_DEVICE static int write_tiles(const ScheduleLengthsParams& p) {
    const int per_request = tiles_of_request(p), count = p.batch_size * per_request;
    int work = 0;
    for (int first = 0; first < count; first += kThreads) {
      const int i = first + static_cast<int>(threadIdx.x);
      RowTile tile = {};
      if (i < count) tile = make_tile(p, i / per_request, i % per_request);
      const int units = i < count ? tile_units(tile) : 0;
      int total;
      tile.work_begin = work + sum_before(units, total);
      if (i < count) p.tiles[i] = tile;
      work += total;
    }
    __syncthreads();  // the row tiles are read again below
    return work;
  }

  QUIRE_DEVICE static RowTile make_tile(const ScheduleLengthsParams& p, int request, int tile_of_request) {
    RowTile tile = {};
    tile.request = request, tile.row_begin = tile_of_request * p.tile_rows;
    tile.partial = tile.group = -1, tile.num_parts = 1;
    tile.kv_first = request * p.pages_per_request, tile.kv_len = p.max_kv_len;
    if (p.kv_lens != nullptr) tile.kv_len = max(0, min(p.kv_lens[request], p.max_kv_len));
    tile.qo_begin = request * p.qo_len, tile.qo_len = p.qo_len;
    set_kv_range(p, tile);
    return tile;
  }

  // The sum of `x` over the threads before this one, and over all. Whole CTAs only.
  QUIRE_DEVICE static int sum_before(int x, int& total) {
    constexpr int kWarps = kThreads / 32;
    __shared__ int sums[kWarps];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int sum = x;
#pragma unroll
    for (int i = 1; i < 32; i *= 2) {
      const int other = __shfl_up_sync(0xffffffffu, sum, i);
      if (lane >= i) sum += other;
    }
    __syncthreads();  // the sums of the last round have been read
    if (lane == 31) sums[warp] = sum;
    __syncthreads();
    int before = 0;
    total = 0;
#pragma unroll
    for (int i = 0; i < kWarps; ++i) {
      if (i < warp) before += sums[i];
      total += sums[i];
    }
    return before + sum - x;
  }

  // A thread a partition. Partials and groups are counted in one sum, groups in the upper half.
  QUIRE_DEVICE static void write_partitions(const ScheduleLengthsParams& p, int work_per_head) {
    const WorkLine line = WorkLine::of(p.tiles, p.batch_size * tiles_of_request(p), p.num_kv_heads, work_per_head,
                                       p.start_cost, true, p.max_ctas);
    int counted = 0;
    for (int first = 0; first < p.max_ctas; first += kThreads) {
      const int i = first + static_cast<int>(threadIdx.x);
      const WorkLine::Place begin = line.begin_of(i), end = line.begin_of(i + 1);
      const PartialsOfPartition adds(begin, end);
      int total;
      const int before = counted + sum_before(adds.count() + (adds.begins << 16), total);
      counted += total;
      if (i >= p.max_ctas) continue;
      const Partition partition = line.between(begin, end, before & 0xffff, before >> 16);
      p.partitions[i] = partition;
      adds.write(line, partition, end, p.tile_rows, p.group_size, p.groups);
    }
  }
};

}  // namespace quire
