#pragma once
/// Sequential (a fixed list of layers, run in order) and ModuleList (a list of modules of one type, of any length).

#include <tuple>
#include <utility>
#include <vector>

#include <chorus/nn/module.hpp>

namespace chorus::nn {

/// Runs its layers in order. Their names are "0", "1", ...
template <class... Layers>
class Sequential : public Module {
 public:
  using device_type = typename decltype(detail::device_of(std::declval<const Layers&>()...))::type;

  explicit Sequential(Layers... layers) : layers_(std::move(layers)...) {}

  template <class X>
  auto operator()(const X& x) const {
    return detail::watched(*this, [&] { return run<0>(x); });
  }
  template <std::size_t I>
  auto& get() {
    return std::get<I>(layers_);
  }
  void visit(Visitor& visitor) override {
    int index = 0;
    std::apply([&](auto&... layers) { (detail::visit_member(visitor, cat(index++), layers), ...); }, layers_);
  }
  std::string describe() const override { return "Sequential"; }

 private:
  template <std::size_t I, class X>
  auto run(const X& x) const {
    if constexpr (I == sizeof...(Layers))
      return x;
    else
      return run<I + 1>(std::get<I>(layers_)(x));
  }
  std::tuple<Layers...> layers_;
};

/// Modules of one type, named "0", "1", ...: `for (const auto& block : blocks) x = block(x);`
template <class M>
class ModuleList : public Module {
 public:
  using device_type = typename M::device_type;

  ModuleList() = default;
  explicit ModuleList(std::vector<M> modules) : modules_(std::move(modules)) {}

  void push_back(M module) { modules_.push_back(std::move(module)); }
  std::size_t size() const { return modules_.size(); }
  const M& operator[](std::size_t i) const { return modules_.at(i); }
  M& operator[](std::size_t i) { return modules_.at(i); }
  auto begin() const { return modules_.begin(); }
  auto end() const { return modules_.end(); }

  void visit(Visitor& visitor) override {
    for (std::size_t i = 0; i < modules_.size(); ++i) visitor.module(cat(i), modules_[i]);
  }
  std::string describe() const override { return "ModuleList"; }

 private:
  std::vector<M> modules_;
};

}  // namespace chorus::nn
