#pragma once
/// One device that does the work of DataParallel's devices, share by share.

#include <algorithm>
#include <list>

#include "random_programs.hpp"

namespace test::random::dp {

using Model = Parcel<Cpu>;

/// One device that does the work of several, share by share: for norms with each copy's own statistics, and copies that
/// do different things.
class ByShares : public Policy<Model> {
 public:
  ByShares(const Program& program) : Policy<Model>(program.model(), std::uint64_t{3}), program_(program) {}

  template <class X>
  auto operator()(const X& x, const Call& call) {
    const Index batch = x.size(program_.dim);
    const auto used = static_cast<std::size_t>(std::clamp<Index>(batch, 1, static_cast<Index>(program_.ids.size())));
    using Output = decltype(this->model_.forward(x, call));
    std::vector<Output> outputs(used);
    const auto buffers = nn::named_buffers<Cpu>(this->model_);
    const auto before = bytes(buffers);
    for (std::size_t i = used; i-- > 0;) {  // the first share's statistics remain
      const Index begin = share_begin(batch, used, i), end = share_begin(batch, used, i + 1);
      for (std::size_t b = 0; b < buffers.size(); ++b)
        std::copy(before[b].begin(), before[b].end(), static_cast<std::byte*>(buffers[b].buffer->data()));
      Call& own = calls_.emplace_back();
      own.uses = call.uses, own.columns = call.columns, own.recomputed = call.recomputed;
      own.stands_for = program_.ids[i];
      RandomContext context{this->seed(), this->forward_passes(), 0, [begin] { return begin; }};
      const RandomScope scope(context);
      outputs[i] = this->model_.forward(slice(x, program_.dim, begin, end), own);
    }
    this->end_forward();
    return concat(program_.dim, std::span<const Output>(outputs));
  }

 private:
  static std::vector<std::vector<std::byte>> bytes(const std::vector<nn::NamedBuffer<Cpu>>& buffers) {
    std::vector<std::vector<std::byte>> out;
    for (const auto& named : buffers) {
      const auto* data = static_cast<const std::byte*>(named.buffer->data());
      out.emplace_back(data, data + named.buffer->size_bytes());
    }
    return out;
  }
  const Program& program_;
  std::list<Call> calls_;
};

}  // namespace test::random::dp
