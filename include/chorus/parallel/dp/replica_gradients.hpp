#pragma once
/// Adding the gradients of a model's copies on other devices to the model's own.

#include <algorithm>
#include <chorus/kernels/pointwise.hpp>
#include <chorus/parallel/dp/replicas.hpp>
#include <chorus/parallel/dp/scatter.hpp>
#include <cstddef>
#include <memory>
#include <type_traits>
#include <vector>

namespace chorus::detail {

/// Sums to the first device's gradients, copy by copy. `run(workers, task)` calls `task(i)` for each worker.
template <class Model>
class ReplicaGradients {
 public:
  using D = typename nn::detail::DeviceOfModel<Model>::type;
  using Flat = nn::FlatParameters<D>;
  using Replicas = std::vector<std::shared_ptr<Replica<Model>>>;  // number 0 is the model itself, and not in here

  ReplicaGradients(const Flat& flat, D device, const Replicas& replicas, std::size_t used)
      : flat_(flat), device_(device), replicas_(replicas), used_(used) {}

  /// Before backward: one that failed may have left gradients on the copies.
  void clear() const {
    for_each_copy([](const auto&, const auto&, const auto& copy) { copy.parameter().set_grad_arrived(false); });
  }

  /// Into the flat buffers. Each worker has a part of the elements to itself, in all copies: which parameters have
  /// gradients differs between them, and so do the pieces, but not whose an element is.
  template <class Run>
  void reduce(const Run& run) const {
    struct Piece {
      const Replica<Model>* replica;
      std::size_t group, begin, count;
      bool add;
    };
    std::vector<Piece> pieces;
    for_each_copy([&](const auto& replica, const auto& entry, const auto& copy) {
      if (!copy.parameter().grad_arrived()) return;
      auto& to = entry.parameter();
      const bool add = to.grad_arrived();
      to.set_grad_arrived(true);
      entry.named.handle.shared()->set_reached();
      trace::sent(replica.device().index, trace::Traffic::gradients, to.size_bytes());
      if (!pieces.empty() && pieces.back().replica == &replica && pieces.back().group == entry.group &&
          pieces.back().add == add && pieces.back().begin + pieces.back().count == entry.begin)
        pieces.back().count += entry.count;
      else
        pieces.push_back({&replica, entry.group, entry.begin, entry.count, add});
    });
    if (pieces.empty()) return;
    struct Range {
      std::size_t begin = static_cast<std::size_t>(-1), end = 0;
    };
    std::vector<Range> ranges(flat_.groups().size());  // that pieces lie in, by group
    for (const Piece& piece : pieces) {
      auto& [begin, end] = ranges[piece.group];
      begin = std::min(begin, piece.begin);
      end = std::max(end, piece.begin + piece.count);
    }
    // A GPU adds by itself, in the order of its stream.
    const std::size_t workers = std::is_same_v<D, Cpu> ? used_ : 1;
    run(workers, [&](std::size_t i) {
      for (const Piece& piece : pieces) {
        const auto [begin, end] = ranges[piece.group];
        const auto share = [&, from = begin, count = static_cast<Index>(end - begin)](std::size_t worker) {
          return from + static_cast<std::size_t>(share_begin(count, workers, worker));
        };
        const auto first = std::max(piece.begin, share(i)), last = std::min(piece.begin + piece.count, share(i + 1));
        if (first >= last) continue;
        const auto& group = flat_.groups()[piece.group];
        add_gradients(group.dtype, static_cast<Index>(last - first), piece.replica->device(),
                      piece.replica->flat().groups()[piece.group].grad(first), group.grad(first), piece.add);
      }
    });
  }

  /// The copies' parameters are skipped where the model's are.
  void skip_as_original(bool skip) const {
    for_each_copy([skip](const auto&, const auto& entry, const auto& copy) {
      copy.named.handle.shared()->set_skipped(skip && entry.named.handle.shared()->skipped());
    });
  }
  /// Not into the flat buffers, but to where `grad` collects.
  void reduce_diverted() const {
    for_each_copy([](const auto& replica, const auto& entry, const auto& copy) {
      auto& parameter = copy.parameter();
      if (!parameter.grad_arrived()) return;
      trace::sent(replica.device().index, trace::Traffic::gradients, parameter.size_bytes());
      entry.parameter().add_grad_of(parameter);
      parameter.set_grad_arrived(false);
    });
  }

 private:
  // For each parameter on each other device: the replica, the model's entry, the replica's.
  template <class F>
  void for_each_copy(const F& f) const {
    for (std::size_t r = 1; r < used_; ++r)
      for (std::size_t e = 0; e < flat_.entries().size(); ++e)
        f(*replicas_[r - 1], flat_.entries()[e], replicas_[r - 1]->flat().entries()[e]);
  }

  // `to`, on the first device, becomes or grows by `from`, on a copy's.
  void add_gradients(DType dtype, Index count, D where, const std::byte* from, std::byte* to, bool add) const {
    const auto bytes = static_cast<std::size_t>(count) * size_of(dtype);
    if (!add) return copy_bytes(device_, to, where, from, bytes);
    Storage<D> near;
    if constexpr (!std::is_same_v<D, Cpu>)
      if (where != device_) {  // a copy waits for the other device's stream, a kernel would not
        near = Storage<D>(device_, bytes);
        copy_bytes(device_, near.data(), where, from, bytes);
        from = static_cast<const std::byte*>(near.data());
      }
    if (dtype == DType::f32)
      kernels::axpy(device_, count, 1.0f, reinterpret_cast<const float*>(from), reinterpret_cast<float*>(to));
    else
      kernels::axpy(device_, count, 1.0, reinterpret_cast<const double*>(from), reinterpret_cast<double*>(to));
  }

  const Flat& flat_;
  D device_;
  const Replicas& replicas_;
  std::size_t used_;
};

}  // namespace chorus::detail
