#include "additive.h"

#include "../launch.h"
#include "choose.h"
#include "run_product.h"

namespace fastattn {
namespace cuda {

namespace {

using T = FASTATTN_ELEMENT;
constexpr int kFloat = 4, kSizes = 2 * kAdditiveWarps;
constexpr int kScoresBytes = kFloat * (kSizes + 2 * kAdditiveColumns * (kAdditivePitch + 1));
constexpr int kGradientBytes =
    kFloat * (kSizes + kAdditiveRows * (kAdditiveColumns + kAdditiveRows + 2));

// The scores of all pairs, p.scores [B, Lq, Lk].
void scores(const AdditiveArguments& p, uintptr_t stream) {
  const int64_t blocks = p.B * blocks_of(p.Lq, kAdditiveRows) * blocks_of(p.Lk, kAdditiveRows);
  launch({"additive_scores", blocks, kAdditiveThreads, kScoresBytes, stream, shapes(p)},
         additive_scores_kernel<T>, p);
}

// Softmax of each row of scores, or its derivative.
template <bool kBackward>
void rows(const AdditiveArguments& p, uintptr_t stream) {
  launch({"additive_rows", blocks_of(p.B * p.Lq, kAdditiveWarps), kAdditiveThreads, 0, stream,
          shapes(p)},
         additive_rows_kernel<T, kBackward>, p);
}

// The gradient of k, or of q with the blocks' shares in the gradients of v and the bias.
template <bool kOfKeys>
void gradient(const AdditiveArguments& p, uintptr_t stream) {
  const int64_t blocks =
      p.B * blocks_of(kOfKeys ? p.Lk : p.Lq, kAdditiveRows) * blocks_of(p.D, kAdditiveColumns);
  launch({"additive_gradient", blocks, kAdditiveThreads, kGradientBytes, stream, shapes(p)},
         additive_gradient_kernel<T, kOfKeys>, p);
}

// A batch of products, [rows, depth] x [depth, columns] for each batch entry.
ProductArguments product(const AdditiveArguments& p, int64_t rows, int64_t depth, int64_t columns) {
  ProductArguments c{};
  c.batch[0] = p.B, c.batch[1] = 1;
  c.rows = static_cast<int>(rows), c.columns = static_cast<int>(columns);
  c.depth[0] = c.depth[1] = 1, c.depth[2] = static_cast<int>(depth);
  return c;
}

// Sets the right side of a product, [depth, columns].
void set_y(ProductArguments& c, const Tensor4& t) {  // [depth, columns]
  c.y = t.data;
  c.y_batch[0] = t.stride[0], c.y_depth[2] = t.stride[2], c.y_column = t.stride[3];
}

// Sets the result of a product, [rows, columns].
void set_c(ProductArguments& c, const Tensor4& t) {
  c.c = t.data;
  c.c_batch[0] = t.stride[0], c.c_row = t.stride[2], c.c_column = t.stride[3];
}

}  // namespace

// Launches the kernels of out and the weights.
void additive_forward(const FASTATTN_ELEMENT*, const AdditiveArguments& p, uintptr_t stream) {
  scores(p, stream);
  rows<false>(p, stream);
  ProductArguments c = product(p, p.Lq, p.Lk, p.Dv);  // out = w value
  c.x = p.scores;
  c.x_batch[0] = p.Lq * p.Lk, c.x_row = p.Lk, c.x_depth[2] = 1;
  set_y(c, p.v);
  set_c(c, p.out);
  run_product<F32, T, T, true>("additive_out", c, stream);
}

// Launches the kernels of all gradients; the scores are computed again.
void additive_backward(const FASTATTN_ELEMENT*, const AdditiveArguments& p, uintptr_t stream) {
  scores(p, stream);
  ProductArguments dp = product(p, p.Lq, p.Dv, p.Lk);  // dp = dO value^T
  dp.x = p.grad_out.data;
  dp.x_batch[0] = p.grad_out.stride[0], dp.x_row = p.grad_out.stride[2];
  dp.x_depth[2] = p.grad_out.stride[3];
  dp.y = p.v.data;
  dp.y_batch[0] = p.v.stride[0], dp.y_depth[2] = p.v.stride[3], dp.y_column = p.v.stride[2];
  dp.c = p.gradients;
  dp.c_batch[0] = p.Lq * p.Lk, dp.c_row = p.Lk, dp.c_column = 1;
  run_product<T, T, F32, false>("additive_weight_gradient", dp, stream);
  rows<true>(p, stream);
  ProductArguments dv = product(p, p.Lk, p.Lq, p.Dv);  // dV = w^T dO
  dv.x = p.scores;
  dv.x_batch[0] = p.Lq * p.Lk, dv.x_row = 1, dv.x_depth[2] = p.Lk;
  set_y(dv, p.grad_out);
  set_c(dv, p.grad_v);
  run_product<F32, T, T, true>("additive_value_gradient", dv, stream);
  gradient<false>(p, stream);
  gradient<true>(p, stream);
}

}  // namespace cuda
}  // namespace fastattn
