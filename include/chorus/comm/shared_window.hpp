#pragma once
/// `allocate_shared`: memory that all ranks of a group have in common (MPI's MPI_Win_allocate_shared).

#include <unistd.h>

#include <chorus/comm/communicator.hpp>
#include <chorus/comm/hmac.hpp>
#include <chorus/comm/shared_region.hpp>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>

namespace chorus::inline CHORUS_ABI::comm {

namespace detail {
/// How the other ranks find a region of rank 0's.
struct SharedWindow {
  std::uint64_t key = 0;  ///< random, and stands in the region's last bytes, too; 0: there is none
  std::int32_t pid = 0, fd = -1;
};
}  // namespace detail

/// `bytes` of zeroed memory, aligned to 4096, that all ranks read and write where it lies, each at an address of its
/// own, until the last of them lets go of it. Nobody keeps ranks from writing at once: that takes a barrier. Null, on
/// all ranks, where one of them can't map it: on another machine, or of another user. A collective, of any engine.
template <class Communicator>
[[gnu::cold]] std::shared_ptr<std::byte> allocate_shared(Communicator& communicator, std::size_t bytes) {
  detail::SharedWindow window;
  const std::size_t key_at = (bytes + sizeof window.key - 1) / sizeof window.key * sizeof window.key;
  const std::size_t all_bytes = key_at + sizeof window.key;
  SharedRegion region;
  if (communicator.rank() == 0) try {
      region = SharedRegion::create(all_bytes);
      region.reserve(0, all_bytes);
      while (window.key == 0) fill_random(std::as_writable_bytes(std::span(&window.key, 1)));
      std::memcpy(region.data() + key_at, &window.key, sizeof window.key);
      window.pid = getpid();
      window.fd = region.fd();
    } catch (const CommError&) {
      window = {};
    }
  communicator.broadcast(std::span(reinterpret_cast<std::uint8_t*>(&window), sizeof window), 0, {});
  std::int32_t mapped = window.key != 0;
  if (communicator.rank() != 0 && mapped) try {
      region = SharedRegion::open(window.pid, window.fd, all_bytes);
      mapped = std::memcmp(region.data() + key_at, &window.key, sizeof window.key) == 0;
    } catch (const CommError&) {
      mapped = 0;
    }
  communicator.all_reduce(std::span(&mapped, 1), ReduceOp::min, {});
  if (mapped == 0) return nullptr;
  auto owner = std::make_shared<SharedRegion>(std::move(region));
  return {owner, owner->data()};
}

}  // namespace chorus::inline CHORUS_ABI::comm
