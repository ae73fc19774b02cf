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
  /// `at`: an empty part's place in the parameter, which may be outside of it: all shards' addresses are in the order
  /// of the parameters, on all ranks.
  Shard(ParameterOn<D>& whole, Index begin, Index count, std::ptrdiff_t at)
      : chorus::detail::ParameterSlice<D>(whole, begin, count),
        at_(at * static_cast<std::ptrdiff_t>(size_of(whole.dtype()))) {}

  void* place() const override { return static_cast<std::byte*>(this->whole().place()) + at_; }
  void* grad_place() const override { return static_cast<std::byte*>(this->whole().grad_storage().data()) + at_; }
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
  const std::ptrdiff_t at_;  // in bytes
  bool arrived_ = false;
  std::uint32_t forgotten_ = 0;
};

}  // namespace chorus::fsdp
