#include "processor.h"

#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <initializer_list>

namespace fastattn {
namespace {

// The parts of XCR0 that a feature's registers need.
constexpr uint64_t kNone = 0;
constexpr uint64_t kAvx = 1u << 1 | 1u << 2;                      // xmm, ymm
constexpr uint64_t kAvx512 = kAvx | 1u << 5 | 1u << 6 | 1u << 7;  // masks, zmm0-15, zmm16-31
constexpr uint64_t kTiles = 1u << 17 | 1u << 18;                  // configuration, data
constexpr uint32_t kOsXsave = 1u << 27;                           // in ecx of leaf 1

struct Feature {
  const char* name;
  uint32_t FeatureRegisters::* in;
  int bit;
  uint64_t state;
};

constexpr Feature kFeatures[] = {
    {"fma", &FeatureRegisters::leaf1_ecx, 12, kAvx},
    {"f16c", &FeatureRegisters::leaf1_ecx, 29, kAvx},
    {"bmi2", &FeatureRegisters::leaf7_ebx, 8, kNone},
    {"avx2", &FeatureRegisters::leaf7_ebx, 5, kAvx},
    {"avx512f", &FeatureRegisters::leaf7_ebx, 16, kAvx512},
    {"avx512dq", &FeatureRegisters::leaf7_ebx, 17, kAvx512},
    {"avx512cd", &FeatureRegisters::leaf7_ebx, 28, kAvx512},
    {"avx512bw", &FeatureRegisters::leaf7_ebx, 30, kAvx512},
    {"avx512vl", &FeatureRegisters::leaf7_ebx, 31, kAvx512},
    {"avx512vbmi", &FeatureRegisters::leaf7_ecx, 1, kAvx512},
    {"avx512_vnni", &FeatureRegisters::leaf7_ecx, 11, kAvx512},
    {"avx512_fp16", &FeatureRegisters::leaf7_edx, 23, kAvx512},
    {"avx_vnni", &FeatureRegisters::leaf7_1_eax, 4, kAvx},
    {"avx512_bf16", &FeatureRegisters::leaf7_1_eax, 5, kAvx512},
    {"amx_tile", &FeatureRegisters::leaf7_edx, 24, kTiles},
    {"amx_bf16", &FeatureRegisters::leaf7_edx, 22, kTiles},
    {"amx_int8", &FeatureRegisters::leaf7_edx, 25, kTiles},
    {"amx_fp16", &FeatureRegisters::leaf7_1_eax, 21, kTiles},
};

#if defined(__x86_64__)
struct Leaf {
  uint32_t eax = 0, ebx = 0, ecx = 0, edx = 0;
};

// Returns zeros for a leaf or subleaf that the processor does not have.
Leaf cpuid(uint32_t leaf, uint32_t subleaf = 0) {
  Leaf r;
  __get_cpuid_count(leaf, subleaf, &r.eax, &r.ebx, &r.ecx, &r.edx);
  return r;
}

// The characters in registers of cpuid.
std::string text_of(std::initializer_list<uint32_t> words) {
  std::string text;
  for (uint32_t word : words)
    for (int byte = 0; byte < 4; ++byte)
      if (const char c = static_cast<char>(word >> 8 * byte); c != '\0') text += c;
  const size_t first = text.find_first_not_of(' ');
  return first == text.npos ? "" : text.substr(first, text.find_last_not_of(' ') + 1 - first);
}

// Which registers the operating system saves; 0 if it cannot tell.
uint64_t xcr0(const Leaf& leaf1) {
  if ((leaf1.ecx & kOsXsave) == 0) return 0;  // xgetbv would be an illegal instruction
  uint32_t low = 0, high = 0;
  asm("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return static_cast<uint64_t>(high) << 32 | low;
}

// The registers that say which features the processor and the system have.
FeatureRegisters read_registers() {
  const Leaf leaf1 = cpuid(1), leaf7 = cpuid(7);
  return {leaf1.ecx, leaf7.ebx, leaf7.ecx, leaf7.edx, cpuid(7, 1).eax, xcr0(leaf1)};
}

// Reads cpuid.
Processor read_processor() {
  Processor found;
  const Leaf name = cpuid(0), leaf1 = cpuid(1);
  found.vendor = text_of({name.ebx, name.edx, name.ecx});
  const int base = leaf1.eax >> 8 & 15, model = leaf1.eax >> 4 & 15;
  found.family = base == 15 ? base + static_cast<int>(leaf1.eax >> 20 & 255) : base;
  const bool extended = base == 6 || base == 15;
  found.model = extended ? static_cast<int>(leaf1.eax >> 16 & 15) << 4 | model : model;
  const Leaf a = cpuid(0x80000002u), b = cpuid(0x80000003u), c = cpuid(0x80000004u);
  found.brand = text_of({a.eax, a.ebx, a.ecx, a.edx, b.eax, b.ebx, b.ecx, b.edx,  //
                         c.eax, c.ebx, c.ecx, c.edx});
  const FeatureRegisters registers = read_registers();
  const bool saved = (registers.xcr0 & kTiles) == kTiles;
  found.features = usable_features(registers, saved && request_tiles() == 0);
  return found;
}

#else

FeatureRegisters read_registers() { return {}; }

// The features that the operating system reports.
Processor read_processor() {
  Processor found;
#if defined(__aarch64__)
  found.vendor = "aarch64";
#if defined(__linux__)
  // Bits of Linux's asm/hwcap.h.
  const unsigned long first = getauxval(AT_HWCAP), second = getauxval(AT_HWCAP2);
  if (first & 1ul << 1) found.features.emplace_back("asimd");
  if (first & 1ul << 10) found.features.emplace_back("asimdhp");
  if (first & 1ul << 22) found.features.emplace_back("sve");
  if (second & 1ul << 13) found.features.emplace_back("i8mm");
  if (second & 1ul << 14) found.features.emplace_back("bf16");
#endif
#endif
  return found;
}

#endif

}  // namespace

// The features that both the processor and the operating system support.
std::vector<std::string> usable_features(const FeatureRegisters& registers, bool tiles_allowed) {
  std::vector<std::string> names;
  for (const Feature& feature : kFeatures) {
    const bool there = registers.*feature.in >> feature.bit & 1;
    const bool saved = (registers.xcr0 & feature.state) == feature.state;
    const bool allowed = (feature.state & kTiles) == 0 || tiles_allowed;
    if (there && saved && allowed) names.emplace_back(feature.name);
  }
  return names;
}

// Asks Linux for the permission to use tiles; returns errno, 0 if granted.
int request_tiles() {
#if defined(__x86_64__) && defined(__linux__)
  // arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA); libc has no wrapper for it.
  static const int error = syscall(SYS_arch_prctl, 0x1023, 18) == 0 ? 0 : errno;
  return error;
#else
  return ENOSYS;
#endif
}

// Why tiles cannot be used; "" if they can.
std::string why_no_tiles(const std::string& type, const FeatureRegisters& registers, int error) {
  FeatureRegisters saved = registers;
  saved.xcr0 |= kTiles;
  const auto names = usable_features(saved, true);
  for (const std::string& name : {std::string("amx_tile"), "amx_" + type})
    if (std::find(names.begin(), names.end(), name) == names.end())
      return "the processor has no AMX with " + type;
  if ((registers.xcr0 & kTiles) != kTiles) return "the system does not save the tiles of AMX";
  if (error == ENOSPC)
    return "Linux refuses the tiles of AMX: a thread's alternate signal stack is too small for "
           "them";
  if (error == EINVAL || error == ENOSYS)
    return "Linux refuses the tiles of AMX: it must be 5.16 or later, and a sandbox may not know "
           "the request";
  return error == 0 ? "" : std::string("Linux refuses the tiles of AMX: ") + std::strerror(error);
}

// Why this processor cannot use tiles of a type, "" if it can.
std::string why_no_tiles(const std::string& type) {
  const FeatureRegisters registers = read_registers();
  const bool saved = (registers.xcr0 & kTiles) == kTiles;
  return why_no_tiles(type, registers, saved ? request_tiles() : 0);
}

const Processor& processor() {
  static const Processor found = read_processor();
  return found;
}

// Whether the processor has a feature, by its name in /proc/cpuinfo.
bool has_feature(const char* name) {
  const auto& names = processor().features;
  return std::find(names.begin(), names.end(), name) != names.end();
}

}  // namespace fastattn
