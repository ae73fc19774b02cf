#pragma once
/// How ranks find the others of their color, and the address of a group.

#include <algorithm>
#include <chorus/comm/connect.hpp>
#include <chorus/comm/meeting/rendezvous_messages.hpp>
#include <chorus/comm/objects.hpp>
#include <chorus/comm/split.hpp>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace chorus::comm {

namespace detail {

/// A rank's announcement of itself.
struct SplitEntry {
  std::int64_t color, key;
  std::uint64_t machine;
};

/// The address at which the first rank of a group listens, or the reason why it can't.
struct SplitAddress {
  std::int64_t port = 0;
  FixedText<504> text{};
};
static_assert(is_message<SplitEntry, 24> && is_message<SplitAddress, 512>);

}  // namespace detail

CHORUS_INLINE World split(AnyCommunicator& parent, const World& world, int color, int key) {
  const auto entries = all_gather_structs(parent, detail::SplitEntry{color, key, detail::machine_id()});
  const auto entry = [&](int rank) -> const detail::SplitEntry& { return entries[static_cast<std::size_t>(rank)]; };
  std::vector<int> ranks;
  for (int rank = 0; rank < parent.size(); ++rank) {
    check<UsageError>(entry(rank).color >= 0, "split: rank ", rank, " has color ", entry(rank).color,
                      ", expected 0 or more");
    if (entry(rank).color == color) ranks.push_back(rank);
  }
  std::stable_sort(ranks.begin(), ranks.end(), [&](int a, int b) { return entry(a).key < entry(b).key; });

  World group = world;
  group.size = static_cast<int>(ranks.size());
  group.local_size = 0;
  group.members.clear();
  for (const int rank : ranks) {
    if (rank == parent.rank()) group.rank = static_cast<int>(group.members.size()), group.local_rank = group.local_size;
    group.local_size += entry(rank).machine == entry(parent.rank()).machine;
    group.members.push_back(world.members.empty() ? rank : world.members[static_cast<std::size_t>(rank)]);
  }

  detail::SplitAddress mine;
  Socket listener;
  if (group.rank == 0 && group.size > 1) {
    try {
      listener = Socket::listen(detail::own_address(world).with_port(0));
      mine.port = listener.local().port();
      mine.text = FixedText<504>(listener.local().host());
    } catch (const CommError& error) {
      mine.text = FixedText<504>(error.what());
    }
  }
  const auto all = all_gather_structs(parent, mine);
  const auto& first = all[static_cast<std::size_t>(ranks.front())];
  const std::string place(first.text.view());
  check<CommError>(group.size == 1 || first.port != 0, "split: rank ", ranks.front(), ", where ranks ",
                   std::span(group.members), " meet, is unreachable: ", printable(place, sizeof first.text));
  group.master_addr = place;
  group.master_port = static_cast<int>(first.port);
  group.listen_fd = listener.release();
  return group;
}

}  // namespace chorus::comm
