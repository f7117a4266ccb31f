// Decode with multi-head latent attention (MLA) and few rows: the warpgroup matrix instruction and the bulk copy
// engine, sm_90a.
//
// The kernel is limited by reading the cache once. Tokens are the rows of both products and heads their columns, so
// that few heads need no padding to 64: S^T = [ckv, kpe] Q^T, and O^T += ckv^T P^T, which reads the same bytes
// transposed. Two warpgroups take KV tiles in turn, each with a softmax and an O^T of its own, and add up both at the
// end of a work tile: the products of one run while the other computes its softmax. A warp loads, as far ahead as
// shared memory allows: a ring of atoms of 64 tokens x 128 bytes, of which a KV tile takes nine, or five of latents of
// 8 bits (tile/hopper/mla_fp8.cuh). Tokens of small pages, or that indices name, are gathered one by one by four warps.
// Schedule: persistent CTAs, one per SM. All CTAs of a merge group merge it.
//
// Sources: vLLM's FlashAttention for heads as columns.
#pragma once
#include "quire/kernels/attention_mla_decode_shape.cuh"
#include "quire/tile/hopper/mla_merge.cuh"

namespace quire {

template <class V>
class AttentionMlaDecode : MlaDecodeCta<V> {
  using Cta = MlaDecodeCta<V>;
  using Cta::kRows, Cta::kCkv, Cta::kIsFp8, Cta::kGathers, Cta::kGroups, Cta::kWarps, Cta::kWorkStages,
      Cta::kTileStages, Cta::kAtomBytes, Cta::kTileAtoms, Cta::kBlocks, Cta::kIsScaled, Cta::kMeetingBlocks, Cta::kLag,
      Cta::kEarly, Cta::kParts, Cta::kComputeRegisters, Cta::kLoadRegisters, Cta::kAll, Cta::kGroup, Cta::base,
      Cta::group, Cta::warp_of_group, Cta::q_tile, Cta::p_tile, Cta::tile_scales, Cta::existing, Cta::query_scales,
      Cta::work_ring, Cta::full, Cta::empty, Cta::kv_end, Cta::row_of, Cta::p_, Cta::shared_;
  using typename Cta::T, typename Cta::TileQ, typename Cta::TileP, typename Cta::Fp8, typename Cta::P,
      typename Cta::Scores, typename Cta::Values, typename Cta::TilePosition;

 public:
  using Cta::kTileRows, Cta::kTileKv, Cta::kThreads, Cta::kMinCtas, Cta::kSmemBytes;

  QUIRE_DEVICE static void run(const AttentionMlaFa3Params& p, unsigned char* smem) {
    const AttentionMlaDecode cta(p, smem);
    if (threadIdx.x == 0) {
      if constexpr (!kGathers) {
        ptx::prefetch_tensor_map(&p.tensor_k);
        ptx::prefetch_tensor_map(&p.tensor_v);
      }
      cta.init_barriers();
    }
    ptx::wait_for_predecessor();
    if (threadIdx.x == 32 * kWarps) cta.take_first_work_tile();
    if (threadIdx.x == 32 * kWarps + 32) prefetch_row_tiles(p.base);
    __syncthreads();
    ptx::launch_dependents();
    if (group() < kGroups) {
      ptx::take_registers<kComputeRegisters>();
      cta.compute();
    } else {
      ptx::give_registers<kLoadRegisters>();
      if (kGathers || warp_of_group() == 0) cta.load();
    }
  }

 private:
  QUIRE_DEVICE AttentionMlaDecode(const AttentionMlaFa3Params& p, unsigned char* smem) : Cta(p, smem) {}

  // ---- The warp that loads.

  QUIRE_DEVICE void take_first_work_tile() const {
    CurrentWork& before = shared_.work[kWorkStages - 1];
    WorkList::begin(p_, before.cursor, shared_.number);
    WorkList::next(p_, before.cursor, shared_.work[0], shared_.number, kTileKv);
  }

  QUIRE_DEVICE void load() const {
    RingPosition<kWorkStages> at;
    TilePosition to;
    for (;; at.advance()) {
      CurrentWork& stage = shared_.work[at.stage()];
      if (kGathers && warp_of_group() != 0) {
        work_ring().wait_full(at);
      } else {
        work_ring().wait_empty(at);
        if (ptx::lane_id() == 0) {
          if (at.count > 0) {
            WorkList::next(p_, shared_.work[at.before().stage()].cursor, stage, shared_.number, kTileKv);
          }
          work_ring().arrive_full(at);
        }
        __syncwarp();
      }
      if (!stage.exists) return;
      if constexpr (kGathers) {
        gather_work_tile(stage.work, to);
      } else {
        load_work_tile(stage.work, to);
      }
    }
  }

  // Page numbers of 32 KV tiles at a time, one a lane.
  QUIRE_DEVICE void load_work_tile(const WorkTile& work, TilePosition& to) const {
    const int begin = work.kv_begin, end = kv_end(work);
    int pages = 0;
#pragma unroll 1
    for (int tile = begin; tile < end; ++tile, to.advance()) {
      const int i = (tile - begin) % 32;
      if (i == 0) pages = page_of(work, tile + ptx::lane_id(), end);
      const int page = __shfl_sync(0xffffffffu, pages, i);
      if (ptx::lane_id() == 0) load_tile(to, page, tile * kTileKv % V::kPageSize);
      if constexpr (kIsScaled) load_scales(to, page, tile * kTileKv % V::kPageSize, work.tile.kv_len - tile * kTileKv);
      __syncwarp();
    }
  }

  // A KV tile beyond kv_len comes from page -1: outside of the tensor, hence zeros.
  QUIRE_DEVICE int page_of(const WorkTile& work, int tile, int end) const {
    const int token = tile * kTileKv;
    if (tile >= end || token >= work.tile.kv_len) return -1;
    return p_.base.kv_indices[work.tile.kv_first + token / V::kPageSize];
  }

  QUIRE_DEVICE void load_tile(TilePosition to, int page, int row) const {
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const int begin = part == 0 ? 0 : kEarly, end = part == 0 ? kEarly : kTileAtoms;
      wait_empty(to.count - kLag + part);
      const uint32_t barrier = full(to.stage(), part);
      ptx::mbarrier_arrive_expect(barrier, (end - begin) * kAtomBytes);
#pragma unroll
      for (int i = begin; i < end; ++i) {
        const bool is_kpe = i == kTileAtoms - 1;
        ptx::tma_load_4d_once(base() + to.atom_at(i), is_kpe ? &p_.tensor_k : &p_.tensor_v, barrier, 0, row,
                              is_kpe ? 0 : i, page);
      }
    }
  }

  // Scales of a KV tile, of which `count` tokens exist: 16 bytes a token, zeros for others. All lanes.
  QUIRE_DEVICE void load_scales(TilePosition to, int page, int row, int count) const {
    __syncwarp();
    wait_empty(to.count - kLag);
    const float* from = p_.ckv_scales + page * p_.ckv_scales_page_stride + row * p_.ckv_scales_token_stride;
#pragma unroll
    for (int token = ptx::lane_id(); token < kTileKv; token += 32) {
      ptx::cp_async_16(tile_scales(to.stage()) + token * 16,
                       token < count ? from + token * p_.ckv_scales_token_stride : p_.ckv_scales,
                       token < count ? 16 : 0);
    }
    ptx::cp_async_arrive(full(to.stage(), 0));
  }

  // Where a token is in the cache. Lanes i and i + 16 find token i of 16. Zeros are copied for a token that does not
  // exist, and nothing is read.
  struct Token {
    int page = -1, row = 0;
  };

  QUIRE_DEVICE Token find(const WorkTile& work, int tile) const {
    const int token = tile * kTileKv + warp_of_group() * 16 + ptx::lane_id() % 16;
    if (token >= work.tile.kv_len) return {};
    const int index = p_.base.page.div(token);
    return {p_.base.kv_indices[work.tile.kv_first + index], token - index * static_cast<int>(p_.base.page.divisor)};
  }

  QUIRE_DEVICE void gather_work_tile(const WorkTile& work, TilePosition& to) const {
    const int begin = work.kv_begin, end = kv_end(work);
    Token token = find(work, begin);
#pragma unroll 1
    for (int tile = begin; tile < end; ++tile, to.advance()) {
      const Token next = tile + 1 < end ? find(work, tile + 1) : Token{};
      gather_tile(to, token);
      token = next;
    }
  }

  // This warp's 16 tokens, four at a time by eight lanes each.
  QUIRE_DEVICE void gather_tile(TilePosition to, Token token) const {
    const AttentionParams& p = p_.base;
    const int lane = ptx::lane_id(), warp = warp_of_group();
    const bool exists = static_cast<uint32_t>(token.page) < static_cast<uint32_t>(p_.num_pages);
    const uint32_t bits = __ballot_sync(0xffffffffu, exists);
    const CachePlace at = cache_place(p_, token.page, token.row);
    const int64_t page = at.page;
    const int64_t ckv = exists ? page * p.v_page_stride + at.row * p.v_token_stride : -1;
    const int64_t kpe = page * p.k_page_stride + at.row * p.k_token_stride;
    constexpr int kKpeBytes = 64 * (kIsScaled ? sizeof(T) : 1);
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      wait_empty(to.count - kLag + part);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int from = 4 * i + lane / 8, row = warp * 16 + from, chunk = lane % 8;
        const int64_t ckv_at = __shfl_sync(0xffffffffu, static_cast<long long>(ckv), from),
                      kpe_at = __shfl_sync(0xffffffffu, static_cast<long long>(kpe), from);
        const int bytes = ckv_at < 0 ? 0 : 16;
#pragma unroll
        for (int atom = part == 0 ? 0 : kEarly; atom < (part == 0 ? kEarly : kTileAtoms); ++atom) {
          const bool is_kpe = atom == kTileAtoms - 1;
          if (is_kpe && chunk * 16 >= kKpeBytes) continue;
          const auto* src = is_kpe ? static_cast<const unsigned char*>(p.k) + (kKpeBytes / 64) * kpe_at
                                   : static_cast<const unsigned char*>(p.v) + ckv_at + atom * 128;
          const uint32_t dst = base() + to.atom_at(atom) + row * 128 + (chunk ^ row % 8) * 16;
          ptx::cp_async_16(dst, bytes == 0 ? p.v : src + chunk * 16, bytes);
        }
      }
    }
    if (kIsScaled && lane < 16) {
      const float* from = p_.ckv_scales + page * p_.ckv_scales_page_stride + at.row * p_.ckv_scales_token_stride;
      ptx::cp_async_16(tile_scales(to.stage()) + (warp * 16 + lane) * 16, exists ? from : p_.ckv_scales,
                       exists ? 16 : 0);
    }
    ptx::cp_async_arrive(full(to.stage(), 0));
    if (lane == 0) {
      existing(to.stage(), warp) = static_cast<uint16_t>(bits);
      ptx::mbarrier_arrive(full(to.stage(), 0));
    }
    __syncwarp();
  }

  // Waits until KV tile `count` of the CTA has been used.
  QUIRE_DEVICE void wait_empty(int count) const {
    if (count >= 0) ptx::mbarrier_wait(empty(count % kTileStages), count / kTileStages & 1);
  }

  // ---- The warpgroups that compute.

  // The softmax of this lane's heads: element 2 * n + c belongs to column 8 * n + 2 * (lane % 4) + c.
  struct Softmax {
    float m[kRows / 4];  // reference maximum, base-2 exponent; lags behind the true one by at most kMostLag
    float d[kRows / 4];  // this lane's part of the denominator
    float scale[kIsFp8 ? kRows / 4 : 1];  // of logits

    QUIRE_DEVICE float scale_of(int i) const { return scale[kIsFp8 ? i : 0]; }
  };

  QUIRE_DEVICE static constexpr int column_of(int i) { return i / 4 * 2 + i % 2; }  // of register i of 8 tokens x kRows

  QUIRE_DEVICE void compute() const {
    RingPosition<kWorkStages> at;
    TilePosition from;
    for (;; at.advance()) {
      work_ring().wait_full(at);
      const CurrentWork& stage = shared_.work[at.stage()];
      if (!ptx::uniform(stage.exists)) return;
      // Load queries.
      load_queries(stage.work);
      Softmax softmax;
      Values o;
      clear(softmax, o);
#pragma unroll
      for (int i = 0; i < static_cast<int>(sizeof(softmax.scale) / sizeof(float)); ++i) {
        softmax.scale[i] = logits_scale<V>(p_.base);
        if (kIsFp8) softmax.scale[i] *= query_scales()[i / 2 * 8 + ptx::lane_id() % 4 * 2 + i % 2];
      }
      // Compute O^T, m and d over this warpgroup's KV tiles.
      const TilePosition last = add_tiles(stage.work, from, softmax, o);
      // Add both warpgroups' O^T, store, and release the work tile.
      store(stage, last, softmax, o);
      __syncwarp();
      if (ptx::lane_id() == 0) work_ring().arrive_empty(at);
    }
  }

  QUIRE_DEVICE static void clear(Softmax& softmax, Values& o) {
#pragma unroll
    for (int i = 0; i < kRows / 4; ++i) softmax.m[i] = kNoLogit, softmax.d[i] = 0.f;
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
      for (int i = 0; i < kRows / 2; ++i) o[block][i] = 0.f;
    }
  }

  QUIRE_DEVICE void load_queries(const WorkTile& work) const {
    const int lane = ptx::lane_id(), warp = ptx::thread_id() / 32;
#pragma unroll 1
    for (int i = 0; i < kRows / kWarps; ++i) {
      const int row = warp + i * kWarps;
      const WorkTile::Place at = work.place(p_.base.group, row_of(work, row));
      const T* nope =
          static_cast<const T*>(p_.q_nope) + at.token * p_.q_nope_token_stride + at.head * p_.q_nope_head_stride;
      const T* pe =
          static_cast<const T*>(p_.base.q) + at.token * p_.base.q_token_stride + at.head * p_.base.q_head_stride;
      if constexpr (kIsFp8) {
        const float scale = Fp8::load_query(q_tile(), row, nope, pe, lane);
        if (lane == 0) query_scales()[row] = scale;
      } else {
#pragma unroll
        for (int chunk = 0; chunk < kCkv / 8; chunk += 32) {
          ptx::cp_async_16(q_tile().chunk(row, chunk + lane), nope + (chunk + lane) * 8);
        }
        if (lane < 8) ptx::cp_async_16(q_tile().chunk(row, kCkv / 8 + lane), pe + lane * 8);
      }
    }
    ptx::cp_async_wait_all();
    ptx::fence_proxy_async();
    ptx::named_barrier_sync(kAll, 32 * kWarps);
  }

  // Computes this warpgroup's KV tiles of a work tile. Returns the position of the work tile's last KV tile, which is
  // not yet released.
  QUIRE_DEVICE TilePosition add_tiles(const WorkTile& work, TilePosition& from, Softmax& softmax, Values& o) const {
    const int begin = ptx::uniform(work.kv_begin), end = ptx::uniform(kv_end(work));
    const int all_see = ptx::uniform(mask(work).visible(p_.base.group.div(row_of(work, 0))).end);
    TilePosition last;
#pragma unroll 1
    for (int tile = begin; tile < end; ++tile, from.advance()) {
      last = from;
      if ((tile - begin) % kGroups != group()) continue;
      const bool is_masked = (!kGathers || V::kMask == kMaskCausal) && (tile + 1) * kTileKv > all_see;
      add_tile(work, tile, is_masked, {ptx::uniform(from.count), ptx::uniform(from.first)}, softmax, o);
      if (tile + 1 < end) release(from);
    }
    return last;
  }

  QUIRE_DEVICE void release(TilePosition from) const {
    __syncwarp();
    if (ptx::lane_id() == 0) ptx::mbarrier_arrive(empty(from.stage()));
  }

  QUIRE_DEVICE void add_tile(const WorkTile& work, int tile, bool is_masked, TilePosition from, Softmax& softmax,
                             Values& o) const {
    Scores s;
    typename Fp8::TileScales scales;
    // Compute S^T.
    multiply(s, scales, from);
    // Hide keys.
    if (is_masked) hide(s, work, tile * kTileKv);
    if constexpr (kGathers) hide_gaps(s, existing(from.stage(), warp_of_group()) >> ptx::lane_id() / 4);
    // Turn S^T into weights, and rescale O^T if a maximum has grown.
    raise_max(s, softmax, o);
    exponentiate(s, scales, softmax);
    // Clear values that do not exist: they may be NaN, and 0 * NaN is NaN.
    if (is_masked && !kGathers) clear_missing((tile + 1) * kTileKv - work.tile.kv_len, from);
    // Compute O^T += ckv^T P^T, when all warps have written their weights.
    ptx::fence_proxy_async();
    ptx::named_barrier_sync(kGroup + group(), 128);
    add_values(o, scales, from);
  }

  // s = [ckv, kpe] q^T.
  QUIRE_DEVICE void multiply(Scores& s, typename Fp8::TileScales& scales, TilePosition from) const {
    const TileDescriptor keys(base(), 16), q(q_tile().base, 16);
    if constexpr (kIsFp8) {
      const auto wait = [&](int atom) {
        if (atom == 0) ptx::mbarrier_wait(full(from.stage(), 0), from.parity());
        if (atom == kEarly && !kGathers) ptx::mbarrier_wait(full(from.stage(), 1), from.parity());
        if (kGathers && kIsScaled && atom == kTileAtoms - 1) ptx::fence_proxy_async();  // kpe is read in place
      };
      const int lane = ptx::lane_id(), warp = warp_of_group();
      return Fp8::multiply(s, scales, base(), q, from, warp, lane, wait,
                           [&] { scales.load(tile_scales(from.stage()), warp, lane); });
    } else {
      ptx::pin(s);
#pragma unroll
      for (int i = 0; i < kTileAtoms; ++i) {
        if (i == 0) ptx::mbarrier_wait(full(from.stage(), 0), from.parity());
        if (i == kEarly) ptx::mbarrier_wait(full(from.stage(), 1), from.parity());
        if (i == 0 || i == kEarly) ptx::wgmma_fence();
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          ptx::Wgmma<kRows>::ss(T{}, s, keys.at(from.atom_at(i) + k * 32), q.at(i * TileQ::kAtomBytes + k * 32),
                                i + k > 0);
        }
      }
      ptx::wgmma_commit();
      ptx::wgmma_wait<0>();
      ptx::pin(s);
    }
  }

  QUIRE_DEVICE Mask<V::kMask, V::kWindow != 0> mask(const WorkTile& work) const {
    return {work.tile.qo_len, work.tile.kv_len, -1, nullptr};
  }

  // Logits that a row does not see become -infinity. `key`: the KV tile's first.
  QUIRE_DEVICE void hide(Scores& s, const WorkTile& work, int key) const {
    const int lane = ptx::lane_id(), token = key + warp_of_group() * 16 + lane / 4;
#pragma unroll
    for (int i = 0; i < kRows / 4; ++i) {
      const int row = row_of(work, i / 2 * 8 + lane % 4 * 2 + i % 2);
      const int end = mask(work).visible(p_.base.group.div(row)).end;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        if (token + 8 * h >= end) s[i / 2 * 4 + 2 * h + i % 2] = __int_as_float(0xff800000);
      }
    }
  }

  // Bits 0 and 8: whether this lane's tokens exist.
  QUIRE_DEVICE static void hide_gaps(Scores& s, uint32_t bits) {
#pragma unroll
    for (int i = 0; i < kRows / 2; ++i) {
      if ((bits >> i / 2 % 2 * 8 & 1) == 0) s[i] = __int_as_float(0xff800000);
    }
  }

  // How far below a new maximum the reference maximum is set, in powers of two. Weights of fp16 are then near the upper
  // end of fp16's range, so that small weights keep their bits.
  static constexpr float kMargin = kIsFp8 ? 7.f : 0.f, kMostLag = kMostLagOf<V> + kMargin;
  static_assert(V::kMaxLogits == 0 || !kIsFp8, "the reference maximum is the true one");

  // Raises m where a logit exceeds it by more than kMostLag, in any warp of the warpgroup.
  QUIRE_DEVICE void raise_max(const Scores& s, Softmax& softmax, Values& o) const {
    float top[kRows / 4];
    bool exceeds = false;
#pragma unroll
    for (int i = 0; i < kRows / 4; ++i) {
      top[i] = fmaxf(s[i / 2 * 4 + i % 2], s[i / 2 * 4 + 2 + i % 2]) * softmax.scale_of(i);
      exceeds |= top[i] > softmax.m[i] + kMostLag;
    }
    if (!ptx::named_barrier_any(kGroup + group(), 128, exceeds)) return;
    share<true>(top, shared_.tops[group()][warp_of_group()]);
    ptx::named_barrier_sync(kGroup + group(), 128);
    float factor[kRows / 4];
#pragma unroll
    for (int i = 0; i < kRows / 4; ++i) {
      const int column = i / 2 * 8 + ptx::lane_id() % 4 * 2 + i % 2;
      const float (&tops)[4][kRows] = shared_.tops[group()];
      const float x = fmaxf(fmaxf(tops[0][column], tops[1][column]), fmaxf(tops[2][column], tops[3][column]));
      const float next = x > softmax.m[i] + kMostLag ? x - kMargin : softmax.m[i];
      factor[i] = ptx::ex2(softmax.m[i] - next);
      softmax.m[i] = next, softmax.d[i] *= factor[i];
    }
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
      for (int i = 0; i < kRows / 2; ++i) o[block][i] *= factor[column_of(i)];
    }
  }

  // Reduces each column over the lanes of a warp, to the maximum or the sum, and writes it to `to` [kRows].
  template <bool kIsMax>
  QUIRE_DEVICE static void share(const float (&x)[kRows / 4], float* to) {
    const int lane = ptx::lane_id();
#pragma unroll
    for (int i = 0; i < kRows / 4; ++i) {
      float y = x[i];
#pragma unroll
      for (int step = 4; step < 32; step *= 2) {
        const float other = __shfl_xor_sync(0xffffffffu, y, step);
        y = kIsMax ? fmaxf(y, other) : y + other;
      }
      if (lane < 4) to[i / 2 * 8 + lane * 2 + i % 2] = y;
    }
  }

  // Computes weights and writes them to shared memory, as rows of P.
  QUIRE_DEVICE void exponentiate(Scores& s, const typename Fp8::TileScales& scales, Softmax& softmax) const {
#pragma unroll
    for (int i = 0; i < kRows / 2; ++i) {
      s[i] = ptx::ex2(fmaf(s[i], softmax.scale_of(column_of(i)), -softmax.m[column_of(i)]));
      softmax.d[column_of(i)] += s[i];
    }
    const int lane = ptx::lane_id();
    const uint32_t to = p_tile().chunk(lane / 16 * 8 + lane % 8, warp_of_group() * 2 + lane / 8 % 2);
#pragma unroll
    for (int n = 0; n < Fp8::kPs; ++n) {
#pragma unroll
      for (int i = 0; i < kRows / 2; i += 8) {
        uint32_t weights[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float factor = kIsScaled ? scales.factor(j % 2, n) : 1.f;
          weights[j] = ptx::pack(P{}, s[i + 2 * j] * factor, s[i + 2 * j + 1] * factor);
        }
        ptx::st_matrix_trans(to + n * TileP::kBytes + i / 8 * 16 * 128, weights);
      }
    }
  }

  // Writes zeros to the last `count` tokens of a KV tile.
  QUIRE_DEVICE static void clear_missing(int count, TilePosition from) {
    constexpr int kAtoms = kTileAtoms - 1;
    const int end = min(count, kTileKv) * kAtoms * 8;
#pragma unroll 1
    for (int i = ptx::thread_id() % 128; i < end; i += 128) {
      const int row = kTileKv - 1 - i / (kAtoms * 8);
      ptx::st_shared_16(base() + from.atom_at(i / 8 % kAtoms) + row * 128 + i % 8 * 16, {0, 0, 0, 0});
    }
  }

  // o += ckv^T p^T.
  QUIRE_DEVICE void add_values(Values& o, const typename Fp8::TileScales& scales, TilePosition from) const {
    const TileDescriptor values(base(), 16), weights(p_tile().base, 16);
    if constexpr (kIsFp8) {
      return Fp8::add_values(o, scales, base(), weights, from, warp_of_group(), ptx::lane_id());
    } else {
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) ptx::pin(o[block]);
      ptx::wgmma_fence();
#pragma unroll
      for (int k = 0; k < 4; ++k) {
#pragma unroll
        for (int block = 0; block < kBlocks; ++block) {
          ptx::Wgmma<kRows>::template ss<ptx::Contiguous::kInner, ptx::Contiguous::kOuter>(
              T{}, o[block], values.at(from.atom_at(block) + k * 16 * 128), weights.at(k * 32), 1);
        }
      }
      ptx::wgmma_commit();
      ptx::wgmma_wait<0>();
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) ptx::pin(o[block]);
    }
  }

  // ---- The end of a work tile. The two O^T are added in the stage of the last KV tile, 16 rows and kMeetingBlocks
  // blocks of columns at a time.

  // The address of a row and column of a warpgroup's block of 64 columns, which is in one atom.
  QUIRE_DEVICE static uint32_t exchange(int group, int row, int col) {
    const int swizzle = ((row >> 1 & 3) ^ row % 2 * 2) * 8;
    return base() + group * (kAtomBytes / kGroups) + (row * 64 + (col ^ swizzle)) * 4;
  }

  // A row's state over both warpgroups, and what each one's part of it is multiplied by.
  struct Total {
    float m, d, weight[kGroups];
  };
  QUIRE_DEVICE Total total(int row) const {
    Total x = {fmaxf(shared_.maxima[0][row], shared_.maxima[1][row]), 0.f, {}};
#pragma unroll
    for (int i = 0; i < kGroups; ++i) {
      const float (&sums)[4][kRows] = shared_.tops[i];
      x.weight[i] = ptx::ex2(shared_.maxima[i][row] - x.m);
      x.d = fmaf(x.weight[i], sums[0][row] + sums[1][row] + (sums[2][row] + sums[3][row]), x.d);
    }
    return x;
  }

  QUIRE_DEVICE void store(const CurrentWork& stage, TilePosition last, const Softmax& softmax, const Values& o) const {
    const WorkTile& work = stage.work;
    const int lane = ptx::lane_id();
    share<false>(softmax.d, shared_.tops[group()][warp_of_group()]);
    if (warp_of_group() == 0) share<true>(softmax.m, shared_.maxima[group()]);
#pragma unroll
    for (int part = 0; part < kRows / 16 * (kBlocks / kMeetingBlocks); ++part) {
      const int first = part % (kRows / 16) * 16, first_block = part / (kRows / 16) * kMeetingBlocks;
      ptx::named_barrier_sync(kAll, 32 * kWarps);  // every warp has used the last KV tile, or stored the part before
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int row = i / 4 * 8 + lane % 4 * 2 + i % 2, half = i / 2 % 2;
        const int col = warp_of_group() * 16 + (kIsFp8 ? lane / 4 * 2 + half : half * 8 + lane / 4);
        const uint32_t to = exchange(group(), row, col);
#pragma unroll
        for (int block = 0; block < kMeetingBlocks; ++block) {
          ptx::st_shared(to + last.atom_at(block), __float_as_uint(o[first_block + block][first / 2 + i]));
        }
      }
      ptx::named_barrier_sync(kAll, 32 * kWarps);
      store_rows(work, last, first, first_block);
    }
    ptx::fence_proxy_async();
    ptx::named_barrier_sync(kAll, 32 * kWarps);
    if ((kv_end(work) - 1 - work.kv_begin) % kGroups == group()) release(last);
    if (work.is_whole()) return;
    const bool has_more = p_.base.partitions == nullptr || stage.cursor.exists();
    merge_together<V, kAll, 1>(p_.base, work, !has_more, shared_.turn, ptx::thread_id());
  }

  // 16 rows from `first` on, and kMeetingBlocks blocks of columns; a warp every eighth 8 columns, a lane columns of a
  // row and of the one 8 below.
  QUIRE_DEVICE void store_rows(const WorkTile& work, TilePosition from, int first, int first_block) const {
    const AttentionParams& p = p_.base;
    const int lane = ptx::lane_id(), warp = ptx::uniform(ptx::thread_id() / 32);
    const Total totals[2] = {total(first + lane / 4), total(first + lane / 4 + 8)};
    const int64_t partial = static_cast<int64_t>(work.partial) * kTileRows + first;
    float scale[2];
    T* to[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = work.tile.row_begin + first + lane / 4 + 8 * h;
      to[h] = nullptr;
      if (!work.is_whole()) {
        auto* states = reinterpret_cast<float2*>(p.partial_md) + partial + lane / 4;
        if (first_block == 0 && warp == 0 && lane % 4 == 0) states[8 * h] = {totals[h].m, totals[h].d};
      } else if (row < work.row_end) {
        const WorkTile::Place at = work.place(p.group, row);
        const RowResult result = finish_row_of<V>(p, at.head, totals[h].m, totals[h].d);
        if (first_block == 0 && warp == 0 && lane % 4 == 0 && p.lse != nullptr) {
          store_statistics<V>(p, work.tile, at, result.lse, totals[h].m, totals[h].d);
        }
        scale[h] = result.scale;
        to[h] = static_cast<T*>(p.o) + at.token * p.o_token_stride + at.head * p.o_head_stride + lane % 4 * 2;
      }
    }
#pragma unroll 2
    for (int i = 0; i < kMeetingBlocks; ++i) {
      const int block = (first_block + i) * kWarps + warp;  // of 8 columns
      float2 x[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        x[h] = {0.f, 0.f};
#pragma unroll
        for (int j = 0; j < kGroups; ++j) {
          const uint32_t at = exchange(j, lane / 4 + 8 * h, warp * 8 + lane % 4 * 2);
          const uint2 part = ptx::ld_shared_8(at + from.atom_at(i));
          x[h].x = fmaf(totals[h].weight[j], __uint_as_float(part.x), x[h].x);
          x[h].y = fmaf(totals[h].weight[j], __uint_as_float(part.y), x[h].y);
        }
        if (to[h] == nullptr) continue;
        *reinterpret_cast<uint32_t*>(to[h] + block * 8) = ptx::pack(T{}, x[h].x * scale[h], x[h].y * scale[h]);
      }
      if (work.is_whole()) continue;
      reinterpret_cast<float4*>(p.partial_o + partial * kCkv)[block * 32 + lane] = {x[0].x, x[0].y, x[1].x, x[1].y};
    }
  }
};

}  // namespace quire
