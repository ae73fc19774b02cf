#pragma once
/// Means over a batch that its policy computes in parts and sums in a fixed order (SameBits). The library's losses use
/// these functions for their means.

#include <atomic>
#include <chorus/autograd/parameter.hpp>
#include <chorus/kernels/axis_shape.hpp>
#include <chorus/kernels/contiguous.hpp>
#include <chorus/kernels/reduction.hpp>
#include <cstddef>
#include <memory>
#include <numeric>
#include <span>
#include <vector>

namespace chorus {

/// How the batch of one forward pass is split into parts; this process has some of them.
class BatchParts {
 public:
  virtual ~BatchParts() = default;

  /// The number of local parts and samples, and the index of part `i`'s first local sample.
  virtual std::size_t parts() const = 0;
  virtual std::int64_t samples() const = 0;
  virtual std::int64_t begin(std::size_t i) const = 0;

  /// A sum over the global batch, and its divisor.
  struct Mean {
    double sum = 0, over = 0;
    double value() const { return over == 0 ? 0 : sum / over; }
  };
  /// Adds this process's parts and those of all others. All processes must call it. Throws UsageError on all of them if
  /// the samples of one are not those of its parts of the batch.
  virtual Mean add_up(std::span<const double> sums, std::span<const double> overs) const = 0;
};

namespace detail {

/// Finds the batch parts that a node depends on; null while no policy computes in parts.
inline std::atomic<std::shared_ptr<const BatchParts> (*)(Node*)> find_parts{nullptr};

/// The name of the operation that `mean_of_parts` records.
inline constexpr const char* mean_of_parts_name = "mean_of_parts";

/// The batch parts of these losses, if there are equally many losses for each sample; else null.
template <Operand X>
std::shared_ptr<const BatchParts> parts_of(const X& losses) {
  const auto find = find_parts.load(std::memory_order_relaxed);
  if (find == nullptr) [[likely]]
    return nullptr;
  if constexpr (AnyTensor<X> || is_graph_variable<X>) {
    return nullptr;
  } else {
    auto parts = find(node_of(losses).get());
    const Index count = value_of(losses).numel();
    const bool fits = parts && (parts->samples() == 0 ? count == 0 : count % parts->samples() == 0);
    return fits ? parts : nullptr;
  }
}

/// sum(losses) / over, for all parts of all processes. `over_of(begin, end)`: the divisor for that range of the flat
/// `losses`; the divisors of all parts are added, unless `over` is given.
template <AnyVariable X, class OverOf>
auto mean_of_parts(const X& losses, const BatchParts& parts, const OverOf& over_of, double over = 0) {
  using T = typename tensor_of<X>::value_type;
  using D = typename tensor_of<X>::device_type;
  const auto values = contiguous(value_of(losses));
  const auto device = values.device();
  const Index each = parts.samples() == 0 ? 0 : values.numel() / parts.samples();
  std::vector<double> sums, overs;
  for (std::size_t i = 0; i < parts.parts(); ++i) {
    const Index begin = parts.begin(i) * each, end = parts.begin(i + 1) * each;
    const auto sum = Tensor<T, 0, D>::zeros({}, device);
    if (end > begin) kernels::sum(device, kernels::AxisShape{.axis = end - begin}, values.data() + begin, sum.data());
    sums.push_back(static_cast<double>(sum.item()));
    overs.push_back(end > begin ? over_of(begin, end) : 0);
  }
  auto whole = parts.add_up(sums, overs);
  if (over != 0) whole.over = over;
  auto mean = record(
      mean_of_parts_name, Tensor<T, 0, D>::full({}, static_cast<T>(whole.value()), device),
      [divisor = whole.over, shape = values.shape()](const auto& dy, auto dx) {
        const double gradient = divisor == 0 ? 0 : static_cast<double>(dy.item()) / divisor;
        dx->add(tensor_of<X>::full(shape, static_cast<T>(gradient), dy.device()));
      },
      losses);
  return as_mean(std::move(mean), over != 0 ? over : std::accumulate(overs.begin(), overs.end(), 0.0));
}

}  // namespace detail
}  // namespace chorus
