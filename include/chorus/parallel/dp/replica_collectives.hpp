#pragma once
/// Parameters, buffers and gradients of a DataParallel whose devices are different GPUs: by NCCL's broadcast and
/// reduce.

#include <algorithm>
#include <chorus/comm/nccl/device_group.hpp>
#include <chorus/parallel/dp/device_threads.hpp>
#include <chorus/parallel/dp/replicas.hpp>
#include <chrono>
#include <cstddef>
#include <exception>
#include <memory>
#include <vector>

namespace chorus::detail {

/// The devices of one model's copies as a comm::DeviceGroup. It is made when it is first needed. Where a collective
/// fails it is left, on all devices, and made anew for the next one.
template <class Model, Device D = typename nn::detail::DeviceOfModel<Model>::type>
class ReplicaCollectives {
 public:
  using Flat = nn::FlatParameters<D>;
  using Buffers = std::vector<nn::NamedBuffer<D>>;
  using Replicas = std::vector<std::shared_ptr<Replica<Model>>>;  // number 0 is the model itself, and not in here

  /// What it is given must outlive it.
  ReplicaCollectives(const Flat& flat, const Buffers& buffers, const Replicas& replicas, DeviceThreads& threads,
                     const std::vector<int>& device_ids, std::chrono::milliseconds timeout)
      : flat_(flat),
        buffers_(buffers),
        replicas_(replicas),
        threads_(threads),
        device_ids_(device_ids),
        timeout_(timeout),
        pieces_(device_ids.size()),
        absent_(device_ids.size()) {
    auto sorted = device_ids;
    std::sort(sorted.begin(), sorted.end());
    possible_ = sorted.size() > 1 && std::adjacent_find(sorted.begin(), sorted.end()) == sorted.end();
  }
  ReplicaCollectives(const ReplicaCollectives&) = delete;
  ReplicaCollectives& operator=(const ReplicaCollectives&) = delete;
  ~ReplicaCollectives() {
    if (threads_.at_work().empty())
      leave();
    else
      static_cast<void>(group_.release());  // a thread that does not come back can't leave it
  }

  /// Whether the first `used` devices pass numbers on in this way. All have to: a collective takes the whole group.
  bool serve(std::size_t used) const {
    return possible_ && used == device_ids_.size() && comm::device_group_maker() != nullptr;
  }

  /// To each copy the parameters that any of them lacks, and all buffers.
  void broadcast() {
    clear();
    const auto& entries = flat_.entries();
    const auto others = replicas_.size();
    for_each_run(
        entries,
        [&](std::size_t i) {
          return std::any_of(replicas_.begin(), replicas_.end(),
                             [&](const auto& replica) { return replica->lacks(entries[i], i); });
        },
        [&](std::size_t group, std::size_t begin, std::size_t count) {
          const DType dtype = flat_.groups()[group].dtype;
          add([&](const Flat& flat) { return flat.groups()[group].value(begin); }, count, dtype);
          trace::sent(device_ids_[0], trace::Traffic::parameters, others * count * size_of(dtype));
        });
    for (std::size_t i = 0; i < buffers_.size(); ++i) {
      const auto& buffer = *buffers_[i].buffer;
      const auto count = static_cast<std::size_t>(buffer.count());
      pieces_[0].push_back({buffer.memory(), count, buffer.dtype()});
      for (std::size_t r = 0; r < others; ++r)
        pieces_[r + 1].push_back({replicas_[r]->buffers()[i].buffer->memory(), count, buffer.dtype()});
      trace::sent(device_ids_[0], trace::Traffic::buffers, others * buffer.size_bytes());
    }
    if (!pieces_[0].empty())
      exchange([this](int rank, auto& group) { group.broadcast(rank, pieces_[static_cast<std::size_t>(rank)]); });
    for (const auto& replica : replicas_) replica->has_followed(flat_);
  }

  /// To the model's gradients those of its copies are added.
  void reduce() {
    clear();
    const auto& entries = flat_.entries();
    const auto arrived = [&](const auto& replica, std::size_t i) {
      return replica->flat().entries()[i].parameter().grad_arrived();
    };
    for_each_run(
        entries,
        [&](std::size_t i) {
          if (std::none_of(replicas_.begin(), replicas_.end(), [&](const auto& r) { return arrived(r, i); }))
            return false;
          // Who has none of a gradient has zeros.
          if (!entries[i].parameter().grad_arrived()) absent_[0].push_back(place(flat_, entries[i]));
          entries[i].parameter().set_grad_arrived(true);
          entries[i].named.handle.shared()->set_reached();
          for (std::size_t r = 0; r < replicas_.size(); ++r) {
            if (!arrived(replicas_[r], i)) absent_[r + 1].push_back(place(replicas_[r]->flat(), entries[i]));
            trace::sent(device_ids_[r + 1], trace::Traffic::gradients, entries[i].parameter().size_bytes());
          }
          return true;
        },
        [&](std::size_t group, std::size_t begin, std::size_t count) {
          add([&](const Flat& flat) { return flat.groups()[group].grad(begin); }, count, flat_.groups()[group].dtype);
        });
    if (pieces_[0].empty()) return;
    exchange([this](int rank, auto& group) {
      const auto i = static_cast<std::size_t>(rank);
      for (const auto& [data, count, dtype] : absent_[i]) zero_bytes(D{device_ids_[i]}, data, count * size_of(dtype));
      group.reduce(rank, pieces_[i]);
    });
  }

 private:
  using Piece = comm::DevicePiece;

  void clear() {
    for (auto& pieces : pieces_) pieces.clear();
    for (auto& pieces : absent_) pieces.clear();
  }
  // A range that lies at `where(flat parameters)` of the model and of each copy.
  template <class Where>
  void add(const Where& where, std::size_t count, DType dtype) {
    pieces_[0].push_back({where(flat_), count, dtype});
    for (std::size_t r = 0; r < replicas_.size(); ++r)
      pieces_[r + 1].push_back({where(replicas_[r]->flat()), count, dtype});
  }
  static Piece place(const Flat& flat, const typename Flat::Entry& entry) {
    const auto& group = flat.groups()[entry.group];
    return {group.grad(entry.begin), entry.count, group.dtype};
  }

  // Calls `task(rank, group)` in each device's thread. Where one throws all others give up; its error is thrown.
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
    // The others fail because one has.
    auto who = static_cast<std::size_t>(std::max(0, group_->failed()));
    if (!errors[who])
      who = static_cast<std::size_t>(std::find_if(errors.begin(), errors.end(), [](const auto& e) { return bool(e); }) -
                                     errors.begin());
    if (who == errors.size()) return;
    const auto error = errors[who];
    leave();
    for (const auto& replica : replicas_) replica->forget();
    rethrow_with(error, cat("DataParallel: replica ", who, " on device ", D{device_ids_[who]}, ": "));
  }

  // Each thread for itself, since they wait for each other.
  void leave() {
    if (!group_) return;
    threads_.run(device_ids_.size(), [this](std::size_t i) { group_->leave(static_cast<int>(i)); });
    group_ = nullptr;
  }

  const Flat& flat_;
  const Buffers& buffers_;
  const Replicas& replicas_;
  DeviceThreads& threads_;
  const std::vector<int>& device_ids_;
  std::chrono::milliseconds timeout_;
  bool possible_ = false;
  std::unique_ptr<comm::DeviceGroup> group_;
  std::vector<std::vector<Piece>> pieces_, absent_;  // by device
};

/// Devices of the host's memory have no such group.
template <class Model>
class ReplicaCollectives<Model, Cpu> {
 public:
  template <class... Anything>
  explicit ReplicaCollectives(const Anything&...) {}
  static constexpr bool serve(std::size_t) { return false; }
  void broadcast() {}
  void reduce() {}
};

}  // namespace chorus::detail
