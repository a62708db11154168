// The layers of an encoder in one call: tensors in, a tensor out, all scratch from one allocation.
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
#include <array>
#include <cmath>
#include <cstdint>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "../function.h"
#include "facts.h"
#include "kernel_table.h"

namespace fastattn {
namespace {

// A linear layer, a norm or the factors of columns: its weight, and its bias, which may be missing.
struct Part {
  TensorView weight, bias;
};

// Where each sequence begins, the order of their work, and the length of the longest.
struct Sequences {
  std::vector<int64_t> starts, order;
  int64_t longest = 0;

  explicit Sequences(std::vector<int64_t> from)
      : starts(std::move(from)), order(starts.size() - 1) {
    std::iota(order.begin(), order.end(), 0);
    for (const int64_t b : order) {
      expect(length(b) >= 0, "starts must not decrease");
      longest = std::max(longest, length(b));
    }
    std::stable_sort(order.begin(), order.end(),
                     [&](int64_t a, int64_t b) { return length(a) > length(b); });
  }

  int64_t length(int64_t b) const {
    return starts[static_cast<size_t>(b) + 1] - starts[static_cast<size_t>(b)];
  }
};

struct EncoderLayer {
  Part query, key, value, out, first, second, norm1, norm2, scale1, scale2;
  TensorView bias;  // [H, distances], no data where there is none
  DType dtype;
  int64_t rows, E, H, F;  // F: the hidden units
  const Sequences* sequences;
  bool norm_first, rms;
  double eps1, eps2;
  MlpActivation activation;
  int threads;

  // One weight, [3E, E], projects queries, keys and values.
  bool is_joint() const { return key.weight.data == nullptr; }

  // A few names and tensors: no text is made unless one is wrong.
  static void expect_of(bool holds, const char* name, const char* what) {
    expect(holds, [&] { return std::string(name) + what; });
  }
  void check_linear(const char* name, const Part& part, int64_t n, int64_t k) const {
    expect_sizes(name, part.weight, dtype, {n, k});
    expect_of(part.weight.stride[1] == 1 || k == 1, name, " must have dense rows");
    check_bias(name, part, n);
  }
  void check_bias(const char* name, const Part& part, int64_t n) const {
    if (part.bias.data == nullptr) return;
    expect_of(part.bias.dtype == dtype && part.bias.has_sizes({n}) &&
                  (part.bias.stride[0] == 1 || n == 1),
              name, ": its bias must be dense, of the dtype and rows of the weight");
  }
  void check_norm(const char* name, const Part& part) const {
    expect_sizes(name, part.weight, dtype, {E});
    expect_of(part.weight.stride[0] == 1 || E == 1, name, " must be dense");
    check_bias(name, part, E);
  }
  void check() const {
    expect_multiple(H, E, "num_heads");
    check_linear("query weight", query, is_joint() ? 3 * E : E, E);
    if (!is_joint())
      check_linear("key weight", key, E, E), check_linear("value weight", value, E, E);
    check_linear("output weight", out, E, E);
    check_linear("first weight", first, F, E);
    check_linear("second weight", second, E, F);
    check_norm("norm1 weight", norm1);
    check_norm("norm2 weight", norm2);
    if (scale1.weight.data != nullptr) check_norm("scale1 weight", scale1);
    if (scale2.weight.data != nullptr) check_norm("scale2 weight", scale2);
    if (bias.data == nullptr) return;
    expect_sizes("relative_bias", bias, DType::f32, {H, bias.rank == 2 ? bias.size[1] : 0});
    expect(
        bias.is_contiguous() && bias.size[1] % 2 == 1 && bias.size[1] >= 2 * sequences->longest - 1,
        [&] {
          return "relative_bias must be contiguous, with an odd number of distances, at least " +
                 std::to_string(2 * sequences->longest - 1);
        });
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
    p.B = static_cast<int64_t>(sequences->order.size());
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
    t.q_starts = t.k_starts = sequences->starts.data();
    t.order = sequences->order.data();
    t.lse_stride = rows;
    kernels(dtype).attention_sequences_forward(t);
  }

  // Of `run`: qkv [rows, 3E], a [rows, E], h [rows, E], lse [H, rows]; m [rows, F], the hidden units,
  // in the place of qkv.
  int64_t scratch() const {
    const int64_t element = element_bytes(dtype);
    return rows * (std::max(3 * E, F) + 2 * E) * element + rows * H * 8 + 64;
  }

  void run(const void* x, char* memory, void* y) const {
    const int64_t element = element_bytes(dtype), row = E * element;
    char* const qkv = memory;
    char* const a = qkv + rows * std::max(3 * row, F * element);
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

// What a layer is computed from: its parts, and the facts of Python that they depend on.
class EncoderPlan {
 public:
  // parts: the pairs of weight and bias of query, key, value, output, first, second, norm1, norm2, scale1,
  // scale2; key and value may be None, and query is then the weight of all three; the scales may be None.
  // sizes: of float32, bf16 and fp16 the largest rows E F, and the most rows of any width.
  EncoderPlan(const Facts& facts, const py::tuple& parts, int64_t num_heads, bool norm_first,
              bool rms, double eps1, double eps2, int activation,
              const std::array<std::array<int64_t, 2>, 3>& sizes)
      : facts_(facts), sizes_(sizes) {
    expect(parts.size() == kParts, "parts must be ten pairs, or None");
    for (size_t n = 0; n < kParts; ++n) {
      if (parts[n].is_none()) continue;
      const auto pair = parts[n].cast<py::tuple>();
      tensors_[n][0] = pair[0], tensors_[n][1] = pair[1];
    }
    expect(activation >= 0 && activation <= static_cast<int>(MlpActivation::silu),
           "activation is unknown");
    layer_.H = num_heads, layer_.norm_first = norm_first, layer_.rms = rms;
    layer_.eps1 = eps1, layer_.eps2 = eps2;
    layer_.activation = static_cast<MlpActivation>(activation);
  }

  // The layer for x [rows, E] or [B, L, E], or nothing: the facts do not hold, a tensor is not plain
  // memory of one dtype, one requires a gradient that is wanted, or x is too large.
  bool read(py::handle x, bool wants_gradients, TensorView* of_x, EncoderLayer* t) const {
    *t = layer_;
    if (!read_plain(x, wants_gradients, of_x) || !facts_.hold()) return false;
    if (of_x->rank != 2 && of_x->rank != 3) return false;
    t->dtype = of_x->dtype, t->threads = threads();
    const int place = t->dtype == DType::f32 ? 0 : t->dtype == DType::bf16 ? 1 : 2;
    if (place == 2 && t->dtype != DType::f16) return false;
    Part* const parts[kParts] = {&t->query,  &t->key,   &t->value, &t->out,    &t->first,
                                 &t->second, &t->norm1, &t->norm2, &t->scale1, &t->scale2};
    for (size_t n = 0; n < kParts; ++n) {
      TensorView* const views[] = {&parts[n]->weight, &parts[n]->bias};
      for (size_t k = 0; k < 2; ++k) {
        const py::object& tensor = tensors_[n][k];
        if (tensor.ptr() == nullptr || tensor.is_none()) continue;
        if (!read_plain(tensor, wants_gradients, views[k]) || views[k]->dtype != t->dtype)
          return false;
      }
    }
    t->E = of_x->size[of_x->rank - 1];
    t->rows = of_x->rank == 2 ? of_x->size[0] : of_x->size[0] * of_x->size[1];
    t->F = t->first.weight.size[0];
    if (t->E == 0 || t->F == 0 || t->E != t->out.weight.size[0]) return false;
    const auto& [most_work, few] = sizes_[static_cast<size_t>(place)];
    return t->rows <= few || t->rows * t->E <= most_work / t->F;
  }

 private:
  static constexpr size_t kParts = 10;
  Facts facts_;
  py::object tensors_[kParts][2];  // a weight, a bias
  EncoderLayer layer_{};
  std::array<std::array<int64_t, 2>, 3> sizes_;

  static bool read_plain(py::handle from, bool wants_gradients, TensorView* to) {
    if (!read_exact(from, to)) return false;
    const int64_t number = number_of_call(to->dtype, {from});
    return number != 0 && !(wants_gradients && number % 2 == 1);
  }
};

struct EncoderCall {
  FASTATTN_TENSORS(x, starts, relative_bias)
};

// The layers, one after the other, on x [rows, E], the sequences one after the other: sequence b is rows
// [starts[b], starts[b + 1]), starts [B + 1] in int32. On x [B, L, E] without starts each entry is
// one, on x [rows, E] all rows. relative_bias: None, or [num_heads, distances] in float32, distance 0
// in the middle. The result is new, or None where another forward must run. `plans` is a tuple.
py::object encoder_layers(const EncoderCall& c, py::handle plans, bool wants_gradients) {
  std::vector<EncoderLayer> layers(plans.cast<py::tuple>().size());
  TensorView x;
  size_t place = 0;
  for (const py::handle plan : plans.cast<py::tuple>())
    if (!plan.cast<const EncoderPlan&>().read(c.x, wants_gradients, &x, &layers[place++]))
      return none();
  expect(!layers.empty(), "plans must not be empty");
  const int64_t rows = layers[0].rows;
  py::object kept;
  const void* from = x.data;
  if (!x.is_contiguous()) {
    kept = contiguous(c.x);
    from = view_of("x", kept).data;
  }
  std::vector<int64_t> starts;
  if (c.starts.is_none()) {
    const int64_t length = x.size[x.rank - 2], count = x.rank == 2 ? 1 : x.size[0];
    for (int64_t b = 0; b <= count; ++b) starts.push_back(b * length);
  } else {
    TensorView view;
    if (!read_exact(c.starts, &view) || view.dtype != kInt32 || view.rank != 1 || view.size[0] == 0)
      return none();
    for (int64_t b = 0; b < view.size[0]; ++b)
      starts.push_back(static_cast<const int32_t*>(view.data)[b * view.stride[0]]);
    if (starts[0] != 0 || starts.back() != rows) return none();  // rows of no sequence
  }
  const Sequences sequences(std::move(starts));
  TensorView bias{};
  if (!c.relative_bias.is_none()) bias = view_of("relative_bias", c.relative_bias);
  int64_t scratch = 0;
  for (EncoderLayer& each : layers) {
    each.sequences = &sequences, each.bias = bias;
    each.check();
    scratch = std::max(scratch, each.scratch());
  }
  void* y = nullptr;
  const py::object result = new_result(x.dtype, x.sizes(), &y);
  if (rows == 0) return result;
  without_gil([&] {
    const std::unique_ptr<char[]> memory(new char[static_cast<size_t>(scratch)]);
    for (const EncoderLayer& each : layers) {
      each.run(from, memory.get(), y);
      from = y;
    }
  });
  return result;
}

void define_encoder_plan(py::module_& m) {
  py::class_<Facts>(m, "Facts")
      .def(py::init<const py::list&, const py::list&, const py::list&>())
      .def("hold", &Facts::hold);
  py::class_<EncoderPlan>(m, "EncoderPlan")
      .def(py::init<const Facts&, const py::tuple&, int64_t, bool, bool, double, double, int,
                    const std::array<std::array<int64_t, 2>, 3>&>())
      .def("serves", [](const EncoderPlan& plan, py::handle x, bool wants_gradients) {
        EncoderLayer t;
        TensorView view;
        return plan.read(x, wants_gradients, &view, &t);
      });
}

}  // namespace

}  // namespace fastattn
