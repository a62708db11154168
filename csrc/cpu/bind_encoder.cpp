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
#include "layer_parts.h"

namespace fastattn {
namespace {

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

  // The rows of sequence b.
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
  TileLimits tiles;
  int threads;

  // One weight, [3E, E], projects queries, keys and values.
  bool is_joint() const { return key.weight.data == nullptr; }

  // A weight [n, k] and its bias [n]; `EncoderPlan::read` accepts only dense rows.
  void check_linear(const char* name, const Part& part, int64_t n, int64_t k) const {
    expect_sizes(name, part.weight, dtype, {n, k});
    check_bias(name, part, n);
  }
  void check_bias(const char* name, const Part& part, int64_t n) const {
    if (part.bias.data == nullptr) return;
    expect(part.bias.has_sizes({n}),
           [&] { return std::string(name) + ": its bias must have a number for each row"; });
  }
  // The weight [E] of a norm, and its bias.
  void check_norm(const char* name, const Part& part) const {
    expect_sizes(name, part.weight, dtype, {E});
    check_bias(name, part, E);
  }
  // Throws if any weight does not fit the sizes of the layer.
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

  // y = f(x W^T + b) for all rows.
  void linear(const void* x, int64_t x_stride, const Part& part, void* y, int64_t y_stride,
              MlpActivation f = MlpActivation::none) const {
    multiply({dtype, threads, rows, tiles}, x, x_stride, part, y, y_stride, f);
  }

  // sum = scale x + residual, to = norm(sum); each null if it is not wanted.
  void norm(const void* x, const Part* scale, const void* residual, void* sum, const Part* part,
            double eps, void* to) const {
    normalize({dtype, threads, rows}, E, x, scale, residual, sum, part, eps, rms, to);
  }

  // to = the attention of every sequence; `qkv` has the rows of queries, keys and values side by
  // side.
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

  // Of `run`: qkv [rows, 3E], a [rows, E], h [rows, E], lse [H, rows]; m [rows, F], the hidden
  // units, in the place of qkv.
  int64_t scratch() const {
    const int64_t element = element_bytes(dtype);
    return rows * (std::max(3 * E, F) + 2 * E) * element + rows * H * 8 + 64;
  }

  // y = the layer's result for x, both [rows, E]; `memory` has scratch() bytes.
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
  typedef std::array<std::array<int64_t, 4>, 3> Limits;

  // parts: the pairs of weight and bias of query, key, value, output, first, second, norm1, norm2,
  // scale1, scale2, of linear layers with a PackedWeight or None as a third; key and value may be
  // None, and query is then the weight of all three; the scales may be None. limits: of float32,
  // bf16 and fp16 the largest rows E F, the most rows of any width, and the TileLimits.
  EncoderPlan(const Facts& facts, const py::tuple& parts, int64_t num_heads, bool norm_first,
              bool rms, double eps1, double eps2, int activation, const Limits& limits)
      : facts_(facts), limits_(limits) {
    expect(parts.size() == kParts, "parts must be ten pairs, or None");
    for (size_t n = 0; n < kParts; ++n) {
      if (parts[n].is_none()) continue;
      const auto pair = parts[n].cast<py::tuple>();
      tensors_[n][0] = pair[0], tensors_[n][1] = pair[1];
      if (pair.size() > 2) packed_[n] = pair[2];
    }
    expect(activation >= 0 && activation <= static_cast<int>(MlpActivation::silu),
           "activation is unknown");
    layer_.H = num_heads, layer_.norm_first = norm_first, layer_.rms = rms;
    layer_.eps1 = eps1, layer_.eps2 = eps2;
    layer_.activation = static_cast<MlpActivation>(activation);
  }

  // The layer for x [rows, E], or nothing: the facts do not hold, a tensor is not plain memory of
  // this dtype with dense rows, one requires a gradient that is wanted, or x is too large.
  // `kept` becomes the owner of what the layer points to.
  bool read(DType dtype, int64_t rows, int64_t E, bool wants_gradients, EncoderLayer* t,
            std::vector<py::object>* kept) const {
    *t = layer_;
    t->dtype = dtype, t->rows = rows, t->E = E;
    const int place = dtype == DType::f32 ? 0 : dtype == DType::bf16 ? 1 : 2;
    if ((place == 2 && dtype != DType::f16) || !facts_.hold()) return false;
    Part* const parts[kParts] = {&t->query,  &t->key,   &t->value, &t->out,    &t->first,
                                 &t->second, &t->norm1, &t->norm2, &t->scale1, &t->scale2};
    for (size_t n = 0; n < kParts; ++n) {
      TensorView* const views[] = {&parts[n]->weight, &parts[n]->bias};
      for (size_t k = 0; k < 2; ++k) {
        const py::object& tensor = tensors_[n][k];
        if (tensor.ptr() == nullptr || tensor.is_none()) continue;
        if (!read_plain(tensor, wants_gradients, views[k]) || views[k]->dtype != t->dtype ||
            !has_dense_rows(*views[k]))
          return false;
      }
      if (packed_[n].ptr() != nullptr && !packed_[n].is_none() &&
          rows >= packed_[n].attr("LEAST_ROWS").cast<int64_t>())
        parts[n]->packed = read_packed(n, parts[n]->weight, kept);
    }
    t->F = t->first.weight.size[0];
    if (t->E == 0 || t->F == 0 || t->E != t->out.weight.size[0]) return false;
    const auto& [most_work, few, tile_rows, tile_products] = limits_[static_cast<size_t>(place)];
    t->tiles = {tile_rows, tile_products};
    return t->rows <= few || t->rows * t->E <= most_work / t->F;
  }

 private:
  static constexpr size_t kParts = 10;
  Facts facts_;
  py::object tensors_[kParts][2];  // a weight, a bias
  py::object packed_[kParts];      // a PackedWeight, or None
  EncoderLayer layer_{};
  Limits limits_;

  // The packed copy of weight n, or null if it does not serve.
  const void* read_packed(size_t n, const TensorView& weight, std::vector<py::object>* kept) const {
    if (!packed_[n].attr("serves")(tensors_[n][0]).cast<bool>()) return nullptr;
    const py::object rows = packed_[n].attr("rows");
    TensorView view;
    const int64_t bytes = packed_weight_bytes(weight.dtype, weight.size[0], weight.size[1]);
    if (!read_exact(rows, &view) || !view.has_sizes({bytes / 4}) || !view.is_contiguous())
      return nullptr;
    kept->push_back(rows);
    return view.data;
  }
};

// Layers that run one after the other, on the same rows.
struct Encoder {
  std::vector<EncoderLayer> layers;
  std::vector<py::object> kept;  // of the layers

  // `plans` is a tuple, not empty. Whether all can run on x [rows, E].
  bool read(py::handle plans, DType dtype, int64_t rows, int64_t E, bool wants_gradients) {
    const auto each = plans.cast<py::tuple>();
    expect(each.size() > 0, "plans must not be empty");
    layers.resize(each.size());
    const int team = threads();
    for (size_t n = 0; n < layers.size(); ++n) {
      if (!each[n].cast<const EncoderPlan&>().read(dtype, rows, E, wants_gradients, &layers[n],
                                                   &kept))
        return false;
      layers[n].threads = team;
    }
    return true;
  }

  // The scratch of `run`; relative_bias as for `encoder_layers`.
  int64_t prepare(const Sequences& sequences, const TensorView& relative_bias) {
    int64_t scratch = 0;
    for (EncoderLayer& each : layers) {
      each.sequences = &sequences, each.bias = relative_bias;
      each.check();
      scratch = std::max(scratch, each.scratch());
    }
    return scratch;
  }

  // y = the result of all layers, one after the other.
  void run(const void* x, char* memory, void* y) const {
    for (const EncoderLayer& each : layers) {
      each.run(x, memory, y);
      x = y;
    }
  }
};

struct EncoderCall {
  FASTATTN_TENSORS(x, starts, relative_bias)
};

// The starts [B + 1] of sequences in rows that lie one after the other, in int32, or nothing.
bool read_starts(py::handle from, int64_t rows, std::vector<int64_t>* to) {
  TensorView view;
  if (!read_exact(from, &view) || view.dtype != kInt32 || view.rank != 1 || view.size[0] == 0)
    return false;
  for (int64_t b = 0; b < view.size[0]; ++b)
    to->push_back(static_cast<const int32_t*>(view.data)[b * view.stride[0]]);
  return to->front() == 0 && to->back() == rows;  // no row without a sequence
}

// The layers, one after the other, on x [rows, E], the sequences one after the other: sequence b is
// rows [starts[b], starts[b + 1]), starts [B + 1] in int32. On x [B, L, E] without starts each
// entry is one, on x [rows, E] all rows. relative_bias: None, or [num_heads, distances] in float32,
// distance 0 in the middle. The result is new, or None where another forward must run. `plans` is a
// tuple.
py::object encoder_layers(const EncoderCall& c, py::handle plans, bool wants_gradients) {
  TensorView x;
  if (!read_plain(c.x, wants_gradients, &x) || (x.rank != 2 && x.rank != 3)) return none();
  const int64_t length = x.size[x.rank - 2], count = x.rank == 2 ? 1 : x.size[0];
  const int64_t rows = count * length;
  Encoder encoder;
  if (!encoder.read(plans, x.dtype, rows, x.size[x.rank - 1], wants_gradients)) return none();
  py::object kept;
  const void* from = x.data;
  if (!x.is_contiguous()) {
    kept = contiguous(c.x);
    from = view_of("x", kept).data;
  }
  std::vector<int64_t> starts;
  if (!c.starts.is_none()) {
    if (!read_starts(c.starts, rows, &starts)) return none();
  } else {
    for (int64_t b = 0; b <= count; ++b) starts.push_back(b * length);
  }
  const Sequences sequences(std::move(starts));
  TensorView bias{};
  if (!c.relative_bias.is_none()) bias = view_of("relative_bias", c.relative_bias);
  const int64_t scratch = encoder.prepare(sequences, bias);
  void* y = nullptr;
  const py::object result = new_result(x.dtype, x.sizes(), &y);
  if (rows == 0) return result;
  without_gil([&] {
    const std::unique_ptr<char[]> memory(new char[static_cast<size_t>(scratch)]);
    encoder.run(from, memory.get(), y);
  });
  return result;
}

// What a model of texts is computed from: its embeddings and the plans of its layers.
//
//   x[b, l] = norm(word[ids[b, l]] + type[types[b, l]] + position[positions[b, l]])
class TextPlan {
 public:
  // tensors: word, position and type [n, E], gamma and beta [E], and what the model has for texts
  // without positions and types: own_positions, own_types [1, n] in int64. type, beta and these may
  // be None. padding_id: positions count the other ids, from padding_id + 1 on; negative:
  // own_positions. unpad: whether padding is no row, and 0 in the result; else texts with padding
  // are not served.
  TextPlan(const Facts& facts, const py::tuple& tensors, double eps, int64_t padding_id, bool unpad,
           const py::tuple& plans)
      : facts(facts), eps(eps), padding_id(padding_id), unpad(unpad), plans(plans) {
    expect(tensors.size() == kTensors, "tensors must be seven, or None");
    for (size_t n = 0; n < kTensors; ++n) tensors_[n] = tensors[n];
  }

  // Views of the tensors, empty for None; false where a layer would not be read either.
  bool read(bool wants_gradients, TensorView* to) const {
    for (size_t n = 0; n < kTensors; ++n) {
      to[n] = {};
      if (tensors_[n].is_none()) continue;
      if (!read_plain(tensors_[n], wants_gradients, &to[n])) return false;
      const int rank = n == kGamma || n == kBeta ? 1 : 2, last = rank - 1;
      if (to[n].rank != rank || !has_dense_rows(to[n])) return false;
      if (n >= kOwnPositions ? to[n].dtype != kInt64 || to[n].size[0] != 1
                             : to[n].dtype != to[0].dtype || to[n].size[last] != to[0].size[1])
        return false;
    }
    return to[kWord].rank == 2 && to[kPosition].rank == 2 && to[kGamma].rank == 1;
  }

  enum { kWord, kPosition, kType, kGamma, kBeta, kOwnPositions, kOwnTypes, kTensors };
  const Facts facts;
  const double eps;
  const int64_t padding_id;
  const bool unpad;
  const py::tuple plans;

 private:
  py::object tensors_[kTensors];
};

struct TextCall {
  FASTATTN_TENSORS(ids, mask, types, positions, starts)
};

// The indices of a call [B, L], or [1, L] for all texts.
struct Indices {
  TensorView view{};

  // False if `from` is neither None nor such a tensor.
  bool read(py::handle from, int64_t B, int64_t L) {
    if (from.is_none()) return true;
    if (!read_exact(from, &view) || is_negated(from) || view.rank != 2) return false;
    return (view.size[0] == B || view.size[0] == 1) && view.size[1] == L;
  }
  // The index of token l of text b.
  template <class T = int64_t>
  T at(int64_t b, int64_t l) const {
    return static_cast<const T*>(
        view.data)[(view.size[0] == 1 ? 0 : b) * view.stride[0] + l * view.stride[1]];
  }
  bool is_given() const { return view.rank != 0; }
};

// The embeddings and the layers of texts: ids [B, L], mask [B, L] in int64 or bool, 0 at padding,
// types and positions [1 or B, L], all but ids may be None. starts: of ids [1, L], the texts one
// after the other. The result [B, L, E] is new, or None where another forward must run.
py::object encode_texts(const TextCall& c, py::handle texts, bool wants_gradients) {
  const TextPlan& plan = texts.cast<const TextPlan&>();
  TensorView of[TextPlan::kTensors], shape;
  if (!plan.facts.hold() || !plan.read(wants_gradients, of)) return none();
  if (!read_exact(c.ids, &shape) || shape.rank != 2) return none();
  const int64_t B = shape.size[0], L = shape.size[1], E = of[TextPlan::kWord].size[1];
  Indices ids, mask, types, positions;
  if (!ids.read(c.ids, B, L) || !mask.read(c.mask, B, L) || !types.read(c.types, B, L) ||
      !positions.read(c.positions, B, L))
    return none();
  if (types.is_given() && of[TextPlan::kType].rank == 0) return none();
  for (const Indices* each : {&ids, &types, &positions})
    if (each->is_given() && each->view.dtype != kInt64) return none();
  if (mask.is_given() && mask.view.dtype != kInt64 && mask.view.dtype != DType::boolean)
    return none();

  // The terms of each row, and its place in the result.
  std::vector<std::array<const void*, 3>> terms;
  std::vector<int64_t> places, starts{0};
  const int64_t element = element_bytes(of[0].dtype);
  bool in_range = true;
  const auto look_up = [&](int table, int64_t index) -> const void* {
    const TensorView& t = of[table];
    in_range = in_range && index >= 0 && index < t.size[0];
    return static_cast<const char*>(t.data) + index * t.stride[0] * element;
  };
  const auto own = [&](int buffer, int64_t index) -> int64_t {
    const TensorView& t = of[buffer];
    in_range = in_range && t.rank != 0 && index >= 0 && index < t.size[1];
    return in_range ? static_cast<const int64_t*>(t.data)[index] : 0;
  };
  for (int64_t b = 0; b < B; ++b) {
    int64_t counted = 0;
    for (int64_t l = 0; l < L; ++l) {
      const int64_t id = ids.at(b, l);
      const bool is_counted = id != plan.padding_id;
      counted += is_counted;
      if (mask.is_given() &&
          !(mask.view.dtype == kInt64 ? mask.at(b, l) != 0 : mask.at<bool>(b, l)))
        continue;
      const int64_t position = positions.is_given()  ? positions.at(b, l)
                               : plan.padding_id < 0 ? own(TextPlan::kOwnPositions, l)
                                                     : plan.padding_id + (is_counted ? counted : 0);
      const void* type = nullptr;
      if (of[TextPlan::kType].rank != 0)
        type = look_up(TextPlan::kType,
                       types.is_given() ? types.at(b, l) : own(TextPlan::kOwnTypes, position));
      const void* const word = look_up(TextPlan::kWord, id);
      const void* const place = look_up(TextPlan::kPosition, position);
      if (!in_range) return none();  // the model's own forward has the error
      terms.push_back(type == nullptr ? std::array{word, place, type}
                                      : std::array{word, type, place});
      places.push_back(b * L + l);
    }
    starts.push_back(static_cast<int64_t>(places.size()));
  }
  const auto rows = static_cast<int64_t>(places.size());
  const bool is_padded = rows != B * L;
  if (is_padded && !plan.unpad) return none();
  if (!c.starts.is_none()) {
    starts.clear();
    if (is_padded || B != 1 || !read_starts(c.starts, rows, &starts)) return none();
  }
  Encoder encoder;
  if (!encoder.read(plan.plans, of[0].dtype, rows, E, wants_gradients)) return none();
  const Sequences sequences(std::move(starts));
  const int64_t scratch = encoder.prepare(sequences, TensorView{});
  char* y = nullptr;
  const py::object result = new_result(of[0].dtype, {B, L, E}, &y);
  without_gil([&] {
    const std::unique_ptr<char[]> memory(
        new char[static_cast<size_t>(scratch + rows * E * element)]);
    char* const x = is_padded ? memory.get() + scratch : y;
    NormParams p{};
    p.dtype = of[0].dtype, p.threads = encoder.layers[0].threads, p.rows = rows, p.E = E;
    p.terms = terms.empty() ? nullptr : terms[0].data();
    p.gamma = of[TextPlan::kGamma].data, p.beta = of[TextPlan::kBeta].data;
    p.eps = plan.eps, p.out = x;
    if (rows > 0) kernels(p.dtype).norm(p), encoder.run(x, memory.get(), x);
    if (!is_padded) return;
    std::fill_n(y, B * L * E * element, char{0});
    for (int64_t r = 0; r < rows; ++r)
      std::copy_n(x + r * E * element, E * element,
                  y + places[static_cast<size_t>(r)] * E * element);
  });
  return result;
}

// Adds the plans of encoder layers and of texts to the module.
void define_encoder_plans(py::module_& m) {
  py::class_<Facts>(m, "Facts")
      .def(py::init<const py::list&, const py::list&>())
      .def("hold", &Facts::hold);
  py::class_<EncoderPlan>(m, "EncoderPlan")
      .def(py::init<const Facts&, const py::tuple&, int64_t, bool, bool, double, double, int,
                    const EncoderPlan::Limits&>());
  py::class_<TextPlan>(m, "TextPlan")
      .def(py::init<const Facts&, const py::tuple&, double, int64_t, bool, const py::tuple&>())
      .def_readonly("plans", &TextPlan::plans);
}

}  // namespace

}  // namespace fastattn
