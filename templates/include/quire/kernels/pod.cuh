// Prefill and decode of one step in one launch: sm_90a.
//
// Decode is limited by memory, which some of the SMs use up, and prefill by the tensor cores. So the first CTAs of the
// launch compute decodes and the others prefills, one CTA per SM. A CTA that has no more decodes goes on with prefills:
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
  uint32_t* decode_counter;  // partitions, or row tiles, beyond the first of each warpgroup; 0 between launches
  int32_t num_decode_ctas;   // the first ones of the launch
};

// V::Prefill, V::Decode: the variants of the two kernels.
template <class V>
struct Pod {
  using Prefill = AttentionFa3<typename V::Prefill, SharedWorkList<1, true>>;
  using Decode = AttentionDecode<typename V::Decode, WarpgroupAsCta>;
  static constexpr int kThreads = Prefill::kThreads, kMinCtas = 1;
  static constexpr int kDecoding = Decode::kMinCtas;  // warpgroups that decode
  static constexpr int kUsedBytes = ceil_div(DecodeShape<typename V::Decode>::kUsedBytes, 16) * 16;
  static constexpr int kDecodeBytes = ceil_div(kUsedBytes + 16, 1024) * 1024;  // and the next partition's number
  static constexpr int kSmemBytes = max(Prefill::kSmemBytes, kDecodeBytes* kDecoding);
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
      decode_all(p, smem + warpgroup * kDecodeBytes, warpgroup);
      ptx::give_registers<kRegisters>();
      ptx::fence_proxy_async();  // what follows is copied to the same shared memory by the copy engine
      __syncthreads();
    } else {
      ptx::give_registers<kIdleRegisters>();
      __syncthreads();
      ptx::take_registers<kRegisters>();
    }
  }

  // A warpgroup takes partitions, or row tiles, until there are none, because memory serves some SMs faster than
  // others. Each take but a warpgroup's first, which follows from its number, increments the counter, as does each
  // warpgroup's final failed take: num_ctas increments per launch, after which atomicInc has wrapped to 0.
  QUIRE_DEVICE static void decode_all(const PodParams& p, unsigned char* smem, int warpgroup) {
    const int all = p.num_decode_ctas * kDecoding, num_parts = p.decode.num_ctas;
    volatile int* next = reinterpret_cast<int*>(smem + kUsedBytes);
    int part = static_cast<int>(blockIdx.x) * kDecoding + warpgroup;
#pragma unroll 1
    while (part < num_parts) {
      Decode::run(p.decode, smem, {part});
      if (WarpgroupAsCta::thread() == 0) *next = all + static_cast<int>(atomicInc(p.decode_counter, num_parts - 1));
      WarpgroupAsCta::sync();
      part = *next;
      WarpgroupAsCta::sync();
    }
  }
};

}  // namespace quire
