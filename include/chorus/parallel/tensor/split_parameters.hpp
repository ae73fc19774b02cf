#pragma once
/// Cuts the parameters of a model into this rank's parts, in place, and joins them again.

#include <algorithm>
#include <chorus/core/tensor_group.hpp>
#include <chorus/nn/copy_of.hpp>
#include <chorus/nn/module.hpp>
#include <chorus/tensor/promised_numbers.hpp>
#include <cstddef>
#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

namespace chorus::detail {

/// The parameters that a model's layers divide, each once, with the way they are divided. Throws UsageError if two
/// layers share a parameter and divide it in different ways.
template <Device D>
class SplitParameters final : public nn::detail::Walker {
 public:
  struct Item {
    std::string name;
    AnyParameter handle;
    Split split;
    ParameterOn<D>& parameter() const { return handle.on<D>(); }
  };

  explicit SplitParameters(nn::Module& model) {
    walk(model);
    for (const auto& one : whole_)
      for (const Item& item : items_)
        check<UsageError>(item.handle.shared() != one.handle.shared(), "TensorParallel: '", item.name, "' and '",
                          one.name,
                          "' are one parameter, which the first layer splits and the second does not: use layers that "
                          "both split it, such as VocabularyParallelEmbedding and ColumnParallelLinear");
  }
  const std::vector<Item>& items() const { return items_; }

  void parameter(std::string_view name, AnyParameter& handle) override { whole_.push_back({path(name), handle, {}}); }
  void split_parameter(std::string_view name, AnyParameter& handle, const Split& split) override {
    for (const Item& item : items_)
      if (item.handle.shared() == handle.shared()) {
        check<UsageError>(item.split == split, "TensorParallel: '", item.name, "' and '", path(name),
                          "' are one parameter, which their layers split in different ways");
        return;
      }
    items_.push_back({path(name), handle, split});
  }

 private:
  std::vector<Item> items_, whole_;
};

/// The numbers of a part of a parameter; promised if the parameter's are.
template <Device D>
Storage<D> part_of(const ParameterOn<D>& parameter, const SplitLayout& layout, const AxisPart& mine) {
  const auto size = size_of(parameter.dtype());
  const auto count = static_cast<std::size_t>(layout.numbers(mine));
  if constexpr (std::is_same_v<D, Cpu>)
    if (auto* const promises = PromisedNumbers::current()) {
      const auto draw_part = [layout, mine, size](const auto& draw_whole, void* out, std::size_t first, std::size_t n) {
        layout.for_runs(mine, [&](Index in_whole, Index in_part, Index run) {
          const auto at = static_cast<std::size_t>(in_part);
          const auto begin = std::max(at, first), end = std::min(at + static_cast<std::size_t>(run), first + n);
          if (begin < end)
            draw_whole(static_cast<std::byte*>(out) + (begin - first) * size,
                       static_cast<std::size_t>(in_whole) + begin - at, end - begin);
        });
      };
      if (auto part = promises->replace(parameter.place(), count * size, count, draw_part)) return *std::move(part);
    }
  const D device = parameter.where();
  const Storage<D> part(device, count * size);
  auto* const to = static_cast<std::byte*>(part.data());
  const auto* const from = static_cast<const std::byte*>(parameter.memory());
  layout.for_runs(mine, [&](Index in_whole, Index in_part, Index run) {
    copy_bytes(device, to + static_cast<std::size_t>(in_part) * size, device,
               from + static_cast<std::size_t>(in_whole) * size, static_cast<std::size_t>(run) * size);
  });
  return part;
}

/// Copies the numbers at `from`, on the same device, if they differ.
template <Device D>
void take_numbers(const AtHome<D>& to, const void* from) {
  const std::size_t bytes = to.size_bytes();
  if constexpr (std::is_same_v<D, Cpu>)
    if (bytes == 0 || std::memcmp(to.memory(), from, bytes) == 0) return;
  copy_bytes(to.where(), to.memory(), to.where(), from, bytes);
  to.touch();
}

/// Replaces `item` by this rank's part of it. Throws UsageError if a rank would get nothing of it.
template <Device D>
void cut(const typename SplitParameters<D>::Item& item, const std::shared_ptr<TensorGroup>& group) {
  auto& parameter = item.parameter();
  const Split& split = item.split;
  std::vector<Index> extents(parameter.extents().begin(), parameter.extents().end());
  Index& along = extents[static_cast<std::size_t>(split.axis)];
  const SplitLayout layout(parameter.extents(), split, along);
  check<UsageError>(layout.width / split.unit >= group->size(), "TensorParallel: '", item.name, "' has ",
                    layout.width / split.unit, split.unit > 1 ? cat(" units of ", split.unit) : std::string(" entries"),
                    " along axis ", split.axis, ", which ", group->size(), " ranks can't split: each rank needs one");
  const auto mine = group->part(layout.width, split.unit);
  auto whole = std::make_shared<PartOfParameter>(PartOfParameter{split, extents, group});
  const MemoryScope scope(trace::Memory::parameters);
  const Storage<D> part = part_of<D>(parameter, layout, mine);
  along = split.blocks * mine.count;
  parameter.replace_numbers(extents, part);
  parameter.set_part(std::move(whole));
}

/// Joins all ranks' `part`s in `whole`, a parameter of another model. A collective.
template <Device D, class Communicator>
void join(const ParameterOn<D>& part, ParameterOn<D>& whole, Communicator& communicator) {
  const PartOfParameter& of = *part.part();
  const SplitLayout layout = of.layout();
  const int ranks = of.group->size();
  const auto size = size_of(part.dtype());
  const D device = part.where();
  const MemoryScope scope(trace::Memory::parameters);
  const auto most = static_cast<std::size_t>(layout.numbers(axis_part(layout.width, of.split.unit, ranks, 0))) * size;
  const Storage<D> mine(device, most), all(device, most * static_cast<std::size_t>(ranks)),
      joined(device, static_cast<std::size_t>(numel(of.extents)) * size);
  zero_bytes(device, mine.data(), most);
  copy_bytes(device, mine.data(), device, part.memory(), part.size_bytes());
  communicator.all_gather(std::span(static_cast<const std::uint8_t*>(mine.data()), most),
                          std::span(static_cast<std::uint8_t*>(all.data()), most * static_cast<std::size_t>(ranks)),
                          {.traffic = trace::Traffic::parameters});
  auto* const to = static_cast<std::byte*>(joined.data());
  for (int rank = 0; rank < ranks; ++rank) {
    const auto* const from = static_cast<const std::byte*>(all.data()) + static_cast<std::size_t>(rank) * most;
    layout.for_runs(axis_part(layout.width, of.split.unit, ranks, rank), [&](Index in_whole, Index at, Index count) {
      copy_bytes(device, to + static_cast<std::size_t>(in_whole) * size, device,
                 from + static_cast<std::size_t>(at) * size, static_cast<std::size_t>(count) * size);
    });
  }
  whole.replace_numbers(of.extents, joined);
  whole.set_part(nullptr);
}

/// Copies this rank's part of `whole` into `part`, if it differs.
template <Device D>
void take_part(const ParameterOn<D>& whole, ParameterOn<D>& part) {
  const PartOfParameter& of = *part.part();
  const MemoryScope scope(trace::Memory::parameters);
  take_numbers(part, part_of<D>(whole, of.layout(), of.mine()).data());
}

/// Calls `f` with a copy of `model` in which the parameters of `Parts(model).items()` are joined; takes this rank's
/// part of what `f` has written. One rank's model is whole. A collective.
template <class Parts, class Model, class Ranks, class F>
void with_joined(Model& model, Ranks& communicator, const F& f) {
  using D = typename nn::detail::DeviceOfModel<Model>::type;
  if (communicator.size() == 1) return void(f(model));
  Model whole = nn::copy_of(model);
  const Parts parts(model), wholes(whole);
  for (std::size_t i = 0; i < parts.items().size(); ++i)
    join(parts.items()[i].parameter(), wholes.items()[i].parameter(), communicator);
  f(whole);
  const auto parameters = nn::named_parameters<D>(model), written = nn::named_parameters<D>(whole);
  for (std::size_t i = 0; i < parameters.size(); ++i)
    if (parameters[i].parameter->part() != nullptr)
      take_part(*written[i].parameter, *parameters[i].parameter);
    else
      take_numbers<D>(*parameters[i].parameter, written[i].parameter->memory());
  const auto buffers = nn::named_buffers<D>(model), written_buffers = nn::named_buffers<D>(whole);
  for (std::size_t i = 0; i < buffers.size(); ++i)
    take_numbers<D>(*buffers[i].buffer, written_buffers[i].buffer->memory());
}

}  // namespace chorus::detail
