#pragma once
/// `SharedMemory`: memory of this process that the other ranks of its machine can map and use directly.

#include <unistd.h>

#include <algorithm>
#include <chorus/comm/meeting/hmac.hpp>
#include <chorus/comm/transport/shared_region.hpp>
#include <chorus/comm/transport/window.hpp>
#include <memory>
#include <mutex>
#include <vector>

namespace chorus::comm {

/// Memory of this process that other processes can map. Thread-safe.
class SharedMemory {
 public:
  /// At least `bytes`, zeroed, aligned to 4096, until its last owner is destroyed. A forked child shares it. Throws
  /// CommError.
  static std::shared_ptr<std::byte> allocate(std::size_t bytes) {
    auto region = std::make_shared<SharedRegion>(SharedRegion::create(front + bytes));
    region->reserve(0, front + bytes);
    auto& all = instance();
    const std::lock_guard lock(all.mutex_);
    const std::uint64_t key = random_key();
    std::memcpy(region->data(), &key, sizeof key);
    all.blocks_.push_back({key, region.get()});
    std::byte* const data = region->data() + front;
    return {data, [region, owner = getpid()](std::byte*) { instance().forget(region.get(), getpid() == owner); }};
  }

  /// The identity of the memory; 0 after its owner has released it.
  static std::uint64_t key_in(const SharedRegion& region) {
    std::uint64_t key = 0;
    std::memcpy(&key, region.data(), sizeof key);
    return key;
  }

  /// The window on `bytes` at `data`; without a key if they are not in such memory.
  static Window find(std::byte* data, std::size_t bytes) {
    auto& all = instance();
    const std::lock_guard lock(all.mutex_);
    for (const auto& block : all.blocks_) {
      const std::byte *const begin = block.region->data() + front, *const end =
                                                                       block.region->data() + block.region->size();
      if (data >= begin && data < end && bytes <= static_cast<std::size_t>(end - data))
        return {block.key, block.region->size(), static_cast<std::uint64_t>(data - block.region->data()), data,
                block.region->fd()};
    }
    return {};
  }

 private:
  static constexpr std::size_t front = 4096;  // with the key

  struct Block {
    std::uint64_t key;
    SharedRegion* region;
  };

  static SharedMemory& instance() {
    static auto& memory = *new SharedMemory;  // never destroyed: tensors in static storage may outlive it
    return memory;
  }
  void forget(const SharedRegion* region, bool for_all) {  // not called by a child forked from its owner
    const std::lock_guard lock(mutex_);
    if (for_all) std::memset(region->data(), 0, sizeof(std::uint64_t));  // others may unmap it
    std::erase_if(blocks_, [&](const Block& block) { return block.region == region; });
  }

  std::mutex mutex_;
  std::vector<Block> blocks_;
};

/// The region that contains a window of process `pid`. Throws CommError if it can't be mapped or no longer exists.
[[gnu::cold]] inline SharedRegion open_region(int pid, const Window& window) {
  check<CommError>(window.key != 0, "shared memory: process ", pid, " has no region");
  auto region = SharedRegion::open(pid, window.fd, window.bytes);
  check<CommError>(SharedMemory::key_in(region) == window.key, "shared memory: the region of process ", pid,
                   " belongs to a different job");
  return region;
}

/// The regions of one other process that this one has mapped.
class MappedWindows {
 public:
  /// The memory of the window of process `pid`; null if it can't be mapped.
  std::byte* open(int pid, const Window& window) {
    for (const auto& known : known_)
      if (known.key == window.key) return known.region.data() + window.offset;
    std::erase_if(known_, [](const Known& known) {  // released since
      return SharedMemory::key_in(known.region) != known.key;
    });
    try {
      known_.push_back({window.key, open_region(pid, window)});
      return known_.back().region.data() + window.offset;
    } catch (const CommError&) {
      return nullptr;
    }
  }

 private:
  struct Known {
    std::uint64_t key = 0;
    SharedRegion region;
  };
  std::vector<Known> known_;
};

}  // namespace chorus::comm
