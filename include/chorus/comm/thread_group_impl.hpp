#pragma once
/// What stands behind `thread_group`.

#include <chorus/comm/algorithms/ring_communicator.hpp>
#include <chorus/comm/thread_group.hpp>
#include <chorus/comm/transport/shm_transport.hpp>
#include <condition_variable>
#include <exception>
#include <map>
#include <memory>
#include <mutex>

namespace chorus::comm {

namespace detail {

[[gnu::cold]] inline std::vector<AnyCommunicator> ranks_in_threads(int size, std::chrono::milliseconds timeout,
                                                                   const std::vector<int>& members) {
  std::vector<AnyCommunicator> group;
  if (size == 1) group.emplace_back();
  if (size == 1) return group;
  const auto region = std::make_shared<SharedRegion>(SharedRegion::create(ShmTransport::region_bytes(size)));
  for (int rank = 0; rank < size; ++rank)
    group.push_back(RingCommunicator("thread", std::make_unique<ShmTransport>(region, rank, size, timeout), members));
  return group;
}

/// Threads of this process that wait for the others of their group, by port.
class Lobby {
 public:
  static Lobby& instance() {
    static Lobby lobby;
    return lobby;
  }

  AnyCommunicator meet(const World& world) {
    check_ranks("thread_group", world.size, world.rank);
    check_timeout("thread_group", world.timeout);
    std::unique_lock lock(mutex_);
    auto& table = tables_[world.master_port];
    if (!table) table = std::make_shared<Table>(world.size);
    const auto mine = table;
    const auto rank = static_cast<std::size_t>(world.rank);
    check<CommError>(mine->seats.size() == static_cast<std::size_t>(world.size), "rank ", world.rank,
                     ": says that there are ", world.size, " ranks, another thread says ", mine->seats.size());
    check<CommError>(!mine->seats[rank], "rank ", world.rank, ": a thread of this rank is there already");
    mine->seats[rank] = true;
    if (++mine->present == world.size) {
      tables_.erase(world.master_port);
      try {
        mine->group = ranks_in_threads(world.size, world.timeout, world.members);
      } catch (const std::exception& error) {  // they all hear of it
        mine->failure = error.what();
      }
      mine->complete.notify_all();
    }
    const auto over = [&] { return mine->present == world.size; };
    if (!mine->complete.wait_for(lock, world.timeout, over)) {
      std::string missing;
      for (std::size_t i = 0; i < mine->seats.size(); ++i)
        if (!mine->seats[i]) missing += cat(missing.empty() ? "" : ", ", i);
      mine->seats[rank] = false;
      if (--mine->present == 0) tables_.erase(world.master_port);
      fail<TimeoutError>("rank ", world.rank, ": ranks ", missing, " of ", world.size, " did not come within ",
                         world.timeout.count(), " ms");
    }
    check<CommError>(mine->failure.empty(), "rank ", world.rank, ": ", mine->failure);
    return std::move(mine->group[rank]);
  }

 private:
  struct Table {
    explicit Table(int size) : seats(static_cast<std::size_t>(size)) {}
    std::vector<bool> seats;
    int present = 0;
    std::vector<AnyCommunicator> group;
    std::string failure;  // why there is none
    std::condition_variable complete;
  };

  std::mutex mutex_;
  std::map<int, std::shared_ptr<Table>> tables_;
};

}  // namespace detail

CHORUS_INLINE std::vector<AnyCommunicator> thread_group(int size, std::chrono::milliseconds timeout) {
  check<UsageError>(size >= 1 && size <= max_ranks, "thread_group: ", size, " ranks, expected 1 to ", max_ranks);
  check_timeout("thread_group", timeout);
  return detail::ranks_in_threads(size, timeout, {});
}

CHORUS_INLINE AnyCommunicator join_thread_group(const World& world) { return detail::Lobby::instance().meet(world); }

}  // namespace chorus::comm
