// Loads KV tiles of the MLA kernel, in two ways.
//
// The copy engine loads boxes of pages: the first warps of a warpgroup of O, as many as a KV tile has boxes, reload the
// half of ckv's columns that the warpgroup has used up. Pages too small for boxes, and tokens that indices name, are
// gathered token by token: all warps of the warpgroup load that half, 16 tokens each, four at a time by eight lanes
// each.
#pragma once
#include "quire/ptx/copy.cuh"
#include "quire/tile/hopper/mla_cta.cuh"

namespace quire {

template <class V>
class MlaSource<V, KvLoadPath::kPages, false> {
  using Cta = MlaCta<V>;
  using Box = typename Cta::Box;
  using TileCkv = typename Cta::TileCkv;
  using TileKpe = typename Cta::TileKpe;

 public:
  QUIRE_DEVICE explicit MlaSource(const Cta& cta) : cta_(cta) {}

  // Fills the ring. The first queries take the way through the last stage.
  QUIRE_DEVICE void load_first_tiles() const {
    if (!Cta::loads()) return;
#pragma unroll 1
    for (int i = 0; i < Cta::kStages; ++i) {
      Box box;
      const bool exists = cta_.find_next(i == 0, *this, box);
      if (i == Cta::kStages - 1 && exists) ptx::mbarrier_wait(cta_.queries_barrier(), 0);
      if (exists) load_half(box, i);
      if (i == 0 && Cta::is_leader()) ptx::mbarrier_arrive(cta_.first_tile_barrier());
      if (Cta::half_of_o() != Cta::kHalves - 1) continue;
      if (i == Cta::kStages - 1) {
        put_off(exists, box);
      } else if (exists) {
        load_kpe(box, {i});
      }
    }
  }

  // Beside and after the product of a half with a KV tile, in whose place the next one comes.
  QUIRE_DEVICE void beside_product(RingPosition<2>) {
    exists_ = false;
    if (Cta::loads()) exists_ = cta_.find_next(false, *this, box_);
  }
  QUIRE_DEVICE void after_product(RingPosition<2> kpe, int stage) const {
    if (Cta::is_leader()) cta_.kpe_ring().arrive_empty(kpe);
    const bool loads_kpe = Cta::loads() && Cta::half_of_o() == Cta::kHalves - 1;
    if (loads_kpe) load_put_off({kpe.count + 2});  // first, because it is needed first
    if (exists_) load_half(box_, stage);
    if (loads_kpe) put_off(exists_, box_);
  }

  QUIRE_DEVICE void finish() const {}

  // For Cta::find_next().
  QUIRE_DEVICE void begin(const WorkTile&) const {}
  QUIRE_DEVICE void find(const WorkTile& work, int tile, Box& box) const { box = find_box(work, tile); }

 private:
  QUIRE_DEVICE Box find_box(const WorkTile& work, int tile) const {
    const int token = tile * Cta::kTileKv + first_row();
    Box box = {-1, token % V::kPageSize};
    if (token < work.tile.kv_len) box.page = cta_.p.base.kv_indices[work.tile.kv_first + token / V::kPageSize];
    return box.uniform();
  }

  // Of this warp's box in a KV tile. All lanes ask together.
  QUIRE_DEVICE static int first_row() { return Cta::kBoxes == 1 ? 0 : Cta::warp_of_group() * Cta::kBoxRows; }

  QUIRE_DEVICE void load_kpe(Box box, RingPosition<2> at) const {
    cta_.kpe_ring().wait_empty(at);
    const uint32_t barrier = cta_.kpe_ring().full(at.stage());
    const uint32_t to = cta_.kpe_tile(at.stage()).base + first_row() * 128;
    if (Cta::is_leader()) ptx::mbarrier_arrive_expect(barrier, TileKpe::kBytes);
    __syncwarp();
    if (ptx::lane_id() == 0) ptx::tma_load_4d(to, &cta_.p.tensor_k, barrier, 0, box.row, 0, box.page);
  }

  // Half of ckv of a KV tile, to a stage whose half nobody reads.
  QUIRE_DEVICE void load_half(Box box, int stage) const {
    const int half = Cta::half_of_o();
    constexpr int kAtoms = TileCkv::kAtoms / Cta::kHalves, kHalfParts = Cta::kParts / Cta::kHalves;
    const int lane = ptx::lane_id();
    if (Cta::warp_of_group() == 0 && lane < kHalfParts) {
      ptx::mbarrier_arrive_expect(cta_.ckv_full(stage, half * kHalfParts + lane), Cta::kPartBytes);
    }
    const uint32_t to = cta_.ckv_tile(stage).base + half * kAtoms * TileCkv::kAtomBytes + first_row() * 128;
    __syncwarp();
    if (lane != 0) return;
    // kpe is loaded later, when the weights in its place have been used. Where reading the cache is the bound, it may
    // come from memory then.
    if (half == 0 && Cta::kCtasPerTile > 1) ptx::tma_prefetch_4d(&cta_.p.tensor_k, 0, box.row, 0, box.page);
#pragma unroll 2  // all four at a time spill a register
    for (int i = 0; i < kAtoms; i += Cta::kBoxAtoms) {
      const uint32_t barrier = cta_.ckv_full(stage, half * kHalfParts + i * kHalfParts / kAtoms);
      ptx::tma_load_4d(to + i * TileCkv::kAtomBytes, &cta_.p.tensor_v, barrier, 0, box.row, half * kAtoms + i,
                       box.page);
    }
  }

  // kpe of a KV tile is loaded a KV tile after its ckv, when the weights in its place have been used.
  QUIRE_DEVICE void put_off(bool exists, Box box) const {
    Box& to = cta_.shared.put_off[Cta::warp_of_group() % Cta::kBoxes];
    if (ptx::lane_id() == 0) to = exists ? box : Box{0, -1};
    __syncwarp();
  }
  QUIRE_DEVICE void load_put_off(RingPosition<2> at) const {
    const Box box = cta_.shared.put_off[Cta::warp_of_group() % Cta::kBoxes].uniform();
    if (box.row >= 0) load_kpe(box, at);
    __syncwarp();
  }

  const Cta& cta_;
  Box box_;
  bool exists_;
};

template <class V>
class MlaSource<V, KvLoadPath::kGather, false> {
 protected:
  using Cta = MlaCta<V>;
  using T = typename Cta::T;
  using TileCkv = typename Cta::TileCkv;
  using TileKpe = typename Cta::TileKpe;

  // Where a token lies, of 16 that lanes 0 to 15 and again 16 to 31 have. In the place of one that does not exist are
  // zeros: nothing is read.
  struct Token {
    int page = -1, row = 0;
  };

 public:
  QUIRE_DEVICE explicit MlaSource(const Cta& cta) : cta_(cta) {}

  // Fills the ring, but for the last stage's kpe: its place is left in `put_off_`.
  QUIRE_DEVICE void load_first_tiles() {
#pragma unroll 1
    for (int i = 0; i < Cta::kStages; ++i) {
      if (i > 0 && has_kpe()) gather_kpe(put_off_, {i - 1});
      token_ = {};
      exists_ = cta_.find_next(i == 0, *this, token_);
      if (i == 1 && exists_) ptx::mbarrier_wait(cta_.queries_barrier(), 0);
      gather_found(i);
    }
  }

  // Beside and after the product of a half with a KV tile, in whose place the next one comes.
  QUIRE_DEVICE void beside_product(RingPosition<2>) {
    token_ = {};
    exists_ = cta_.find_next(false, *this, token_);
  }
  QUIRE_DEVICE void after_product(RingPosition<2> kpe, int stage) {
    ptx::named_barrier_sync(Cta::kHalf + Cta::half_of_o(), 128);  // every warp has used these keys and weights
    if (Cta::is_leader()) cta_.kpe_ring().arrive_empty(kpe);
    if (has_kpe()) gather_kpe(put_off_, {kpe.count + 2});  // first, because it is needed first
    gather_found(stage);
  }
  QUIRE_DEVICE void finish() const { ptx::cp_async_wait_all(); }

  // For Cta::find_next().
  QUIRE_DEVICE void begin(const WorkTile& work) const {
    if (!has_kpe()) prefetch_queries(work);
  }
  QUIRE_DEVICE void find(const WorkTile& work, int tile, Token& found) const {
    const int token = tile * Cta::kTileKv + Cta::warp_of_group() * 16 + ptx::lane_id() % 16;
    found = {};
    if (token >= work.tile.kv_len) return;
    const int index = cta_.p.base.page.div(token);
    found.row = token - index * static_cast<int>(cta_.p.base.page.divisor);
    found.page = cta_.p.base.kv_indices[work.tile.kv_first + index];
  }

 protected:
  QUIRE_DEVICE static bool has_kpe() { return Cta::half_of_o() == Cta::kHalves - 1; }

  // A page number that is none, below 0 or beyond the cache, is that of no token either.
  QUIRE_DEVICE bool exists(Token token) const {
    return static_cast<uint32_t>(token.page) < static_cast<uint32_t>(cta_.p.num_pages);
  }
  // Elements before a token; kNowhere if it does not exist.
  static constexpr int64_t kNowhere = -1;
  QUIRE_DEVICE int64_t place_of(Token token, int64_t page_stride, int64_t token_stride) const {
    const CachePlace at = cache_place(cta_.p, token.page, token.row);
    return exists(token) ? at.page * page_stride + at.row * token_stride : kNowhere;
  }

  QUIRE_DEVICE void note_existing(Token token, int stage) const {
    const uint32_t bits = __ballot_sync(0xffffffffu, exists(token));
    const int warp = Cta::warp_of_group();
    if (ptx::lane_id() != 0) return;
    reinterpret_cast<uint16_t*>(&cta_.existing(stage))[warp] = bits;
    ptx::mbarrier_arrive(cta_.ckv_full(stage, Cta::kParts / Cta::kHalves));
  }

  // Starts to copy kAtoms * 64 columns, from column `col` of `from` on, of this warp's tokens to the tile's.
  template <int kAtoms, int kAtomBytes>
  QUIRE_DEVICE static void gather(uint32_t tile, const void* from, int col, int64_t place) {
    const int lane = ptx::lane_id(), row = Cta::warp_of_group() * 16 + lane / 8;
    const T* base = static_cast<const T*>(from) + col + lane % 8 * 8;
    const uint32_t to = tile + row * 128 + (lane % 8 ^ lane / 8) * 16;
#pragma unroll 2  // all four at a time leave too few registers
    for (int i = 0; i < 4; ++i) {
      const int64_t at = __shfl_sync(0xffffffffu, static_cast<long long>(place), 4 * i + lane / 8);
      const int bytes = at < 0 ? 0 : 16;
      const T* src = base + max<int64_t>(at, 0);
#pragma unroll
      for (int atom = 0; atom < kAtoms; ++atom) {
        ptx::cp_async_16((to ^ i % 2 * 64) + i * 512 + atom * kAtomBytes, src + atom * 64, bytes);
      }
    }
  }

  QUIRE_DEVICE int64_t place_of_kpe(Token token) const {
    return place_of(token, cta_.p.base.k_page_stride, cta_.p.base.k_token_stride);
  }

  // Queries into the L2 while KV tiles of an earlier work tile are computed; 16 rows a warp, two lanes a row.
  QUIRE_DEVICE void prefetch_queries(const WorkTile& work) const {
    const int lane = ptx::lane_id(), row = Cta::warp_of_group() * 16 + lane / 2;
    const T* nope = cta_.nope_row(work, row) + lane % 2 * (Cta::kCkv / 2);
#pragma unroll
    for (int i = 0; i < Cta::kCkv / 2; i += 64) ptx::prefetch_l2(nope + i);
    ptx::prefetch_l2(cta_.pe_row(work, row));
  }

  // The KV tile of `token_`, but for its kpe.
  QUIRE_DEVICE void gather_found(int stage) {
    if (exists_) gather_half(token_, stage);
    if (exists_ && has_kpe()) note_existing(token_, stage);
    put_off_ = place_of_kpe(token_);
    if (!has_kpe()) prefetch_kpe(put_off_);
  }

  QUIRE_DEVICE void gather_half(Token token, int stage) const {
    const AttentionParams& p = cta_.p.base;
    const int half = Cta::half_of_o();
    const uint32_t tile = cta_.ckv_tile(stage).base + half * (TileCkv::kBytes / Cta::kHalves);
    constexpr int kAtoms = TileCkv::kAtoms / Cta::kHalves;
    const int64_t place = place_of(token, p.v_page_stride, p.v_token_stride);
    gather<kAtoms, TileCkv::kAtomBytes>(tile, p.v, half * Cta::kHalfCols, place);
    ptx::cp_async_arrive(cta_.ckv_full(stage, half * (Cta::kParts / Cta::kHalves)));
  }
  // kpe is gathered later, when the weights in its place have been used.
  QUIRE_DEVICE void prefetch_kpe(int64_t place) const {
    if (place != kNowhere) ptx::prefetch_l2(static_cast<const typename Cta::Kpe*>(cta_.p.base.k) + place);
  }
  QUIRE_DEVICE void gather_kpe(int64_t place, RingPosition<2> at) const {
    cta_.kpe_ring().wait_empty(at);
    gather<1, TileKpe::kBytes>(cta_.kpe_tile(at.stage()).base, cta_.p.base.k, 0, place);
    ptx::cp_async_arrive(cta_.kpe_ring().full(at.stage()));
  }

  const Cta& cta_;
  int64_t put_off_;  // where this lane's token of kpe lies that is gathered next
  Token token_;      // of the KV tile that is gathered next, if it exists
  bool exists_;
};

}  // namespace quire
