// A CUDA driver of two devices that does nothing but remember. Contexts are 100 + device, functions 200 + context.
// As the real one does, it takes a launch from any context on a stream that says which one it is of, and else refuses.
#include <stdint.h>
#include <string.h>

extern "C" {
static uintptr_t current = 0;
int pushes = 0, pops = 0, loads = 0, launches = 0, capturing = 0, refuse_launch = 0, old = 0;
int max_smem_set = 0;
unsigned char last_config[56], last_attributes[2 * 72];
uintptr_t last_function = 0, last_params = 0, context_at_launch = 0;

int cuInit(unsigned) { return 0; }
int cuDriverGetVersion(int* v) {
  *v = 13000;
  return 0;
}
int cuGetErrorName(int, const char** s) {
  *s = "CUDA_ERROR_STUB";
  return 0;
}
int cuGetErrorString(int, const char** s) {
  *s = "the stub refuses";
  return 0;
}
int cuDeviceGet(int* d, int i) {
  *d = i;
  return i < 2 ? 0 : 101;
}
int cuDeviceGetCount(int* n) {
  *n = 2;
  return 0;
}
int cuDeviceGetAttribute(int* v, int a, int) {
  *v = a == 97 ? 232448 : 132;
  return 0;
}
int cuDevicePrimaryCtxRetain(uintptr_t* c, int d) {
  *c = 100 + d;
  return 0;
}
int cuCtxGetCurrent(uintptr_t* c) {
  *c = current;
  return 0;
}
static uintptr_t stack[16];
static int depth = 0;
int cuCtxPushCurrent_v2(uintptr_t c) {
  stack[depth++] = current;
  current = c;
  ++pushes;
  return 0;
}
int cuCtxPopCurrent_v2(uintptr_t* c) {
  *c = current;
  current = stack[--depth];
  ++pops;
  return 0;
}
int cuStreamIsCapturing(void*, int* s) {
  *s = capturing;
  return 0;
}
int cuLibraryLoadData(uintptr_t* l, const char* image, void*, void*, unsigned, void*, void*, unsigned) {
  ++loads;
  *l = 1;
  return memcmp(image,
                "\x7f"
                "ELF",
                4)
             ? 200
             : 0;
}
int cuLibraryGetKernel(uintptr_t* k, uintptr_t, const char* name) {
  *k = 2;
  return strcmp(name, "quire_scale") ? 500 : 0;
}
int cuKernelGetFunction(uintptr_t* f, uintptr_t) {
  *f = 200 + current;
  return current ? 0 : 201;
}
int cuFuncSetAttribute(uintptr_t, int attribute, int value) {
  max_smem_set = attribute == 8 ? value : -1;
  return 0;
}
int cuLaunchKernelEx(const unsigned char* config, uintptr_t f, void** args, void**) {
  uintptr_t stream;
  memcpy(&stream, config + 32, 8);
  if (refuse_launch) return 1;
  if (!stream && current != f - 200) return current ? 400 : 201;
  memcpy(last_config, config, 56);
  unsigned n;
  memcpy(&n, config + 48, 4);
  const unsigned char* attributes;
  memcpy(&attributes, config + 40, 8);
  if (n) memcpy(last_attributes, attributes, n * 72);
  last_function = f;
  last_params = (uintptr_t)args[0];
  context_at_launch = current;
  ++launches;
  return 0;
}
int cuTensorMapEncodeTiled(unsigned char* out, int dtype, unsigned rank, void*, const uint64_t* dims,
                           const uint64_t* strides, const unsigned* box, const unsigned* steps, int, int swizzle,
                           int promotion, int oob) {
  if (box[0] > 256) return 1;
  uint64_t seen[12] = {(uint64_t)dtype, rank,   dims[0],  dims[1],           strides[0],
                       box[0],          box[1], steps[0], (uint64_t)swizzle, (uint64_t)promotion,
                       (uint64_t)oob,   0};
  memcpy(out, seen, sizeof seen);
  return 0;
}
void set_current(uintptr_t c) { current = c; }
uintptr_t get_current() { return current; }
}
