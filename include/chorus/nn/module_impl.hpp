#pragma once
/// Collects the named parameters of a model.

#include <string_view>
#include <utility>
#include <vector>

#include <chorus/nn/module.hpp>

namespace chorus::nn {

namespace detail {

CHORUS_INLINE void Walker::module(std::string_view name, Module& child) {
  const auto length = prefix_.size();
  prefix_.append(name).append(1, '.');
  enter(child);
  child.visit(*this);
  prefix_.resize(length);
}

CHORUS_INLINE bool any_layer_trains(Module& model) {
  struct Look final : Walker {
    bool any = false;
    void enter(Module& layer) override { any = any || layer.training(); }
  } look;
  look.walk(model);
  return look.any;
}

template <Device D>
struct Collector final : Walker {
  std::vector<NamedParameter<D>> parameters;
  std::vector<NamedBuffer<D>> buffers;
  void parameter(std::string_view name, AnyParameter& handle) override {
    for (const auto& known : parameters)
      if (known.handle.shared() == handle.shared()) return;
    parameters.push_back({path(name), handle, &handle.on<D>()});
    parameters.back().parameter->set_name(parameters.back().name);
  }
  void buffer(std::string_view name, AnyBuffer& handle) override {
    for (const auto& known : buffers)
      if (known.handle.shared() == handle.shared()) return;
    buffers.push_back({path(name), handle, &handle.on<D>()});
    buffers.back().buffer->set_name(buffers.back().name);
  }
};

}  // namespace detail

template <Device D>
std::vector<NamedParameter<D>> named_parameters(Module& module) {
  detail::Collector<D> collector;
  collector.walk(module);
  return std::move(collector.parameters);
}

template <Device D>
std::vector<NamedBuffer<D>> named_buffers(Module& module) {
  detail::Collector<D> collector;
  collector.walk(module);
  return std::move(collector.buffers);
}

CHORUS_INLINE void Module::train(bool training) {
  struct Switch final : detail::Walker {
    bool on = true;
    void enter(Module& module) override { module.training_ = on; }
  } all;
  all.on = training;
  training_ = training;
  all.walk(*this);
}

}  // namespace chorus::nn
