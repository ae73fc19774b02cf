#pragma once
/// What the processes of an elastic job tell each other: who they are, who lives, and why they come to a door.

#include <array>
#include <chorus/comm/meeting/rendezvous_messages.hpp>
#include <chorus/comm/transport/fixed_text.hpp>
#include <chorus/comm/transport/socket.hpp>
#include <chorus/comm/world.hpp>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace chorus::elastic::detail {

inline constexpr std::uint64_t magic = 0x0001'6369'7473'616c;  // "lastic", then the protocol's version

/// A process, as the others know it.
struct Card {
  std::uint64_t id = 0;       ///< random and never used again; the challenges of its door begin with it
  std::uint64_t machine = 0;  ///< see machine_id; 0: not known
  std::int32_t pid = 0;
  std::uint32_t length = 0;
  std::array<std::byte, 32> door{};  ///< a socket's address of that length

  void set_address(const comm::Address& address) {
    length = address.length;
    if (length <= door.size()) std::memcpy(door.data(), &address.storage, length);
  }
  /// Not sound (see Address) if a peer has sent nonsense.
  comm::Address address() const {
    comm::Address address;
    address.length = length <= door.size() ? length : 0;
    std::memcpy(&address.storage, door.data(), address.length);
    return address;
  }
};
static_assert(comm::is_message<Card, 56>);

/// A connecting process's first message, after the door's Challenge.
struct Hello {
  enum Kind : std::int32_t {
    comes,  ///< to the round; its View follows
    asks,   ///< whether it is still one of the ranks
    joins,  ///< wants to be let in
    fails   ///< by an error of its own: FixedText<1024> follows
  };
  std::uint64_t magic = detail::magic;
  comm::Nonce nonce{};  ///< its challenge to the door
  Kind kind = comes;
  std::int32_t port = 0;  ///< of its own door
  std::uint64_t id = 0, machine = 0;
  std::int64_t epoch = 0;  ///< its newest
  std::int32_t pid = 0, reserved = 0;
  comm::Mac proof{};
};
static_assert(comm::is_message<Hello, 96>);

/// An epoch, or the reason why there is none.
struct View {
  enum Verdict : std::int32_t {
    formed,
    elsewhere,  ///< these are the ranks, whose chair lets newcomers in; not this process
    evicted,
    too_few,
    late,
    failed
  };
  std::uint64_t magic = detail::magic;
  std::int64_t epoch = 0;
  std::uint64_t key = 0;  ///< random: two epochs of one number differ in it
  Verdict verdict = formed;
  std::int32_t count = 0;  ///< of `cards`, in the order of ranks
  std::int32_t port = 0;   ///< where rank 0 meets the others
  std::int32_t reserved = 0;
  comm::FixedText<1024> why{};
  std::array<Card, comm::max_ranks> cards{};
  comm::Mac proof{};

  std::span<const Card> members() const { return std::span(cards).first(static_cast<std::size_t>(count)); }
  /// The rank of a process, or -1.
  int rank_of(std::uint64_t id) const {
    for (int rank = 0; rank < count; ++rank)
      if (cards[static_cast<std::size_t>(rank)].id == id) return rank;
    return -1;
  }
  void add(const Card& card) { cards[static_cast<std::size_t>(count++)] = card; }
  /// Whether a peer may have meant it.
  bool sound() const {
    if (magic != detail::magic || count < 0 || count > comm::max_ranks || port < 0 || port > 65535) return false;
    for (const auto& card : members())
      if (!card.address().sound()) return false;
    return true;
  }
};
static_assert(comm::is_message<View, 40 + 1024 + 56 * comm::max_ranks + 32>);

}  // namespace chorus::elastic::detail
