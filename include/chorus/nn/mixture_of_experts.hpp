#pragma once
/// MixtureOfExperts: a router sends each token to a few of many small networks (Shazeer et al. 2017). Under the axis
/// Expert of a mesh the experts live on different ranks, and tokens travel.

#include <chorus/core/random.hpp>
#include <chorus/core/recomputation.hpp>
#include <chorus/kernels/copy.hpp>
#include <chorus/kernels/reduction.hpp>
#include <chorus/nn/expert_group.hpp>
#include <chorus/nn/init.hpp>
#include <chorus/nn/linear.hpp>
#include <chorus/ops/activations.hpp>
#include <chorus/ops/collectives.hpp>
#include <chorus/ops/scatter.hpp>
#include <chorus/ops/softmax.hpp>
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <numeric>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace chorus::nn {

/// Options of MixtureOfExperts.
struct MixtureOfExpertsOptions {
  Index experts = 8;
  /// The experts of each token.
  Index top_k = 2;
  /// Features between the two linear layers of an expert; 0 means 4 times the model's.
  Index hidden = 0;
  /// An expert takes at most ceil(capacity * top_k * tokens / experts) tokens of a pass; others are dropped. All first
  /// choices come before all second ones, each in the order of the batch. 0: no token is dropped.
  double capacity = 0;
  /// Whether the weights of a token's experts sum to 1 (Mixtral); otherwise they are probabilities (Switch).
  bool renormalize = true;
  /// Factor of the loss experts * Σ fᵢ Pᵢ, with expert i's share fᵢ of the choices and its mean probability Pᵢ (Fedus,
  /// Zoph and Shazeer 2022).
  double balance_loss = 0.01;
  /// Factor of the loss mean(logsumexp(logits)²) (Zoph et al. 2022).
  double z_loss = 0;
};

/// Base of layers whose parameters have one expert's numbers in each entry of axis 0. The axis Expert splits them.
class ExpertLayer : public Module {};

/// What MixtureOfExperts returns.
template <class Y, class Loss>
struct MixtureOfExpertsOutput {
  Y y;
  Loss loss;  ///< of each token, [...] for x: [..., features]; add its mean to the model's loss
  /// By expert: how many tokens of the whole batch chose it; in evaluation without a capacity, of this rank's part.
  std::vector<Index> load;
  Index dropped = 0;  ///< choices of the whole batch that exceeded the capacity
};

namespace detail {

/// y[r] = x[r] weight[g]ᵀ + bias[g] for the rows r of each group g: the first `rows[0]` rows are group 0's, and so on.
/// x: [rows, in], weight: [groups, out, in], bias: [groups, out]. `replicas` adds up the gradients of weight and bias.
template <Operand X, Operand W, Operand B>
auto grouped_linear(const X& x, const W& weight, const B& bias, const std::vector<Index>& rows,
                    const ExpertGroupRef& replicas) {
  using kernels::Trans;
  using T = typename tensor_of<X>::value_type;
  using D = typename tensor_of<X>::device_type;
  const auto input = contiguous(value_of(x));
  const auto w = contiguous(value_of(weight));
  const auto b = contiguous(value_of(bias));
  const auto device = input.device();
  const Index out_features = w.size(1), in_features = w.size(2);
  auto out = Tensor<T, 2, D>::empty({input.size(0), out_features}, device);
  chorus::detail::count_multiply_adds(input.size(0) * out_features * in_features);
  // Calls f(group, first row, rows).
  const auto each = [rows](const auto& f) {
    Index first = 0;
    for (std::size_t g = 0; g < rows.size(); first += rows[g++]) f(static_cast<Index>(g), first, rows[g]);
  };
  each([&](Index g, Index first, Index n) {
    kernels::gemm(device, Trans::no, Trans::yes, n, out_features, in_features, input.data() + first * in_features,
                  in_features, w.data() + g * out_features * in_features, in_features,
                  out.data() + first * out_features, out_features, false, b.data() + g * out_features);
  });
  return record(
      "grouped_linear", std::move(out),
      [input = chorus::detail::Saved(input), w = chorus::detail::Saved(w), device, in_features, out_features, each,
       replicas](const auto& dy, auto dx, auto dw, auto db) {
        // Into the gradient if this is all of it; else into memory of its own, which replicas add up.
        const auto with_target = [&](auto& node, const auto& shape, const auto& f) {
          if (replicas == nullptr || !replicas->has_replicas()) {
            const auto [grad, accumulate] = node.target();
            return f(grad.data(), accumulate);
          }
          auto own = Tensor<T, std::tuple_size_v<std::remove_cvref_t<decltype(shape)>>, D>::empty(shape, device);
          f(own.data(), false);
          replicas->sum_replicas(std::span<T>(own.data(), static_cast<std::size_t>(own.numel())));
          node.add(own);
        };
        const auto numbers = static_cast<std::size_t>(out_features * in_features);
        if (db)
          with_target(*db, Shape<2>{w.tensor().size(0), out_features}, [&](T* grad, bool accumulate) {
            each([&](Index g, Index first, Index n) {
              kernels::sum(device, {1, n, out_features}, dy.data() + first * out_features, grad + g * out_features,
                           accumulate);
            });
          });
        if (dw)
          with_target(*dw, w.tensor().shape(), [&](T* grad, bool accumulate) {
            const T* const in = input.read("grouped_linear").data();
            each([&](Index g, Index first, Index n) {
              T* const of_group = grad + static_cast<std::size_t>(g) * numbers;
              if (n == 0 && !accumulate) return zero_bytes(device, of_group, numbers * sizeof(T));
              kernels::gemm(device, Trans::yes, Trans::no, out_features, in_features, n,
                            dy.data() + first * out_features, out_features, in + first * in_features, in_features,
                            of_group, in_features, accumulate);
            });
          });
        if (dx) {
          const auto [grad, accumulate] = dx->target();
          const T* const weights = w.read("grouped_linear").data();
          each([&, to = grad.data(), adds = accumulate](Index g, Index first, Index n) {
            kernels::gemm(device, Trans::no, Trans::no, n, in_features, out_features, dy.data() + first * out_features,
                          out_features, weights + static_cast<std::size_t>(g) * numbers, in_features,
                          to + first * in_features, in_features, adds);
          });
        }
      },
      x, weight, bias);
}

/// Where the tokens of a pass go.
struct ExpertPlan {
  std::vector<std::int64_t> chosen;  ///< [tokens, top_k] experts, the most probable first
  /// The choices that are not dropped, by (expert, token): whose they are, and their places in `chosen`.
  std::vector<std::int64_t> tokens, slots;
  std::vector<Index> rows;       ///< by expert: the number of these choices
  std::vector<Index> load;       ///< by expert: the choices of all ranks
  Index dropped = 0, whole = 0;  ///< of all ranks: choices that are dropped; tokens
};

/// The `top_k` most probable experts of each row of [tokens, experts]; of equal ones the first.
template <Real T>
std::vector<std::int64_t> most_probable(std::span<const T> probabilities, Index experts, Index top_k) {
  std::vector<std::int64_t> chosen;
  for (auto row = probabilities; !row.empty(); row = row.subspan(static_cast<std::size_t>(experts))) {
    const auto begin = chosen.end() - chosen.begin();
    for (Index c = 0; c < top_k; ++c) {
      Index best = -1;
      for (Index e = 0; e < experts; ++e) {
        if (std::find(chosen.begin() + begin, chosen.end(), e) != chosen.end()) continue;
        if (best < 0 || row[static_cast<std::size_t>(e)] > row[static_cast<std::size_t>(best)]) best = e;
      }
      chosen.push_back(best);
    }
  }
  return chosen;
}

/// Drops choices beyond the capacity and orders the others. `group`: the ranks or devices that have the rest of the
/// batch, which all call it; null: there are none.
inline ExpertPlan plan_experts(std::vector<std::int64_t> chosen, const MixtureOfExpertsOptions& options,
                               const std::shared_ptr<BatchGroup>& group) {
  const auto experts = static_cast<std::size_t>(options.experts), k = static_cast<std::size_t>(options.top_k);
  const std::size_t tokens = chosen.size() / k;
  ExpertPlan plan;
  plan.chosen = std::move(chosen);
  plan.rows.resize(experts);
  plan.load.resize(experts);
  // How often each member's c-th choice was expert e: at c * experts + e; then its number of tokens.
  const auto numbers = static_cast<Index>(k * experts + 1);
  auto counts = chorus::Tensor<std::int64_t, 2>::zeros({1, numbers});
  for (std::size_t slot = 0; slot < plan.chosen.size(); ++slot)
    ++counts.data()[slot % k * experts + static_cast<std::size_t>(plan.chosen[slot])];
  counts.data()[numbers - 1] = static_cast<std::int64_t>(tokens);
  std::size_t me = 0;
  if (group != nullptr) {
    counts = chorus::detail::rows_of_members(*group, "MixtureOfExperts", counts).all;
    me = group->member();
  }
  const auto members = static_cast<std::size_t>(counts.size(0));
  const auto of = [&](std::size_t member, std::size_t i) {
    return counts.data()[member * static_cast<std::size_t>(numbers) + i];
  };
  std::vector<Index> place(k * experts);  // in the expert's queue: of this member's next c-th choice
  for (std::size_t i = 0; i < k * experts; ++i) {
    place[i] = plan.load[i % experts];
    for (std::size_t member = 0; member < members; ++member) {
      if (member < me) place[i] += of(member, i);
      plan.load[i % experts] += of(member, i);
    }
  }
  for (std::size_t member = 0; member < members; ++member) plan.whole += of(member, k * experts);
  const Index room = options.capacity == 0
                         ? static_cast<Index>(k) * plan.whole
                         : static_cast<Index>(std::ceil(options.capacity * static_cast<double>(options.top_k) *
                                                        static_cast<double>(plan.whole) /
                                                        static_cast<double>(options.experts)));
  for (const Index load : plan.load) plan.dropped += std::max<Index>(load - room, 0);
  std::vector<std::vector<std::int64_t>> slots(experts);
  for (std::size_t token = 0; token < tokens; ++token)
    for (std::size_t c = 0; c < k; ++c) {
      const auto slot = token * k + c, expert = static_cast<std::size_t>(plan.chosen[slot]);
      if (place[c * experts + expert]++ < room) slots[expert].push_back(static_cast<std::int64_t>(slot));
    }
  for (std::size_t e = 0; e < experts; ++e) {
    plan.rows[e] = static_cast<Index>(slots[e].size());
    for (const auto slot : slots[e]) {
      plan.slots.push_back(slot);
      plan.tokens.push_back(slot / options.top_k);
    }
  }
  return plan;
}

/// The rows that ranks exchange so that each has those of its own experts.
struct ExpertRows {
  std::vector<std::size_t> sends, receives;  ///< rows, by rank
  std::vector<std::int64_t> arranged, back;  ///< by (expert, rank, token): the place of arrival; the inverse
  std::vector<Index> rows;                   ///< by own expert
};

/// `rows`: this rank's rows for each of all experts. All members call it.
inline ExpertRows expert_rows(ExpertGroup& group, const std::vector<Index>& rows) {
  const auto experts = rows.size(), ranks = static_cast<std::size_t>(group.size());
  const std::vector<double> own(rows.begin(), rows.end());
  std::vector<double> all(experts * ranks);
  group.all_gather(std::span<const double>(own), std::span<double>(all));
  const auto part_of = [&](std::size_t rank) {
    return axis_part(static_cast<Index>(experts), 1, group.size(), static_cast<int>(rank));
  };
  const auto of = [&](std::size_t rank, Index expert) {
    return static_cast<std::size_t>(all[rank * experts + static_cast<std::size_t>(expert)]);
  };
  ExpertRows out;
  const AxisPart mine = part_of(static_cast<std::size_t>(group.rank()));
  std::vector<std::size_t> arrival(ranks);
  for (std::size_t rank = 0, arrived = 0; rank < ranks; ++rank) {
    const AxisPart theirs = part_of(rank);
    std::size_t there = 0, here = 0;
    for (Index e = theirs.begin; e < theirs.begin + theirs.count; ++e)
      there += of(static_cast<std::size_t>(group.rank()), e);
    for (Index e = mine.begin; e < mine.begin + mine.count; ++e) here += of(rank, e);
    out.sends.push_back(there);
    out.receives.push_back(here);
    arrival[rank] = std::exchange(arrived, arrived + here);
  }
  for (Index e = mine.begin; e < mine.begin + mine.count; ++e) {
    const auto before = out.arranged.size();
    for (std::size_t rank = 0; rank < ranks; ++rank)
      for (std::size_t i = 0; i < of(rank, e); ++i)
        out.arranged.push_back(static_cast<std::int64_t>(arrival[rank]++));
    out.rows.push_back(static_cast<Index>(out.arranged.size() - before));
  }
  out.back.resize(out.arranged.size());
  for (std::size_t i = 0; i < out.arranged.size(); ++i)
    out.back[static_cast<std::size_t>(out.arranged[i])] = static_cast<std::int64_t>(i);
  return out;
}

/// x: [rows, features], of which `sends[r]` go to rank r -> the rows that come. Ranks' losses count by their weights
/// (BatchGroup::weight), and an expert's gradient is the sum over ranks. So a gradient has the home rank's weight while
/// it is at the experts: `to_experts`, it comes home from there.
template <Operand X>
auto exchange_rows(const X& x, const ExpertGroupRef& group, const std::vector<std::size_t>& sends,
                   const std::vector<std::size_t>& receives, bool to_experts) {
  using T = typename tensor_of<X>::value_type;
  using D = typename tensor_of<X>::device_type;
  const auto move = [group](const Tensor<T, 2, D>& from, std::vector<std::size_t> out, std::vector<std::size_t> in) {
    const Index width = from.size(1);
    const auto rows = std::accumulate(in.begin(), in.end(), std::size_t{0});
    auto to = Tensor<T, 2, D>::empty({static_cast<Index>(rows), width}, from.device());
    for (auto& count : out) count *= static_cast<std::size_t>(width);
    for (auto& count : in) count *= static_cast<std::size_t>(width);
    group->all_to_all(std::span<const T>(from.data(), static_cast<std::size_t>(from.numel())), out,
                      std::span<T>(to.data(), static_cast<std::size_t>(to.numel())), in);
    return to;
  };
  const auto times = [](const Tensor<T, 2, D>& gradient, double factor) {
    if (factor == 0) return Tensor<T, 2, D>::zeros(gradient.shape(), gradient.device());  // also of NaN
    auto out = clone(gradient);
    kernels::scale(out.device(), out.numel(), static_cast<T>(factor), out.data());
    return out;
  };
  return record(
      "all_to_all", move(contiguous(value_of(x)), sends, receives),
      [move, times, sends, receives, to_experts, batch = batch_group()](const auto& dy, auto dx) {
        const double weight = batch->weight();
        if (to_experts)
          dx->add(times(move(contiguous(dy), receives, sends), weight == 0 ? 0 : 1 / weight));
        else
          dx->add(move(times(contiguous(dy), weight), receives, sends));
      },
      x);
}

}  // namespace detail

/// A linear layer for each expert; weight: [experts, out, in], bias: [experts, out].
template <Device D, Real T = float>
class ExpertLinear : public ExpertLayer {
 public:
  using device_type = D;
  Parameter<T, 3, D> weight;
  Parameter<T, 2, D> bias;

  ExpertLinear(Index experts, Index in_features, Index out_features)
      : weight(init::default_uniform<T, D, 3>({experts, out_features, in_features}, in_features)),
        bias(init::default_uniform<T, D, 2>({experts, out_features}, in_features)) {}

  /// x: [rows, in], of which each of this rank's experts has `rows[e]`, one after the other -> [rows, out].
  template <Operand X>
  auto operator()(const X& x, const std::vector<Index>& rows, const ExpertGroupRef& group = nullptr) const {
    return detail::watched(*this, [&] {
      const ReadsParts parts;
      return chorus::detail::with_variables(
          [&](const auto&... xs) { return detail::grouped_linear(xs..., rows, group); }, x, weight, bias);
    });
  }
  void visit(Visitor& visitor) override {
    visitor.parameter("weight", weight);
    visitor.parameter("bias", bias);
  }
  std::string describe() const override {
    const ReadsParts parts;
    return cat("ExpertLinear(", weight.shape()[0], ", ", weight.shape()[2], ", ", weight.shape()[1], ")");
  }
};

/// x: [..., features] -> y of the same shape: the sum of the outputs of each token's `top_k` experts, weighted by the
/// router. An expert is Linear, GELU, Linear. `loss`: the router's own losses; 0 in evaluation.
///
/// The load, the capacity and the losses are those of the global batch under every policy, and of each micro-batch
/// where a program adds up gradients. So passes in training, and where capacity is limited also those in evaluation,
/// are calls of all ranks. Axis 0 of x holds the samples. The layer computes bf16 and half inputs in float. In a mesh
/// with the axis Expert a rank holds the parameters of some experts: see parallel/expert.hpp. Throws UsageError in a
/// model under Pipeline or SameBits, which compute parts of a batch one after the other.
template <Device D, Real T = float>
class MixtureOfExperts : public Module {
 public:
  using device_type = D;
  Linear<D, T> router;
  ExpertLinear<D, T> up, down;

  /// Throws ShapeError unless sizes are positive and 1 <= top_k <= experts, UsageError for negative factors.
  explicit MixtureOfExperts(Index features, const MixtureOfExpertsOptions& options = {})
      : router(features, checked(features, options).experts, {.bias = false}),
        up(options.experts, features, options.hidden > 0 ? options.hidden : 4 * features),
        down(options.experts, options.hidden > 0 ? options.hidden : 4 * features, features),
        features_(features),
        options_(options) {}

  template <Operand X>
  auto operator()(const X& x) const {
    return detail::watched(*this, [&] {
      if constexpr (NarrowOperand<X>) {
        auto out = mixed(to<T>(x));
        auto y = to<typename tensor_of<X>::value_type>(out.y);
        return MixtureOfExpertsOutput<decltype(y), decltype(out.loss)>{std::move(y), std::move(out.loss),
                                                                       std::move(out.load), out.dropped};
      } else {
        return mixed(x);
      }
    });
  }
  void visit(Visitor& visitor) override {
    visitor.module("router", router);
    visitor.module("up", up);
    visitor.module("down", down);
  }
  std::string describe() const override {
    return cat("MixtureOfExperts(", features_, ", experts=", options_.experts, ", top_k=", options_.top_k, ")");
  }

 private:
  static const MixtureOfExpertsOptions& checked(Index features, const MixtureOfExpertsOptions& options) {
    check<ShapeError>(features > 0 && options.hidden >= 0 && options.top_k > 0 && options.top_k <= options.experts,
                      "MixtureOfExperts: expected positive sizes, and top_k of at most experts, got ", features,
                      " features, hidden ", options.hidden, ", top_k ", options.top_k, " and experts ",
                      options.experts);
    for (const double factor : {options.capacity, options.balance_loss, options.z_loss})
      check<UsageError>(factor >= 0 && std::isfinite(factor),
                        "MixtureOfExperts: expected capacity, balance_loss and z_loss of at least 0, got ", factor);
    return options;
  }

  template <Operand X>
  auto mixed(const X& x) const {
    static_assert(tensor_of<X>::rank >= 2, "MixtureOfExperts: expected an input [samples, ..., features]");
    const auto& shape = value_of(x).shape();
    check<ShapeError>(shape.back() == features_, "MixtureOfExperts: expected ", features_, " features, got shape ",
                      shape);
    const Index tokens = value_of(x).numel() / features_;
    const auto rows = reshape(x, Shape<2>{tokens, features_});
    const auto logits = router(rows);
    const auto probabilities = softmax(logits, 1);
    const auto near = contiguous(to_device(contiguous(value_of(probabilities)), Cpu{}));
    const auto plan = detail::plan_experts(
        detail::most_probable(std::span<const T>(near.data(), static_cast<std::size_t>(near.numel())),
                              options_.experts, options_.top_k),
        options_, group_of_batch());

    const auto device = value_of(x).device();
    const auto index = [device](const std::vector<std::int64_t>& numbers) {
      return Tensor<std::int64_t, 1, D>::from(numbers, {static_cast<Index>(numbers.size())}, device);
    };
    const auto chosen = Tensor<std::int64_t, 2, D>::from(plan.chosen, {tokens, options_.top_k}, device);
    const auto best = gather(probabilities, 1, chosen);
    const auto weights = options_.renormalize ? best / sum(best, 1, keep_axis) : T{1} * best;
    const auto own_weights = index_select(reshape(weights, Shape<2>{tokens * options_.top_k, 1}), 0, index(plan.slots));
    const auto places = index(plan.tokens);
    const auto results = experts_of(index_select(rows, 0, places), plan, index);
    const auto y = chorus::detail::index_add(own_weights * results, Shape<2>{tokens, features_}, 0, places);

    Shape<tensor_of<X>::rank - 1> of_tokens{};
    std::copy_n(shape.begin(), of_tokens.size(), of_tokens.begin());
    auto loss = reshape(router_losses(logits, probabilities, plan), of_tokens);
    auto out = reshape(y, shape);
    return MixtureOfExpertsOutput<decltype(out), decltype(loss)>{std::move(out), std::move(loss), plan.load,
                                                                 plan.dropped};
  }

  /// The members of this pass with which it has to agree; null: none.
  std::shared_ptr<BatchGroup> group_of_batch() const {
    auto group = training() || options_.capacity > 0 ? batch_group() : nullptr;
    if (chorus::detail::first_run != nullptr) [[unlikely]]
      check<UsageError>(chorus::detail::first_run->found(this, 3, group != nullptr) == (group != nullptr),
                        "MixtureOfExperts: a checkpoint computes it again without the other devices: call backward or "
                        "grad on the policy's output");
    const auto* const random = chorus::detail::random_context();
    check<UsageError>(group == nullptr || options_.capacity == 0 || random == nullptr || random->dim == 0,
                      "MixtureOfExperts: expected samples along axis 0, which gives the order of tokens where capacity "
                      "is limited, got the option dim of the policy");
    return group;
  }

  /// x: [choices, features], by (expert, token) -> what the experts give for them.
  template <Operand X, class IndexOf>
  auto experts_of(const X& x, const detail::ExpertPlan& plan, const IndexOf& index) const {
    const auto computed = [&](const auto& rows, const std::vector<Index>& counts, const ExpertGroupRef& group) {
      return down(gelu(up(rows, counts, group)), counts, group);
    };
    using Y = decltype(computed(x, plan.rows, nullptr));
    const auto& part = up.weight.template on<D>().part();
    if (part == nullptr) return Y(computed(x, plan.rows, nullptr));
    const ExpertGroupRef group(part->group, dynamic_cast<ExpertGroup*>(part->group.get()));
    check<UsageError>(group != nullptr && batch_group() != nullptr,
                      "MixtureOfExperts: its experts are split over ranks: call the net, not its module(), and not in "
                      "join; net.gathered gives a whole model");
    const auto travel = detail::expert_rows(*group, plan.rows);
    const auto arrived = detail::exchange_rows(x, group, travel.sends, travel.receives, true);
    const auto results = computed(index_select(arrived, 0, index(travel.arranged)), travel.rows, group);
    return Y(detail::exchange_rows(index_select(results, 0, index(travel.back)), group, travel.receives, travel.sends,
                                   false));
  }

  /// Of each token; `load` is the global batch's, and so is the mean over all ranks' tokens.
  template <class Logits, class Probabilities>
  auto router_losses(const Logits& logits, const Probabilities& probabilities, const detail::ExpertPlan& plan) const {
    std::vector<T> factors;
    const double choices = std::max(1.0, static_cast<double>(plan.whole * options_.top_k));
    for (const Index load : plan.load)
      factors.push_back(static_cast<T>(training() ? options_.balance_loss * static_cast<double>(options_.experts) *
                                                        static_cast<double>(load) / choices
                                                  : 0));
    const auto factor = Tensor<T, 1, D>::from(factors, {options_.experts}, value_of(logits).device());
    const T z = static_cast<T>(training() ? options_.z_loss : 0);
    return sum(probabilities * factor, 1) + z * square(logsumexp(logits, 1));
  }

  Index features_;
  MixtureOfExpertsOptions options_;
};

}  // namespace chorus::nn
