#pragma once
/// Collectives in a model or a loss: differentiable functions of what all ranks or devices have that share a batch.

#include <algorithm>
#include <any>
#include <chorus/autograd/parameter.hpp>
#include <chorus/core/batch_group.hpp>
#include <chorus/kernels/contiguous.hpp>
#include <chorus/kernels/to_device.hpp>
#include <chorus/ops/global_batch.hpp>
#include <chorus/ops/indexing.hpp>
#include <chorus/ops/shape.hpp>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <numeric>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace chorus {

namespace detail {

/// The rows of all members, and where this member's begin.
template <Scalar T, int Rank, Device D>
struct RowsOfMembers {
  Tensor<T, Rank, D> all;
  std::vector<Index> counts;
  Index first = 0;
};

/// What the members pass to one call, as bytes. `call` describes it. Throws UsageError, on all of them, if they differ.
[[gnu::cold]] inline std::vector<std::string> given_by_all(BatchGroup& group, std::string_view name,
                                                           std::string_view call, std::string_view bytes) {
  const auto given = group.exchange(cat(name, ' ', call, '\n').append(bytes));
  check<UsageError>(!given.empty(), name,
                    ": expected the whole batch at once; Pipeline and SameBits compute parts of it one after the "
                    "other: call it outside of the model");
  const std::string own = cat(name, ' ', call);
  std::vector<std::string> all;
  for (std::size_t i = 0; i < given.size(); ++i) {
    const auto* const text = std::any_cast<std::string>(&given[i]);
    const auto end = text == nullptr ? std::string::npos : text->find('\n');
    const std::string other = end == std::string::npos ? "another layer" : text->substr(0, end);
    check<UsageError>(other == own, name, ": expected one call on all ranks, got '", own, "' on rank ", group.member(),
                      " and '", other, "' on rank ", i);
    all.push_back(text->substr(end + 1));
  }
  return all;
}

template <Scalar T, int Rank, Device D>
RowsOfMembers<T, Rank, D> rows_of_members(BatchGroup& group, std::string_view name, const Tensor<T, Rank, D>& x) {
  const auto own = contiguous(to_device(contiguous(x), Cpu{}));
  auto shape = own.shape();
  const Index rows = shape[0];
  shape[0] = -1;
  std::string bytes(sizeof rows + own.bytes(), '\0');
  std::memcpy(bytes.data(), &rows, sizeof rows);
  if (own.bytes() > 0) std::memcpy(bytes.data() + sizeof rows, own.data(), own.bytes());
  const auto given = given_by_all(group, name, cat("of ", dtype<T>, " and shape ", shape), bytes);
  RowsOfMembers<T, Rank, D> out;
  for (const auto& text : given) {
    Index count = 0;
    std::memcpy(&count, text.data(), sizeof count);
    out.counts.push_back(count);
  }
  out.first = std::accumulate(out.counts.begin(), out.counts.begin() + static_cast<std::ptrdiff_t>(group.member()),
                              Index{0});
  shape[0] = std::accumulate(out.counts.begin(), out.counts.end(), Index{0});
  auto all = Tensor<T, Rank, Cpu>::empty(shape);
  auto* to = reinterpret_cast<char*>(all.data());
  for (const auto& text : given) to = std::copy(text.begin() + sizeof rows, text.end(), to);
  out.all = to_device(all, x.device());
  return out;
}

/// The group of a call that may be recorded; null if the batch is whole.
template <Operand X>
std::shared_ptr<BatchGroup> group_of_call(std::string_view name, const X& x) {
  static_assert(!is_graph_variable<X>, "collectives: a GraphVariable is not supported: they have no second derivative");
  auto group = batch_group();
  if constexpr (!AnyTensor<X>)
    check<UsageError>(group == nullptr || !node_of(x) || !group->recorded(), name,
                      ": GraphVariables under DataParallel are not supported");
  return group;
}
/// Tells LossTerms whether the numbers are equal on all members, or belong to this one's samples.
template <Operand Y>
Y of_samples(const Y& y, bool own) {
  if constexpr (!AnyTensor<Y>)
    if (const auto node = node_of(y)) node->set_operands(false, false, own);
  return y;
}
template <Operand Y>
auto as_own_samples(const std::shared_ptr<BatchGroup>& group, const char* name, const Y& y) {
  const auto backward = [group, name](const auto& dy, auto dx) {
    if (group != nullptr && group->weight() == 0) {
      const auto near = contiguous(to_device(dy, Cpu{}));
      check<UsageError>(std::all_of(near.data(), near.data() + near.numel(), [](auto v) { return v == 0; }), name,
                        ": this rank has no samples, so its loss of the rows that it got would not count: expected "
                        "samples on each rank, or a mean over these rows");
    }
    dx->add(dy);
  };
  return of_samples(record(name, value_of(y), backward, y), true);
}

/// x as record returns it.
template <Operand X>
auto as_it_is(const X& x) {
  if constexpr (AnyTensor<X>)
    return tensor_of<X>(x);
  else
    return variable_of(x);
}

/// Sets the group of a net for calls outside of its model.
template <class Net>
BatchGroupScope group_of_net(const char* name, const Net& net) {
  auto group = net.global_batch();
  check<UsageError>(!Net::adds_up_in_pass || group == nullptr, name,
                    ": SameBits sums the parts of a batch in a fixed order: expected a policy without it");
  return BatchGroupScope(std::move(group));
}

}  // namespace detail

/// x: [rows, ...] -> the rows of all ranks, in rank order: [all rows, ...]. Shares may be uneven and empty. The
/// gradient by x is that of the whole batch's loss, if each rank's loss counts by its own rows, as means do: one
/// device's. On one device it returns x. The result is equal on all ranks, so a loss of it alone is the whole batch's.
///
/// In a model's `forward`; all ranks call it, also in passes without gradients. Forward sends x to all; backward adds
/// up gradients for all rows. Throws UsageError, on every rank, if they call it for other shapes or types, and in a
/// model under Pipeline or SameBits.
template <Operand X>
auto all_gather(const X& x) {
  static_assert(tensor_of<X>::rank > 0, "all_gather: expected an operand with an axis of rows");
  const auto group = detail::group_of_call("all_gather", x);
  if (group == nullptr) return detail::as_it_is(x);
  const auto rows = detail::rows_of_members(*group, "all_gather", value_of(x));
  const auto backward = [group, first = rows.first, count = value_of(x).size(0)](const auto& dy, auto dx) {
    const auto sums = detail::sum_of_gradients(*group, dy);
    check<UsageError>(count == 0 || group->weight() != 0,
                      "all_gather: this rank's loss counts no element, so its rows would get no gradient of other "
                      "ranks' losses: expected a loss that counts some on each rank with rows");
    dx->add(contiguous(sums.slice(0, first, first + count)));
  };
  return detail::of_samples(record(detail::global_batch_name, rows.all, backward, x), false);
}

/// The index of x's first row in all_gather(x): the rows of the ranks before this one.
template <Operand X>
Index first_row(const X& x) {
  const auto group = batch_group();
  if (group == nullptr) return 0;
  return detail::rows_of_members(*group, "first_row", Tensor<bool, 2, Cpu>::empty({value_of(x).size(0), 0})).first;
}

/// The sum of all ranks' x, which have one shape; equal on all ranks. On one device it returns x, so x must be a sum
/// over this rank's samples. Sums in double. Errors: see all_gather.
template <Operand X>
auto all_reduce(const X& x) {
  using T = typename tensor_of<X>::value_type;
  constexpr int rank = tensor_of<X>::rank;
  const auto group = detail::group_of_call("all_reduce", x);
  const auto& own = value_of(x);
  if (group == nullptr) return detail::as_it_is(x);
  const auto near = contiguous(to_device(contiguous(own), Cpu{}));
  detail::given_by_all(*group, "all_reduce", cat("of ", dtype<T>, " and shape ", own.shape()), {});
  std::vector<double> numbers(near.data(), near.data() + near.numel());
  group->sum(numbers);
  auto sums = Tensor<T, rank, Cpu>::empty(near.shape());
  std::transform(numbers.begin(), numbers.end(), sums.data(), [](double v) { return static_cast<T>(v); });
  // A sum over no samples is 0.
  const bool empty = std::all_of(near.data(), near.data() + near.numel(), [](T v) { return v == 0; });
  const auto backward = [group, empty](const auto& dy, auto dx) {
    const auto gradients = detail::sum_of_gradients(*group, dy);
    check<UsageError>(empty || group->weight() != 0,
                      "all_reduce: this rank's loss counts no element, so its part of the sum would get no gradient of "
                      "other ranks' losses: expected a loss that counts some on each rank with samples");
    dx->add(gradients);
  };
  return detail::of_samples(record(detail::global_batch_name, to_device(sums, own.device()), backward, x), false);
}

/// x: [all rows, ...] of one shape on all ranks -> this rank's `rows` rows of the sum: the ranks' rows follow each
/// other in rank order. On one device it returns x. Throws ShapeError unless the ranks' `rows` add up to x's; see
/// all_reduce.
template <Operand X>
auto reduce_scatter(const X& x, Index rows) {
  static_assert(tensor_of<X>::rank > 0, "reduce_scatter: expected an operand with an axis of rows");
  const auto group = detail::group_of_call("reduce_scatter", x);
  const auto places = group == nullptr
                          ? detail::RowsOfMembers<bool, 2, Cpu>{Tensor<bool, 2, Cpu>::empty({rows, 0}), {rows}, 0}
                          : detail::rows_of_members(*group, "reduce_scatter", Tensor<bool, 2, Cpu>::empty({rows, 0}));
  check<ShapeError>(places.all.size(0) == value_of(x).size(0), "reduce_scatter: expected shares of ",
                    value_of(x).size(0), " rows together, got ", places.all.size(0));
  return detail::as_own_samples(group, "reduce_scatter", slice(all_reduce(x), 0, places.first, places.first + rows));
}

/// x: [rows, ...], of which `counts[r]` go to rank r, in rank order -> the rows that all ranks send to this one, in
/// rank order. On one device it returns x. Each rank sends x to all others. Throws ShapeError unless there is a count
/// for each rank and they add up to x's rows; see all_gather.
template <Operand X>
auto all_to_all(const X& x, std::span<const Index> counts) {
  static_assert(tensor_of<X>::rank > 0, "all_to_all: expected an operand with an axis of rows");
  const auto group = detail::group_of_call("all_to_all", x);
  const auto ranks = static_cast<Index>(counts.size());
  const auto own_counts = Tensor<std::int64_t, 2>::from(std::span<const std::int64_t>(counts.data(), counts.size()),
                                                        {1, ranks});
  const auto of_all = group == nullptr ? own_counts : detail::rows_of_members(*group, "all_to_all", own_counts).all;
  const Index rows = value_of(x).size(0);
  const Index sum = std::accumulate(counts.begin(), counts.end(), Index{0});
  const bool valid = std::all_of(counts.begin(), counts.end(), [](Index n) { return n >= 0; });
  check<ShapeError>(valid && of_all.size(0) == ranks && sum == rows, "all_to_all: expected ", of_all.size(0),
                    " counts of at least 0 that add up to ", rows, ", got ", ranks, " with the sum ", sum);
  std::vector<std::int64_t> chosen;
  const Index me = group == nullptr ? 0 : static_cast<Index>(group->member());
  for (Index from = 0, at = 0; from < ranks; ++from)
    for (Index to = 0; to < ranks; at += of_all(from, to), ++to)
      for (Index i = 0; to == me && i < of_all(from, to); ++i) chosen.push_back(at + i);
  using D = typename tensor_of<X>::device_type;
  const auto index =
      Tensor<std::int64_t, 1, D>::from(chosen, {static_cast<Index>(chosen.size())}, value_of(x).device());
  return detail::as_own_samples(group, "all_to_all", index_select(all_gather(x), 0, index));
}

/// x: [rows, ...] -> the rows of rank `root`, on all ranks. Other ranks' x may have other rows; only its type and the
/// other axes count. Throws UsageError if there is no such rank; see all_gather.
template <Operand X>
auto broadcast(const X& x, Index root = 0) {
  const auto group = detail::group_of_call("broadcast", x);
  const Index me = group == nullptr ? 0 : static_cast<Index>(group->member());
  Index ranks = 1;
  if (group != nullptr)
    ranks = static_cast<Index>(detail::given_by_all(*group, "broadcast", cat("of rank ", root), {}).size());
  check<UsageError>(root >= 0 && root < ranks, "broadcast: expected a root in [0, ", ranks, "), got ", root);
  return all_gather(slice(x, 0, 0, me == root ? value_of(x).size(0) : 0));
}

// The same outside of the model, for values computed from a net's outputs: `all_gather(net, net(x))`. The code is the
// same under every policy: where an output is the whole batch's, they return it.

/// See all_gather(x).
template <class Net, Operand X>
auto all_gather(const Net& net, const X& x) {
  const auto scope = detail::group_of_net("all_gather", net);
  return all_gather(x);
}
/// See first_row(x).
template <class Net, Operand X>
Index first_row(const Net& net, const X& x) {
  const auto scope = detail::group_of_net("first_row", net);
  return first_row(x);
}
/// See all_reduce(x).
template <class Net, Operand X>
auto all_reduce(const Net& net, const X& x) {
  const auto scope = detail::group_of_net("all_reduce", net);
  return all_reduce(x);
}
/// See reduce_scatter(x, rows).
template <class Net, Operand X>
auto reduce_scatter(const Net& net, const X& x, Index rows) {
  const auto scope = detail::group_of_net("reduce_scatter", net);
  return reduce_scatter(x, rows);
}
/// See all_to_all(x, counts).
template <class Net, Operand X>
auto all_to_all(const Net& net, const X& x, std::span<const Index> counts) {
  const auto scope = detail::group_of_net("all_to_all", net);
  return all_to_all(x, counts);
}
/// See broadcast(x, root).
template <class Net, Operand X>
requires requires(const Net& net) { net.global_batch(); }
auto broadcast(const Net& net, const X& x, Index root = 0) {
  const auto scope = detail::group_of_net("broadcast", net);
  return broadcast(x, root);
}

}  // namespace chorus
