// Prefill and decode of one step in one launch: sm_90a.
//
// Bound: decode by memory, which half of the SMs use up, and prefill by the tensor cores. So the first CTAs of the
// launch compute decodes and the others prefills, one CTA an SM. A CTA that has no more decodes goes on with prefills:
// row tiles that it takes from the tile counter, so that all CTAs end together. Where row tiles are divided, partitions
// belong to the other CTAs.
// A warpgroup of a decoding CTA is what attention_decode knows as a CTA. It takes the registers of the warpgroups that
// have nothing to decode, and gives them back afterwards.
//
// Source: POD-Attention (Kamath et al., 2024) for both in one launch.
#pragma once
#include "quire/kernels/attention_decode.cuh"
#include "quire/kernels/attention_fa3.cuh"

namespace quire {

struct PodParams {
  AttentionFa3Params prefill;
  AttentionParams decode;
  int32_t num_decode_ctas;  // the first ones of the launch
};

// V::Prefill, V::Decode: the variants of the two kernels.
template <class V>
struct Pod {
  using Prefill = AttentionFa3<typename V::Prefill, SharedWorkList<1, true>>;
  using Decode = AttentionDecode<typename V::Decode, WarpgroupAsCta>;
  static constexpr int kThreads = Prefill::kThreads, kMinCtas = 1;
  static constexpr int kDecoding = Decode::kMinCtas;  // warpgroups that decode
  static constexpr int kDecodeBytes = ceil_div(DecodeShape<typename V::Decode>::kUsedBytes, 1024) * 1024;
  static constexpr int kSmemBytes = max(Prefill::kSmemBytes, kDecoding* kDecodeBytes);
  static_assert(Decode::kThreads == 128, "a warpgroup decodes");
  static_assert(kSmemBytes <= 227 * 1024, "the rings of decoding warpgroups fit into shared memory");

  QUIRE_DEVICE static void run(const PodParams& p, unsigned char* smem) {
    if (static_cast<int>(blockIdx.x) < p.num_decode_ctas) decode(p, smem);
    Prefill::run(p.prefill, smem);
  }

 private:
  // Registers a thread: of the launch, of warpgroups that wait, and of those that decode.
  static constexpr int kRegisters = 65536 / kThreads / 8 * 8, kIdleRegisters = 24;
  static constexpr int kIdle = kThreads / 128 - kDecoding;
  static constexpr int kDecodeRegisters =
      min(240, (kRegisters * kThreads / 128 - kIdle * kIdleRegisters) / kDecoding / 8 * 8);

  QUIRE_DEVICE static void decode(const PodParams& p, unsigned char* smem) {
    const int warpgroup = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 128, 0);
    if (warpgroup < kDecoding) {
      ptx::take_registers<kDecodeRegisters>();
      decode_all(p, smem, warpgroup);
      ptx::give_registers<kRegisters>();
      ptx::fence_proxy_async();  // what follows is copied to the same shared memory by the copy engine
      __syncthreads();
    } else {
      ptx::give_registers<kIdleRegisters>();
      __syncthreads();
      ptx::take_registers<kRegisters>();
    }
  }

  // Every so many partitions, or row tiles, which descend: a warpgroup that has the longest of one round has the
  // shortest of the next.
  QUIRE_DEVICE static void decode_all(const PodParams& p, unsigned char* smem, int warpgroup) {
    const int own = static_cast<int>(blockIdx.x) * kDecoding + warpgroup, all = p.num_decode_ctas * kDecoding;
    bool is_reversed = false;
#pragma unroll 1
    for (int first = 0; first < p.decode.num_ctas; first += all, is_reversed = !is_reversed) {
      const int cta = first + (is_reversed ? all - 1 - own : own);
      if (cta < p.decode.num_ctas) Decode::run(p.decode, smem + warpgroup * kDecodeBytes, {cta});
      WarpgroupAsCta::sync();
    }
  }
};

}  // namespace quire
