#pragma once
/// Where a rank keeps units: whole ones, and its parts of the others.

#include <chorus/nn/flat_parameters.hpp>
#include <chorus/parallel/ddp/parts.hpp>
#include <chorus/parallel/fsdp/units.hpp>
#include <chorus/tensor/memory.hpp>
#include <chorus/tensor/paged_memory.hpp>
#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

namespace chorus::fsdp {

/// A unit and this rank's part of it, in elements from the unit's first.
struct UnitPart {
  const Unit* unit;
  ddp::Elements own;
};

/// In the memory of a GPU: whole units are blocks of the device's pool, which other units and activations use in turn;
/// this rank's parts stay, in one block for each dtype, in the order of the units. Parameters and gradients move
/// between them: their homes are told. The address of a parameter that is away is such that this rank's part of it lies
/// at its place; the rest is others' memory.
template <Device D>
class UnitMemory {
 public:
  /// Takes the parameters out of `flat`, where all units are whole.
  [[gnu::cold]] UnitMemory(nn::FlatParameters<D>& flat, std::vector<UnitPart> units)
      : flat_(flat), units_(std::move(units)), device_(flat.entries().front().parameter().where()) {
    std::vector<std::size_t> end(flat_.groups().size()), at;  // by group, by unit: in bytes of the parts
    for (std::size_t u = 0; u < units_.size(); ++u) {
      constexpr std::size_t alignment = 256;
      auto& bytes = end[units_[u].unit->group];
      at.push_back((bytes + alignment - 1) / alignment * alignment);
      bytes = at.back() + own_bytes(u);
    }
    std::vector<Storage<D>> values, grads;
    for (const std::size_t bytes : end) {
      values.push_back(block(bytes, trace::Memory::parameters));
      grads.push_back(block(bytes, trace::Memory::gradients));
    }
    for (std::size_t u = 0; u < units_.size(); ++u) {
      const auto [group, begin] = std::pair(units_[u].unit->group, units_[u].unit->begin);
      const auto place = [&](const Storage<D>& own, const Storage<D>& whole, std::byte* whole_at) {
        return Place{own, static_cast<std::byte*>(own.data()) + at[u], whole, whole_at};
      };
      values_.push_back(place(values[group], flat_.groups()[group].values, flat_.groups()[group].value(begin)));
      grads_.push_back(place(grads[group], flat_.groups()[group].grads, flat_.groups()[group].grad(begin)));
    }
  }
  /// Nothing is in the flat buffers any more.
  void settled() { flat_.leave_memory(); }

  std::byte* values(std::size_t u) const { return values_[u].whole_at; }
  /// Memory for the whole unit, with this rank's part; other values are not set, other gradients are zeros.
  void take_values(std::size_t u) { take(u, true); }
  void take_grads(std::size_t u) { take(u, false); }
  /// Keeps this rank's part only.
  void give_values_back(std::size_t u) { give_back(u, true); }
  void give_grads_back(std::size_t u) { give_back(u, false); }

 private:
  struct Place {
    Storage<D> own;  // of all units of a dtype
    std::byte* own_at;
    Storage<D> whole;
    std::byte* whole_at;
  };

  std::size_t size(std::size_t u) const { return size_of(flat_.groups()[units_[u].unit->group].dtype); }
  std::size_t own_begin(std::size_t u) const { return units_[u].own.begin * size(u); }
  std::size_t own_bytes(std::size_t u) const { return (units_[u].own.end - units_[u].own.begin) * size(u); }
  Storage<D> block(std::size_t bytes, trace::Memory kind) const {
    const MemoryScope scope(kind);
    return Storage<D>(device_, bytes);
  }

  void take(std::size_t u, bool values) {
    Place& place = values ? values_[u] : grads_[u];
    const std::size_t bytes = units_[u].unit->count * size(u);
    place.whole = block(bytes, values ? trace::Memory::parameters : trace::Memory::gradients);
    place.whole_at = static_cast<std::byte*>(place.whole.data());
    if (!values) zero_bytes(device_, place.whole_at, bytes);
    copy_bytes(device_, place.whole_at + own_begin(u), device_, place.own_at, own_bytes(u));
    move(u, values, place.whole, place.whole_at);
  }
  void give_back(std::size_t u, bool values) {
    Place& place = values ? values_[u] : grads_[u];
    if (!values) check_not_held(u);
    copy_bytes(device_, place.own_at, device_, place.whole_at + own_begin(u), own_bytes(u));
    move(u, values, place.own, place.own_at - own_begin(u));
    place.whole = {};
    place.whole_at = nullptr;
  }
  void check_not_held(std::size_t u) const {
    for (const std::size_t i : units_[u].unit->entries)
      check<UsageError>(flat_.entries()[i].parameter().grad_storage().owners() == 1,
                        "FullyShardedDataParallel: the program holds the gradient of '", flat_.entries()[i].named.name,
                        "', whose memory is freed now: keep a copy of its numbers instead");
  }
  // The unit's first element is at `first` now.
  void move(std::size_t u, bool values, const Storage<D>& memory, std::byte* first) {
    const Unit& unit = *units_[u].unit;
    for (const std::size_t i : unit.entries) {
      const auto& entry = flat_.entries()[i];
      const auto& home = values ? entry.parameter().storage() : entry.parameter().grad_storage();
      home.move_home(memory, first + (entry.begin - unit.begin) * size(u));
    }
  }

  nn::FlatParameters<D>& flat_;
  std::vector<UnitPart> units_;
  D device_;
  std::vector<Place> values_, grads_;  // by unit
};

/// In the host's memory units stay in the flat buffers; the pages of other ranks' parts are released to the system, so
/// that addresses never change.
template <>
class UnitMemory<Cpu> {
 public:
  /// Moves the flat buffers to memory whose pages can be freed.
  [[gnu::cold]] UnitMemory(nn::FlatParameters<Cpu>& flat, std::vector<UnitPart> units)
      : flat_(flat), units_(std::move(units)) {
    const int slot = trace_slot(flat.groups().front().values.device());
    const auto pages = [slot](auto& list, trace::Memory kind) {
      return [slot, kind, &list](std::size_t bytes) {
        list.push_back(std::make_shared<PagedMemory>(bytes, slot, kind));
        return std::shared_ptr<void>(list.back(), list.back()->data());
      };
    };
    flat.use_memory(pages(values_, trace::Memory::parameters), pages(grads_, trace::Memory::gradients));
  }
  void settled() {}

  std::byte* values(std::size_t u) const { return flat_.groups()[units_[u].unit->group].value(units_[u].unit->begin); }
  void take_values(std::size_t u) { on_others(u, values_, &PagedMemory::take); }
  void take_grads(std::size_t u) { on_others(u, grads_, &PagedMemory::take); }
  void give_values_back(std::size_t u) { on_others(u, values_, &PagedMemory::give_back); }
  void give_grads_back(std::size_t u) { on_others(u, grads_, &PagedMemory::give_back); }

 private:
  using Pages = std::vector<std::shared_ptr<PagedMemory>>;  // by group

  // For the byte ranges of the group's buffer that hold other ranks' parts.
  void on_others(std::size_t u, const Pages& pages, void (PagedMemory::*call)(std::size_t, std::size_t)) const {
    const auto& [unit, own] = units_[u];
    const std::size_t size = size_of(flat_.groups()[unit->group].dtype);
    PagedMemory& memory = *pages[unit->group];
    (memory.*call)(unit->begin * size, (unit->begin + own.begin) * size);
    (memory.*call)((unit->begin + own.end) * size, (unit->begin + unit->count) * size);
  }

  nn::FlatParameters<Cpu>& flat_;
  std::vector<UnitPart> units_;
  Pages values_, grads_;
};

}  // namespace chorus::fsdp
