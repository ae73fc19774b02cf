#pragma once
/// How `thread_group` makes communicators.

#include <chorus/comm/algorithms/transport_communicator.hpp>
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
                                                                   const std::vector<int>& members,
                                                                   Algorithm all_reduce) {
  std::vector<AnyCommunicator> group;
  if (size == 1) group.emplace_back();
  if (size == 1) return group;
  const auto region = std::make_shared<SharedRegion>(SharedRegion::create(ShmTransport::region_bytes(size)));
  for (int rank = 0; rank < size; ++rank)
    group.push_back(TransportCommunicator("thread", std::make_unique<ShmTransport>(region, rank, size, timeout),
                                          members, all_reduce));
  return group;
}

/// The meeting places of threads of this process, by port.
class ThreadRendezvous {
 public:
  static ThreadRendezvous& instance() {
    static ThreadRendezvous rendezvous;
    return rendezvous;
  }

  AnyCommunicator meet(const World& world) {
    check_ranks("thread_group", world.size, world.rank);
    check_timeout("thread_group", world.timeout);
    std::unique_lock lock(mutex_);
    const auto rank = static_cast<std::size_t>(world.rank);
    auto& waiting = waiting_[world.master_port];
    // A failed group stays until all its ranks know of it, or one of them tries again.
    const bool again = waiting && !waiting->failure.empty() && rank < waiting->came.size() && waiting->came[rank];
    if (!waiting || again) waiting = std::make_shared<Group>(world);
    const auto group = waiting;
    check<CommError>(group->came.size() == static_cast<std::size_t>(world.size), "rank ", world.rank, ": expects ",
                     world.size, " ranks, another thread expects ", group->came.size());
    check<CommError>(!group->came[rank], "rank ", world.rank, ": another thread has this rank");
    group->came[rank] = true;
    if (world.all_reduce != group->all_reduce && group->failure.empty())
      group->failure =
          cat("rank ", world.rank, " uses all-reduce ", world.all_reduce, ", another thread uses ", group->all_reduce);
    const bool last = ++group->present == world.size;
    if (last && group->failure.empty()) {
      try {
        group->ranks = ranks_in_threads(world.size, world.timeout, world.members, world.all_reduce);
      } catch (const std::exception& error) {  // all ranks get the error
        group->failure = error.what();
      }
    }
    if (last) waiting_.erase(world.master_port);
    if (last || !group->failure.empty()) group->complete.notify_all();
    const auto over = [&] { return group->present == world.size || !group->failure.empty(); };
    if (!group->complete.wait_for(lock, world.timeout, over)) {
      std::string missing;
      for (std::size_t i = 0; i < group->came.size(); ++i)
        if (!group->came[i]) missing += cat(missing.empty() ? "" : ", ", i);
      group->came[rank] = false;
      if (--group->present == 0) waiting_.erase(world.master_port);
      fail<TimeoutError>("rank ", world.rank, ": ranks ", missing, " of ", world.size, " did not arrive within ",
                         world.timeout.count(), " ms");
    }
    check<CommError>(group->failure.empty(), "rank ", world.rank, ": ", group->failure);
    return std::move(group->ranks[rank]);
  }

 private:
  struct Group {
    explicit Group(const World& world) : came(static_cast<std::size_t>(world.size)), all_reduce(world.all_reduce) {}
    std::vector<bool> came;
    const Algorithm all_reduce;
    int present = 0;
    std::vector<AnyCommunicator> ranks;
    std::string failure;  // the reason if there are none
    std::condition_variable complete;
  };

  std::mutex mutex_;
  std::map<int, std::shared_ptr<Group>> waiting_;
};

}  // namespace detail

CHORUS_INLINE std::vector<AnyCommunicator> thread_group(int size, std::chrono::milliseconds timeout,
                                                        Algorithm all_reduce) {
  check<UsageError>(size >= 1 && size <= max_ranks, "thread_group: ", size, " ranks, expected 1 to ", max_ranks);
  check_timeout("thread_group", timeout);
  return detail::ranks_in_threads(size, timeout, {}, all_reduce);
}

CHORUS_INLINE AnyCommunicator join_thread_group(const World& world) {
  return detail::ThreadRendezvous::instance().meet(world);
}

}  // namespace chorus::comm
