// A linear layer, and self-attention between two linear layers, as Python calls them: tensors in,
// tensors out.
#include <cmath>
#include <cstdint>
#include <memory>

#include "../function.h"
#include "kernel_table.h"

namespace fastattn {
namespace {

struct LinearTensors {
  // [M, K], K > 0; [N, K] with dense rows or columns; [N] or None
  FASTATTN_TENSORS(x, weight, bias)
};

// Where w is, and its sizes.
void read_weight(const TensorView& w, LinearParams* p) {
  p->N = w.size[0];
  p->w_transposed = w.stride[1] != 1;
  expect(!p->w_transposed || w.stride[0] == 1 || p->N <= 1,
         "weight must have dense rows or dense columns");
  p->w = w.data, p->w_stride = w.stride[p->w_transposed ? 1 : 0];
}

// Returns x W^T + bias. `packed`: the weight's pack_weight(), or None.
py::object linear(const LinearTensors& x, bool on_tiles, py::handle packed_weight) {
  const TensorView of_x = view_of("x", x.x), w = view_of("weight", x.weight);
  expect_dtype("x", of_x, kFloats);
  LinearParams p{};
  p.dtype = of_x.dtype, p.threads = threads(), p.on_tiles = on_tiles;
  p.M = of_x.size[0], p.K = of_x.size[1];
  expect_sizes("x", of_x, p.dtype, {p.M, p.K});
  expect_sizes("weight", w, p.dtype, {w.size[0], p.K});
  p.x = of_x.data, p.x_stride[0] = of_x.stride[0], p.x_stride[1] = of_x.stride[1];
  read_weight(w, &p);
  if (!packed_weight.is_none()) {
    const TensorView packed = view_of("packed", packed_weight);
    expect_sizes("packed", packed, DType::f32, {packed_weight_bytes(p.dtype, p.N, p.K) / 4});
    expect(packed.is_contiguous(), "packed must be contiguous");
    p.packed = packed.data;
  }
  py::object owner;
  p.bias = read_flat_if_given("bias", x.bias, p.dtype, {p.N}, &owner);
  const py::object y = new_result(p.dtype, {p.M, p.N}, &p.y);
  p.y_stride = p.N;
  without_gil([&] { kernels(p.dtype).linear(p); });
  return y;
}

struct WeightTensors {
  FASTATTN_TENSORS(weight)  // [N, K], N and K > 0, with dense rows or columns
};

// The weight, packed for linear() on tiles, as a tensor of float32 that holds bits; None if the
// instruction set has no tiles.
py::object pack_weight(const WeightTensors& x) {
  const TensorView w = view_of("weight", x.weight);
  expect_dtype("weight", w, kFloats);
  expect_sizes("weight", w, w.dtype, {w.size[0], w.size[1]});
  LinearParams p{};
  p.dtype = w.dtype, p.threads = threads(), p.M = 1, p.K = w.size[1];
  read_weight(w, &p);
  const auto pack = kernels(p.dtype).pack_weight;
  if (pack == nullptr || p.dtype == DType::f64) return none();
  void* to;
  const py::object packed =
      new_result(DType::f32, {packed_weight_bytes(p.dtype, p.N, p.K) / 4}, &to);
  without_gil([&] { pack(p, to); });
  return packed;
}

// The tensors of a small self-attention, and its sizes: N sequences of L positions of E columns.
struct SelfAttention {
  TensorView x, w_in, w_out, b_in, b_out, padding;  // no data: none
  bool causal;
  int64_t N, L, E, H;
  int64_t row[2];  // position (n, l) is row n * row[0] + l * row[1]
  int threads;

  // [q | k | v] = x W_in^T + b_in        out = attention(q, k, v) W_out^T + b_out
  void run(void* out) const {
    const int64_t D = E / H, rows = N * L, element = element_bytes(x.dtype);
    // qkv [rows, 3E], attended [rows, E], visible [N, L]
    const int64_t row_bytes = rows * E * element;
    const std::unique_ptr<char[]> memory(new char[static_cast<size_t>(4 * row_bytes + rows)]);
    char* const qkv = memory.get();
    char* const attended = qkv + 3 * row_bytes;
    bool* const visible = reinterpret_cast<bool*>(attended + row_bytes);

    LinearParams in{};
    in.dtype = x.dtype, in.threads = threads;
    in.M = rows, in.N = 3 * E, in.K = E;
    in.x = x.data, in.x_stride[0] = E, in.x_stride[1] = 1;
    in.w = w_in.data, in.w_stride = w_in.stride[0], in.bias = b_in.data;
    in.y = qkv, in.y_stride = 3 * E;
    kernels(x.dtype).linear(in);

    AttentionParams p{};
    p.dtype = x.dtype, p.threads = threads;
    p.B = N, p.Hq = p.Hkv = H, p.Lq = p.Lk = L, p.D = p.Dv = D;
    const auto heads = [&](char* data, int64_t width) {
      return Tensor4{data, {row[0] * width, D, row[1] * width, 1}};
    };
    p.q = heads(qkv, 3 * E);
    p.k = heads(qkv + E * element, 3 * E);
    p.v = heads(qkv + 2 * E * element, 3 * E);
    p.out = heads(attended, E);
    p.scale = 1.0 / std::sqrt(static_cast<double>(D));
    p.window_left = -1, p.window_right = causal ? 0 : -1;
    if (padding.data != nullptr) {
      const bool* ignored = static_cast<const bool*>(padding.data);
      for (int64_t b = 0; b < N; ++b)
        for (int64_t l = 0; l < L; ++l)
          visible[b * L + l] = !ignored[b * padding.stride[0] + l * padding.stride[1]];
      p.mask = {visible, {L, 0, 0, 1}};
      p.mask_dtype = DType::boolean;
    }
    kernels(x.dtype).attention_forward(p);

    LinearParams to = in;
    to.N = E;
    to.x = attended;
    to.w = w_out.data, to.w_stride = w_out.stride[0], to.bias = b_out.data;
    to.y = out, to.y_stride = E;
    kernels(x.dtype).linear(to);
  }
};

struct LayerTensors {
  // [N, L, E] or [L, N, E]; [3 E, E]; [3 E] or None; [E, E]; [E], with b_in; [N, L] bool,
  // true = ignored, or None
  FASTATTN_TENSORS(x, w_in, b_in, w_out, b_out, padding)
};

// A whole multi-head self-attention, for sizes at which calls cost more than arithmetic; the result
// has the layout of x. Returns None unless read_exact() accepts all tensors and they have one dtype
// and dense rows, or if gradients are `recorded` and one of them requires a gradient.
py::object self_attention(const LayerTensors& x, int64_t num_heads, bool batch_first, bool causal,
                          bool recorded) {
  SelfAttention a{};
  const auto reads = [](py::handle from, TensorView* to) {
    return from.is_none() || read_exact(from, to);
  };
  if (!read_exact(x.x, &a.x) || !read_exact(x.w_in, &a.w_in) || !read_exact(x.w_out, &a.w_out) ||
      !reads(x.b_in, &a.b_in) || !reads(x.b_out, &a.b_out) || !reads(x.padding, &a.padding))
    return none();
  const DType dtype = a.x.dtype;
  const int64_t key = call_key(dtype, {x.x, x.w_in, x.b_in, x.w_out, x.b_out, x.padding});
  const bool needs_gradient = key % 2 != 0;
  if (key == 0 || (needs_gradient && recorded)) return none();
  a.E = a.x.size[2], a.H = num_heads;
  expect_multiple(a.H, a.E, "num_heads");
  const int64_t E = a.E;
  a.N = a.x.size[batch_first ? 0 : 1], a.L = a.x.size[batch_first ? 1 : 0];
  const auto fits = [dtype](const TensorView& t, const Sizes& sizes) {
    return t.dtype == dtype && t.has_sizes(sizes) && t.stride[t.rank - 1] == 1;
  };
  const bool right = a.x.rank == 3 && dtype < DType::boolean && a.x.is_contiguous() &&
                     fits(a.w_in, {3 * E, E}) && fits(a.w_out, {E, E}) &&
                     (x.b_in.is_none() || fits(a.b_in, {3 * E})) &&
                     (x.b_out.is_none() || fits(a.b_out, {E})) &&
                     (x.padding.is_none() ||
                      (a.padding.dtype == DType::boolean && a.padding.has_sizes({a.N, a.L})));
  if (!right) return none();
  a.row[0] = batch_first ? a.L : 1, a.row[1] = batch_first ? 1 : a.N;
  a.causal = causal, a.threads = threads();
  TensorView result;
  const py::object out = new_like(x.x, &result);
  without_gil([&] { a.run(result.data); });
  return out;
}

}  // namespace
}  // namespace fastattn
