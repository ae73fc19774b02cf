#pragma once
/// Collectives of structs, and of texts of different lengths: a configuration, a report.

#include <algorithm>
#include <chorus/core/error.hpp>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

namespace chorus::comm {

/// The longest possible text.
inline constexpr std::int64_t most_object_bytes = std::int64_t{1} << 30;

namespace detail {
/// Checks the announced size of a rank's text, so that memory is only allocated for a valid one.
inline std::size_t object_bytes(std::string_view call, std::size_t rank, std::int64_t length) {
  check<CommError>(length >= 0 && length <= most_object_bytes, call, ": rank ", rank, " has a text of ", length,
                   " bytes, expected 0 to ", most_object_bytes);
  return static_cast<std::size_t>(length);
}
}  // namespace detail

/// The structs of all ranks, in rank order, sent as their bytes.
template <class Communicator, class Message>
requires std::is_trivially_copyable_v<Message> std::vector<Message> all_gather_structs(Communicator& communicator,
                                                                                       const Message& own) {
  std::vector<Message> all(static_cast<std::size_t>(communicator.size()));
  communicator.all_gather(std::span(reinterpret_cast<const std::uint8_t*>(&own), sizeof own),
                          std::span(reinterpret_cast<std::uint8_t*>(all.data()), all.size() * sizeof own), {});
  return all;
}

/// The texts of all ranks, in rank order; any bytes (PyTorch's all_gather_object, which pickles). Send structured data
/// as JSON, for example. Each rank temporarily holds size() times the longest text. Throws CommError for a text with
/// more than `most_object_bytes`.
template <class Communicator>
[[gnu::cold]] std::vector<std::string> all_gather_object(Communicator& communicator, std::string_view own) {
  if (communicator.size() == 1) return {std::string(own)};
  const auto ranks = static_cast<std::size_t>(communicator.size());
  const auto lengths = all_gather_structs(communicator, static_cast<std::int64_t>(own.size()));
  std::size_t longest = 0;
  for (std::size_t rank = 0; rank < ranks; ++rank)
    longest = std::max(longest, detail::object_bytes("all_gather_object", rank, lengths[rank]));
  std::vector<std::uint8_t> padded(own.begin(), own.end()), all(longest * ranks);
  padded.resize(longest);
  communicator.all_gather(std::span<const std::uint8_t>(padded), std::span<std::uint8_t>(all), {});
  std::vector<std::string> texts;
  for (std::size_t rank = 0; rank < ranks; ++rank)
    texts.emplace_back(reinterpret_cast<const char*>(all.data()) + rank * longest,
                       static_cast<std::size_t>(lengths[rank]));
  return texts;
}

/// The text of rank `root`, on all ranks; the others' arguments are ignored (PyTorch's broadcast_object_list). Throws
/// like all_gather_object.
template <class Communicator>
[[gnu::cold]] std::string broadcast_object(Communicator& communicator, std::string_view own, int root = 0) {
  auto length = static_cast<std::int64_t>(own.size());
  communicator.broadcast(std::span(&length, 1), root, {});
  std::vector<std::uint8_t> text(own.begin(), own.end());
  text.resize(detail::object_bytes("broadcast_object", static_cast<std::size_t>(root), length));
  communicator.broadcast(std::span<std::uint8_t>(text), root, {});
  return {text.begin(), text.end()};
}

/// Whether all ranks pass the same text; the same answer on all of them.
template <class Communicator>
[[gnu::cold]] bool same_text(Communicator& communicator, std::string_view own) {
  double different = broadcast_object(communicator, own) == own ? 0 : 1;
  communicator.all_reduce(std::span(&different, 1));
  return different == 0;
}

}  // namespace chorus::comm
