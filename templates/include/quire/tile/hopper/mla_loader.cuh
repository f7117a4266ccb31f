// KV tiles of the MLA kernel token by token: for pages too small for boxes, and for tokens that indices name. The warps
// of a warpgroup of O gather the half of ckv's columns that they have used up, 16 tokens each, four at a time by eight
// lanes each.
#pragma once
#include "quire/ptx/copy.cuh"
#include "quire/tile/hopper/mla_cta.cuh"

namespace quire {

template <class V>
class MlaSource<V, KvPath::kGather, false> {
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

  // Before, beside and after the product of a half with a KV tile, in whose place the next one comes.
  QUIRE_DEVICE void before_product(RingPosition<2>) const {}
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
    return exists(token) ? token.page * page_stride + token.row * token_stride : kNowhere;
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
