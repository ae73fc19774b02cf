#pragma once
/// NCCL's broadcast and reduce for the parameters, buffers and gradients of a DataParallel on different GPUs.

#include <algorithm>
#include <chorus/comm/nccl/device_group.hpp>
#include <chorus/parallel/dp/device_threads.hpp>
#include <chorus/parallel/dp/replicate.hpp>
#include <chrono>
#include <cstddef>
#include <exception>
#include <memory>
#include <vector>

namespace chorus::dp {

/// An extension of steps 2 and 5: if the devices are different GPUs and <chorus/comm/nccl.hpp> is included (by
/// chorus.hpp in builds with NCCL), NCCL broadcasts parameters and buffers and reduces gradients. Passes that don't use
/// all devices, and recorded ones, don't use it. NCCL may add three or more gradients in another order, hence round
/// differently: a repeated run has the same bits if NCCL chooses the same algorithms. `trace` counts the bytes between
/// device 0 and the others, whatever route NCCL takes. After a failed collective, gradients and parameters are invalid:
/// all devices leave the group, and the next collective forms it again and sends all parameters.
template <class Model, Device D = typename Replicas<Model>::D>
class Collectives {
 public:
  /// The arguments must outlive it.
  Collectives(const std::vector<int>& device_ids, std::chrono::milliseconds timeout, const Replicas<Model>& replicas,
              DeviceThreads& threads)
      : replicas_(replicas),
        threads_(threads),
        device_ids_(device_ids),
        timeout_(timeout),
        pieces_(device_ids.size()),
        absent_(device_ids.size()) {
    auto sorted = device_ids;
    std::sort(sorted.begin(), sorted.end());
    possible_ = sorted.size() > 1 && std::adjacent_find(sorted.begin(), sorted.end()) == sorted.end();
  }
  Collectives(const Collectives&) = delete;
  Collectives& operator=(const Collectives&) = delete;
  ~Collectives() {
    if (threads_.at_work().empty())
      leave();
    else
      static_cast<void>(group_.release());  // a thread that does not come back can't leave the group
  }

  /// Sends each copy all buffers and the parameters that any copy lacks. Returns false, and does nothing, unless this
  /// pass uses all devices, which are different GPUs, in a build with NCCL.
  bool replicate(std::size_t devices) {
    if (!serves(devices)) return false;
    const auto& from = replicas_.parameters(0);
    const auto count_sent = [&](trace::Traffic kind, std::size_t bytes) {
      for (std::size_t i = 1; i < replicas_.size(); ++i) trace::sent(device_ids_[0], device_ids_[i], kind, bytes);
    };
    for_each_run(
        from.entries(),
        [&](std::size_t p) {
          return std::any_of(replicas_.copies().begin(), replicas_.copies().end(),
                             [&](const auto& copy) { return copy->lacks(from.entries()[p], p); });
        },
        [&](std::size_t group, std::size_t begin, std::size_t count) {
          const DType dtype = from.groups()[group].dtype;
          add([&](std::size_t i) { return replicas_.parameters(i).groups()[group].value(begin); }, count, dtype);
          count_sent(trace::Traffic::parameters, count * size_of(dtype));
        });
    for (std::size_t b = 0; b < replicas_.buffers(0).size(); ++b) {
      const auto& buffer = *replicas_.buffers(0)[b].buffer;
      add([&](std::size_t i) { return replicas_.buffers(i)[b].buffer->memory(); },
          static_cast<std::size_t>(buffer.count()), buffer.dtype());
      count_sent(trace::Traffic::buffers, buffer.size_bytes());
    }
    if (!pieces_[0].empty())
      exchange([this](int rank, auto& group) { group.broadcast(rank, pieces_[static_cast<std::size_t>(rank)]); });
    for (const auto& copy : replicas_.copies()) copy->is_up_to_date(from);
    return true;
  }

  /// Adds the copies' gradients to the model's. Returns false, and does nothing, in the same cases.
  bool reduce(std::size_t devices) {
    if (!serves(devices)) return false;
    const auto& to = replicas_.parameters(0);
    const auto entry = [&](std::size_t i, std::size_t p) -> const auto& {
      return replicas_.parameters(i).entries()[p];
    };
    for_each_run(
        to.entries(),
        [&](std::size_t p) {
          bool any = false;
          for (std::size_t i = 1; i < devices; ++i) any = any || entry(i, p).parameter().grad_arrived();
          for (std::size_t i = 0; any && i < devices; ++i) {
            const auto& own = replicas_.parameters(i).groups()[entry(i, p).group];
            // A device without that gradient adds zeros.
            if (!entry(i, p).parameter().grad_arrived())
              absent_[i].push_back({own.grad(entry(i, p).begin), entry(i, p).count, own.dtype});
            if (i > 0)
              trace::sent(device_ids_[i], device_ids_[0], trace::Traffic::gradients,
                          entry(i, p).parameter().size_bytes());
          }
          if (any) entry(0, p).parameter().set_grad_arrived(true);
          if (any) entry(0, p).named.handle.shared()->set_reached();
          return any;
        },
        [&](std::size_t group, std::size_t begin, std::size_t count) {
          add([&](std::size_t i) { return replicas_.parameters(i).groups()[group].grad(begin); }, count,
              to.groups()[group].dtype);
        });
    if (pieces_[0].empty()) return true;
    exchange([this](int rank, auto& group) {
      const auto i = static_cast<std::size_t>(rank);
      for (const auto& [data, count, dtype] : absent_[i]) zero_bytes(D{device_ids_[i]}, data, count * size_of(dtype));
      group.reduce(rank, pieces_[i]);
    });
    return true;
  }

 private:
  using Piece = comm::DevicePiece;

  // Prepares a new collective; returns whether it covers all devices.
  bool serves(std::size_t devices) {
    for (auto& pieces : pieces_) pieces.clear();
    for (auto& pieces : absent_) pieces.clear();
    return possible_ && devices == device_ids_.size() && comm::device_group_maker() != nullptr;
  }
  // Adds a range of numbers, at `where(i)` on device i.
  template <class Where>
  void add(const Where& where, std::size_t count, DType dtype) {
    for (std::size_t i = 0; i < pieces_.size(); ++i) pieces_[i].push_back({where(i), count, dtype});
  }

  // Calls `task(rank, group)` in each device's thread. If one throws, aborts the others and throws its error.
  template <class Task>
  void exchange(const Task& task) {
    const bool joins = group_ == nullptr;
    if (joins) group_ = comm::device_group_maker()(device_ids_, timeout_);
    const auto& errors = threads_.run(device_ids_.size(), [&](std::size_t i) {
      const int rank = static_cast<int>(i);
      try {
        if (joins) group_->join(rank);
        task(rank, *group_);
      } catch (const std::exception& error) {
        group_->abort(rank, error.what());
        throw;
      } catch (...) {
        group_->abort(rank, "an exception of unknown type");
        throw;
      }
    });
    // Find the first failure: the other devices failed because of it.
    auto who = static_cast<std::size_t>(std::max(0, group_->failed()));
    if (!errors[who])
      who = static_cast<std::size_t>(std::find_if(errors.begin(), errors.end(), [](const auto& e) { return bool(e); }) -
                                     errors.begin());
    if (who == errors.size()) return;
    const auto error = errors[who];
    leave();
    for (const auto& copy : replicas_.copies()) copy->forget();
    rethrow_with(error, cat("DataParallel: replica ", who, " on device ", D{device_ids_[who]}, ": "));
  }

  // Each device leaves in its own thread, since they wait for each other.
  void leave() {
    if (!group_) return;
    threads_.run(device_ids_.size(), [this](std::size_t i) { group_->leave(static_cast<int>(i)); });
    group_ = nullptr;
  }

  const Replicas<Model>& replicas_;
  DeviceThreads& threads_;
  const std::vector<int>& device_ids_;
  std::chrono::milliseconds timeout_;
  bool possible_ = false;
  std::unique_ptr<comm::DeviceGroup> group_;
  std::vector<std::vector<Piece>> pieces_, absent_;  // by device
};

/// Host devices need no such group.
template <class Model>
class Collectives<Model, Cpu> {
 public:
  template <class... Arguments>
  explicit Collectives(const Arguments&...) {}
  static constexpr bool replicate(std::size_t) { return false; }
  static constexpr bool reduce(std::size_t) { return false; }
};

}  // namespace chorus::dp
