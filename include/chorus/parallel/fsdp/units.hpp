#pragma once
/// The units of FullyShardedDataParallel: neighbouring parameters that are gathered and freed together.

#include <algorithm>
#include <chorus/nn/flat_parameters.hpp>
#include <chorus/parallel/ddp/parts.hpp>
#include <chorus/parallel/elsewhere.hpp>
#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace chorus {

namespace fsdp {

/// Elements [begin, begin + count) of a group's flat buffer.
struct Unit {
  std::size_t group, begin, count;
  std::vector<std::size_t> entries;
};

/// Elements [begin, end) of a parameter, counted from its first, that lie in elements [begin, end) of its unit.
template <Device D>
ddp::Elements within(const Unit& unit, const typename nn::FlatParameters<D>::Entry& entry, const ddp::Elements& of) {
  const std::size_t from = entry.begin - unit.begin;
  const std::size_t behind = from + static_cast<std::size_t>(entry.parameter().count());
  return {std::clamp(of.begin, from, behind) - from, std::clamp(of.end, from, behind) - from};
}

namespace detail {

/// The path of a parameter's module, from the parameter's path.
inline std::string_view owner(std::string_view path) {
  const auto dot = path.rfind('.');
  return dot == std::string_view::npos ? std::string_view() : path.substr(0, dot);
}

/// The paths of all modules of the types `Blocks` in a model, without those nested in others.
template <class... Blocks>
class PathsOf final : public nn::detail::Walker {
 public:
  explicit PathsOf(nn::Module& model) { this->walk(model); }
  /// The path of the block that contains a parameter; empty if none does.
  std::string_view block_of(std::string_view parameter) const {
    for (const std::string& path : paths_)
      if (parameter.starts_with(path) && parameter.substr(path.size()).starts_with('.')) return path;
    return {};
  }

 private:
  void enter(nn::Module& module) override {
    auto path = this->prefix();
    if (!path.empty() && path.back() == '.') path.pop_back();
    if ((... || (dynamic_cast<Blocks*>(&module) != nullptr)) && block_of(path + ".").empty()) paths_.push_back(path);
  }
  std::vector<std::string> paths_;
};

/// Makes a unit of each run of neighbours for which `starts(entry, unit so far)` is false.
template <Device D, class Starts>
std::vector<Unit> cut(const nn::FlatParameters<D>& flat, const Starts& starts) {
  std::vector<Unit> units;
  std::vector<std::size_t> open(flat.groups().size(), flat.entries().size());  // by group: its last unit
  for (std::size_t i = 0; i < flat.entries().size(); ++i) {
    const auto& entry = flat.entries()[i];
    auto& last = open[entry.group];
    if (last == flat.entries().size() || starts(i, units[last])) {
      last = units.size();
      units.push_back({entry.group, entry.begin, 0, {}});
    }
    units[last].entries.push_back(i);
    units[last].count += entry.count;
  }
  return units;
}

}  // namespace detail
}  // namespace fsdp

/// Units of at most `Bytes` bytes, cut between modules: the parameters of one layer stay together. A larger layer is a
/// unit of its own. Parameters that are frozen when the policy takes the model have separate units.
template <std::size_t Bytes>
struct ByBytes {
  static constexpr bool reshard_after_forward = true;

  template <Device D>
  static std::vector<fsdp::Unit> cut(nn::Module&, const nn::FlatParameters<D>& flat) {
    const auto& entries = flat.entries();
    const auto bytes_of_layer = [&](std::size_t i) {
      std::size_t bytes = 0;
      const auto owner = fsdp::detail::owner(entries[i].named.name);
      for (; i < entries.size() && fsdp::detail::owner(entries[i].named.name) == owner; ++i)
        bytes += entries[i].count * size_of(flat.groups()[entries[i].group].dtype);
      return bytes;
    };
    return fsdp::detail::cut(flat, [&](std::size_t i, const fsdp::Unit& unit) {
      const auto& before = entries[unit.entries.back()];
      if (before.parameter().wants_grad() != entries[i].parameter().wants_grad()) return true;
      if (fsdp::detail::owner(before.named.name) == fsdp::detail::owner(entries[i].named.name)) return false;
      return unit.count * size_of(flat.groups()[unit.group].dtype) + bytes_of_layer(i) > Bytes;
    });
  }
};

/// A unit for each module of the types `Blocks`, such as a transformer layer; parameters between them form other units.
template <class... Blocks>
struct ByModule {
  static constexpr bool reshard_after_forward = true;

  template <Device D>
  static std::vector<fsdp::Unit> cut(nn::Module& model, const nn::FlatParameters<D>& flat) {
    const fsdp::detail::PathsOf<Blocks...> blocks(model);
    return fsdp::detail::cut(flat, [&](std::size_t i, const fsdp::Unit& unit) {
      const auto& before = flat.entries()[unit.entries.back()];
      return before.parameter().wants_grad() != flat.entries()[i].parameter().wants_grad() ||
             blocks.block_of(before.named.name) != blocks.block_of(flat.entries()[i].named.name);
    });
  }
};

/// ZeRO's stage 2: units gathered in forward stay until backward has used them, so that a step gathers each unit once.
/// Only gradients and optimizer state are sharded.
struct KeepParameters : ByBytes<> {
  static constexpr bool reshard_after_forward = false;
};

}  // namespace chorus
