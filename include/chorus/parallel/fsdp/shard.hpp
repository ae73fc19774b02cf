#pragma once
/// A rank's part of a parameter, as optimizers see it.

#include <chorus/parallel/parameter_slice.hpp>
#include <cstddef>
#include <cstdint>
#include <span>

namespace chorus::fsdp {

/// This rank's part of a parameter and of its averaged gradient.
template <Device D>
class Shard final : public chorus::detail::ParameterSlice<D> {
 public:
  using chorus::detail::ParameterSlice<D>::ParameterSlice;

  void* place() const override { return this->at(this->whole().place()); }
  bool grad_arrived() const override { return arrived_; }
  /// Dropping the part's gradient also drops the whole parameter's gradient from passes under no_sync.
  void set_grad_arrived(bool arrived) override {
    arrived_ = arrived;
    if (arrived) return;
    ++forgotten_;
    this->whole().set_grad_arrived(false);
  }
  std::uint32_t times_forgotten() const override { return forgotten_; }
  /// The average has arrived, or is put aside while another pass adds to it: the whole parameter's gradient stays.
  void set_averaged(bool averaged) { arrived_ = averaged; }

 private:
  bool arrived_ = false;
  std::uint32_t forgotten_ = 0;
};

}  // namespace chorus::fsdp
