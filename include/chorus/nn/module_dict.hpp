#pragma once
/// ModuleDict: modules of one type, by name.

#include <algorithm>
#include <chorus/nn/module.hpp>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace chorus::nn {

/// Modules of one type by name, in the order in which they were added: `for (const auto& [name, head] : heads)`. Their
/// names are parts of parameters' paths.
template <class M>
class ModuleDict : public Module {
 public:
  using device_type = typename M::device_type;
  using Entry = std::pair<std::string, M>;

  ModuleDict() = default;
  explicit ModuleDict(std::vector<Entry> modules) {
    for (auto& [name, module] : modules) insert(std::move(name), std::move(module));
  }

  /// Throws UsageError for a name that is taken, empty or has a dot.
  void insert(std::string name, M module) {
    check<UsageError>(!name.empty() && name.find('.') == std::string::npos,
                      "ModuleDict: expected a name without a dot, got '", name, "'");
    check<UsageError>(!contains(name), "ModuleDict: expected a name that is not taken, got '", name, "'");
    modules_.emplace_back(std::move(name), std::move(module));
  }
  bool contains(std::string_view name) const { return find(name) != modules_.end(); }
  std::size_t size() const { return modules_.size(); }
  /// Throws UsageError if there is no such module.
  const M& operator[](std::string_view name) const {
    const auto found = find(name);
    check<UsageError>(found != modules_.end(), "ModuleDict: expected one of ", size(), " names, got '", name, "'");
    return found->second;
  }
  M& operator[](std::string_view name) { return const_cast<M&>(std::as_const(*this)[name]); }
  auto begin() const { return modules_.begin(); }
  auto end() const { return modules_.end(); }

  void visit(Visitor& visitor) override {
    for (auto& [name, module] : modules_) visitor.module(name, module);
  }
  std::string describe() const override { return "ModuleDict"; }

 private:
  auto find(std::string_view name) const {
    return std::find_if(modules_.begin(), modules_.end(), [name](const Entry& entry) { return entry.first == name; });
  }
  std::vector<Entry> modules_;
};

}  // namespace chorus::nn
