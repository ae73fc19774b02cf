#pragma once
/// Averaging parameters instead of gradients.

#include <algorithm>
#include <chorus/comm/communicator.hpp>
#include <chorus/nn/flat_parameters.hpp>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

namespace chorus::detail {

/// The parameters that ranks have stepped on their own since they last had the same. No others are averaged: the mean
/// of equal numbers may differ from them in its last digit.
class ParametersApart {
 public:
  /// Steps follow, of all parameters that want gradients and of which `shared(name)`.
  template <Device D, class Shared>
  void note(const nn::FlatParameters<D>& flat, const Shared& shared) {
    for (const auto& entry : flat.entries())
      if (entry.parameter().wants_grad() && shared(entry.named.name)) add(&entry.parameter());
  }
  /// Their names, for checkpoints.
  template <Device D>
  std::vector<std::string> names(const nn::FlatParameters<D>& flat) const {
    std::vector<std::string> all;
    for (const auto& entry : flat.entries())
      if (is_apart(entry)) all.push_back(entry.named.name);
    return all;
  }
  template <Device D>
  void set(const nn::FlatParameters<D>& flat, std::span<const std::string> names) {
    apart_.clear();
    for (const auto& entry : flat.entries())
      if (std::find(names.begin(), names.end(), entry.named.name) != names.end()) add(&entry.parameter());
  }

  bool empty() const { return apart_.empty(); }

  /// Adds those that other ranks have stepped. All ranks call it.
  template <Device D, class Communicator>
  void unite(const nn::FlatParameters<D>& flat, Communicator& communicator) {
    std::vector<std::uint8_t> marks;
    for (const auto& entry : flat.entries()) marks.push_back(is_apart(entry) ? 1 : 0);
    communicator.all_reduce(std::span(marks), comm::ReduceOp::max, {});
    for (std::size_t i = 0; i < marks.size(); ++i)
      if (marks[i] != 0) add(&flat.entries()[i].parameter());
  }

  /// Replaces them by sum(weight * parameters) over the ranks; the weights add up to 1. Each of n ranks sends
  /// 2 (n - 1) / n of their bytes. Throws UsageError for parameters that are not F32 or F64.
  template <Device D, class Communicator>
  void average(const nn::FlatParameters<D>& flat, Communicator& communicator, double weight) {
    const auto& entries = flat.entries();
    for (std::size_t i = 0; i < entries.size();) {
      const std::size_t first = i;
      while (i < entries.size() && entries[i].group == entries[first].group && is_apart(entries[i])) ++i;
      if (i == first) {
        ++i;
      } else if (communicator.size() > 1) {
        average(flat.groups()[entries[first].group], entries[first].begin, entries[i - 1].begin + entries[i - 1].count,
                communicator, weight);
        for (std::size_t k = first; k < i; ++k) entries[k].parameter().touch();
      }
    }
    apart_.clear();
  }

 private:
  void add(const void* parameter) {
    const auto place = std::lower_bound(apart_.begin(), apart_.end(), parameter, std::less<>());
    if (place == apart_.end() || *place != parameter) apart_.insert(place, parameter);
  }
  template <class Entry>
  bool is_apart(const Entry& entry) const {
    return std::binary_search(apart_.begin(), apart_.end(), &entry.parameter(), std::less<const void*>());
  }
  template <class Group, class Communicator>
  static void average(const Group& group, std::size_t begin, std::size_t end, Communicator& communicator,
                      double weight) {
    check<UsageError>(group.dtype == DType::f32 || group.dtype == DType::f64,
                      "averaging parameters: expected F32 or F64, got ", group.dtype);
    const auto sum = [&]<class T>(T* values) {
      communicator.all_reduce(std::span<T>(values, end - begin), comm::ReduceOp::sum,
                              {.scale = weight, .traffic = trace::Traffic::parameters});
    };
    if (group.dtype == DType::f32)
      sum(reinterpret_cast<float*>(group.value(begin)));
    else
      sum(reinterpret_cast<double*>(group.value(begin)));
  }

  std::vector<const void*> apart_;  // sorted
};

}  // namespace chorus::detail
