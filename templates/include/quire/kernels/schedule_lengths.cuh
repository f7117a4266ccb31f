// Schedules on the device, from lengths that the host does not know: keys in pages or ragged, and equally many query
// rows in each request or as many as offsets say. One CTA schedules, in a few microseconds; further ones fill rows of
// the results that belong to no request. It may be captured in a CUDA graph whose lengths change.
//
// Lengths that cannot be (negative, descending, beyond the tensors) are cut off at what the tensors hold.
#pragma once
#include "quire/core/parallel.h"
#include "quire/core/schedule.h"
#include "quire/ptx/barrier.cuh"

namespace quire {

struct ScheduleLengthsParams {
  const int32_t* kv_lens;    // [batch_size] tokens of requests; null: as kv_indptr says
  const int32_t* qo_indptr;  // [batch_size + 1] offsets of requests in q; null: qo_len rows each
  const int32_t* kv_indptr;  // [batch_size + 1] cumulative lengths, offsets in k if is_ragged; null: max_kv_len each
  RowTile* tiles;            // [max_tiles]
  int32_t* first_tiles;      // [batch_size + 1] with qo_indptr: the number of each request's first row tile
  Partition* partitions;     // [max_ctas]
  MergeGroup* groups;        // [max_ctas]
  uint32_t* tile_counter;
  uint4* o;    // [num_rows, row_vectors] contiguous: rows that no request has become 0; or null
  float* lse;  // [num_rows, num_qo_heads] contiguous: such rows become -inf; or null
  int32_t batch_size;
  int32_t qo_len;
  int32_t max_kv_len;         // longer requests end there: there are no pages or rows beyond
  int32_t pages_per_request;  // entries of kv_indices from one request's first to the next one's
  int32_t num_kv_heads;
  int32_t group_size;
  int32_t tile_rows;
  int32_t tile_kv;
  int32_t mask_mode;
  int32_t window_left;
  int32_t start_cost;  // of a work tile, in sixteenths of a unit; see WorkSequence
  int32_t max_ctas;
  int32_t num_rows;     // of q
  int32_t max_tiles;    // as many as any lengths give
  int32_t is_ragged;    // keys have no pages
  int32_t l2_tokens;    // of one KV head that should be in the L2 at a time; 0: the kernel has no tile counter
  int32_t row_vectors;  // 16-byte vectors of a row of o
  int32_t may_divide;   // 0: a row tile belongs to one partition
};

template <class Variant>
struct ScheduleLengths {
  static constexpr int kThreads = kParallelThreads, kMinCtas = 1, kSmemBytes = 0;

  QUIRE_DEVICE static void run(const ScheduleLengthsParams& p, unsigned char*) {
    ptx::wait_for_predecessor();
    ptx::launch_dependents();
    if (blockIdx.x > 0) return fill_rows_without_request(p);
    const int num_tiles = p.qo_indptr == nullptr ? p.batch_size * tiles_of(p, p.qo_len) : number_tiles(p);
    const Sizes sizes = measure(p, num_tiles);
    if (takes_whole_tiles(p, sizes)) {
      write_longest_first(p, sizes);
      write_counted_partitions(p, sizes);
    } else {
      write_in_order(p, num_tiles);
      write_partitions(p, sizes);
    }
    if (threadIdx.x == 0) *p.tile_counter = 0;
  }

 private:
  struct Sizes {
    int num_tiles;
    int units;    // work units of one KV head
    int longest;  // units of a row tile
  };

  QUIRE_DEVICE static int tiles_of(const ScheduleLengthsParams& p, int qo_len) {
    return ceil_div(qo_len * p.group_size, p.tile_rows);
  }

  // --- requests ---

  QUIRE_DEVICE static int offset(const int32_t* indptr, int i, int most) { return max(0, min(indptr[i], most)); }

  QUIRE_DEVICE static int qo_length(const ScheduleLengthsParams& p, int request) {
    if (p.qo_indptr == nullptr) return p.qo_len;
    return max(0, offset(p.qo_indptr, request + 1, p.num_rows) - offset(p.qo_indptr, request, p.num_rows));
  }

  // Numbers the row tiles of all requests; returns how many there are.
  QUIRE_DEVICE static int number_tiles(const ScheduleLengthsParams& p) {
    int before = 0;
    for (int first = 0; first < p.batch_size; first += kThreads) {
      const int i = first + static_cast<int>(threadIdx.x);
      int total;
      const int at = before + sum_before(i < p.batch_size ? tiles_of(p, qo_length(p, i)) : 0, total);
      if (i < p.batch_size) p.first_tiles[i] = min(at, p.max_tiles);
      before += total;
    }
    before = min(before, p.max_tiles);
    if (threadIdx.x == 0) p.first_tiles[p.batch_size] = before;
    __syncthreads();
    return before;
  }

  // The last request whose first row tile is `tile` or an earlier one: those before it that begin there have no rows.
  QUIRE_DEVICE static int request_of(const ScheduleLengthsParams& p, int tile) {
    return last_begin(p.first_tiles, tile, 0, p.batch_size - 1);
  }

  // --- row tiles ---

  QUIRE_DEVICE static RowTile make_tile(const ScheduleLengthsParams& p, int number) {
    RowTile tile = {};
    tile.partial = tile.group = -1, tile.num_parts = 1;
    if (p.qo_indptr == nullptr) {
      const int per_request = tiles_of(p, p.qo_len);
      tile.request = number / per_request, tile.row_begin = number % per_request * p.tile_rows;
      tile.qo_begin = tile.request * p.qo_len, tile.qo_len = p.qo_len;
    } else {
      tile.request = request_of(p, number), tile.row_begin = (number - p.first_tiles[tile.request]) * p.tile_rows;
      tile.qo_begin = offset(p.qo_indptr, tile.request, p.num_rows), tile.qo_len = qo_length(p, tile.request);
    }
    set_keys(p, tile);
    set_kv_range(p, tile);
    return tile;
  }

  QUIRE_DEVICE static void set_keys(const ScheduleLengthsParams& p, RowTile& tile) {
    const int request = tile.request;
    tile.kv_first = request * p.pages_per_request, tile.kv_len = p.max_kv_len;
    int most = p.max_kv_len;
    if (p.kv_indptr != nullptr) {
      const int begin = p.kv_indptr[request], end = p.kv_indptr[request + 1];
      tile.kv_len = end > begin ? static_cast<int>(min<int64_t>(static_cast<int64_t>(end) - begin, most)) : 0;
      if (p.is_ragged) tile.kv_first = max(0, min(begin, most)), most -= tile.kv_first;
    }
    if (p.kv_lens != nullptr) tile.kv_len = p.kv_lens[request];
    tile.kv_len = max(0, min(tile.kv_len, most));
  }

  QUIRE_DEVICE static Sizes measure(const ScheduleLengthsParams& p, int num_tiles) {
    __shared__ int longest;
    if (threadIdx.x == 0) longest = 0;
    int units = 0, most = 0, total;
    for (int i = static_cast<int>(threadIdx.x); i < num_tiles; i += kThreads) {
      const int size = tile_units(make_tile(p, i));
      units += size, most = max(most, size);
    }
    sum_before(units, total);  // with a barrier
    if (p.l2_tokens > 0) {
      atomicMax(&longest, most);
      __syncthreads();
    }
    return {num_tiles, total, longest};
  }

  // Whether CTAs take whole row tiles from the counter; as ScheduleAttention::whole_tiles_suffice() decides.
  QUIRE_DEVICE static bool takes_whole_tiles(const ScheduleLengthsParams& p, const Sizes& sizes) {
    if (p.l2_tokens == 0 || sizes.num_tiles == 0) return false;
    if (p.may_divide == 0) return true;
    if (sizes.units <= sizes.num_tiles * max(1, min(p.start_cost, kMostShort))) return true;
    const int64_t all = static_cast<int64_t>(sizes.units) * p.num_kv_heads,
                  wave = static_cast<int64_t>(sizes.longest) * p.max_ctas;
    return 4 * wave <= all || 100 * ceil_div(all, wave) * wave <= 107 * all;
  }

  QUIRE_DEVICE static void write_in_order(const ScheduleLengthsParams& p, int num_tiles) {
    int work = 0;
    for (int first = 0; first < num_tiles; first += kThreads) {
      const int i = first + static_cast<int>(threadIdx.x);
      RowTile tile = {};
      if (i < num_tiles) tile = make_tile(p, i);
      int total;
      tile.work_begin = work + sum_before(i < num_tiles ? tile_units(tile) : 0, total);
      if (i < num_tiles) p.tiles[i] = tile;
      work += total;
    }
    __syncthreads();  // the row tiles are read again below
  }

  // A counting sort by units, descending. Within a bucket row tiles stay near their neighbours, with which they share
  // keys in the L2.
  QUIRE_DEVICE static void write_longest_first(const ScheduleLengthsParams& p, const Sizes& sizes) {
    __shared__ int places[kThreads];
    const int thread = static_cast<int>(threadIdx.x);
    const auto bucket = [&](const RowTile& tile) {
      return static_cast<int>(static_cast<int64_t>(sizes.longest - tile_units(tile)) * (kThreads - 1) / sizes.longest);
    };
    places[thread] = 0;
    __syncthreads();
    for (int i = thread; i < sizes.num_tiles; i += kThreads) atomicAdd(&places[bucket(make_tile(p, i))], 1);
    __syncthreads();
    int total;
    const int place = sum_before(places[thread], total);
    places[thread] = place;
    __syncthreads();
    for (int first = 0; first < sizes.num_tiles; first += kThreads) {
      if (first + thread < sizes.num_tiles) {
        const RowTile tile = make_tile(p, first + thread);
        p.tiles[atomicAdd(&places[bucket(tile)], 1)] = tile;
      }
      __syncthreads();
    }
  }

  // --- partitions ---

  // Partitions without units: CTAs take row tiles from the counter.
  QUIRE_DEVICE static void write_counted_partitions(const ScheduleLengthsParams& p, const Sizes& sizes) {
    const int heads = heads_per_l2_group(p);
    for (int i = static_cast<int>(threadIdx.x); i < p.max_ctas; i += kThreads) {
      p.partitions[i] = {0, 0, 0, 0, 0, {0}, sizes.num_tiles, {heads}};
    }
  }

  QUIRE_DEVICE static int heads_per_l2_group(const ScheduleLengthsParams& p) {
    int blocks = 0, total;  // of 16 tokens, whose sum fits 32 bits
    for (int b = static_cast<int>(threadIdx.x); b < p.batch_size; b += kThreads) {
      RowTile tile = {};
      tile.request = b;
      set_keys(p, tile);
      blocks += tile.kv_len / 16;
    }
    sum_before(blocks, total);
    for (int heads = p.num_kv_heads; heads > 1; --heads) {
      if (p.num_kv_heads % heads == 0 && 16 * static_cast<int64_t>(heads) * total <= p.l2_tokens) return heads;
    }
    return 1;
  }

  // A thread a partition. Partials and groups are counted in one sum, groups in the upper half.
  QUIRE_DEVICE static void write_partitions(const ScheduleLengthsParams& p, const Sizes& sizes) {
    const WorkSequence sequence = WorkSequence::of(p.tiles, sizes.num_tiles, p.num_kv_heads, sizes.units, p.start_cost,
                                                   p.may_divide != 0, p.max_ctas);
    int counted = 0;
    for (int first = 0; first < p.max_ctas; first += kThreads) {
      const int i = first + static_cast<int>(threadIdx.x);
      const WorkPosition begin = sequence.begin_of_partition(i), end = sequence.begin_of_partition(i + 1);
      const PartialsOfPartition adds(begin, end);
      int total;
      const int before = counted + sum_before(adds.count() + (adds.begins << 16), total);
      counted += total;
      if (i >= p.max_ctas) continue;
      const Partition partition = sequence.between(begin, end, before & 0xffff, before >> 16);
      p.partitions[i] = partition;
      adds.write(sequence, partition, end, p.tile_rows, p.group_size, p.groups);
    }
  }

  // --- rows of the results without a request ---

  QUIRE_DEVICE static void fill_rows_without_request(const ScheduleLengthsParams& p) {
    const int64_t begin = offset(p.qo_indptr, p.batch_size, p.num_rows), rows = p.num_rows - begin;
    const int64_t step = static_cast<int64_t>(gridDim.x - 1) * kThreads,
                  first = static_cast<int64_t>(blockIdx.x - 1) * kThreads + threadIdx.x;
    for (int64_t i = first; p.o != nullptr && i < rows * p.row_vectors; i += step) {
      p.o[begin * p.row_vectors + i] = make_uint4(0, 0, 0, 0);
    }
    const int num_qo_heads = p.num_kv_heads * p.group_size;
    for (int64_t i = first; p.lse != nullptr && i < rows * num_qo_heads; i += step) {
      p.lse[begin * num_qo_heads + i] = __int_as_float(0xff800000);
    }
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

  static constexpr int kMostShort = 24;  // units of a short row tile, as in ScheduleAttention
};

}  // namespace quire
