// Calls a function of a library of another machine, under an emulator: see emulated.py.
//
//   emulated LIBRARY FUNCTION MEMORY PARAMS [WORD...]
//
// MEMORY is a file that holds the call's memory, PARAMS where in it the function's parameters lie. The 8 bytes at each
// WORD are a place in the file too; the function finds an address there. The exit status is what the function returns.
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>

int main(int count, char** words) {
  const int file = open(words[3], O_RDWR);
  struct stat status;
  if (file < 0 || fstat(file, &status) != 0) return perror(words[3]), 120;
  void* memory = mmap(nullptr, status.st_size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (memory == MAP_FAILED) return perror(words[3]), 121;
  char* const begin = static_cast<char*>(memory);
  for (int i = 5; i < count; ++i) {
    *reinterpret_cast<uint64_t*>(begin + atoll(words[i])) += reinterpret_cast<uint64_t>(begin);
  }
  void* library = dlopen(words[1], RTLD_NOW);
  void* function = library == nullptr ? nullptr : dlsym(library, words[2]);
  if (function == nullptr) return fprintf(stderr, "%s\n", dlerror()), 122;
  return reinterpret_cast<int (*)(void*)>(function)(begin + atoll(words[4]));
}
