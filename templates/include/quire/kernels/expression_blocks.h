// Makes the block mask of a mask expression (core/expression.h) in plan(): which KV tiles a row tile sees in full, in
// part or not at all. Kernels then skip empty tiles, and evaluate the expression only in partial tiles. A tile counts
// as full or empty only if it is so for all query heads of the block mask, which is that of a KV head or of all.
#pragma once
#ifdef __CUDACC__
#include "quire/ptx/barrier.cuh"
#include "quire/tile/shared/expression.cuh"
#include "quire/tile/shared/tile_order.cuh"
#else
#include "quire/tile/cpu/expression.h"
#endif
#include "quire/core/mask.h"
#include "quire/core/parallel.h"

namespace quire {

struct ExpressionBlocksParams {
  RowTile*
      tiles;  // [num_tiles], in any order; sorted in the end if there is scratch memory (tile/shared/tile_order.cuh)
  void* scratch;
  uint32_t* arrivals;
  int32_t num_tiles;  // a divisor of the grid
  int32_t tile_rows;
  int32_t tile_kv;
  int32_t group_size;
  int32_t mask_mode;
  int32_t window_left;
  int32_t num_masks;     // block masks, one for each KV head or one for all, Operands::block_mask_stride bytes apart
  int32_t mask_heads;    // query heads of a block mask
  int32_t tested_heads;  // of them, from the first on: 1 if the expression does not differ between them
};

// What the queries of a row tile see of one KV tile.
struct BlockSeen {
  bool is_visible, is_full;

  QUIRE_HD void add(const BlockSeen& other) { is_visible |= other.is_visible, is_full &= other.is_full; }
};

template <class Variant>
struct BuildExpressionBlocks {
  static constexpr int kThreads = kParallelThreads, kMinCtas = 4, kSmemBytes = 0;
  using Params = ExpressionBlocksParams;
  using Operands = typename Variant::Operands;

  QUIRE_HD static const Operands& operands(const Params& p) {
    return *reinterpret_cast<const Operands*>(reinterpret_cast<const unsigned char*>(&p) + Variant::kOperandsAt);
  }
  QUIRE_HD static void store(const Params& p, const RowTile& tile, int mask, int kv, const BlockSeen& seen) {
    const int found = seen.is_visible * kBlockVisible | seen.is_full * kBlockFull;
    uint8_t* to = const_cast<uint8_t*>(operands(p).block_mask);
    if constexpr (Variant::kMaskHeads != 0) to += mask * operands(p).block_mask_stride;
    to[tile.work_begin + kv - tile.kv_begin] = static_cast<uint8_t>(found);
  }

  // The queries of a row tile.
  QUIRE_HD static int first_query(const Params& p, const RowTile& tile) { return tile.row_begin / p.group_size; }
  QUIRE_HD static int last_query(const Params& p, const RowTile& tile) {
    return (min(tile.row_begin + p.tile_rows, tile.qo_len * p.group_size) - 1) / p.group_size;
  }

#ifdef __CUDACC__
  // CTA i has row tile i % num_tiles; a warp has one KV tile and block mask of it at a time, a lane every 32nd key.
  QUIRE_DEVICE static void run(const Params& p, unsigned char*) {
    ptx::wait_for_predecessor();
    const int parts = static_cast<int>(gridDim.x) / p.num_tiles, part = static_cast<int>(blockIdx.x) / p.num_tiles;
    const int warp = part * (kThreads / 32) + static_cast<int>(threadIdx.x) / 32;
    const RowTile tile = p.tiles[static_cast<int>(blockIdx.x) - part * p.num_tiles];
    uint32_t cost = 0;
    const int size = tile.kv_end - tile.kv_begin;
    for (int i = warp; i < size * p.num_masks; i += parts * (kThreads / 32)) {
      const int mask = i / size, kv = tile.kv_begin + i - mask * size;
      const BlockSeen seen = classify(p, tile, mask, kv, static_cast<int>(threadIdx.x) % 32);
      if (threadIdx.x % 32 != 0) continue;
      store(p, tile, mask, kv, seen);
      if (seen.is_visible) cost += seen.is_full ? TileOrder::kFullCost : TileOrder::kMaskedCost;
    }
    TileOrder(p.tiles, p.num_tiles, p.scratch, p.arrivals).sort_after(cost);
  }

  struct Place {
    const RowTile& tile;
    int query, key, query_head;

    QUIRE_DEVICE int q_idx() const { return query; }
    QUIRE_DEVICE int kv_idx() const { return key; }
    QUIRE_DEVICE int head() const { return query_head; }
    QUIRE_DEVICE int request() const { return tile.request; }
    QUIRE_DEVICE int qo_len() const { return tile.qo_len; }
    QUIRE_DEVICE int kv_len() const { return tile.kv_len; }
  };

  QUIRE_DEVICE static BlockSeen classify(const Params& p, const RowTile& tile, int mask, int kv, int lane) {
    const int last = last_query(p, tile), end = (kv + 1) * p.tile_kv, first_head = mask * p.mask_heads;
    BlockSeen seen = {false, end <= tile.kv_len};
    for (int query = first_query(p, tile); query <= last; ++query) {
      const KeyRange keys = visible_from(p.mask_mode, p.window_left, tile.kv_len, query + tile.kv_len - tile.qo_len);
      for (int head = first_head; head < first_head + p.tested_heads; ++head) {
        for (int key = kv * p.tile_kv + lane; key < end; key += 32) {
          const bool sees =
              keys.contains(key) && Variant::template mask<ExpressionMath>(operands(p), Place{tile, query, key, head});
          seen.add({sees, sees});
        }
      }
      // Once a lane sees a key and another does not, the tile is partial.
      if (__any_sync(0xffffffffu, seen.is_visible) && !__all_sync(0xffffffffu, seen.is_full)) break;
    }
    return {__any_sync(0xffffffffu, seen.is_visible) != 0, __all_sync(0xffffffffu, seen.is_full) != 0};
  }
#else
  static int run(Params& p) {
#pragma omp parallel for schedule(dynamic)
    for (int i = 0; i < p.num_tiles; ++i) {
      const RowTile& tile = p.tiles[i];
      for (int mask = 0; mask < p.num_masks; ++mask) {
        for (int kv = tile.kv_begin; kv < tile.kv_end; ++kv) store(p, tile, mask, kv, classify(p, tile, mask, kv));
      }
    }
    return 0;
  }

  struct Place {
    const RowTile& tile;
    int query, key, query_head;

    int q_idx() const { return query; }
    cpu::Ints kv_idx() const { return key + cpu::iota(); }
    int head() const { return query_head; }
    int request() const { return tile.request; }
    int qo_len() const { return tile.qo_len; }
    int kv_len() const { return tile.kv_len; }
  };

  static BlockSeen classify(const Params& p, const RowTile& tile, int mask, int kv) {
    const int last = last_query(p, tile), end = (kv + 1) * p.tile_kv, first_head = mask * p.mask_heads;
    BlockSeen seen = {false, end <= tile.kv_len};
    for (int query = first_query(p, tile); query <= last; ++query) {
      const KeyRange keys = visible_from(p.mask_mode, p.window_left, tile.kv_len, query + tile.kv_len - tile.qo_len);
      for (int head = first_head; head < first_head + p.tested_heads; ++head) {
        for (int key = kv * p.tile_kv; key < end; key += cpu::kLanes) {
          const cpu::Ints lane = cpu::iota();
          const cpu::Bools bits =
              cpu::as_vector(Variant::template mask<cpu::ExpressionMath>(operands(p), Place{tile, query, key, head}));
          const cpu::Ints sees = bits.lanes & (lane >= keys.begin - key) & (lane < keys.end - key);
          for (int i = 0; i < min(cpu::kLanes, end - key); ++i) seen.add({sees[i] != 0, sees[i] != 0});
        }
      }
      if (seen.is_visible && !seen.is_full) break;
    }
    return seen;
  }
#endif
};

}  // namespace quire
