// What layers that run in one native call are made of: linear layers and norms of rows.
#pragma once
#include "../function.h"
#include "isa.h"
#include "kernel_table.h"

namespace fastattn {
namespace {

// The weight and the bias of a linear layer, of a norm, or of the factors of columns. A missing one
// has no data.
struct Part {
  TensorView weight, bias;
  const void* packed = nullptr;  // the weight's pack_weight(), null = none
};

// The least rows and the least M N K of the products that run on tiles, where they are faster. A row
// has other bits there than among fewer rows.
struct TileLimits {
  int64_t rows = INT64_MAX, products = 0;
};

// Dense rows that are computed on some threads.
struct Rows {
  DType dtype;
  int threads;
  int64_t count;
  TileLimits tiles{};
};

// y = f(x W^T + b)
void multiply(const Rows& rows, const void* x, int64_t x_stride, const Part& part, void* y,
              int64_t y_stride, MlpActivation f) {
  LinearParams p{};
  p.dtype = rows.dtype, p.threads = rows.threads;
  p.M = rows.count, p.N = part.weight.size[0], p.K = part.weight.size[1];
  p.x = x, p.x_stride[0] = x_stride, p.x_stride[1] = 1;
  p.w = part.weight.data, p.w_stride = part.weight.stride[0], p.bias = part.bias.data;
  p.y = y, p.y_stride = y_stride, p.activation = f;
  p.on_tiles = p.M >= rows.tiles.rows && p.M * p.N * p.K >= rows.tiles.products;
  if (part.packed != nullptr) p.packed = part.packed, p.on_tiles = true;
  kernels(rows.dtype).linear(p);
}

// sum = scale x + residual, to = norm(sum), of rows [E]; each null if it is not wanted.
void normalize(const Rows& rows, int64_t E, const void* x, const Part* scale, const void* residual,
               void* sum, const Part* part, double eps, bool rms, void* to) {
  NormParams p{};
  p.dtype = rows.dtype, p.threads = rows.threads, p.rows = rows.count, p.E = E;
  p.x = x, p.residual = residual, p.sum = sum, p.out = to;
  if (scale != nullptr) p.scale = scale->weight.data;
  if (part != nullptr) p.gamma = part->weight.data, p.beta = part->bias.data;
  p.eps = eps, p.rms = rms;
  kernels(rows.dtype).norm(p);
}

// Whether a tensor is plain memory, and needs no tape.
bool read_plain(py::handle from, bool wants_gradients, TensorView* to) {
  return read_exact(from, to) && !is_negated(from) && !(wants_gradients && requires_gradient(from));
}

// Whether the elements of each row lie one after the other.
bool has_dense_rows(const TensorView& x) {
  return x.rank > 0 && (x.stride[x.rank - 1] == 1 || x.size[x.rank - 1] == 1);
}

}  // namespace
}  // namespace fastattn
