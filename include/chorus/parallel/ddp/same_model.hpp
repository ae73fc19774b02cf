#pragma once
/// Checks that all ranks built the same model, before any parameter is sent; then gives all ranks rank 0's values.

#include <chorus/comm/objects.hpp>
#include <chorus/core/random.hpp>
#include <chorus/nn/module.hpp>
#include <chorus/tensor/promised_numbers.hpp>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>

namespace chorus::detail {

/// One line for each parameter and buffer whose name `counts` accepts: `conv1.weight F32 [6, 3, 5, 5]`. For a deferred
/// model also the seed of its initial values.
template <Device D, class Counts>
[[gnu::cold]] std::string model_description(nn::Module& model, const Counts& counts) {
  std::string text;
  if (PromisedNumbers::current() != nullptr) text = cat("initial seed ", initial_seed(), '\n');
  for (const auto& named : nn::named_parameters<D>(model))
    if (counts(named.name))
      text += cat(named.name, " ", named.parameter->dtype(), " ", named.parameter->extents(),
                  named.parameter->wants_grad() ? "\n" : ", frozen,\n");
  for (const auto& named : nn::named_buffers<D>(model))
    if (counts(named.name)) text += cat(named.name, " ", named.buffer->dtype(), " ", named.buffer->extents(), "\n");
  return text;
}

/// The first pair of lines in which two descriptions differ; "nothing" for one that has ended.
[[gnu::cold]] inline std::pair<std::string, std::string> first_difference(std::string_view a, std::string_view b) {
  const auto line = [](std::string_view& text) {
    const auto end = text.find('\n');
    const std::string_view first = end == std::string_view::npos ? std::string_view("nothing") : text.substr(0, end);
    text.remove_prefix(end == std::string_view::npos ? text.size() : end + 1);
    return first;
  };
  for (;;) {
    const auto from_a = line(a), from_b = line(b);
    if (from_a != from_b) return {std::string(from_a), std::string(from_b)};
  }
}

/// Throws the same UsageError on every rank if the description of a rank differs from rank 0's.
template <class Communicator>
[[gnu::cold]] void check_same_description(Communicator& communicator, std::string_view policy, const std::string& own) {
  const auto all = comm::all_gather_object(communicator, own);
  for (std::size_t rank = 1; rank < all.size(); ++rank) {
    if (all[rank] == all[0]) continue;
    const auto [theirs, first] = first_difference(all[rank], all[0]);
    fail<UsageError>(policy, ": expected one model: rank ", rank, " has ", theirs, " where rank 0 has ", first);
  }
}

/// Gives all ranks rank 0's parameters and buffers, except promised ones, which all ranks draw alike. A collective.
template <Device D, class Communicator>
[[gnu::cold]] void take_rank_0s(nn::Module& model, Communicator& communicator) {
  if (communicator.size() == 1) return;
  const auto take = [&](const AtHome<D>& home, trace::Traffic traffic) {
    if constexpr (std::is_same_v<D, Cpu>)
      if (auto* const promises = PromisedNumbers::current(); promises != nullptr && promises->promised(home.place()))
        return;
    if (home.size_bytes() > 0)
      communicator.broadcast(std::span(static_cast<std::uint8_t*>(home.memory()), home.size_bytes()), 0,
                             {.traffic = traffic});
    home.touch();
  };
  for (const auto& named : nn::named_parameters<D>(model)) take(*named.parameter, trace::Traffic::parameters);
  for (const auto& named : nn::named_buffers<D>(model)) take(*named.buffer, trace::Traffic::buffers);
}

}  // namespace chorus::detail
