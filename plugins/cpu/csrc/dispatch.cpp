// Which instruction set serves this process.
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

#include "kernels.h"

namespace octavo {

#if !(defined(__x86_64__) || defined(_M_X64))
const Kernels* avx2_kernels() { return nullptr; }
const Kernels* avx512vnni_kernels() { return nullptr; }
#endif

namespace {

const Kernels* find(const char* name) {
  const Kernels* all[] = {avx512vnni_kernels(), avx2_kernels(), &portable_kernels()};
  std::string known;
  for (const Kernels* kernels : all) {
    if (!kernels) continue;
    if (!name || !std::strcmp(name, kernels->name)) return kernels;
    known += std::string(known.empty() ? "" : ", ") + kernels->name;
  }
  throw std::invalid_argument(std::string("no kernels for the instruction set '") + name + "' here; there are: " + known);
}

std::atomic<const Kernels*> chosen{nullptr};

}  // namespace

const Kernels& kernels() {
  const Kernels* now = chosen.load(std::memory_order_acquire);
  if (!now) {
    const char* name = std::getenv("OCTAVO_CPU_ISA");
    chosen.store(now = find(name && *name ? name : nullptr), std::memory_order_release);
  }
  return *now;
}

void set_isa(const char* name) { chosen.store(find(name), std::memory_order_release); }

}  // namespace octavo
