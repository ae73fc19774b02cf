#pragma once
/// L-BFGS (Liu, Nocedal 1989), as in PyTorch, on the CPU.

#include <algorithm>
#include <chorus/optim/optimizer.hpp>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <limits>
#include <numeric>
#include <type_traits>
#include <utility>
#include <vector>

namespace chorus::optim {

/// How Lbfgs finds the length of a step: always `lr`, or by a search until the strong Wolfe conditions hold.
enum class LineSearch : std::uint8_t { none, strong_wolfe };

/// Options of Lbfgs; defaults are PyTorch's.
struct LbfgsOptions {
  double lr = 1;
  /// Iterations in a step, and evaluations of the loss; 0: 1.25 times as many as iterations.
  int max_iter = 20, max_eval = 0;
  /// A step ends if no gradient is larger, or if the loss and the parameters change by less.
  double tolerance_grad = 1e-7, tolerance_change = 1e-9;
  int history_size = 100;
  LineSearch line_search = LineSearch::none;
};

/// Steps along the gradient times an approximate inverse Hessian, from the last `history_size` changes. `step(closure)`
/// evaluates the loss several times:
///   optimizer.step([&] {
///     optimizer.zero_grad();
///     auto loss = ch::mse_loss(net(x), y);
///     loss.backward();
///     return loss.item();
///   });
/// For SingleDevice and DataParallel: with several processes each would decide by the loss of its own samples.
template <Device D>
class Lbfgs final : public Optimizer<D> {
  static_assert(std::is_same_v<D, Cpu>, "Lbfgs: expected parameters on the CPU");

 public:
  using options_type = LbfgsOptions;
  static constexpr bool needs_whole_parameters = true;

  /// Throws UsageError for options out of range, and for parameters of a policy of several processes.
  explicit Lbfgs(std::vector<nn::NamedParameter<D>> parameters, const LbfgsOptions& options = {})
      : Optimizer<D>(parameters, options.lr), options_(options), parameters_(std::move(parameters)) {
    check<UsageError>(options.max_iter > 0 && options.max_eval >= 0 && options.history_size > 0,
                      "Lbfgs: expected max_iter and history_size of at least 1, max_eval of at least 0, got ",
                      options.max_iter, ", ", options.history_size, " and ", options.max_eval);
    check<UsageError>(options.tolerance_grad >= 0 && options.tolerance_change >= 0,
                      "Lbfgs: expected tolerances of at least 0, got ", options.tolerance_grad, " and ",
                      options.tolerance_change);
    for (const auto& named : parameters_) {
      nn::check_whole("Lbfgs", named, "it needs whole parameters");
      first_.push_back(count_);
      count_ += static_cast<std::size_t>(named.parameter->count());
    }
    if (options_.max_eval == 0) options_.max_eval = options.max_iter * 5 / 4;
    check_one_process();
  }

  /// Throws UsageError: L-BFGS needs the closure.
  void step() override { fail<UsageError>("Lbfgs: expected step(closure), where closure computes the loss again"); }

  /// `closure` clears the gradients, computes the loss and its gradients, and returns the loss, a number or a scalar.
  /// Returns the first loss. Throws UsageError if a parameter group has options of its own, or if a policy of several
  /// processes has taken the parameters.
  template <class Closure>
  double step(const Closure& closure) {
    const auto evaluate = [&](Point& at) {
      const GradMode on(true);
      const auto loss = closure();
      if constexpr (std::is_arithmetic_v<std::remove_cvref_t<decltype(loss)>>)
        at.loss = static_cast<double>(loss);
      else
        at.loss = static_cast<double>(loss.item());
      at.gradient = gradient();
      ++evaluations_;
    };
    check_one_process();
    evaluations_ = 0;
    Point now;
    evaluate(now);
    const double first = now.loss;
    for (int i = 1; largest(now.gradient) > options_.tolerance_grad && i <= options_.max_iter; ++i) {
      const bool begins = direction_.empty();
      follow(now.gradient);
      before_ = now.gradient;
      const double loss = now.loss, slope = dot(now.gradient, direction_);
      length_ = begins ? std::min(1.0, 1 / sum_of_sizes(now.gradient)) * this->lr() : this->lr();
      if (slope > -options_.tolerance_change) break;
      const Numbers from = values();
      if (options_.line_search == LineSearch::strong_wolfe) {
        now.slope = slope;
        now = search(now, [&](double length) {
          move(from, length);
          Point there{.length = length};
          evaluate(there);
          there.slope = dot(there.gradient, direction_);
          return there;
        });
        length_ = now.length;
        now.length = 0;
        move(from, length_);
      } else {
        move(from, length_);
        if (i == options_.max_iter) break;
        evaluate(now);
      }
      if (evaluations_ >= options_.max_eval || largest(direction_) * length_ <= options_.tolerance_change ||
          std::abs(now.loss - loss) < options_.tolerance_change)
        break;
    }
    return first;
  }

  /// Forgets the history: the next step begins along the gradient.
  void reset_history() {
    direction_.clear();
    history_.clear();
    scale_ = 1;
  }
  /// For checkpoints, which hold no history. Throws UsageError if there is one: a resumed run would take other steps.
  std::vector<StateTensor> state() {
    check<UsageError>(direction_.empty(),
                      "Lbfgs: a checkpoint does not hold its history: call reset_history() before it is saved");
    return Optimizer<D>::state();
  }

 protected:
  std::span<const std::string_view> slots() const override { return {}; }

 private:
  using Numbers = std::vector<double>;
  /// A point along the direction.
  struct Point {
    double length = 0, loss = 0, slope = 0;
    Numbers gradient{};
  };
  struct Change {
    Numbers gradient, values;
    double weight;
  };

  static double dot(const Numbers& a, const Numbers& b) {
    return std::inner_product(a.begin(), a.end(), b.begin(), 0.0);
  }
  static double largest(const Numbers& x) {
    double most = 0;
    for (const double number : x) most = std::abs(number) > most || std::isnan(number) ? std::abs(number) : most;
    return most;
  }
  static double sum_of_sizes(const Numbers& x) {
    return std::accumulate(x.begin(), x.end(), 0.0, [](double sum, double number) { return sum + std::abs(number); });
  }
  static void add(Numbers& to, double factor, const Numbers& x) {
    for (std::size_t i = 0; i < to.size(); ++i) to[i] += factor * x[i];
  }

  void check_one_process() const {
    for (const auto& named : parameters_)
      check<UsageError>(named.parameter->ledger() == nullptr, "Lbfgs: '", named.name,
                        "' belongs to a policy of several processes, each with a loss over other samples: expected "
                        "SingleDevice or DataParallel");
  }

  // Calls `f(parameter, place in the flat vector, T{})`.
  template <class F>
  void for_each_parameter(const F& f) const {
    for (std::size_t i = 0; i < parameters_.size(); ++i)
      if (parameters_[i].parameter->dtype() == DType::f32)
        f(parameters_[i], first_[i], float{});
      else
        f(parameters_[i], first_[i], double{});
  }
  // Parameters without a gradient count as 0.
  Numbers gradient() const {
    Numbers all(count_);
    for_each_parameter([&]<class T>(const nn::NamedParameter<D>& named, std::size_t first, T) {
      named.parameter->check_grad_whole();
      if (!named.parameter->grad_arrived() || !named.parameter->wants_grad()) return;
      const auto* const from = static_cast<const T*>(named.parameter->grad_data());
      std::copy_n(from, named.parameter->count(), all.begin() + static_cast<std::ptrdiff_t>(first));
    });
    return all;
  }
  Numbers values() const {
    Numbers all(count_);
    for_each_parameter([&]<class T>(const nn::NamedParameter<D>& named, std::size_t first, T) {
      const auto* const from = static_cast<const T*>(named.parameter->memory());
      std::copy_n(from, named.parameter->count(), all.begin() + static_cast<std::ptrdiff_t>(first));
    });
    return all;
  }
  // The parameters become `from` + length direction.
  void move(const Numbers& from, double length) {
    this->for_each_range({.each_alone = true}, [&]<class T>(T, const typename Optimizer<D>::Range& range) {
      check<UsageError>(range.group.lr_scale == 1 && !range.group.weight_decay,
                        "Lbfgs: expected one group of parameters: its direction is of all together");
      std::size_t i = 0;
      while (parameters_[i].parameter->memory() != range.value) ++i;
      auto* const to = static_cast<T*>(range.value);
      for (std::size_t k = 0; k < static_cast<std::size_t>(range.count); ++k)
        to[k] = static_cast<T>(from[first_[i] + k] + length * direction_[first_[i] + k]);
    });
  }

  // The direction from the gradient: the two loops over the history (Nocedal 1980).
  void follow(const Numbers& gradient) {
    if (!direction_.empty()) {
      Change change{gradient, direction_, 0};
      add(change.gradient, -1, before_);
      for (double& number : change.values) number *= length_;
      const double product = dot(change.gradient, change.values);
      if (product > 1e-10) {
        if (history_.size() == static_cast<std::size_t>(options_.history_size)) history_.pop_front();
        change.weight = 1 / product;
        scale_ = product / dot(change.gradient, change.gradient);
        history_.push_back(std::move(change));
      }
    }
    Numbers next(count_);
    add(next, -1, gradient);
    std::vector<double> along(history_.size());
    for (std::size_t i = history_.size(); i-- > 0;) {
      along[i] = dot(history_[i].values, next) * history_[i].weight;
      add(next, -along[i], history_[i].gradient);
    }
    for (double& number : next) number *= scale_;
    for (std::size_t i = 0; i < history_.size(); ++i)
      add(next, along[i] - dot(history_[i].gradient, next) * history_[i].weight, history_[i].values);
    direction_ = std::move(next);
  }

  // The minimum of the cubic through two points with their slopes, at least `margin` of their distance inside.
  static double between(const Point& a, const Point& b, double margin) {
    const double distance = b.length - a.length, d = a.slope + b.slope - 3 * (a.loss - b.loss) / (a.length - b.length);
    const double root = std::copysign(std::sqrt(d * d - a.slope * b.slope), distance);
    const double at = b.length - distance * (b.slope + root - d) / (b.slope - a.slope + 2 * root);
    if (!std::isfinite(at)) return a.length + distance / 2;
    const auto [low, high] = std::minmax(a.length, b.length);
    return std::clamp(at, low + margin * (high - low), high - margin * (high - low));
  }

  // A point where the loss is low enough and flat enough (Nocedal, Wright 2006, algorithms 3.5 and 3.6); the best one
  // if evaluations run out.
  template <class At>
  Point search(const Point& start, const At& at) {
    constexpr double enough = 1e-4, flat = 0.9;
    const auto too_high = [&](const Point& x) { return !(x.loss <= start.loss + enough * x.length * start.slope); };
    const auto is_flat = [&](const Point& x) { return std::abs(x.slope) <= -flat * start.slope; };
    Point low = start, high;
    double length = length_;
    bool bracketed = false;
    for (bool first = true; !bracketed; first = false) {
      if (evaluations_ >= options_.max_eval) return low;
      Point next = at(length);
      if (too_high(next) || (!first && next.loss >= low.loss)) {
        high = std::move(next);
        bracketed = true;
      } else if (is_flat(next)) {
        return next;
      } else if (next.slope >= 0) {
        high = std::exchange(low, std::move(next));
        bracketed = true;
      } else {
        const double step = next.length - low.length;
        low = std::move(next);
        length = low.length + 4 * step;
      }
    }
    while (evaluations_ < options_.max_eval &&
           std::abs(high.length - low.length) * largest(direction_) > options_.tolerance_change) {
      Point next = at(between(low, high, 0.1));
      if (too_high(next) || next.loss >= low.loss) {
        high = std::move(next);
        continue;
      }
      if (is_flat(next)) return next;
      if (next.slope * (high.length - low.length) >= 0) high = low;
      low = std::move(next);
    }
    return low;
  }

  LbfgsOptions options_;
  std::vector<nn::NamedParameter<D>> parameters_;
  std::vector<std::size_t> first_;  // of each parameter in the flat vectors
  std::size_t count_ = 0;
  int evaluations_ = 0;
  Numbers direction_, before_;  // the last direction, and the gradient before it
  double length_ = 0, scale_ = 1;
  std::deque<Change> history_;
};

}  // namespace chorus::optim
