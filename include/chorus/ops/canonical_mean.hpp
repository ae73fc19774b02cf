#pragma once
/// Losses of what a policy with canonical shares has returned: means over the whole batch, on every process, added up
/// share by share in one fixed order.

#include <chorus/autograd/found_nodes.hpp>
#include <chorus/autograd/parameter.hpp>
#include <chorus/core/canonical_cut.hpp>
#include <chorus/core/config.hpp>
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
[[gnu::cold]] std::shared_ptr<const CanonicalCut> find_cut(Node* node);

/// `nodes`: of a backward run. Throws UsageError where what goes back into a net's output, of samples in shares, comes
/// from anything but means over the whole batch: it would be this process's alone.
[[gnu::cold]] void check_canonical_means(std::span<const Ref<Node>> nodes);

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
[[gnu::cold]] WholeMean add_shares(const CanonicalCut& cut, std::span<const double> sums,
                                   std::span<const double> overs);

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
    if (end > begin) kernels::sum(device, kernels::AxisShape{.axis = end - begin}, values.data() + begin, sum.data());
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

#if !CHORUS_COMPILED
#include <chorus/ops/canonical_mean_impl.hpp>
#endif
