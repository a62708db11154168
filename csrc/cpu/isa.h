// Which instruction sets were compiled, which this processor has, and which one is in use.
#pragma once
#include <string>
#include <vector>

namespace fastattn {

std::vector<std::string> compiled_isas();  // weakest first
std::vector<std::string>
supported_isas();  // the compiled ones that this processor can run, weakest first
void set_isa(
    const std::string& name);  // throws std::invalid_argument for any name not in supported_isas()

}  // namespace fastattn
