// nvcc includes a header of this name in every unit. This file replaces the toolkit's, and is parsed in a third of the
// time: it declares only what device code here uses, not the host's runtime and not double precision. NVRTC has all of
// this built in and does not read the file.
#pragma once
#define __CUDA_INCLUDE_COMPILER_INTERNAL_HEADERS__
// Headers that crt/device_functions.h would include and nothing here uses: the host's runtime, textures, atomics.
#define __CUDA_DEVICE_RUNTIME_API_H__
#define __CUDA_RUNTIME_API_H__
#define __DEVICE_DOUBLE_FUNCTIONS_H__
#define __SM_20_ATOMIC_FUNCTIONS_H__
#define __SM_32_ATOMIC_FUNCTIONS_H__
#define __SM_35_ATOMIC_FUNCTIONS_H__
#define __SM_60_ATOMIC_FUNCTIONS_H__
#define __SM_61_INTRINSICS_H__
#define __SURFACE_INDIRECT_FUNCTIONS_H__
#define __TEXTURE_INDIRECT_FUNCTIONS_H__
#include "builtin_types.h"
#include "crt/host_defines.h"
#include "vector_functions.h"

#define QUIRE_BUILTIN extern "C" __device__ __device_builtin__ float
QUIRE_BUILTIN acosf(float);
QUIRE_BUILTIN asinf(float);
QUIRE_BUILTIN atan2f(float, float);
QUIRE_BUILTIN atanf(float);
QUIRE_BUILTIN ceilf(float);
QUIRE_BUILTIN copysignf(float, float);
QUIRE_BUILTIN cosf(float);
QUIRE_BUILTIN coshf(float);
QUIRE_BUILTIN cospif(float);
QUIRE_BUILTIN erfcf(float);
QUIRE_BUILTIN erff(float);
QUIRE_BUILTIN exp2f(float);
QUIRE_BUILTIN expf(float);
QUIRE_BUILTIN expm1f(float);
QUIRE_BUILTIN fabsf(float);
QUIRE_BUILTIN fdimf(float, float);
QUIRE_BUILTIN floorf(float);
QUIRE_BUILTIN fmaf(float, float, float);
QUIRE_BUILTIN fmaxf(float, float);
QUIRE_BUILTIN fminf(float, float);
QUIRE_BUILTIN fmodf(float, float);
QUIRE_BUILTIN hypotf(float, float);
QUIRE_BUILTIN log10f(float);
QUIRE_BUILTIN log1pf(float);
QUIRE_BUILTIN log2f(float);
QUIRE_BUILTIN logf(float);
QUIRE_BUILTIN nearbyintf(float);
QUIRE_BUILTIN powf(float, float);
QUIRE_BUILTIN rintf(float);
QUIRE_BUILTIN roundf(float);
QUIRE_BUILTIN rsqrtf(float);
QUIRE_BUILTIN sinf(float);
QUIRE_BUILTIN sinhf(float);
QUIRE_BUILTIN sinpif(float);
QUIRE_BUILTIN sqrtf(float);
QUIRE_BUILTIN tanf(float);
QUIRE_BUILTIN tanhf(float);
QUIRE_BUILTIN truncf(float);
#undef QUIRE_BUILTIN

// Functions on which the intrinsics below depend.
extern "C" __device__ __device_builtin__ void* memcpy(void*, const void*, size_t);
__device__ __forceinline__ int max(int a, int b) { return a > b ? a : b; }
__device__ __forceinline__ int min(int a, int b) { return a < b ? a : b; }
__device__ __forceinline__ unsigned int max(unsigned int a, unsigned int b) { return a > b ? a : b; }
__device__ __forceinline__ unsigned int min(unsigned int a, unsigned int b) { return a < b ? a : b; }

#include "crt/device_functions.h"
#include "device_launch_parameters.h"
