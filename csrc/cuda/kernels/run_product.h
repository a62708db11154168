// Launches a product; host code.
#pragma once
#include "../launch.h"
#include "product.h"

namespace fastattn {
namespace cuda {

// Launches the product x y of matrices in parts, see product.h.
template <class X, class Y, class C, bool kMarked>
void run_product(const char* name, const ProductArguments& p, uintptr_t stream) {
  auto tiles = [](int64_t n) { return (n + kProductTile - 1) / kProductTile; };
  const int64_t blocks = p.batch[0] * p.batch[1] * tiles(p.rows) * tiles(p.columns);
  auto text = [](int64_t n) { return std::to_string(n); };
  const int64_t depth = int64_t(p.depth[0]) * p.depth[1] * p.depth[2];
  launch({name, blocks, kProductThreads, 2 * kProductDepth * kProductPitch * 4, stream,
          text(p.batch[0] * p.batch[1]) + " times " + text(p.rows) + "x" + text(depth) + "x" +
              text(p.columns)},
         product_kernel<X, Y, C, kMarked>, p);
}

}  // namespace cuda
}  // namespace fastattn
