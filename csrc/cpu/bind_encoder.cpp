// A layer of an encoder in one call: tensors in, a tensor out, all scratch from one allocation.
//
//   post-norm:  h = norm1(x + A(x)),     y = norm2(h + B(h))
//   pre-norm:   h = x + A(norm1(x)),     y = h + B(norm2(h))
//   A(x) = s1 (attention(x Wq^T + bq, x Wk^T + bk, x Wv^T + bv) Wo^T + bo)
//   B(x) = s2 (f(x W1^T + b1) W2^T + b2)
//
// s1 and s2, one factor a column, are 1 in most models. The scores may have a bias that depends on
// the distance of query and key.
//
// The rows of the sequences lie one after the other, so padding is no row. Nothing is written twice
// but h: biases and f are applied to the sums of a product, and a residual is read by its norm.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "../function.h"
#include "kernel_table.h"

namespace fastattn {
namespace {

// A linear layer, a norm or the factors of columns: its weight, and its bias, which may be missing.
struct Part {
  TensorView weight, bias;
};

// No data where the part is None.
Part read_part(const py::tuple& parts, size_t n) {
  Part part{};
  if (parts[n].is_none()) return part;
  const py::tuple pair = parts[n];
  part.weight = view_of("weight", pair[0]);
  if (!pair[1].is_none()) part.bias = view_of("bias", pair[1]);
  return part;
}

struct EncoderLayer {
  Part query, key, value, out, first, second, norm1, norm2, scale1, scale2;
  TensorView bias;  // [H, distances], no data where there is none
  DType dtype;
  int64_t rows, E, H, F;  // F: the hidden units
  std::vector<int64_t> starts, order;
  int64_t longest;
  bool norm_first, rms;
  double eps1, eps2;
  MlpActivation activation;
  int threads;

  // One weight, [3E, E], projects queries, keys and values.
  bool is_joint() const { return key.weight.data == nullptr; }

  void check_linear(const std::string& name, const Part& part, int64_t n, int64_t k) const {
    const TensorView& w = part.weight;
    expect_sizes((name + " weight").c_str(), w, dtype, {n, k});
    expect(w.stride[1] == 1 || k == 1, name + " weight must have dense rows");
    check_bias(name, part, n);
  }
  void check_bias(const std::string& name, const Part& part, int64_t n) const {
    if (part.bias.data == nullptr) return;
    expect_sizes((name + " bias").c_str(), part.bias, dtype, {n});
    expect(part.bias.stride[0] == 1 || n == 1, name + " bias must be dense");
  }
  void check_norm(const std::string& name, const Part& part) const {
    expect_sizes((name + " weight").c_str(), part.weight, dtype, {E});
    expect(part.weight.stride[0] == 1 || E == 1, name + " weight must be dense");
    check_bias(name, part, E);
  }
  void check() const {
    check_linear("query", query, is_joint() ? 3 * E : E, E);
    if (!is_joint()) check_linear("key", key, E, E), check_linear("value", value, E, E);
    check_linear("output", out, E, E);
    check_linear("first", first, F, E);
    check_linear("second", second, E, F);
    check_norm("norm1", norm1);
    check_norm("norm2", norm2);
    if (scale1.weight.data != nullptr) check_norm("scale1", scale1);
    if (scale2.weight.data != nullptr) check_norm("scale2", scale2);
    if (bias.data == nullptr) return;
    expect_sizes("relative_bias", bias, DType::f32, {H, bias.rank == 2 ? bias.size[1] : 0});
    expect(bias.is_contiguous() && bias.size[1] % 2 == 1 && bias.size[1] >= 2 * longest - 1,
           "relative_bias must be contiguous, with an odd number of distances, at least " +
               std::to_string(2 * longest - 1));
  }

  void linear(const void* x, int64_t x_stride, const Part& part, void* y, int64_t y_stride,
              MlpActivation f = MlpActivation::none) const {
    LinearParams p{};
    p.dtype = dtype, p.threads = threads;
    p.M = rows, p.N = part.weight.size[0], p.K = part.weight.size[1];
    p.x = x, p.x_stride[0] = x_stride, p.x_stride[1] = 1;
    p.w = part.weight.data, p.w_stride = part.weight.stride[0], p.bias = part.bias.data;
    p.y = y, p.y_stride = y_stride, p.activation = f;
    kernels(dtype).linear(p);
  }

  // sum = scale x + residual, to = norm(sum); each null if it is not wanted.
  void norm(const void* x, const Part* scale, const void* residual, void* sum, const Part* part,
            double eps, void* to) const {
    NormParams p{};
    p.dtype = dtype, p.threads = threads, p.rows = rows, p.E = E;
    p.x = x, p.residual = residual, p.sum = sum, p.out = to;
    if (scale != nullptr) p.scale = scale->weight.data;
    if (part != nullptr) p.gamma = part->weight.data, p.beta = part->bias.data;
    p.eps = eps, p.rms = rms;
    kernels(dtype).norm(p);
  }

  void attend(char* qkv, char* to, double* lse) const {
    const int64_t D = E / H, element = element_bytes(dtype);
    SequencesParams t{};
    AttentionParams& p = t.attention;
    p.dtype = dtype, p.threads = threads;
    p.B = static_cast<int64_t>(starts.size()) - 1;
    p.Hq = p.Hkv = H, p.Lq = p.Lk = rows, p.D = p.Dv = D;
    const auto heads = [&](char* data, int64_t width) { return Tensor4{data, {0, D, width, 1}}; };
    p.q = heads(qkv, 3 * E);
    p.k = heads(qkv + E * element, 3 * E);
    p.v = heads(qkv + 2 * E * element, 3 * E);
    p.out = heads(to, E);
    p.lse = lse;
    p.scale = 1.0 / std::sqrt(static_cast<double>(D));
    p.window_left = p.window_right = -1;
    if (bias.data != nullptr) {
      p.relative_bias = bias.data;
      p.relative_bias_stride[1] = bias.stride[0];
      p.relative_bias_size = bias.size[1];
    }
    t.q_starts = t.k_starts = starts.data();
    t.order = order.data();
    t.lse_stride = rows;
    kernels(dtype).attention_sequences_forward(t);
  }

  void run(const void* x, void* y) const {
    const int64_t element = element_bytes(dtype), row = E * element;
    // qkv [rows, 3E], a [rows, E], h [rows, E]; m [rows, F], the hidden units, in the place of qkv
    const int64_t wide = std::max(3 * row, F * element);
    const std::unique_ptr<char[]> memory(
        new char[static_cast<size_t>(rows * (wide + 2 * row) + rows * H * 8 + 64)]);
    char* const qkv = memory.get();
    char* const a = qkv + rows * wide;
    char* const h = a + rows * row;
    double* const lse =
        reinterpret_cast<double*>((reinterpret_cast<uintptr_t>(h + rows * row) + 63) / 64 * 64);

    const void* from = x;
    if (norm_first) {
      norm(x, nullptr, nullptr, nullptr, &norm1, eps1, h);
      from = h;
    }
    linear(from, E, query, qkv, 3 * E);
    if (!is_joint()) {
      linear(from, E, key, qkv + row, 3 * E);
      linear(from, E, value, qkv + 2 * row, 3 * E);
    }
    attend(qkv, a, lse);
    linear(a, E, out, h, E);
    if (norm_first) {  // h = x + s1 h, a = norm2(h)
      norm(h, &scale1, x, h, &norm2, eps2, a);
      linear(a, E, first, qkv, F, activation);
      linear(qkv, F, second, a, E);
      norm(a, &scale2, h, y, nullptr, 0, nullptr);
    } else {  // h = norm1(x + s1 h)
      norm(h, &scale1, x, nullptr, &norm1, eps1, h);
      linear(h, E, first, qkv, F, activation);
      linear(qkv, F, second, a, E);
      norm(a, &scale2, h, nullptr, &norm2, eps2, y);
    }
  }
};

// x [rows, E], the sequences of the given lengths one after the other; parts: the pairs of weight and
// bias of query, key, value, output, first, second, norm1, norm2, scale1, scale2; key and value may be
// None, and query is then the weight of all three; the scales may be None. relative_bias: None, or
// [num_heads, distances] in float32, distance 0 in the middle. The result is new.
py::object encoder_layer(py::handle x, const std::vector<int64_t>& lengths, const py::tuple& parts,
                         int64_t num_heads, bool norm_first, bool rms, double eps1, double eps2,
                         int activation, py::handle relative_bias) {
  const TensorView of_x = view_of("x", x);
  expect_dtype("x", of_x, {DType::f32, DType::bf16, DType::f16});
  EncoderLayer t{};
  t.dtype = of_x.dtype, t.threads = threads();
  t.rows = of_x.size[0], t.E = of_x.size[1], t.H = num_heads;
  expect_sizes("x", of_x, t.dtype, {t.rows, t.E});
  expect(of_x.is_contiguous(), "x must be contiguous");
  expect(t.E > 0, "x must have columns");
  expect_multiple(t.H, t.E, "num_heads");
  t.query = read_part(parts, 0), t.key = read_part(parts, 1), t.value = read_part(parts, 2);
  t.out = read_part(parts, 3), t.first = read_part(parts, 4), t.second = read_part(parts, 5);
  t.norm1 = read_part(parts, 6), t.norm2 = read_part(parts, 7);
  t.scale1 = read_part(parts, 8), t.scale2 = read_part(parts, 9);
  if (!relative_bias.is_none()) t.bias = view_of("relative_bias", relative_bias);
  for (const int64_t length : lengths) t.longest = std::max(t.longest, length);
  t.F = t.first.weight.size[0];
  expect(t.first.weight.rank == 2 && t.F > 0, "first weight must be [F, E]");
  t.check();
  t.starts.reserve(lengths.size() + 1);
  t.starts.push_back(0);
  for (const int64_t length : lengths) {
    expect(length >= 0, "lengths must not be negative");
    t.starts.push_back(t.starts.back() + length);
  }
  expect(t.starts.back() == t.rows, "lengths must add up to the rows of x");
  t.order.resize(lengths.size());
  std::iota(t.order.begin(), t.order.end(), 0);
  std::stable_sort(t.order.begin(), t.order.end(), [&](int64_t a, int64_t b) {
    return lengths[static_cast<size_t>(a)] > lengths[static_cast<size_t>(b)];
  });
  expect(activation >= 0 && activation <= static_cast<int>(MlpActivation::silu),
         "activation is unknown");
  t.norm_first = norm_first, t.rms = rms, t.eps1 = eps1, t.eps2 = eps2;
  t.activation = static_cast<MlpActivation>(activation);
  void* y = nullptr;
  const py::object result = new_result(t.dtype, {t.rows, t.E}, &y);
  if (t.rows > 0) without_gil([&] { t.run(of_x.data, y); });
  return result;
}

}  // namespace

}  // namespace fastattn
