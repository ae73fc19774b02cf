#pragma once
/// Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/), as in PyTorch 2.15: momentum, made orthogonal
/// by Newton-Schulz iterations, for matrices; AdamW for all other parameters.

#include <algorithm>
#include <array>
#include <chorus/core/narrow_float.hpp>
#include <chorus/kernels/copy.hpp>
#include <chorus/kernels/gemm.hpp>
#include <chorus/kernels/square_sum.hpp>
#include <chorus/optim/adam.hpp>
#include <chorus/optim/elementwise.hpp>
#include <chorus/optim/pieces.hpp>
#include <chorus/tensor/allocator.hpp>
#include <chorus/tensor/memory.hpp>
#include <cmath>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace chorus::optim {

/// The factor on Muon's learning rate for a matrix of `rows` and `columns`, so that one rate suits matrices of all
/// shapes.
enum class AdjustLr : std::uint8_t {
  original,           ///< sqrt(max(1, rows / columns)) (Jordan)
  match_rms_adamw,    ///< 0.2 sqrt(max(rows, columns)): AdamW's rates and decay suit it (Liu et al. 2025)
  spectral_unclamped  ///< sqrt(rows / columns) (Bernstein 2025)
};

/// Options of Muon.
struct MuonOptions {
  double lr = 1e-3, weight_decay = 0.1, momentum = 0.95;
  bool nesterov = true;
  std::array<double, 3> ns_coefficients{3.4445, -4.7750, 2.0315};
  double eps = 1e-7;
  int ns_steps = 5;
  AdjustLr adjust_lr = AdjustLr::original;
  /// For AdamW. Its rate follows Muon's: it is always `adam.lr / lr` times as large.
  AdamOptions adam = {.weight_decay = 0.01};
  /// Matrices for AdamW, too: the beginnings of their names. Embeddings and the output layer belong here.
  std::vector<std::string> adam_for = {};
};

namespace detail {

/// A temporary array.
template <class T, Device D>
class StepMemory {
 public:
  StepMemory(D device, Index count) : storage_(device, static_cast<std::size_t>(count) * sizeof(T)) {}
  T* data() const { return static_cast<T*>(storage_.data()); }

 private:
  Storage<D> storage_;
};

/// PyTorch's lerp: from a to b.
struct Lerp {
  double weight;
  template <class S>
  CHORUS_HD S operator()(const S& a, const S& b) const {
    using R = math::real_of<S>;
    return weight < 0.5 ? S(a + (b - a) * R(weight)) : S(b - (b - a) * R(1 - weight));
  }
};

struct DividedBy {
  double divisor;
  template <class S>
  CHORUS_HD S operator()(const S& x) const {
    return x / math::real_of<S>(divisor);
  }
};

/// x becomes the nearest numbers of bf16.
template <Device D>
void round_to_bf16(D device, Index count, float* x, bf16* rounded) {
  kernels::convert(device, count, static_cast<const float*>(x), rounded);
  kernels::convert(device, count, static_cast<const bf16*>(rounded), x);
}

/// Makes the singular values of x, [rows, columns], about 1 (0.7 to 1.2): X /= max(|X|, eps), then `ns_steps` times
/// A = X Xᵀ, G = b A + c A A, X = a X + G X; from the right, if there are more rows than columns. Products are summed
/// in float; |X|, A, G and X are rounded to bf16, as in PyTorch.
template <Device D>
void orthogonalize(D device, Index rows, Index columns, bf16* x, const MuonOptions& options) {
  using kernels::gemm, kernels::Trans;
  const Index count = rows * columns, side = std::min(rows, columns), squares = side * side;
  const bool tall = rows > columns;
  const auto [a, b, c] = options.ns_coefficients;
  const StepMemory<float, D> of_x(device, count), of_product(device, count), of_gram(device, squares),
      of_square(device, squares);
  const StepMemory<bf16, D> rounded(device, squares);
  float *const x32 = of_x.data(), *const product = of_product.data(), *const gram = of_gram.data(),
               *const square = of_square.data();
  kernels::convert(device, count, static_cast<const bf16*>(x), x32);
  const double norm = std::sqrt(kernels::square_sum(device, count, static_cast<const float*>(x32)));
  const float divisor = std::max<float>(bf16(norm), bf16(options.eps));
  update(device, count, DividedBy{divisor}, x32, static_cast<const float*>(x32));
  round_to_bf16(device, count, x32, x);
  for (int i = 0; i < options.ns_steps; ++i) {
    if (tall)
      gemm(device, Trans::yes, Trans::no, side, side, rows, x32, columns, x32, columns, gram, side, false);
    else
      gemm(device, Trans::no, Trans::yes, side, side, columns, x32, columns, x32, columns, gram, side, false);
    round_to_bf16(device, squares, gram, rounded.data());
    gemm(device, Trans::no, Trans::no, side, side, side, gram, side, gram, side, square, side, false);
    update(device, squares, Mix{b, c}, gram, static_cast<const float*>(gram), static_cast<const float*>(square));
    round_to_bf16(device, squares, gram, rounded.data());
    if (tall)
      gemm(device, Trans::no, Trans::yes, rows, columns, side, x32, columns, gram, side, product, columns, false);
    else
      gemm(device, Trans::no, Trans::no, rows, columns, side, gram, side, x32, columns, product, columns, false);
    update(device, count, Mix{a, 1}, x32, static_cast<const float*>(x32), static_cast<const float*>(product));
    round_to_bf16(device, count, x32, x);
  }
}

inline double adjusted(double lr, AdjustLr how, Index rows, Index columns) {
  const auto height = static_cast<double>(rows), width = static_cast<double>(columns);
  switch (how) {
    case AdjustLr::match_rms_adamw:
      return lr * 0.2 * std::sqrt(std::max(height, width));
    case AdjustLr::spectral_unclamped:
      return lr * std::sqrt(height / width);
    default:
      return lr * std::sqrt(std::max(1.0, height / width));
  }
}

}  // namespace detail

/// For matrices: m = momentum m + (1 - momentum) g; u = m, or (1 - momentum) g + momentum m for Nesterov, in bf16; p -=
/// lr (weight_decay p + scale O), where O is u with singular values of about 1 and AdjustLr gives the scale. All
/// parameters with another number of axes, also convolutions, and those named by `adam_for` take AdamW's steps.
///
/// Where ranks have pieces of a matrix (FullyShardedDataParallel, ShardedOptimizer, TensorParallel, Mesh), one of them,
/// the owner, gets all of u, in bf16, computes O alone and sends its pieces back. A step has the bits of a rank with
/// the whole matrix. The state, one number for each of a matrix, stays in pieces.
template <Device D>
class Muon final : public Optimizer<D> {
  using Range = typename Optimizer<D>::Range;

 public:
  using options_type = MuonOptions;
  /// ShardedOptimizer then gives each rank its pieces of all parameters, also empty ones.
  static constexpr bool asks_ranks = true;

  /// Throws UsageError for options out of range, and for a name in `adam_for` with which none of several parameters
  /// begins.
  explicit Muon(std::vector<nn::NamedParameter<D>> parameters, const MuonOptions& options = {})
      : Optimizer<D>(parameters, options.lr,
                     {options.weight_decay, options.momentum, options.nesterov ? 1.0 : 0.0, options.ns_coefficients[0],
                      options.ns_coefficients[1], options.ns_coefficients[2], options.eps,
                      static_cast<double>(options.ns_steps), static_cast<double>(options.adjust_lr), options.adam.lr,
                      options.adam.beta1, options.adam.beta2, options.adam.eps, options.adam.weight_decay,
                      options.adam.amsgrad ? 1.0 : 0.0, static_cast<double>(options.adam_for.size())}),
        options_(checked(options)),
        pieces_("Muon", parameters) {
    for (const auto& named : parameters) is_matrix_.push_back(takes(named));
    for (const auto& begin : options_.adam_for)
      check<UsageError>(parameters.size() == 1 || std::any_of(parameters.begin(), parameters.end(), NameBegins{begin}),
                        "Muon: expected beginnings of parameters' names in adam_for, got '", begin, "'");
  }

  void step() override {
    this->refuse_capture("Muon");
    pieces_.meet([this](std::size_t i) {
      if (!is_matrix_[i]) return 0.0;
      const auto [low, high] = std::minmax({rows(i), columns(i)});
      return static_cast<double>(low) * static_cast<double>(low) * static_cast<double>(high);
    });
    std::vector<char> waits(pieces_.any() ? pieces_.size() : 0);  // also where this rank's piece is empty
    for (std::size_t i = 0; i < waits.size(); ++i) {
      const auto& parameter = pieces_.parameter(i);
      waits[i] = is_matrix_[i] && pieces_.cut(i) && parameter.grad_arrived() && parameter.wants_grad();
    }
    std::vector<std::vector<bf16>> pieces(waits.size());
    std::vector<Range> ranges(waits.size());
    this->for_each_range({.each_alone = true, .in_pieces = true}, [&]<class T>(T type, const Range& range) {
      const auto device = this->device();
      const std::size_t i = range.number;
      if (!is_matrix_[i]) return adam_step(type, range);
      const detail::StepMemory<bf16, D> u(device, range.count);
      direction(type, range, u.data());
      if (pieces_.cut(i)) {
        ranges[i] = range;
        pieces[i].resize(static_cast<std::size_t>(range.count));
        copy_bytes(Cpu{}, pieces[i].data(), device, u.data(), pieces[i].size() * sizeof(bf16));
        return;
      }
      detail::orthogonalize(device, rows(i), columns(i), u.data(), options_);
      apply(type, range, static_cast<const bf16*>(u.data()));
    });
    if (!pieces_.any()) return;
    pieces_.by_owners(waits, pieces, [&](std::size_t i, std::span<bf16> whole) {
      const detail::StepMemory<bf16, D> near(this->device(), rows(i) * columns(i));
      copy_bytes(this->device(), near.data(), Cpu{}, whole.data(), whole.size_bytes());
      detail::orthogonalize(this->device(), rows(i), columns(i), near.data(), options_);
      copy_bytes(Cpu{}, whole.data(), this->device(), near.data(), whole.size_bytes());
    });
    for (std::size_t i = 0; i < ranges.size(); ++i) {
      const Range& range = ranges[i];
      if (range.count == 0) continue;
      const detail::StepMemory<bf16, D> near(this->device(), range.count);
      copy_bytes(this->device(), near.data(), Cpu{}, pieces[i].data(), pieces[i].size() * sizeof(bf16));
      if (range.dtype == DType::f32)
        apply(float{}, range, static_cast<const bf16*>(near.data()));
      else
        apply(double{}, range, static_cast<const bf16*>(near.data()));
      pieces_.parameter(i).storage().settle();
    }
  }

 protected:
  std::span<const std::string_view> slots() const override {
    static constexpr std::string_view names[] = {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"};
    return {names, options_.adam.amsgrad ? std::size_t{3} : std::size_t{2}};
  }
  std::span<const std::string_view> slots_of(const nn::NamedParameter<D>& named) const override {
    static constexpr std::string_view names[] = {"momentum_buffer"};
    return takes(named) ? std::span<const std::string_view>(names) : slots();
  }

 private:
  static const MuonOptions& checked(const MuonOptions& options) {
    check<UsageError>(options.lr > 0 && options.weight_decay >= 0 && options.momentum >= 0 && options.momentum <= 1,
                      "Muon: expected lr above 0, weight_decay of at least 0 and momentum in [0, 1], got ", options.lr,
                      ", ", options.weight_decay, " and ", options.momentum);
    check<UsageError>(options.ns_steps >= 0 && options.ns_steps < 100 && options.eps > 0,
                      "Muon: expected ns_steps in [0, 100) and eps above 0, got ", options.ns_steps, " and ",
                      options.eps);
    const auto& adam = options.adam;
    check<UsageError>(adam.lr >= 0 && adam.eps >= 0 && adam.weight_decay >= 0 && adam.beta1 >= 0 && adam.beta1 < 1 &&
                          adam.beta2 >= 0 && adam.beta2 < 1,
                      "Muon: expected adam's lr, eps and weight_decay of at least 0 and betas in [0, 1), got ", adam.lr,
                      ", ", adam.eps, ", ", adam.weight_decay, ", ", adam.beta1, " and ", adam.beta2);
    return options;
  }

  bool takes(const nn::NamedParameter<D>& named) const {
    const auto& names = options_.adam_for;
    return named.parameter->extents().size() == 2 &&
           std::none_of(names.begin(), names.end(), [&](const auto& begin) { return named.name.starts_with(begin); });
  }
  Index rows(std::size_t i) const { return pieces_.parameter(i).extents()[0]; }
  Index columns(std::size_t i) const { return pieces_.parameter(i).extents()[1]; }

  // The momentum's step; its direction becomes `u`.
  template <class T>
  void direction(T, const Range& range, bf16* u) const {
    const auto device = this->device();
    const auto m = static_cast<T*>(range.state[0]);
    const auto g = static_cast<const T*>(range.grad);
    detail::update(device, range.count, detail::Lerp{1 - options_.momentum}, m, static_cast<const T*>(m), g);
    if (!options_.nesterov) return kernels::convert(device, range.count, static_cast<const T*>(m), u);
    const detail::StepMemory<T, D> ahead(device, range.count);
    detail::update(device, range.count, detail::Lerp{options_.momentum}, ahead.data(), g, static_cast<const T*>(m));
    kernels::convert(device, range.count, static_cast<const T*>(ahead.data()), u);
  }
  template <class T>
  void apply(T, const Range& range, const bf16* o) const {
    const auto device = this->device();
    const auto p = static_cast<T*>(range.value);
    const detail::StepMemory<T, D> wide(device, range.count);
    kernels::convert(device, range.count, o, wide.data());
    const double lr = this->lr_of(range),
                 scaled = detail::adjusted(lr, options_.adjust_lr, rows(range.number), columns(range.number));
    detail::update(device, range.count, detail::Mix{1 - lr * range.weight_decay(options_.weight_decay), -scaled}, p,
                   static_cast<const T*>(p), static_cast<const T*>(wide.data()));
  }
  template <class T>
  void adam_step(T, const Range& range) {
    const auto& adam = options_.adam;
    kernels::adam_step(this->device(), range.count, static_cast<T*>(range.value), static_cast<const T*>(range.grad),
                       static_cast<T*>(range.state[0]), static_cast<T*>(range.state[1]),
                       static_cast<T*>(range.state[2]),
                       this->scalars(kernels::AdamScalars{.lr = this->lr_of(range) * (adam.lr / options_.lr),
                                                          .beta1 = adam.beta1,
                                                          .beta2 = adam.beta2,
                                                          .eps = adam.eps,
                                                          .weight_decay = range.weight_decay(adam.weight_decay),
                                                          .decoupled = true,
                                                          .step = range.steps + 1},
                                     range));
  }

  MuonOptions options_;
  std::vector<char> is_matrix_;  // by parameter
  detail::Pieces<D> pieces_;
};

}  // namespace chorus::optim
