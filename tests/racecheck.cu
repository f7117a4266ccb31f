// What compute-sanitizer's racecheck (CUDA 13.0) reports of code without races, on one H200, 2026-11-23.
//
//     nvcc -arch=sm_90a -o racecheck tests/racecheck.cu
//     for i in 0 1 2 3; do compute-sanitizer --tool racecheck ./racecheck $i; done
//
//   0  eight warps share an int between two named barriers                                    0 hazards
//   1  the same, and in turns one half of them passes a barrier of its own (bar.red) before    2 or 3
//   2  lanes read a stage, __syncwarp(), and lane 0 alone hands it back through an mbarrier    4 hazards
//   3  the same, and each lane hands it back                                                   0 hazards
//
// Kernels of Quire do as 1 (MLA decode, decode of 512 dims) and 2 (fa3, MLA).
#include <cstdio>
#include <cstdlib>

__device__ void bar_sync(int id, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }

__device__ bool bar_any(int id, int threads, bool condition) {
  int any;
  asm volatile(
      "{\n.reg .pred p, q;\nsetp.ne.b32 p, %3, 0;\nbar.red.or.pred q, %1, %2, p;\nselp.b32 %0, 1, 0, q;\n}\n"
      : "=r"(any)
      : "r"(id), "r"(threads), "r"(static_cast<int>(condition))
      : "memory");
  return any != 0;
}

__device__ void mbarrier_init(unsigned at, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(at), "r"(count) : "memory");
}

__device__ void mbarrier_arrive(unsigned at) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(at) : "memory");
}

__device__ void mbarrier_wait(unsigned at, int parity) {
  asm volatile(
      "{\n.reg .pred done;\nagain%=:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra.uni through%=;\nbra.uni again%=;\nthrough%=:\n}\n" ::"r"(at),
      "r"(parity)
      : "memory");
}

template <bool kHasTurns>
__global__ void share(int* out) {
  __shared__ int shared;
  const int thread = threadIdx.x, half = thread / 128;
  if (thread >= 256) return;
  int sum = 0;
  for (int i = 0; i < 20; ++i) {
    if (kHasTurns && i % 2 == half) sum += bar_any(2 + half, 128, thread == i);
    bar_sync(1, 256);
    if (thread == 0) shared = i;
    bar_sync(1, 256);
    sum += shared;
  }
  out[blockIdx.x * 256 + thread] = sum;
}

template <bool kEachLane>
__global__ void ring(int* out) {
  __shared__ int stage[32];
  __shared__ unsigned long long full, empty;
  const int thread = threadIdx.x, lane = thread % 32;
  const unsigned full_at = __cvta_generic_to_shared(&full), empty_at = __cvta_generic_to_shared(&empty);
  if (thread == 0) mbarrier_init(full_at, 32), mbarrier_init(empty_at, kEachLane ? 128 : 4);
  __syncthreads();
  int sum = 0;
  for (int i = 0; i < 20; ++i) {
    if (thread < 32) {
      mbarrier_wait(empty_at, i % 2 ^ 1);
      stage[lane] = i + lane;
      mbarrier_arrive(full_at);
    } else {
      mbarrier_wait(full_at, i % 2);
      sum += stage[lane] + stage[(lane + 5) % 32];
      __syncwarp();
      if (kEachLane || lane == 0) mbarrier_arrive(empty_at);
    }
  }
  out[blockIdx.x * 160 + thread] = sum;
}

int main(int, char** argv) {
  int* out;
  cudaMalloc(&out, 1 << 20);
  switch (atoi(argv[1])) {
    case 0: share<false><<<8, 384>>>(out); break;
    case 1: share<true><<<8, 384>>>(out); break;
    case 2: ring<false><<<8, 160>>>(out); break;
    default: ring<true><<<8, 160>>>(out);
  }
  puts(cudaGetErrorString(cudaDeviceSynchronize()));
}
