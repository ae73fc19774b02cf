#pragma once
/// Parameters of which a process has only a part, or nothing, in the form that optimizers take.

#include <array>
#include <chorus/nn/module.hpp>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>

namespace chorus::detail {

/// A range of a parameter's numbers, for an optimizer that steps only these.
template <Device D>
class ParameterSlice : public ParameterOn<D> {
 public:
  ParameterSlice(ParameterOn<D>& whole, Index begin, Index count) : whole_(whole), begin_(begin), count_{count} {
    this->set_part(whole.part());
  }

  DType dtype() const override { return whole_.dtype(); }
  std::span<const Index> extents() const override { return whole_.extents(); }
  std::span<const Index> extents_here() const override { return count_; }
  bool is_part() const override { return true; }
  D where() const override { return whole_.where(); }
  void* place() const override { return at(whole_.memory()); }
  Index part_begin() const override { return begin_; }
  const Storage<D>& storage() const override { return whole_.storage(); }
  void* grad_place() const override { return at(whole_.grad_place()); }
  const Storage<D>& grad_storage() const override { return whole_.grad_storage(); }
  const void* grad_block() const override { return whole_.grad_block(); }
  bool grad_arrived() const override { return whole_.grad_arrived(); }
  void set_grad_arrived(bool arrived) override { whole_.set_grad_arrived(arrived); }
  std::uint32_t times_forgotten() const override { return whole_.times_forgotten(); }
  bool wants_grad() const override { return whole_.wants_grad(); }
  void set_wants_grad(bool wants) override { whole_.set_wants_grad(wants); }
  void bind(const Storage<D>&, void*, const Storage<D>&, void*) override { no_parameter(); }
  void on_grad(std::function<void()>) override { no_parameter(); }
  void move_to_device(D) override { no_parameter(); }
  void replace_numbers(std::span<const Index>, const Storage<D>&) override { no_parameter(); }
  Ref<Node> copy_to(D) const override { no_parameter(); }
  void add_grad_of(const ParameterOn<D>&) override { no_parameter(); }
  void set_origin(Ref<Node>) override { no_parameter(); }
  Ref<Node> make_stand_in() const override { no_parameter(); }
  const void* grad_data_of(const Node&) const override { no_parameter(); }
  void drop_grad_of(Node&) const override { no_parameter(); }

 protected:
  ParameterOn<D>& whole() const { return whole_; }
  void* at(void* whole) const {
    return static_cast<std::byte*>(whole) + static_cast<std::size_t>(begin_) * size_of(whole_.dtype());
  }

 private:
  [[noreturn]] static void no_parameter() { fail<UsageError>("ParameterSlice: a slice is not a parameter"); }
  ParameterOn<D>& whole_;
  Index begin_;
  std::array<Index, 1> count_;
};

/// A parameter of another process: this one takes part in operations on it with no numbers.
template <Device D>
class ParameterElsewhere final : public ParameterSlice<D> {
 public:
  explicit ParameterElsewhere(ParameterOn<D>& whole) : ParameterSlice<D>(whole, 0, 0) {}
  void* place() const override { return this->whole().place(); }
  bool grad_arrived() const override { return false; }
  void set_grad_arrived(bool) override {}
  void on_grad(std::function<void()>) override {}
};

}  // namespace chorus::detail
