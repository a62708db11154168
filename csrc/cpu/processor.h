// Which processor this is, and what it has of the units that kernels ask for.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace fastattn {

struct Processor {
  std::string vendor;  // "AuthenticAMD", "GenuineIntel"; elsewhere the architecture, as "aarch64"
  int family = 0, model = 0;          // as lscpu shows them; 0 where the architecture has none
  std::string brand;                  // "" where the processor does not tell
  std::vector<std::string> features;  // named as in /proc/cpuinfo, see processor.cpp
};

// What a feature is read from on x86-64: three leaves of cpuid, and XCR0, in which the system says
// whose registers it saves (0 where it says nothing).
struct FeatureRegisters {
  uint32_t leaf1_ecx = 0;
  uint32_t leaf7_ebx = 0, leaf7_ecx = 0, leaf7_edx = 0;
  uint32_t leaf7_1_eax = 0;
  uint64_t xcr0 = 0;
};

// The features that can be used: the processor has them, and the system saves their registers.
// Pure, so that any processor's registers can be tried on any other. `tiles_allowed`: whether Linux
// lets this process use AMX's tiles, see tiles_allowed().
std::vector<std::string> usable_features(const FeatureRegisters& registers, bool tiles_allowed);

// Asks Linux for AMX's tiles, once for the process; without that, their first use ends it. False
// where the kernel knows no such request or refuses it.
bool tiles_allowed();

const Processor& processor();  // read once
bool has_feature(const char* name);

}  // namespace fastattn
