#pragma once
/// Losses of what a policy with canonical shares has returned: means over the whole batch, on every process, added up
/// share by share in one fixed order.

#include <algorithm>
#include <chorus/autograd/found_nodes.hpp>
#include <chorus/autograd/parameter.hpp>
#include <chorus/core/canonical_cut.hpp>
#include <chorus/kernels/axis_shape.hpp>
#include <chorus/kernels/contiguous.hpp>
#include <chorus/kernels/reduction.hpp>
#include <cstddef>
#include <memory>
#include <numeric>
#include <span>
#include <vector>

namespace chorus::detail {

inline constexpr const char* canonical_mean_name = "canonical_mean";

/// How the batch was cut that `node` was made of; null where no policy has cut it, where it is one share, and where
/// nothing is recorded. Throws UsageError where it was made of batches that are cut in different ways.
[[gnu::cold]] inline std::shared_ptr<const CanonicalCut> find_cut(Node* node) {
  std::shared_ptr<const CanonicalCut> found;
  if (node == nullptr || within_share() || !grad_enabled()) return found;
  FoundNodes nodes;
  nodes.add(*node);
  nodes.walk([&](const Node& next) {
    const auto* const cut = next.canonical_cut();
    if (cut == nullptr) return true;
    check<UsageError>(!found || (found->samples() == (*cut)->samples() && found->run() == (*cut)->run()),
                      "canonical shares: a loss of two outputs, of batches that are cut in different ways: ",
                      found ? found->samples() : 0, " and ", (*cut)->samples(), " samples in ",
                      found ? found->run().count() : 0, " and ", (*cut)->run().count(), " shares");
    found = *cut;
    return false;
  });
  return found;
}

/// `nodes`: of a backward run. Throws UsageError where what goes back into a net's output, of samples in shares, comes
/// from anything but means over the whole batch: it would be this process's alone.
[[gnu::cold]] inline void check_canonical_means(std::span<const Ref<Node>> nodes) {
  const auto is_mean = [](const Node& node) { return node.operation() == canonical_mean_name; };
  FoundNodes under;
  for (const Ref<Node>& node : nodes)
    if (is_mean(*node)) under.add_inputs_of(*node);
  under.walk([](const Node& node) { return node.canonical_cut() == nullptr; });
  for (const Node* const node : under.all())
    check<UsageError>(!node->is_leaf() || node->numbers_name()[0] == '\0',
                      "canonical shares: the loss uses the parameter ", node->numbers_name(),
                      " outside of the net's forward pass, where samples are not in shares: use it in the model");
  FoundNodes beside;  // what others than means go back into
  for (const Ref<Node>& node : nodes)
    if (!is_mean(*node) && !under.has(*node)) beside.add_inputs_of(*node);
  for (const Node* const node : beside.all())
    check<UsageError>(node->canonical_cut() == nullptr && !under.has(*node),
                      "canonical shares: backward begins with something other than a mean over the batch: expected "
                      "mean(), cross_entropy(), mse_loss() or another loss of the library, taken of what the net "
                      "returned for its samples");
}

/// That of losses, as many for each sample; null where they are not.
template <Operand X>
std::shared_ptr<const CanonicalCut> cut_of_losses(const X& losses) {
  if (canonical_policies().load(std::memory_order_relaxed) == 0) return nullptr;
  if constexpr (AnyTensor<X> || is_graph_variable<X>) {
    return nullptr;
  } else {
    auto cut = find_cut(node_of(losses).get());
    const Index count = value_of(losses).numel();
    const bool fits = cut && (cut->samples() == 0 ? count == 0 : count % cut->samples() == 0);
    return fits ? cut : nullptr;
  }
}

/// Of the whole batch: a sum over its shares, and what it is divided by.
struct WholeMean {
  double sum = 0, over = 0;
  double value() const { return over == 0 ? 0 : sum / over; }
};

/// From what this process's shares give. All processes call it. Throws UsageError, on all of them, where one has other
/// samples than its shares of the batch.
[[gnu::cold]] inline WholeMean add_shares(const CanonicalCut& cut, std::span<const double> sums,
                                          std::span<const double> overs) {
  const std::size_t shares = cut.shares();
  std::vector<double> numbers(3 * shares);  // of all shares: sums, what they are divided by, numbers of samples
  for (std::size_t i = 0; i < sums.size(); ++i) {
    const std::size_t share = cut.run().begin + i;
    numbers[share] = sums[i];
    numbers[shares + share] = overs[i];
    numbers[2 * shares + share] = static_cast<double>(cut.size(i));
  }
  cut.sum_over_processes(numbers);
  const auto of_shares = [&](std::size_t which) { return std::span(numbers).subspan(which * shares, shares); };
  const auto samples = of_shares(2);
  const auto batch = static_cast<std::int64_t>(std::accumulate(samples.begin(), samples.end(), 0.0));
  for (std::size_t i = 0; i < shares; ++i) {
    const auto expected = share_begin(batch, shares, i + 1) - share_begin(batch, shares, i);
    check<UsageError>(samples[i] == static_cast<double>(expected), "canonical shares: of ", batch, " samples in ",
                      shares, " shares, share ", i, " has ", samples[i], ", expected ", expected,
                      ": each process takes its shares of the batch, as the policy's sampler gives them");
  }
  const auto used = static_cast<std::size_t>(std::min<std::int64_t>(batch, static_cast<std::int64_t>(shares)));
  return {chorus::add_shares(of_shares(0).first(used)), chorus::add_shares(of_shares(1).first(used))};
}

/// sum(losses) / over: of all shares, on all processes. `over_of(begin, end)`: what the losses in that range of the
/// flat `losses` are divided by; those of all shares add up, unless `over` says what all are divided by.
template <AnyVariable X, class OverOf>
auto canonical_mean(const X& losses, const CanonicalCut& cut, const OverOf& over_of, double over = 0) {
  using T = typename tensor_of<X>::value_type;
  using D = typename tensor_of<X>::device_type;
  const auto values = contiguous(value_of(losses));
  const auto device = values.device();
  const Index each = cut.samples() == 0 ? 0 : values.numel() / cut.samples();
  std::vector<double> sums, overs;
  for (std::size_t i = 0; i < cut.run().count(); ++i) {
    const Index begin = cut.begin(i) * each, end = cut.begin(i + 1) * each;
    const auto sum = Tensor<T, 0, D>::zeros({}, device);
    if (end > begin)
      kernels::sum(device, kernels::AxisShape{.axis = end - begin}, values.data() + begin, sum.data());
    sums.push_back(static_cast<double>(sum.item()));
    overs.push_back(end > begin ? over_of(begin, end) : 0);
  }
  auto whole = add_shares(cut, sums, overs);
  if (over != 0) whole.over = over;
  auto mean = record(
      canonical_mean_name, Tensor<T, 0, D>::full({}, static_cast<T>(whole.value()), device),
      [divisor = whole.over, shape = values.shape()](const auto& dy, auto dx) {
        const double gradient = divisor == 0 ? 0 : static_cast<double>(dy.item()) / divisor;
        dx->add(tensor_of<X>::full(shape, static_cast<T>(gradient), dy.device()));
      },
      losses);
  return as_mean(std::move(mean), over != 0 ? over : std::accumulate(overs.begin(), overs.end(), 0.0));
}

}  // namespace chorus::detail
