#pragma once
/// `allocate_shared`: memory of each rank's that all of them have in common (MPI's MPI_Win_allocate_shared).

#include <unistd.h>

#include <chorus/comm/communicator.hpp>
#include <chorus/comm/meeting/hmac.hpp>
#include <chorus/comm/transport/shared_region.hpp>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <vector>

namespace chorus::comm {

namespace detail {

/// How other ranks find a region of one rank's.
struct SharedWindow {
  std::uint64_t key = 0;  ///< random, and stands in the region's last bytes, too; 0: there is none
  std::uint64_t bytes = 0;
  std::int32_t pid = 0, fd = -1;

  std::size_t key_at() const { return (bytes + sizeof key - 1) / sizeof key * sizeof key; }
  std::size_t region_bytes() const { return key_at() + sizeof key; }
};

/// Makes a region, and says in `window` where it is. Throws CommError where there is no memory.
[[gnu::cold]] inline SharedRegion make_shared_region(SharedWindow& window) {
  auto region = SharedRegion::create(window.region_bytes());
  region.reserve(0, window.region_bytes());
  std::uint64_t key = 0;
  while (key == 0) fill_random(std::as_writable_bytes(std::span(&key, 1)));
  std::memcpy(region.data() + window.key_at(), &key, sizeof key);
  window.key = key;
  window.pid = getpid();
  window.fd = region.fd();
  return region;
}

/// Maps another rank's. Throws CommError where it isn't found.
[[gnu::cold]] inline SharedRegion open_shared_region(const SharedWindow& window) {
  check<CommError>(window.key != 0, "shared memory: a rank has none");
  auto region = SharedRegion::open(window.pid, window.fd, window.region_bytes());
  check<CommError>(std::memcmp(region.data() + window.key_at(), &window.key, sizeof window.key) == 0,
                   "shared memory: that of process ", window.pid, " is another one");
  return region;
}

}  // namespace detail

/// Zeroed memory of each rank's, `bytes` of this one's, aligned to 4096, that all ranks read and write where it lies,
/// each at an address of its own, until the last of them lets go of it: one pointer for each rank, null for one that
/// has asked for 0 bytes. Nobody keeps ranks from writing at once: that takes a barrier. Empty, on all ranks, where one
/// of them can't map another one's: on another machine, or of another user. A collective, of any engine.
template <class Communicator>
[[gnu::cold]] std::vector<std::shared_ptr<std::byte>> allocate_shared(Communicator& communicator, std::size_t bytes) {
  const auto ranks = static_cast<std::size_t>(communicator.size()), own = static_cast<std::size_t>(communicator.rank());
  std::vector<SharedRegion> regions(ranks);
  std::vector<detail::SharedWindow> windows(ranks);
  detail::SharedWindow mine{.bytes = bytes};
  if (bytes > 0) try {
      regions[own] = detail::make_shared_region(mine);
    } catch (const CommError&) {  // the others hear of it
    }
  communicator.all_gather(std::span(reinterpret_cast<const std::uint8_t*>(&mine), sizeof mine),
                          std::span(reinterpret_cast<std::uint8_t*>(windows.data()), ranks * sizeof mine), {});
  std::int32_t mapped = bytes == 0 || regions[own] ? 1 : 0;
  try {
    for (std::size_t rank = 0; rank < ranks; ++rank)
      if (rank != own && windows[rank].bytes > 0) regions[rank] = detail::open_shared_region(windows[rank]);
  } catch (const CommError&) {
    mapped = 0;
  }
  communicator.all_reduce(std::span(&mapped, 1), ReduceOp::min, {});
  if (mapped == 0) return {};
  std::vector<std::shared_ptr<std::byte>> memory;
  for (auto& region : regions) {
    auto& of_rank = memory.emplace_back();
    if (!region) continue;
    auto owner = std::make_shared<SharedRegion>(std::move(region));
    of_rank = {owner, owner->data()};
  }
  return memory;
}

}  // namespace chorus::comm
