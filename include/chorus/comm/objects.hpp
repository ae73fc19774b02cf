#pragma once
/// Collectives of texts, which may have another length on each rank: a configuration, a file's name, a report.

#include <algorithm>
#include <chorus/core/config.hpp>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace chorus::inline CHORUS_ABI::comm {

/// The texts of all ranks, in the order of ranks; any bytes (PyTorch's all_gather_object, which pickles). What has a
/// structure is sent as JSON, say. Each rank holds size() times the longest text for a moment.
template <class Communicator>
[[gnu::cold]] std::vector<std::string> all_gather_object(Communicator& communicator, std::string_view own) {
  if (communicator.size() == 1) return {std::string(own)};
  const auto ranks = static_cast<std::size_t>(communicator.size());
  const auto own_length = static_cast<std::int64_t>(own.size());
  std::vector<std::int64_t> lengths(ranks);
  communicator.all_gather(std::span<const std::int64_t>(&own_length, 1), std::span<std::int64_t>(lengths), {});
  const auto longest = static_cast<std::size_t>(*std::max_element(lengths.begin(), lengths.end()));
  std::vector<std::uint8_t> padded(own.begin(), own.end()), all(longest * ranks);
  padded.resize(longest);
  communicator.all_gather(std::span<const std::uint8_t>(padded), std::span<std::uint8_t>(all), {});
  std::vector<std::string> texts;
  for (std::size_t rank = 0; rank < ranks; ++rank)
    texts.emplace_back(reinterpret_cast<const char*>(all.data()) + rank * longest,
                       static_cast<std::size_t>(lengths[rank]));
  return texts;
}

/// The text of rank `root`, on all ranks; what others pass is not looked at (PyTorch's broadcast_object_list).
template <class Communicator>
[[gnu::cold]] std::string broadcast_object(Communicator& communicator, std::string_view own, int root = 0) {
  auto length = static_cast<std::uint64_t>(own.size());
  communicator.broadcast(std::span(&length, 1), root, {});
  std::vector<std::uint8_t> text(own.begin(), own.end());
  text.resize(length);
  communicator.broadcast(std::span<std::uint8_t>(text), root, {});
  return {text.begin(), text.end()};
}

}  // namespace chorus::inline CHORUS_ABI::comm
