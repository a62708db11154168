#include "memory_hops_stream.h"
#include "run_hops.h"
#include "run_product.h"

namespace fastattn {
namespace cuda {

namespace {

using T = FASTATTN_ELEMENT;

// A query's hops run in one block, unless its memory is divided into splits: then each hop is read
// by many blocks and merged.
template <int kN>
void forward(HopsArguments p, uintptr_t stream) {
  p.lanes = lanes_of_row<kN>(p.D);
  if (p.splits == 0) {
    const int64_t shared = choose_residents<T>(p);
    return launch(launch_of("memory_hops", p, p.B * p.Q, shared, stream), memory_hops_kernel<T, kN>,
                  p);
  }
  const int64_t shared = rooms_bytes(p.D, kHopRowsOfSplit), queries = p.B * p.Q;
  for (p.hop = 0; p.hop < p.K; ++p.hop) {
    launch(launch_of("memory_hops_split", p, queries * p.splits, shared, stream),
           memory_hops_split_kernel<T, kN>, p);
    launch(launch_of("memory_hops_combine", p, queries, shared, stream),
           memory_hops_combine_kernel<T, kN>, p);
  }
}

// The same for the gradients of the queries.
template <int kN>
void backward(HopsArguments p, uintptr_t stream) {
  p.lanes = lanes_of_row<kN>(p.D);
  if (p.splits == 0) {
    const int64_t shared = choose_residents<T>(p);
    return launch(launch_of("memory_hops_backward", p, p.B * p.Q, shared, stream),
                  memory_hops_backward_kernel<T, kN>, p);
  }
  const int64_t shared = rooms_bytes(p.D, kHopRowsOfSplit), queries = p.B * p.Q;
  for (p.hop = static_cast<int>(p.K);; --p.hop) {
    launch(launch_of("memory_hops_combine_backward", p, queries, shared, stream),
           memory_hops_combine_backward_kernel<T, kN>, p);
    if (p.hop == 0) return;
    --p.hop;
    launch(launch_of("memory_hops_split_weights", p, queries * p.splits, shared, stream),
           memory_hops_split_weights_kernel<T, kN>, p);
    launch(launch_of("memory_hops_split_scores", p, queries * p.splits, shared, stream),
           memory_hops_split_scores_kernel<T, kN>, p);
    ++p.hop;
  }
}

// A gradient of memories [memories, slots, N, D]: the sum of xs[which] ys[which]^T over the queries
// of each memory, and over the hops if they share it.
void memory_gradient(const HopsArguments& p, void* result, int which, int count, bool of_batch,
                     int64_t slots, uintptr_t stream) {
  const int64_t all = p.B * p.Q * p.slots;
  ProductArguments c{};
  c.rows = static_cast<int>(p.N), c.columns = static_cast<int>(p.D);
  c.batch[0] = of_batch ? 1 : p.B, c.batch[1] = slots;
  c.depth[0] = count;
  c.depth[1] = static_cast<int>(of_batch ? p.B * p.Q : p.Q);
  c.depth[2] = slots > 1 ? 1 : static_cast<int>(p.K);
  auto strides = [&](int64_t length, int64_t (&batch)[2], int64_t (&depth)[3]) {
    batch[0] = p.Q * p.slots * length, batch[1] = length;
    depth[0] = all * length, depth[1] = p.slots * length, depth[2] = length;
  };
  c.x = p.xs + which * all * p.N;
  c.x_row = 1;
  strides(p.N, c.x_batch, c.x_depth);
  c.y = p.ys + which * all * p.D;
  c.y_column = 1;
  strides(p.D, c.y_batch, c.y_depth);
  c.c = result;
  c.c_batch[0] = slots * p.N * p.D, c.c_batch[1] = p.N * p.D, c.c_row = p.D, c.c_column = 1;
  run_product<F32, F32, T, true>("memory_hops_memory_gradient", c, stream);
}

// dH = sum g u^T over the queries, and over the hops if they share H.
void projection_gradient(const HopsArguments& p, uintptr_t stream) {
  ProductArguments c{};
  c.rows = c.columns = static_cast<int>(p.D);
  c.batch[0] = 1, c.batch[1] = p.proj_slots;
  c.depth[0] = 1, c.depth[1] = static_cast<int>(p.B * p.Q);
  c.depth[2] = p.proj_slots > 1 ? 1 : static_cast<int>(p.K);
  c.x = p.ys + (p.B * p.Q * p.slots + (p.stack ? 1 : 0)) * p.D;
  c.x_row = 1;
  c.x_batch[1] = p.D, c.x_depth[1] = p.slots * p.D, c.x_depth[2] = p.D;
  c.y = p.trace;
  c.y_column = 1;
  c.y_batch[1] = 2 * p.D, c.y_depth[1] = (2 * p.K + 1) * p.D, c.y_depth[2] = 2 * p.D;
  c.c = p.grad_proj;
  c.c_batch[1] = p.D * p.D, c.c_row = p.D, c.c_column = 1;
  run_product<F32, F32, T, true>("memory_hops_projection_gradient", c, stream);
}

}  // namespace

// Launches the kernels of all hops.
void memory_hops_forward(const FASTATTN_ELEMENT*, const HopsArguments& p, bool aligned,
                         uintptr_t stream) {
  if (p.B * p.Q == 0) return;
  constexpr int kN = kChunk<T>;
  aligned ? forward<kN>(p, stream) : forward<1>(p, stream);
}

// Launches the kernels of all gradients.
void memory_hops_backward(const FASTATTN_ELEMENT*, const HopsArguments& p, bool aligned,
                          uintptr_t stream) {
  if (p.B * p.Q == 0) return;
  constexpr int kN = kChunk<T>;
  aligned ? backward<kN>(p, stream) : backward<1>(p, stream);
  if (p.grad_in != nullptr)
    memory_gradient(p, p.grad_in, 0, p.same_rows || p.stack ? 2 : 1, p.in_of_batch, p.in_slots,
                    stream);
  if (p.grad_out_memory != nullptr)
    memory_gradient(p, p.grad_out_memory, 1, 1, p.out_of_batch, p.out_slots, stream);
  if (p.grad_proj != nullptr) projection_gradient(p, stream);
}

}  // namespace cuda
}  // namespace fastattn
