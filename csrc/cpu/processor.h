// Identifies the processor and the features that kernels need.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace fastattn {

struct Processor {
  std::string vendor;  // "AuthenticAMD", "GenuineIntel"; elsewhere the architecture, as "aarch64"
  int family = 0, model = 0;          // as lscpu shows them; 0 where the architecture has none
  std::string brand;                  // "" if the processor does not report it
  std::vector<std::string> features;  // named as in /proc/cpuinfo, see processor.cpp
};

// The registers that the features are read from on x86-64: three leaves of cpuid, and XCR0, the
// mask of registers that the system saves (0 if unknown).
struct FeatureRegisters {
  uint32_t leaf1_ecx = 0;
  uint32_t leaf7_ebx = 0, leaf7_ecx = 0, leaf7_edx = 0;
  uint32_t leaf7_1_eax = 0;
  uint64_t xcr0 = 0;
};

// The usable features: the processor has them, and the system saves their registers. A pure
// function, so that tests can pass the registers of any processor. `tiles_allowed`: whether Linux
// lets this process use AMX's tiles, see request_tiles().
std::vector<std::string> usable_features(const FeatureRegisters& registers, bool tiles_allowed);

// Requests AMX's tiles from Linux, once per process; without the request, their first use kills the
// process. Returns the error of the request, 0 if it is granted. A grant holds for all present and
// future threads, and for forked children.
int request_tiles();

// Why this process cannot multiply numbers of a type, "bf16" or "fp16", on AMX's tiles, "" if it
// can. `error` is the result of request_tiles(). A pure function, as usable_features().
std::string why_no_tiles(const std::string& type, const FeatureRegisters& registers, int error);
std::string why_no_tiles(const std::string& type);  // on this processor

const Processor& processor();  // read once
bool has_feature(const char* name);

}  // namespace fastattn
