// Hints about memory that PyTorch has just allocated for a result.
#pragma once
#include <cstddef>

namespace fastattn {

// A large result is made of fresh pages, and the first touch of each page costs more than computing
// its contents. So this requests 2 MiB pages inside [data, data + bytes), all of which will be
// written. Does nothing for small results.
void expect_to_fill(void* data, size_t bytes);

}  // namespace fastattn
