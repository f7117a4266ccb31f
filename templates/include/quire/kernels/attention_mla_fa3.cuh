// Decode with multi-head latent attention (MLA) on the warpgroup matrix instruction and the bulk copy engine: sm_90a.
//
// Bound: from 64 rows on the tensor cores, below that reading the cache once. All query heads share one head of keys
// [ckv, kpe], and the latent ckv is the value too: a KV tile lies in shared memory once and serves S = Q [ckv, kpe]^T
// and O += P ckv.
// Three warpgroups: one computes S and its softmax; two compute half of O's columns each. The first holds most of Q in
// registers, so that three KV tiles fit into shared memory: one in each product and one on its way. Weights P take the
// place of the kpe that they were computed with.
// The two products take turns at the tensor cores: P of a KV tile is handed on when S of the next one is done, and the
// softmax of that one runs beside O += P ckv. Warps cannot overlap the two themselves: a product with queries in
// registers keeps its warps waiting until the one before it is under way.
// Loading needs no warps of its own: a half of ckv's columns is reloaded by the warpgroup that has used it up.
// Schedule: persistent CTAs, one an SM. Row tiles of more than 64 rows belong to pairs of CTAs that read the same keys
// at the same time, once from memory. The last warpgroup takes work tiles as it starts to load them, up to three KV
// tiles ahead.
//
// Sources: FlashMLA (DeepSeek, 2025) for halves of O in two warpgroups.
#pragma once
#include "quire/core/params_mla_fa3.h"
#include "quire/ptx/grid.cuh"
#include "quire/ptx/store.cuh"
#include "quire/ptx/tma.cuh"
#include "quire/ptx/warp.cuh"
#include "quire/tile/logits.cuh"
#include "quire/tile/shared_merge.cuh"
#include "quire/tile/sm90_load.cuh"
#include "quire/tile/sm90_scheduler.cuh"
#include "quire/tile/sm90_softmax.cuh"
#include "quire/tile/sm90_store.cuh"
#include "quire/tile/smem.cuh"

namespace quire {

template <class V>
struct AttentionMlaFa3 {
  using T = typename V::Q;
  static constexpr int kTileRows = V::kTileRows, kTileKv = V::kTileKv;
  static constexpr int kRows = 64, kCtasPerTile = kTileRows / kRows;  // rows of a CTA, CTAs of a row tile
  static constexpr int kCkv = V::kHeadDimVo, kKpe = V::kHeadDimQk - V::kHeadDimVo;

  static_assert(is_same<typename V::Q, typename V::Kv>::value && is_same<typename V::Q, typename V::O>::value,
                "q, ckv, kpe and o have one dtype");
  static_assert(kCkv == 512 && kKpe == 64, "the registers of three warpgroups hold these dims");
  static_assert(kTileRows % kRows == 0 && kTileKv == 64, "a warpgroup owns 64 rows, and weights take the place of kpe");
  static_assert(kv_path<V>() != KvPath::kRagged, "keys are in pages");

  static constexpr int kThreads = 384, kMinCtas = 1;

 private:
  // Pages are boxes of the copy engine, or tokens are gathered one by one.
  static constexpr bool kGathers = kv_path<V>() == KvPath::kGather;

  using Stage = CurrentWork;
  using TileCkv = SwizzledTile<kTileKv, kCkv>;
  using TileKpe = SwizzledTile<kTileKv, kKpe>;

  static constexpr int kHalves = 2, kHalfCols = kCkv / kHalves;
  static constexpr int kWorkStages = 4;  // a half is loaded up to three work tiles ahead
  static constexpr int kStages = 3;      // of ckv
  static constexpr int kParts = 4;       // of a ckv stage, with a full barrier each: S starts with the first
  static constexpr int kPartBytes = TileCkv::kBytes / kParts;
  // Steps of 16 columns: of S in all, and those whose queries are in registers.
  static constexpr int kSteps = V::kHeadDimQk / 16, kHeldSteps = 28;
  using TileP = TileKpe;  // weights, in the place of the kpe that they were computed with
  using TileQ = SwizzledTile<kRows, (kSteps - kHeldSteps) * 16>;  // the other queries

  // One box of the copy engine a lane, 64 columns at a time; all columns of a part where a box has all rows of the
  // tile.
  static constexpr int kBoxRows = kGathers ? kTileKv : gcd(V::kPageSize, kTileKv), kBoxes = kTileKv / kBoxRows;
  static constexpr int kBoxAtoms = kBoxes == 1 ? TileCkv::kAtoms / kParts : 1;

  // Where this lane's box of a KV tile lies; boxes beyond kv_len come from page -1: outside of the tensor, hence zeros.
  struct Box {
    int page, row;

    // The only box is the same for all lanes; the compiler then issues its copies without a loop over lanes.
    QUIRE_DEVICE Box uniform() const { return kBoxes == 1 ? Box{ptx::uniform(page), ptx::uniform(row)} : *this; }
  };
  // The KV tile of which a half is loaded next. It lives in shared memory: o leaves few registers.
  struct NextTile {
    RingPosition<kWorkStages> at;  // its work tile
    int tile, end;                 // of that; end 0: there is none
  };

  // Row states on their way from the warpgroup of S to those of O.
  struct Shared {
    Stage work[kWorkStages];
    float2 states[2][kRows];  // of a work tile, of which this ring has one each: maximum and denominator
    float factors[2][kRows];  // that o is multiplied by before a KV tile, if `is_raised` in the rows' warp
    int is_raised[2][4];
    int is_last[2];                                   // KV tile of a work tile
    NextTile next[kGathers ? kHalves * 4 : kHalves];  // a warp that gathers has its own
    Box put_off[kBoxes];                              // of kpe; row -1: there is none
    int number;                                       // of the last whole row tile taken
    int turn;                                         // at merging
    alignas(8) unsigned char work_barriers[RingBarriers<kWorkStages>::kBytes];
    unsigned char kpe_barriers[RingBarriers<2>::kBytes], weights_barriers[RingBarriers<2>::kBytes];
    unsigned char states_barriers[RingBarriers<2>::kBytes];
    uint64_t ckv_barriers[kStages * kParts];
    uint64_t queries_barrier;  // the first work tile's are there
  };
  static constexpr int kKpeAt = kStages * TileCkv::kBytes;
  static constexpr int kQAt = kKpeAt + 2 * TileKpe::kBytes;
  static constexpr int kSharedAt = kQAt + TileQ::kBytes;

  // Registers a thread: 504 for a thread of each warpgroup.
  static constexpr int kScoreRegisters = 184, kValueRegisters = 160;
  static_assert(kScoreRegisters + 2 * kValueRegisters <= 65536 / kThreads / 8 * 8 * 3,
                "the warps ask for more registers than the launch has, and would wait for them forever");

  // 0 is the barrier of the CTA.
  enum NamedBarrier { kScore = 1, kValues, kHalf };  // kHalf + i: of a half

 public:
  static constexpr int kSmemBytes = kSharedAt + static_cast<int>(sizeof(Shared)) + (kGathers ? kStages * 8 : 0);
  static_assert(kSmemBytes <= 227 * 1024, "the tiles do not fit into shared memory");

  QUIRE_DEVICE static void run(const AttentionMlaFa3Params& p, unsigned char* smem) {
    const AttentionMlaFa3 self(p, smem);
    if (threadIdx.x == 0) {
      if constexpr (!kGathers) {
        ptx::prefetch_tensor_map(&p.tensor_k);
        ptx::prefetch_tensor_map(&p.tensor_v);
      }
      self.init_barriers();
    }
    __syncthreads();
    ptx::wait_for_predecessor();
    ptx::launch_dependents();
    if (warpgroup() == 0) {
      ptx::take_registers<kScoreRegisters>();
      self.touch_parameters();
      self.compute_weights();
    } else {
      ptx::give_registers<kValueRegisters>();
      self.compute_values();
    }
  }

 private:
  const AttentionMlaFa3Params& p_;
  Shared& shared_;
  uint32_t barriers_;  // address of shared_

  QUIRE_DEVICE AttentionMlaFa3(const AttentionMlaFa3Params& p, unsigned char* smem)
      : p_(p), shared_(*reinterpret_cast<Shared*>(smem + kSharedAt)), barriers_(ptx::smem_address(smem) + kSharedAt) {}

  // Where tiles begin: not `barriers_`, because lanes compute with that one. The compiler then keeps this address, and
  // the descriptors made from it, in uniform registers, and a product of 32 keys takes 20 clocks instead of 40.
  QUIRE_DEVICE static uint32_t base() {
    extern __shared__ __align__(1024) unsigned char smem[];
    return ptx::smem_address(smem);
  }
  template <int kRing>
  QUIRE_DEVICE RingBarriers<kRing> ring(size_t offset) const {
    return {barriers_ + static_cast<uint32_t>(offset)};
  }
  QUIRE_DEVICE RingBarriers<kWorkStages> work_ring() const {
    return ring<kWorkStages>(__builtin_offsetof(Shared, work_barriers));
  }
  QUIRE_DEVICE RingBarriers<2> kpe_ring() const { return ring<2>(__builtin_offsetof(Shared, kpe_barriers)); }
  QUIRE_DEVICE RingBarriers<2> states_ring() const { return ring<2>(__builtin_offsetof(Shared, states_barriers)); }
  QUIRE_DEVICE RingBarriers<2> weights_ring() const { return ring<2>(__builtin_offsetof(Shared, weights_barriers)); }
  QUIRE_DEVICE uint32_t queries_barrier() const { return ring<1>(__builtin_offsetof(Shared, queries_barrier)).base; }
  QUIRE_DEVICE uint32_t ckv_full(int stage, int part) const {
    return ring<1>(__builtin_offsetof(Shared, ckv_barriers)).base + 8 * (stage * kParts + part);
  }

  // Stages of ckv have no empty barriers: who has used a half reloads it. `weights` has none either, because weights
  // take the place of a kpe that was loaded.
  QUIRE_DEVICE void init_barriers() const {
    constexpr int kArrivals = kGathers ? 4 : 1;  // warps that gather, or the copy engine
    work_ring().init(1, kThreads / 32);
    kpe_ring().init(kArrivals, kHalves);
    weights_ring().init(4, 1);
    states_ring().init(4, 8);
    for (int i = 0; i < kStages * kParts; ++i) ptx::mbarrier_init(ckv_full(0, i), kArrivals);
    ptx::mbarrier_init(queries_barrier(), 4);
    ptx::fence_mbarrier_init();
  }

  // Parameters come from memory at their first use, one line after another: here while the first work tile is sought.
  QUIRE_DEVICE void touch_parameters() const {
    const AttentionParams& p = p_.base;
    asm volatile("" ::"l"(p_.q_nope), "l"(p_.q_nope_token_stride), "l"(p_.q_nope_head_stride), "l"(p.q),
                 "l"(p.q_token_stride), "l"(p.q_head_stride), "r"(p.group.divisor), "f"(logits_scale<V>(p)));
    asm volatile("" ::"l"(p.o), "l"(p.o_token_stride), "l"(p.o_head_stride), "l"(p.lse), "l"(p.partial_o), "l"(p.groups));
  }

  QUIRE_DEVICE static int warpgroup() { return ptx::uniform(ptx::thread_id() / 128); }
  QUIRE_DEVICE static int warp_of_group() { return ptx::uniform(ptx::thread_id() / 32 % 4); }
  QUIRE_DEVICE static bool is_leader() { return ptx::thread_id() % 128 == 0; }
  // This lane's upper row.
  QUIRE_DEVICE static int lane_row() { return ptx::thread_id() % 128 / 32 * 16 + ptx::lane_id() / 4; }

  QUIRE_DEVICE TileCkv ckv_tile(int stage) const { return {base() + stage * TileCkv::kBytes}; }
  QUIRE_DEVICE TileKpe kpe_tile(int stage) const { return {base() + kKpeAt + stage * TileKpe::kBytes}; }
  QUIRE_DEVICE TileP weights_tile(int stage) const { return kpe_tile(stage); }
  QUIRE_DEVICE TileQ q_tile() const { return {base() + kQAt}; }

  // The first of this CTA's rows of a work tile. Rows from row_end on do not exist: it may have none.
  QUIRE_DEVICE static int first_row(const WorkTile& work) {
    return work.tile.row_begin + static_cast<int>(blockIdx.x) % kCtasPerTile * kRows;
  }

  // A work tile without keys has one KV tile, of zeros that no row sees.
  QUIRE_DEVICE static int kv_end(const WorkTile& work) { return max(work.kv_end, work.kv_begin + 1); }

  QUIRE_DEVICE void release_work_tile(RingPosition<kWorkStages>& at) const {
    __syncwarp();
    if (ptx::lane_id() == 0) work_ring().arrive_empty(at);
    at.advance();
  }

  // ---- Loading.

  QUIRE_DEVICE Box find_box(const WorkTile& work, int tile) const {
    const int lane = kBoxes == 1 ? 0 : ptx::lane_id(), token = tile * kTileKv + lane * kBoxRows;
    Box box = {-1, token % V::kPageSize};
    if (lane < kBoxes && token < work.tile.kv_len) {
      box.page = p_.base.kv_indices[work.tile.kv_first + token / V::kPageSize];
    }
    return box.uniform();
  }

  QUIRE_DEVICE void find(const WorkTile& work, int tile, Box& box) const { box = find_box(work, tile); }

  // One warp.
  QUIRE_DEVICE void load_kpe(Box box, RingPosition<2> at) const {
    kpe_ring().wait_empty(at);
    const uint32_t barrier = kpe_ring().full(at.stage());
    if (ptx::lane_id() == 0) ptx::mbarrier_arrive_expect(barrier, TileKpe::kBytes);
    __syncwarp();
    if (ptx::lane_id() >= kBoxes) return;
    ptx::tma_load_4d(kpe_tile(at.stage()).base + ptx::lane_id() * kBoxRows * 128, &p_.tensor_k, barrier, 0, box.row, 0,
                     box.page);
  }

  // Half of ckv of a KV tile, to a stage whose half nobody reads. One warp.
  QUIRE_DEVICE void load_half(Box box, int stage) const {
    const int half = half_of_o();
    constexpr int kAtoms = TileCkv::kAtoms / kHalves, kHalfParts = kParts / kHalves;
    const int lane = ptx::lane_id();
    if (lane < kHalfParts) ptx::mbarrier_arrive_expect(ckv_full(stage, half * kHalfParts + lane), kPartBytes);
    __syncwarp();
    if (lane >= kBoxes) return;
    // kpe is loaded later, when the weights in its place have been used.
    if (half == 0) ptx::tma_prefetch_4d(&p_.tensor_k, 0, box.row, 0, box.page);
    const uint32_t to = ckv_tile(stage).base + half * kAtoms * TileCkv::kAtomBytes + lane * kBoxRows * 128;
#pragma unroll
    for (int i = 0; i < kAtoms; i += kBoxAtoms) {
      const uint32_t barrier = ckv_full(stage, half * kHalfParts + i * kHalfParts / kAtoms);
      ptx::tma_load_4d(to + i * TileCkv::kAtomBytes, &p_.tensor_v, barrier, 0, box.row, half * kAtoms + i, box.page);
    }
  }

  // Finds the KV tile that follows; false if none does. One warp, of which the last warpgroup's takes work tiles too.
  template <class Place>
  QUIRE_DEVICE bool find_next(bool is_first, Place& place) const {
    const int half = half_of_o();
    NextTile& shared = shared_.next[kGathers ? half * 4 + warp_of_group() : half];
    NextTile next = is_first ? NextTile{} : shared;
    __syncwarp();
    if (!is_first && next.end == 0) return false;
    if (is_first || ++next.tile == next.end) {
      if (!is_first) next.at.advance();
      if (half == kHalves - 1 && (!kGathers || warp_of_group() == 0)) schedule(next.at);
      work_ring().wait_full(next.at);
      const Stage& stage = shared_.work[next.at.stage()];
      next.tile = stage.work.kv_begin;
      next.end = stage.exists ? kv_end(stage.work) : 0;
      if constexpr (kGathers) {
        if (half == 0 && stage.exists) prefetch_queries(stage.work);
      }
    }
    if (ptx::lane_id() == 0) shared = next;
    __syncwarp();
    if (next.end != 0) find(shared_.work[next.at.stage()].work, next.tile, place);
    return next.end != 0;
  }

  // One warp.
  QUIRE_DEVICE void schedule(RingPosition<kWorkStages> at) const {
    work_ring().wait_empty(at);
    if (ptx::lane_id() == 0) {
      const Stage& before = shared_.work[at.before().stage()];
      SharedWorkList<kCtasPerTile>::next(p_, before.cursor, shared_.work[at.stage()], shared_.number, kTileKv);
      work_ring().arrive_full(at);
    }
    __syncwarp();
  }

  // ---- Gathering: the warps of a half copy 16 tokens each, four at a time by eight lanes each.

  // Where a token lies, of 16 that lanes 0 to 15 and again 16 to 31 have. In the place of one that does not exist are
  // zeros: nothing is read.
  struct Token {
    int page = -1, row = 0;
  };
  // A page number that is none, below 0 or beyond the cache, is that of no token either.
  QUIRE_DEVICE bool exists(Token token) const {
    return static_cast<uint32_t>(token.page) < static_cast<uint32_t>(p_.num_pages);
  }
  // In chunks of 16 bytes: the host refuses a cache of more than 2^32 of them.
  static constexpr uint32_t kNowhere = 0xffffffffu;
  QUIRE_DEVICE uint32_t chunks_before(Token token, int64_t page_stride, int64_t token_stride) const {
    const int64_t element = token.page * page_stride + token.row * token_stride;
    return exists(token) ? static_cast<uint32_t>(element >> 3) : kNowhere;
  }

  // Which tokens of a ckv stage exist, a bit each. It is there when the stage's latter half is.
  QUIRE_DEVICE uint2& existing(int stage) const { return reinterpret_cast<uint2*>(&shared_ + 1)[stage]; }
  QUIRE_DEVICE void note_existing(Token token, int stage) const {
    const uint32_t bits = __ballot_sync(0xffffffffu, exists(token));
    const int warp = warp_of_group();
    if (ptx::lane_id() == 0) reinterpret_cast<uint16_t*>(&existing(stage))[warp] = bits;
  }

  QUIRE_DEVICE void find(const WorkTile& work, int tile, Token& found) const {
    const int token = tile * kTileKv + warp_of_group() * 16 + ptx::lane_id() % 16;
    found = {};
    if (token >= work.tile.kv_len) return;
    const int index = p_.base.page.div(token);
    found.row = token - index * static_cast<int>(p_.base.page.divisor);
    found.page = p_.base.kv_indices[work.tile.kv_first + index];
  }

  // Starts to copy kAtoms * 64 columns, from column `col` of `from` on, of this warp's tokens to the tile's.
  template <int kAtoms, int kAtomBytes>
  QUIRE_DEVICE static void gather(uint32_t tile, const void* from, int col, uint32_t place) {
    const int lane = ptx::lane_id(), row = warp_of_group() * 16 + lane / 8;
    const unsigned char* base = static_cast<const unsigned char*>(from) + col * 2 + lane % 8 * 16;
    const uint32_t to = tile + row * 128 + (lane % 8 ^ lane / 8) * 16;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t chunks = __shfl_sync(0xffffffffu, place, 4 * i + lane / 8);
      const int bytes = chunks == kNowhere ? 0 : 16;
      const unsigned char* src = base + static_cast<uint64_t>(chunks == kNowhere ? 0 : chunks) * 16;
#pragma unroll
      for (int atom = 0; atom < kAtoms; ++atom) {
        ptx::cp_async_16((to ^ i % 2 * 64) + i * 512 + atom * kAtomBytes, src + atom * 128, bytes);
      }
    }
  }

  QUIRE_DEVICE uint32_t kpe_chunks(Token token) const {
    return chunks_before(token, p_.base.k_page_stride, p_.base.k_token_stride);
  }

  // Queries into the L2 while KV tiles of an earlier work tile are computed; 16 rows a warp, two lanes a row.
  QUIRE_DEVICE void prefetch_queries(const WorkTile& work) const {
    const int lane = ptx::lane_id(), row = warp_of_group() * 16 + lane / 2;
    const T* nope = nope_row(work, row) + lane % 2 * (kCkv / 2);
#pragma unroll
    for (int i = 0; i < kCkv / 2; i += 64) ptx::prefetch_l2(nope + i);
    ptx::prefetch_l2(pe_row(work, row));
  }

  QUIRE_DEVICE void gather_half(Token token, int stage) const {
    const AttentionParams& p = p_.base;
    const int half = half_of_o();
    const uint32_t tile = ckv_tile(stage).base + half * (TileCkv::kBytes / kHalves);
    constexpr int kAtoms = TileCkv::kAtoms / kHalves;
    const uint32_t place = chunks_before(token, p.v_page_stride, p.v_token_stride);
    gather<kAtoms, TileCkv::kAtomBytes>(tile, p.v, half * kHalfCols, place);
  }
  // kpe is gathered later, when the weights in its place have been used.
  QUIRE_DEVICE void prefetch_kpe(uint32_t place) const {
    if (place != kNowhere) ptx::prefetch_l2(static_cast<const unsigned char*>(p_.base.k) + uint64_t{place} * 16);
  }
  QUIRE_DEVICE void gather_kpe(uint32_t place, RingPosition<2> at) const {
    kpe_ring().wait_empty(at);
    gather<1, TileKpe::kBytes>(kpe_tile(at.stage()).base, p_.base.k, 0, place);
  }

  // Waits for the copies of all groups but the latest kLater. The writer orders its copies before the tensor cores'
  // reads, which costs the readers nothing.
  template <int kLater>
  QUIRE_DEVICE static void wait_copied() {
    ptx::cp_async_wait<kLater>();
    ptx::fence_proxy_async();
    __syncwarp();
  }
  QUIRE_DEVICE void announce_half(int stage) const {
    constexpr int kHalfParts = kParts / kHalves;
    const int lane = ptx::lane_id(), part = half_of_o() * kHalfParts + lane;
    if (lane < kHalfParts) ptx::mbarrier_arrive(ckv_full(stage, part));
  }
  QUIRE_DEVICE void announce_kpe(RingPosition<2> at) const {
    if (half_of_o() == kHalves - 1 && ptx::lane_id() == 0) kpe_ring().arrive_full(at);
  }

  // Fills the ring, but for the last stage's kpe: its place is left in `put_off`. Each KV tile leaves two groups
  // of copies, kpe of the tile before it and then its ckv; all but the last two are announced.
  QUIRE_DEVICE void gather_first_tiles(uint32_t& put_off) const {
    const bool has_kpe = half_of_o() == kHalves - 1;
#pragma unroll 1
    for (int i = 0; i < kStages; ++i) {
      if (i > 0 && has_kpe) gather_kpe(put_off, {i - 1});
      ptx::cp_async_commit();
      Token token;
      const bool exists = find_next(i == 0, token);
      if (i == 1 && exists) ptx::mbarrier_wait(queries_barrier(), 0);
      if (exists) gather_half(token, i);
      if (has_kpe) note_existing(token, i);
      ptx::cp_async_commit();
      put_off = kpe_chunks(token);
    }
    wait_copied<3>();
    announce_half(0);
    announce_kpe({0});
    wait_copied<2>();
    announce_half(1);
  }

  // add_tile() of gathered KV tiles. What the KV tile before it began to copy is announced on the way: kpe before the
  // warps wait for weights, because S waits for it meanwhile, and ckv beside the product.
  QUIRE_DEVICE bool add_gathered(float (&o)[kHalfCols / 2], RingPosition<2> kpe, uint32_t& put_off) const {
    const bool has_kpe = half_of_o() == kHalves - 1;
    const int stage = kpe.count % kStages;
    wait_copied<1>();
    announce_kpe({kpe.count + 1});
    const bool is_last = start_values(o, kpe, stage);
    wait_copied<0>();
    announce_half((kpe.count + 2) % kStages);
    Token token;
    const bool exists = find_next(false, token);
    ptx::wgmma_wait<0>();
    ptx::pin(o);
    ptx::named_barrier_sync(kHalf + half_of_o(), 128);  // every warp has used these keys and weights
    if (is_leader()) kpe_ring().arrive_empty(kpe);
    if (has_kpe) gather_kpe(put_off, {kpe.count + 2});
    ptx::cp_async_commit();
    if (exists) gather_half(token, stage);
    if (has_kpe) note_existing(token, stage);
    ptx::cp_async_commit();
    put_off = kpe_chunks(token);
    if (!has_kpe) prefetch_kpe(put_off);
    return is_last;
  }

  // ---- The warpgroup of S: weights of each KV tile.

  struct Scores {
    uint32_t q[kHeldSteps][4];
    WarpgroupSoftmax softmax;
    uint32_t weights[kTileKv / 4];  // of the latest KV tile, two a register
    int num_missing;                // of its tokens, from the last on: values to be cleared; gathered: not 0 if any
  };
  using TileOfS = float[kTileKv / 2];

  QUIRE_DEVICE void compute_weights() const {
    RingPosition<kWorkStages> at;
    RingPosition<kStages> ckv;
    RingPosition<2> kpe;
    for (;;) {
      work_ring().wait_full(at);
      if (!ptx::uniform(shared_.work[at.stage()].exists)) break;
      const WorkTile& work = shared_.work[at.stage()].work;
      Scores scores;
      load_queries(scores, work);
      if (at.count == 0 && ptx::lane_id() == 0) ptx::mbarrier_arrive(queries_barrier());
      scores.softmax.clear();
      compute_weights(scores, work, ckv, kpe);
      put_states(scores, {at.count});
      release_work_tile(at);
    }
  }

  // Weights of a work tile.
  QUIRE_DEVICE void compute_weights(Scores& scores, const WorkTile& work, RingPosition<kStages>& ckv,
                                    RingPosition<2>& kpe) const {
    const int begin = ptx::uniform(work.kv_begin), end = ptx::uniform(kv_end(work));
    const int all_see = ptx::uniform(first_masked_key(work));
#pragma unroll 1
    for (int tile = begin; tile < end; ++tile) {
      ckv = ckv.uniform(), kpe = kpe.uniform();
      TileOfS s;
      multiply(s, scores, ckv, kpe, tile > begin);
      const bool is_masked = (!kGathers || V::kMask == kMaskCausal) && (tile + 1) * kTileKv > all_see;
      if (is_masked) mask(s, work, tile * kTileKv);
      if constexpr (kGathers) {
        if (scores.num_missing != 0) hide_gaps(s, existing(ckv.stage()));
      }
      scores.num_missing = is_masked && !kGathers ? min(kTileKv, (tile + 1) * kTileKv - work.tile.kv_len) : 0;
      exponentiate(s, scores);
      ckv.advance(), kpe.advance();
    }
    store_weights(scores, ckv.before(), kpe.before());
    hand_on(kpe.before(), true);
  }

  // The first key that some row does not see.
  QUIRE_DEVICE int first_masked_key(const WorkTile& work) const {
    const int first = p_.base.group.div(min(first_row(work), work.row_end - 1));
    return Mask<V::kMask, V::kWindow != 0>{work.tile.qo_len, work.tile.kv_len, -1, nullptr}.visible(first).end;
  }

  // S of a KV tile: one group of products, kpe last, because it is the last to be loaded.
  // The KV tile before, if `has_before`: its weights are stored beside the first products, and handed on so long before
  // the last ones as the other warpgroups take to begin.
  QUIRE_DEVICE void multiply(TileOfS& s, Scores& scores, RingPosition<kStages> ckv, RingPosition<2> kpe,
                             bool has_before) const {
    const TileDescriptor keys(ckv_tile(ckv.stage()).base, 16), positions(kpe_tile(kpe.stage()).base, 16);
    const TileDescriptor q(q_tile().base, 16);
    constexpr int kPartSteps = kCkv / 16 / kParts;
    pin(s, scores);
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      ptx::mbarrier_wait(ckv_full(ckv.stage(), part), ckv.parity());
      ptx::wgmma_fence();
#pragma unroll
      for (int i = part * kPartSteps; i < (part + 1) * kPartSteps; ++i) {
        multiply_step(s, scores, q, keys.at(i / 4 * TileCkv::kAtomBytes + i % 4 * 32), i, i > 0);
      }
      if (part == 0 && has_before) store_weights(scores, ckv.before(), kpe.before());
    }
    if constexpr (kGathers) {
      const uint2 bits = existing(ckv.stage());
      scores.num_missing = (bits.x & bits.y) != 0xffffffffu;
    }
    if (has_before) hand_on(kpe.before(), false);
    kpe_ring().wait_full(kpe);
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < kKpe / 16; ++i) multiply_step(s, scores, q, positions.at(i * 32), kCkv / 16 + i, 1);
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    ptx::pin(s);
  }

  QUIRE_DEVICE void hand_on(RingPosition<2> at, bool is_last) const {
    if (is_leader()) shared_.is_last[at.stage()] = is_last;
    if (ptx::lane_id() == 0) weights_ring().arrive_full(at);
  }

  QUIRE_DEVICE static void pin(TileOfS& s, Scores& scores) {
    ptx::pin(s);
#pragma unroll
    for (int i = 0; i < kHeldSteps; ++i) ptx::pin(scores.q[i]);
  }

  // s (+)= q k^T of 16 columns, the i-th of S.
  QUIRE_DEVICE static void multiply_step(TileOfS& s, Scores& scores, const TileDescriptor& q, uint64_t keys, int i,
                                         int accumulate) {
    if (i < kHeldSteps) {
      ptx::Wgmma<kTileKv>::template rs<ptx::Contiguous::kInner>(T{}, s, scores.q[i], keys, accumulate);
    } else {
      const int step = i - kHeldSteps;
      ptx::Wgmma<kTileKv>::ss(T{}, s, q.at(step / 4 * TileQ::kAtomBytes + step % 4 * 32), keys, accumulate);
    }
  }

  // From S to weights.
  QUIRE_DEVICE void exponentiate(TileOfS& s, Scores& scores) const {
    const float scale = logits_scale<V>(p_.base);
    scores.softmax.raise_max(s, scale);
    scores.softmax.exponentiate(s, scale);
#pragma unroll
    for (int i = 0; i < kTileKv / 4; ++i) scores.weights[i] = ptx::pack(T{}, s[2 * i], s[2 * i + 1]);
    ptx::pin(scores.weights);
  }

  QUIRE_DEVICE void mask(TileOfS& s, const WorkTile& work, int key) const {
    const LogitsTransform<V, FragmentMath<false>> transform(p_.base);
    static_assert(decltype(transform)::kIsIdentity, "a mask is all that changes logits");
    const LogitsTile<V> logits = {{work.tile.qo_len, work.tile.kv_len, -1, nullptr},
                                  p_.base.group,
                                  work.tile.request,
                                  work.kv_head,
                                  first_row(work) + lane_row(),
                                  key,
                                  ptx::lane_id()};
    score_logits<true>(s, transform, logits);
  }

  // No row sees tokens that do not exist.
  QUIRE_DEVICE static void hide_gaps(TileOfS& s, uint2 existing) {
    const int shift = ptx::lane_id() % 4 * 2;
    const uint32_t words[2] = {existing.x >> shift, existing.y >> shift};
#pragma unroll
    for (int i = 0; i < kTileKv / 2; ++i) {
      const int block = i / 4, bit = block % 4 * 8 + i % 2;
      if ((words[block / 4] >> bit & 1) == 0) s[i] = __int_as_float(0xff800000);
    }
  }

  // Weights, and what o is multiplied by before them, to where kpe was; hand_on() then shows them to others.
  QUIRE_DEVICE void store_weights(const Scores& scores, RingPosition<kStages> ckv, RingPosition<2> kpe) const {
    const TileP to = weights_tile(kpe.stage());
    const int lane = ptx::lane_id(), warp = warp_of_group();
    const WarpgroupSoftmax& softmax = scores.softmax;
    ptx::named_barrier_sync(kScore, 128);  // these keys have been read by every warp
    if (scores.num_missing > 0) clear_values(ckv_tile(ckv.stage()), scores.num_missing);
#pragma unroll
    for (int i = 0; i < kTileKv / 16; ++i) {
      const uint32_t* w = scores.weights + 4 * i;
      ptx::st_matrix(to.chunk(warp * 16 + lane % 16, 2 * i + lane / 16), {w[0], w[1], w[2], w[3]});
    }
    if (lane == 0) shared_.is_raised[kpe.stage()][warp] = softmax.is_raised;
    if (softmax.is_raised && lane % 4 == 0) {
      shared_.factors[kpe.stage()][lane_row()] = softmax.factor[0];
      shared_.factors[kpe.stage()][lane_row() + 8] = softmax.factor[1];
    }
    ptx::fence_proxy_async();
    __syncwarp();
  }

  // Values that do not exist may be anything, and 0 * NaN is NaN: zeros in the last `rows` tokens of a KV tile.
  QUIRE_DEVICE static void clear_values(TileCkv ckv, int rows) {
    for (int i = ptx::thread_id() % 128; i < rows * TileCkv::kChunks; i += 128) {
      const int row = i / TileCkv::kChunks;
      const uint32_t chunk = ckv.chunk(kTileKv - 1 - row, i - row * TileCkv::kChunks);
#pragma unroll
      for (int word = 0; word < 4; ++word) ptx::st_shared(chunk + 4 * word, 0);
    }
  }

  QUIRE_DEVICE void put_states(Scores& scores, RingPosition<2> at) const {
    WarpgroupSoftmax& softmax = scores.softmax;
    softmax.reduce();
    states_ring().wait_empty(at);
    if (ptx::lane_id() % 4 == 0) {
      shared_.states[at.stage()][lane_row()] = {softmax.m[0], softmax.d[0]};
      shared_.states[at.stage()][lane_row() + 8] = {softmax.m[1], softmax.d[1]};
    }
    __syncwarp();
    if (ptx::lane_id() == 0) states_ring().arrive_full(at);
  }

  // ---- Queries: kHeldSteps of 16 columns in registers, the rest of q_nope and q_pe in shared memory.

  // Rows that do not exist repeat the last one; their results are not stored.
  QUIRE_DEVICE WorkTile::Place place(const WorkTile& work, int row) const {
    return work.place(p_.base.group, min(first_row(work) + row, work.row_end - 1));
  }

  QUIRE_DEVICE const T* nope_row(const WorkTile& work, int row) const {
    const WorkTile::Place at = place(work, row);
    return static_cast<const T*>(p_.q_nope) + at.token * p_.q_nope_token_stride + at.head * p_.q_nope_head_stride;
  }
  QUIRE_DEVICE const T* pe_row(const WorkTile& work, int row) const {
    const WorkTile::Place at = place(work, row);
    return static_cast<const T*>(p_.base.q) + at.token * p_.base.q_token_stride + at.head * p_.base.q_head_stride;
  }

  // A warp's rows, 16 bytes a load, four lanes a row: chunk `chunk` of this lane's upper and lower row.
  struct QueryRows {
    const uint4 *nope[2], *pe[2];

    QUIRE_DEVICE uint4 load(int half, int chunk) const {
      return __ldg(chunk < kCkv / 8 ? nope[half] + chunk : pe[half] + (chunk - kCkv / 8));
    }
  };
  QUIRE_DEVICE QueryRows query_rows(const WorkTile& work) const {
    QueryRows rows;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      rows.nope[h] = reinterpret_cast<const uint4*>(nope_row(work, lane_row() + 8 * h)) + ptx::lane_id() % 4;
      rows.pe[h] = reinterpret_cast<const uint4*>(pe_row(work, lane_row() + 8 * h)) + ptx::lane_id() % 4;
    }
    return rows;
  }

  // All loads are on their way together. Held columns pass through the tile of the others, as many at a time as it has
  // columns: matrix loads from there turn rows into fragments.
  QUIRE_DEVICE void load_queries(Scores& scores, const WorkTile& work) const {
    constexpr int kLoads = V::kHeadDimQk / 32, kHeldLoads = kHeldSteps / 2, kTileLoads = kLoads - kHeldLoads;
    const QueryRows rows = query_rows(work);
    const TileQ tile = q_tile();
    const int lane = ptx::lane_id();
    uint32_t others[kTileLoads * 2][4];
#pragma unroll
    for (int i = 0; i < 2 * kLoads; ++i) {
      uint32_t (&to)[4] = i < 2 * kHeldLoads ? scores.q[i] : others[i - 2 * kHeldLoads];
      const uint4 x = rows.load(i % 2, i / 2 * 4);
      to[0] = x.x, to[1] = x.y, to[2] = x.z, to[3] = x.w;
    }
#pragma unroll
    for (int i = 0; i < 2 * kLoads; ++i) ptx::pin(i < 2 * kHeldLoads ? scores.q[i] : others[i - 2 * kHeldLoads]);
    const auto store = [&](const uint32_t (&x)[4], int i) {
      ptx::st_shared_16(tile.chunk(lane_row() + i % 2 * 8, i / 2 % kTileLoads * 4 + lane % 4), x);
    };
#pragma unroll
    for (int first = 0; first < kHeldSteps; first += 2 * kTileLoads) {
#pragma unroll
      for (int i = first; i < min(first + 2 * kTileLoads, kHeldSteps); ++i) store(scores.q[i], i);
      __syncwarp();
#pragma unroll
      for (int i = first; i < min(first + 2 * kTileLoads, kHeldSteps); ++i) {
        ptx::ldmatrix_x4(scores.q[i], tile.chunk(warp_of_group() * 16 + lane % 16, 2 * (i - first) + lane / 16));
      }
      __syncwarp();
    }
#pragma unroll
    for (int i = 0; i < 2 * kTileLoads; ++i) store(others[i], i);
    ptx::fence_proxy_async();
    ptx::named_barrier_sync(kScore, 128);
  }

  // ---- The warpgroups of O: half of the columns each.

  QUIRE_DEVICE static int half_of_o() { return warpgroup() - 1; }

  QUIRE_DEVICE void compute_values() const {
    if (half_of_o() == kHalves - 1 && is_leader()) {
      SharedWorkList<kCtasPerTile>::begin(p_, shared_.work[kWorkStages - 1].cursor, shared_.number);
    }
    __syncwarp();
    [[maybe_unused]] uint32_t put_off;
    if constexpr (kGathers) {
      gather_first_tiles(put_off);
    } else {
      if (warp_of_group() == 0) load_first_tiles();
    }
    RingPosition<kWorkStages> at;
    RingPosition<2> kpe;  // counts KV tiles
    for (;;) {
      work_ring().wait_full(at);
      Stage& stage = shared_.work[at.stage()];
      if (!ptx::uniform(stage.exists)) break;
      float o[kHalfCols / 2];
#pragma unroll
      for (int i = 0; i < kHalfCols / 2; ++i) o[i] = 0.f;
      bool is_last;
#pragma unroll 1
      do {
        if constexpr (kGathers) {
          is_last = add_gathered(o, kpe, put_off);
        } else {
          is_last = add_tile(o, kpe);
        }
        kpe.advance();
      } while (!is_last);
      store(o, stage, {at.count});
      release_work_tile(at);
    }
  }

  // Fills the ring. The first queries and the first KV tile come before the others, which would be in their way.
  QUIRE_DEVICE void load_first_tiles() const {
#pragma unroll 1
    for (int i = 0; i < kStages; ++i) {
      Box box;
      const bool exists = find_next(i == 0, box);
      if (i == 1 && exists) ptx::mbarrier_wait(queries_barrier(), 0);
      if (exists) load_half(box, i);
      if (half_of_o() != kHalves - 1) continue;
      if (i == kStages - 1) {
        put_off(exists, box);
      } else if (exists) {
        load_kpe(box, {i});
      }
    }
  }

  // o += p ckv of a KV tile; then loads what comes to its place. Whether it was the work tile's last.
  QUIRE_DEVICE bool add_tile(float (&o)[kHalfCols / 2], RingPosition<2> kpe) const {
    const int stage = kpe.count % kStages;
    const bool is_last = start_values(o, kpe, stage);
    Box box;
    bool exists = false;
    if (warp_of_group() == 0) exists = find_next(false, box);
    ptx::wgmma_wait<0>();
    ptx::pin(o);
    if (is_leader()) kpe_ring().arrive_empty(kpe);
    const bool loads_kpe = warp_of_group() == 0 && half_of_o() == kHalves - 1;
    if (loads_kpe) load_put_off({kpe.count + 2});  // first, because it is needed first
    if (exists) load_half(box, stage);
    if (loads_kpe) put_off(exists, box);
    return is_last;
  }

  // kpe of a KV tile is loaded a KV tile after its ckv, when the weights in its place have been used. One warp.
  QUIRE_DEVICE void put_off(bool exists, Box box) const {
    if (ptx::lane_id() < kBoxes) shared_.put_off[ptx::lane_id()] = exists ? box : Box{0, -1};
    __syncwarp();
  }
  QUIRE_DEVICE void load_put_off(RingPosition<2> at) const {
    const Box box = shared_.put_off[ptx::lane_id() % kBoxes].uniform();
    if (box.row >= 0) load_kpe(box, at);
    __syncwarp();
  }

  // Starts o += p ckv of a KV tile. Whether that is the work tile's last one.
  QUIRE_DEVICE bool start_values(float (&o)[kHalfCols / 2], RingPosition<2> at, int stage) const {
    weights_ring().wait_full(at);
    const bool is_last = ptx::uniform(shared_.is_last[at.stage()]);
    if (ptx::uniform(shared_.is_raised[at.stage()][warp_of_group()])) {
      const float* factors = shared_.factors[at.stage()] + lane_row();
      const float factor[2] = {factors[0], factors[8]};
#pragma unroll
      for (int i = 0; i < kHalfCols / 2; ++i) o[i] *= factor[i / 2 % 2];
    }
    const TileDescriptor weights(weights_tile(at.stage()).base, 16);
    const TileDescriptor values(ckv_tile(stage).base + half_of_o() * (TileCkv::kBytes / kHalves), TileCkv::kAtomBytes);
    ptx::pin(o);
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < kTileKv / 16; ++i) {
      ptx::Wgmma<kHalfCols>::template ss<ptx::Contiguous::kN>(T{}, o, weights.at(i * 32), values.at(i * 16 * 128), 1);
    }
    ptx::wgmma_commit();
    return is_last;
  }

  QUIRE_DEVICE void store(float (&o)[kHalfCols / 2], Stage& stage, RingPosition<2> at) const {
    const WorkTile& work = stage.work;
    float m[2], d[2];
    states_ring().wait_full(at);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float2 state = shared_.states[at.stage()][lane_row() + 8 * h];
      m[h] = state.x, d[h] = state.y;
    }
    __syncwarp();
    if (ptx::lane_id() == 0) states_ring().arrive_empty(at);
    if (work.is_whole()) {
      store_whole(o, work, m, d);
    } else {
      store_partial(o, stage, m, d);
    }
  }

  QUIRE_DEVICE void store_whole(const float (&o)[kHalfCols / 2], const WorkTile& work, const float (&m)[2],
                                const float (&d)[2]) const {
    const AttentionParams& p = p_.base;
    const int half = half_of_o();
    const int lane = ptx::lane_id();
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = first_row(work) + lane_row() + 8 * h;
      const WorkTile::Place to = place(work, lane_row() + 8 * h);
      const float* sink = p.sinks == nullptr ? nullptr : p.sinks + to.head;
      const RowResult result = finish_row(m[h], d[h], sink, output_scale(p));
      if (half == 0 && p.lse != nullptr && lane % 4 == 0 && row < work.row_end) {
        p.lse[to.token * p.num_qo_heads + to.head] = returned_lse<V>(result.lse, p, work.tile, to.head);
      }
      T* dst = static_cast<T*>(p.o) + to.token * p.o_token_stride + to.head * p.o_head_stride + half * kHalfCols;
      store_row(dst, o, h, result.scale, row < work.row_end, lane);
    }
  }

  QUIRE_DEVICE void store_partial(const float (&o)[kHalfCols / 2], Stage& stage, const float (&m)[2],
                                  const float (&d)[2]) const {
    const AttentionParams& p = p_.base;
    const int half = half_of_o();
    const WorkTile& work = stage.work;
    const int lane = ptx::lane_id();
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = first_row(work) - work.tile.row_begin + lane_row() + 8 * h;
      if (work.tile.row_begin + row >= work.row_end) continue;
      const int64_t at = static_cast<int64_t>(work.partial) * kTileRows + row;
      float2* dst = reinterpret_cast<float2*>(p.partial_o + at * kCkv + half * kHalfCols) + lane % 4;
#pragma unroll
      for (int i = 0; i < kHalfCols / 2; i += 4) dst[i] = {o[i + 2 * h], o[i + 2 * h + 1]};
      if (half == 0 && lane % 4 == 0) reinterpret_cast<float2*>(p.partial_md)[at] = {m[h], d[h]};
    }
    const bool has_more = p.partitions == nullptr || stage.cursor.exists();
    merge_together<V, kValues, kCtasPerTile>(p, work, !has_more, shared_.turn, ptx::thread_id() - 128);
  }
};

}  // namespace quire
