#pragma once
/// Step 5, reduce: the gradients of all copies are added to the model's gradients on the first device.

#include <algorithm>
#include <chorus/kernels/copy.hpp>
#include <chorus/parallel/dp/replica.hpp>
#include <chorus/parallel/dp/samples.hpp>
#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <vector>

namespace chorus::dp {

/// Calls `f(i, entry of the model, entry of the copy)` for each parameter of the copies on devices 1 to `used` - 1.
template <class Model, class F>
void for_each_copy(const Replicas<Model>& replicas, std::size_t used, const F& f) {
  for (std::size_t i = 1; i < used; ++i)
    for (std::size_t p = 0; p < replicas.parameters(0).entries().size(); ++p)
      f(i, replicas.parameters(0).entries()[p], replicas[i].parameters().entries()[p]);
}

/// Called before backward: a failed backward may have left gradients on the copies.
template <class Model>
void forget_gradients(const Replicas<Model>& replicas, std::size_t used) {
  for_each_copy(replicas, used,
                [](std::size_t, const auto&, const auto& copy) { copy.parameter().set_grad_arrived(false); });
}

/// Copies `from` (on another device) to `to` (on the first), or adds it if `add`.
template <Device D>
void add_gradients(DType dtype, std::size_t count, D from_device, const std::byte* from, D to_device, std::byte* to,
                   bool add) {
  const auto bytes = count * size_of(dtype);
  if (!add) return copy_bytes(to_device, to, from_device, from, bytes);
  Storage<D> near;
  if constexpr (!std::is_same_v<D, Cpu>)
    if (from_device != to_device) {  // a copy waits for the other device's stream, a kernel doesn't
      near = Storage<D>(to_device, bytes);
      copy_bytes(to_device, near.data(), from_device, from, bytes);
      from = static_cast<const std::byte*>(near.data());
    }
  const auto elements = static_cast<Index>(count);
  if (dtype == DType::f32)
    kernels::axpy(to_device, elements, 1.0f, reinterpret_cast<const float*>(from), reinterpret_cast<float*>(to));
  else
    kernels::axpy(to_device, elements, 1.0, reinterpret_cast<const double*>(from), reinterpret_cast<double*>(to));
}

/// Adds the gradients of the copies on devices 1 to `used` - 1 to the model's, one copy after the other. `run(workers,
/// task)` calls `task(i)` in the threads of the first devices.
template <class Model, class Run>
void reduce(const Replicas<Model>& replicas, std::size_t used, const Run& run) {
  struct Piece {
    std::size_t device, group, begin, count;
    bool add;
  };
  std::vector<Piece> pieces;  // arrived gradients; neighbours are merged
  std::vector<std::size_t> bytes(used);
  for_each_copy(replicas, used, [&](std::size_t i, const auto& entry, const auto& copy) {
    if (!copy.parameter().grad_arrived()) return;
    auto& to = entry.parameter();
    const bool add = to.grad_arrived();
    to.set_grad_arrived(true);
    entry.named.handle.shared()->set_reached();
    bytes[i] += to.size_bytes();
    if (!pieces.empty() && pieces.back().device == i && pieces.back().group == entry.group &&
        pieces.back().add == add && pieces.back().begin + pieces.back().count == entry.begin)
      pieces.back().count += entry.count;
    else
      pieces.push_back({i, entry.group, entry.begin, entry.count, add});
  });
  if (pieces.empty()) return;
  for (std::size_t i = 1; i < used; ++i)
    trace::sent(replicas.device(i).index, replicas.device(0).index, trace::Traffic::gradients, bytes[i]);
  // Each worker adds its own block of the range between the first and last element with a gradient. Blocks are the same
  // for all copies, even if these have gradients of different parameters. A GPU adds in the order of its stream.
  const auto& groups = replicas.parameters(0).groups();
  struct Range {
    std::size_t begin = SIZE_MAX, end = 0;
  };
  std::vector<Range> ranges(groups.size());
  for (const Piece& piece : pieces) {
    auto& [begin, end] = ranges[piece.group];
    begin = std::min(begin, piece.begin);
    end = std::max(end, piece.begin + piece.count);
  }
  const std::size_t workers = std::is_same_v<typename Replicas<Model>::D, Cpu> ? used : 1;
  run(workers, [&](std::size_t worker) {
    const trace::Span span(trace::Lane::communication, "copy", "reduce");
    for (const Piece& piece : pieces) {
      const Range& range = ranges[piece.group];
      const Split blocks{static_cast<Index>(range.end - range.begin), workers};
      const auto block = [&](std::size_t i) { return range.begin + static_cast<std::size_t>(blocks.begin(i)); };
      const auto begin = std::max(piece.begin, block(worker)),
                 end = std::min(piece.begin + piece.count, block(worker + 1));
      if (begin >= end) continue;
      add_gradients(groups[piece.group].dtype, end - begin, replicas.device(piece.device),
                    replicas[piece.device].parameters().groups()[piece.group].grad(begin), replicas.device(0),
                    groups[piece.group].grad(begin), piece.add);
    }
  });
}

/// An extension for `grad`, which computes the gradients of some parameters and leaves all others unchanged. Runs
/// `backward` on all devices; the copies skip the parameters that the model skips. Adds the results to the buffers of
/// `grad`.
template <class Model, class Backward>
void reduce_wanted(const Replicas<Model>& replicas, std::size_t used, const Backward& backward) {
  const auto skip = [&](bool on) {
    for_each_copy(replicas, used, [on](std::size_t, const auto& entry, const auto& copy) {
      copy.named.handle.shared()->set_skipped(on && entry.named.handle.shared()->skipped());
    });
  };
  skip(true);
  try {
    backward();
  } catch (...) {
    skip(false);
    throw;
  }
  skip(false);
  for_each_copy(replicas, used, [&](std::size_t i, const auto& entry, const auto& copy) {
    auto& parameter = copy.parameter();
    if (!parameter.grad_arrived()) return;
    trace::sent(replicas.device(i).index, replicas.device(0).index, trace::Traffic::gradients, parameter.size_bytes());
    entry.parameter().add_grad_of(parameter);
    parameter.set_grad_arrived(false);
  });
}

}  // namespace chorus::dp
