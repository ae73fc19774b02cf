#pragma once
/// Local SGD: ranks step parameters by themselves and average them every few steps. Shared by the policy LocalSgd and
/// the communication hook PostLocalSgd.

#include <algorithm>
#include <chorus/comm/communicator.hpp>
#include <chorus/nn/flat_parameters.hpp>
#include <chorus/parallel/ddp/with_type.hpp>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

namespace chorus::detail {

/// The steps of one rank. Records which parameters ranks have stepped since all ranks last had equal ones, and averages
/// only these: the average of equal numbers may differ from them in the last digit.
class LocalSteps {
 public:
  int steps = 0;  ///< since the last average

  /// A forward pass begins. If an average is `due`, `average()` takes it first. Then records that all parameters that
  /// want gradients and are `shared(name)` may be stepped.
  template <Device D, class Shared, class Average>
  void begin_pass(const nn::FlatParameters<D>& flat, const Shared& shared, bool due, const Average& average) {
    if (due) average();
    for (const auto& entry : flat.entries())
      if (entry.parameter().wants_grad() && shared(entry.named.name)) add(&entry.parameter());
  }
  /// The names of the stepped parameters, for checkpoints.
  template <Device D>
  std::vector<std::string> names(const nn::FlatParameters<D>& flat) const {
    std::vector<std::string> all;
    for (const auto& entry : flat.entries())
      if (is_stepped(entry)) all.push_back(entry.named.name);
    return all;
  }
  template <Device D>
  void set(const nn::FlatParameters<D>& flat, std::span<const std::string> names) {
    stepped_.clear();
    for (const auto& entry : flat.entries())
      if (std::find(names.begin(), names.end(), entry.named.name) != names.end()) add(&entry.parameter());
  }

  bool empty() const { return stepped_.empty(); }

  /// Adds the parameters that other ranks have stepped. All ranks call it.
  template <Device D, class Communicator>
  void unite(const nn::FlatParameters<D>& flat, Communicator& communicator) {
    std::vector<std::uint8_t> marks;
    for (const auto& entry : flat.entries()) marks.push_back(is_stepped(entry) ? 1 : 0);
    communicator.all_reduce(std::span(marks), comm::ReduceOp::max, {});
    for (std::size_t i = 0; i < marks.size(); ++i)
      if (marks[i] != 0) add(&flat.entries()[i].parameter());
  }

  /// Replaces the stepped parameters by sum(weight * parameters) over the ranks; the weights sum to 1. Each of n ranks
  /// sends 2 (n - 1) / n of their bytes. Throws UsageError for dtypes other than F32 and F64.
  template <Device D, class Communicator>
  void average(const nn::FlatParameters<D>& flat, Communicator& communicator, double weight) {
    const auto& entries = flat.entries();
    for (std::size_t i = 0; i < entries.size();) {
      const std::size_t first = i;
      while (i < entries.size() && entries[i].group == entries[first].group && is_stepped(entries[i])) ++i;
      if (i == first) {
        ++i;
      } else if (communicator.size() > 1) {
        average(flat.groups()[entries[first].group], entries[first].begin, entries[i - 1].begin + entries[i - 1].count,
                communicator, weight);
        for (std::size_t k = first; k < i; ++k) entries[k].parameter().touch();
      }
    }
    stepped_.clear();
    steps = 0;
  }

 private:
  void add(const void* parameter) {
    const auto place = std::lower_bound(stepped_.begin(), stepped_.end(), parameter, std::less<>());
    if (place == stepped_.end() || *place != parameter) stepped_.insert(place, parameter);
  }
  template <class Entry>
  bool is_stepped(const Entry& entry) const {
    return std::binary_search(stepped_.begin(), stepped_.end(), &entry.parameter(), std::less<const void*>());
  }
  template <class Group, class Communicator>
  static void average(const Group& group, std::size_t begin, std::size_t end, Communicator& communicator,
                      double weight) {
    ddp::with_type("averaging parameters", group.dtype, group.value(begin), [&]<class T>(T* values) {
      communicator.all_reduce(std::span<T>(values, end - begin), comm::ReduceOp::sum,
                              {.scale = weight, .traffic = trace::Traffic::parameters});
    });
  }

  std::vector<const void*> stepped_;  // sorted
};

}  // namespace chorus::detail
