#pragma once
/// Which units of the parameters a rank has gathered: operations gather them; they are freed afterwards.

#include <algorithm>
#include <chorus/autograd/tape.hpp>
#include <chorus/autograd/variable.hpp>
#include <chorus/comm/communicator.hpp>
#include <chorus/nn/flat_parameters.hpp>
#include <chorus/parallel/ddp/parts.hpp>
#include <chorus/parallel/ddp/with_type.hpp>
#include <chorus/parallel/fsdp/order.hpp>
#include <chorus/parallel/fsdp/unit_memory.hpp>
#include <chorus/parallel/fsdp/units.hpp>
#include <chorus/tensor/promised_numbers.hpp>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <limits>
#include <memory>
#include <numeric>
#include <optional>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

namespace chorus::fsdp {

/// The phase in which a rank uses its parameters.
enum class Pass : std::uint8_t {
  none,     // only this rank's parts are present
  forward,  // a forward pass that backward will follow
  aside,    // a forward pass without gradients
  backward,
  gathered,  // within gathered()
};

/// Each rank keeps its part of each unit and gathers the other parts (UnitMemory says where; tensors and saved values
/// follow). All ranks make the same calls and gather in one order (see
/// Order). At most two units are whole at a time: the one that operations read, and the next, which is being gathered.
/// A unit that is used again later in the pass stays.
template <Device D, class Communicator>
class UnitsAtHand final : public Residence {
 public:
  /// All units are present at first. `keeps_unused`: ranks need not use the same units. `reshard_after_forward`: see
  /// KeepParameters. `at_once`: passes use units in any order, and again: they begin with all gathers, and units stay
  /// until they end.
  UnitsAtHand(nn::FlatParameters<D>& flat, Communicator& ranks, std::vector<Unit> units, bool keeps_unused,
              bool reshard_after_forward, bool at_once)
      : flat_(&flat),
        ranks_(ranks),
        keeps_unused_(keeps_unused),
        reshard_after_forward_(reshard_after_forward && !at_once),
        at_once_(at_once),
        forward_(layer_order(units), units.size()),
        aside_(forward_),
        backward_({forward_.units.rbegin(), forward_.units.rend()}, units.size()) {
    for (auto& unit : units) states_.push_back({.unit = std::move(unit)});
  }

  /// Moves the parameters to memory that can be freed, and frees the other ranks' parts. Draws promised values: only
  /// this rank's part of each unit.
  [[gnu::cold]] void settle(std::shared_ptr<UnitsAtHand> self) {
    const auto device = flat_->entries().front().parameter().where();
    {
      const trace::PeakKept kept(trace_slot(device));
      std::vector<UnitPart> parts;
      for (std::size_t u = 0; u < states_.size(); ++u) parts.push_back({&states_[u].unit, part(u)});
      memory_.emplace(*flat_, std::move(parts));
      const auto grads = std::shared_ptr<Residence>(self, &grads_);
      for (std::size_t u = 0; u < states_.size(); ++u) {
        for (const std::size_t i : states_[u].unit.entries) {
          const auto& parameter = flat_->entries()[i].parameter();
          draw_promised(states_[u].unit, flat_->entries()[i], part(u));
          parameter.storage().set_residence(self, u);
          if constexpr (!std::is_same_v<D, Cpu>) parameter.grad_storage().set_residence(grads, u);
        }
        give_back(u);
        states_[u].has_gradients = true;
        give_gradients_back(u);
      }
      memory_->settled();
      if (auto* const promises = PromisedNumbers::current())
        for (const auto& entry : flat_->entries()) promises->forget(entry.parameter().place());
    }
    CachingAllocator<D>::of(device).empty_cache();
  }
  /// The policy is being destroyed.
  void end() { flat_ = nullptr; }

  std::size_t units() const { return states_.size(); }
  const Unit& unit(std::size_t u) const { return states_[u].unit; }
  /// This rank's part of a unit, in elements from the unit's first.
  ddp::Elements part(std::size_t u) const {
    return ddp::part_of(states_[u].unit.count, static_cast<std::size_t>(ranks_.rank()),
                        static_cast<std::size_t>(ranks_.size()));
  }

  // Passes.

  /// All ranks begin with their parts only; backward also keeps units that the forward pass left.
  void begin(Pass pass) {
    if (failure_) std::rethrow_exception(std::exchange(failure_, nullptr));
    pass_ = pass;
    next_ = come_ = 0;
    touched_.clear();
    for (std::size_t u = 0; u < states_.size(); ++u) {
      if (pass != Pass::backward) give_back(u);
      states_[u].touched = false;
      states_[u].gathered = states_[u].at == At::here;
    }
    if (at_once_)
      for (const Order& order = order_of_pass(); next_ < order.units.size();) start_next(order);
    // Backward's first unit is present: start gathering the next one.
    if (const Order& order = order_of_pass(); pass == Pass::backward && order.learned && next_ < order.units.size()) {
      const bool has_first = states_[order.units.front()].at == At::here;
      for (int i = 0; i < (has_first ? 2 : 1) && next_ < order.units.size(); ++i) start_next(order);
    }
  }
  /// Ends the pass: joins the gathers that other ranks need and this one didn't, and frees all units except the one
  /// that backward begins with.
  void end_pass() {
    if (pass_ == Pass::none) return;
    Order& order = order_of_pass();
    while (next_ < order.units.size()) {
      come_ = next_;
      start_next(order);
      release_passed(Order::none);
    }
    const bool keeps = pass_ == Pass::forward && (order.learned || at_once_);
    if (!order.learned && !at_once_) learn(order);
    const std::size_t last = order.units.empty() ? Order::none : order.units.back();
    for (std::size_t u = 0; u < states_.size(); ++u) {
      if (keeps && (u == last || !reshard_after_forward_)) continue;
      if (states_[u].at != At::away) arrive(u);
      give_back(u);
    }
    if (pass_ == Pass::backward)
      for (State& state : states_) state.first_node = never;
    pass_ = Pass::none;
  }
  /// After an exception: waits for gathers and frees all units.
  [[gnu::cold]] void give_up() noexcept {
    for (std::size_t u = 0; u < states_.size(); ++u) {
      try {
        arrive(u);
      } catch (...) {  // the group has failed
        states_[u].work.clear();
      }
      give_back(u);
    }
    pass_ = Pass::none;
  }

  /// The unit's gradients of this backward pass are complete: nothing reads its parameters any more.
  void gradients_complete(std::size_t u) {
    if (pass_ == Pass::backward && states_[u].at == At::here && !at_once_) give_back(u);
  }
  /// A gradient of the unit is about to be written.
  void gradient_begins(std::size_t u) {
    State& state = states_[u];
    if (!std::exchange(state.has_gradients, true)) memory_->take_grads(u);
  }
  /// Frees the parts of the unit's gradients that belong to other ranks.
  void give_gradients_back(std::size_t u) {
    State& state = states_[u];
    if (std::exchange(state.has_gradients, false)) memory_->give_grads_back(u);
  }

  /// Keeps all units gathered until `end_gathered`.
  [[gnu::cold]] void begin_gathered() {
    begin(Pass::gathered);
    for (std::size_t u = 0; u < states_.size(); ++u) start(u);
    for (std::size_t u = 0; u < states_.size(); ++u) arrive(u);
    versions_ = versions();
  }
  /// `write`: all ranks take rank 0's values.
  [[gnu::cold]] void end_gathered(bool write) noexcept {
    try {
      if (!write)
        check<UsageError>(versions() == versions_,
                          "FullyShardedDataParallel: parameters were written within net.gathered(), which is "
                          "read-only; gathered({.write = true}) takes rank 0's values");
      else
        for (std::size_t u = 0; u < states_.size(); ++u) send_rank_0s(u);
    } catch (...) {
      failure_ = std::current_exception();
    }
    for (std::size_t u = 0; u < states_.size(); ++u) give_back(u);
    pass_ = Pass::none;
  }

  // For storage.

  bool present(std::size_t u) const override { return states_[u].at == At::here; }
  void touch(std::size_t u) override {
    State& state = states_[u];
    if (pass_ == Pass::none || pass_ == Pass::gathered) {
      if (state.at != At::here) refuse(u);
      return;
    }
    if (!std::exchange(state.touched, true)) touched_.push_back(u);
    state.last_use = chorus::detail::operations_ended;
    state.last_used = touched_.size() - 1;
    if (pass_ == Pass::forward && state.first_node == never) state.first_node = Node::next_sequence();
    if (state.at != At::here) fetch(u);
  }

 private:
  static constexpr std::uint64_t never = std::numeric_limits<std::uint64_t>::max();
  enum class At : std::uint8_t { away, on_its_way, here };
  struct State {
    Unit unit;
    At at = At::here;
    bool touched = false, gathered = false;  // in this pass
    bool has_gradients = false;              // of the whole unit
    std::uint64_t last_use = 0;              // operations that had ended at the last use
    std::size_t last_used = 0;               // units that the pass had used by then, minus one
    std::uint64_t first_node = never;        // nodes with smaller numbers don't use it
    std::vector<comm::Work> work = {};
  };

  // The gradients of a unit get memory before one is written.
  class GradsOfUnits final : public Residence {
   public:
    explicit GradsOfUnits(UnitsAtHand& units) : units_(units) {}
    void touch(std::size_t u) override {
      if (units_.flat_ == nullptr) units_.refuse(u);
      units_.gradient_begins(u);
    }
    bool present(std::size_t u) const override { return units_.states_[u].has_gradients; }

   private:
    UnitsAtHand& units_;
  };

  static void draw_promised(const Unit& unit, const typename nn::FlatParameters<D>::Entry& entry,
                            const ddp::Elements& part) {
    auto* const promises = PromisedNumbers::current();
    if (promises == nullptr) return;
    const auto& parameter = entry.parameter();
    const auto mine = within<D>(unit, entry, part);
    auto* const own = static_cast<std::byte*>(parameter.place()) + mine.begin * size_of(parameter.dtype());
    promises->draw(parameter.place(), own, mine.begin, mine.end - mine.begin);
  }

  Order& order_of_pass() { return pass_ == Pass::backward ? backward_ : pass_ == Pass::aside ? aside_ : forward_; }

  // The order in which layers are listed: the flat buffers have the last one first.
  static std::vector<std::size_t> layer_order(const std::vector<Unit>& units) {
    std::vector<std::size_t> order(units.size());
    std::iota(order.rbegin(), order.rend(), std::size_t{0});
    return order;
  }

  void fetch(std::size_t u) {
    if (at_once_) return arrive(u);
    Order& order = order_of_pass();
    if (const std::size_t place = order.place[u]; place != Order::none && place >= come_) {
      while (next_ <= place) start_next(order);
      come_ = place;
    } else {
      check<UsageError>(
          !order.learned || ranks_.size() == 1, "FullyShardedDataParallel: rank ", ranks_.rank(), " needs '", name(u),
          "' at a point where rank 0 did not need it in its first pass, and has freed it: ranks may skip layers "
          "(find_unused_parameters) but must use them in one order; KeepParameters keeps all until backward ends");
      start(u);
    }
    arrive(u);
    release_passed(u);
    if (next_ < order.units.size()) start_next(order);
  }

  void start_next(const Order& order) {
    const std::size_t u = order.units[next_++];
    if (!states_[u].gathered) start(u);
  }
  void start(std::size_t u) {
    State& state = states_[u];
    if (state.at != At::away) return;
    state.at = At::on_its_way;
    state.gathered = true;
    if (ranks_.size() > 1) memory_->take_values(u);
    if (ranks_.size() == 1) return;
    with_values(u, [&]<class T>(std::span<T> numbers) {
      const auto ranks = static_cast<std::size_t>(ranks_.size()), share = numbers.size() / ranks;
      const auto how = of_unit(u);
      if (share > 0)
        state.work.push_back(ranks_.all_gather_async(
            std::span<const T>(numbers.subspan(static_cast<std::size_t>(ranks_.rank()) * share, share)),
            numbers.first(share * ranks), how));
      if (const auto rest = numbers.size() % ranks; rest > 0)
        state.work.push_back(ranks_.broadcast_async(numbers.last(rest), ranks_.size() - 1, how));
    });
  }
  void arrive(std::size_t u) {
    State& state = states_[u];
    if (state.at != At::on_its_way) return;
    for (comm::Work& work : state.work) work.wait();
    state.work.clear();
    state.at = At::here;
  }
  void give_back(std::size_t u) {
    State& state = states_[u];
    if (ranks_.size() == 1 || state.at == At::away) return;
    state.at = At::away;
    for (const std::size_t i : state.unit.entries)
      if (auto* const writes = flat_->entries()[i].parameter().storage().writes()) writes->end_watch();
    memory_->give_values_back(u);
  }
  // Frees units that the pass has finished with and that no running operation can use. `now` is in use.
  void release_passed(std::size_t now) {
    for (std::size_t u = 0; u < states_.size(); ++u) {
      State& state = states_[u];
      if (u == now || state.at == At::away || !is_passed(u)) continue;
      if (pass_ != Pass::backward && state.touched && state.last_use == chorus::detail::operations_ended) continue;
      arrive(u);
      give_back(u);
    }
  }
  bool is_passed(std::size_t u) const {
    const State& state = states_[u];
    // Backward: units whose nodes have all run; units with gradients to come are freed in gradients_complete.
    if (pass_ == Pass::backward)
      return state.first_node > backward_node() && backward_.place[u] != Order::none && backward_.place[u] < come_;
    if (!reshard_after_forward_) return false;
    const Order& order = pass_ == Pass::aside ? aside_ : forward_;
    return order.place[u] == Order::none ? state.touched : order.last_used[u] < come_;
  }
  // Units that this rank has not used, but others may, keep their place before their successor in the guess.
  void learn(Order& order) {
    std::vector<std::size_t> units = touched_;
    if (keeps_unused_)
      for (auto u = order.units.rbegin(); u != order.units.rend(); ++u) {
        if (states_[*u].touched) continue;
        const auto behind = u == order.units.rbegin() ? units.end() : std::find(units.begin(), units.end(), *(u - 1));
        units.insert(behind, *u);
      }
    Order mine(units, states_.size());
    for (const std::size_t u : touched_) mine.last_used[u] = mine.place[touched_[states_[u].last_used]];
    order = std::move(mine);
    order.take_rank_0s(ranks_);
  }

  template <class F>
  void with_values(std::size_t u, const F& f) const {
    const Unit& unit = states_[u].unit;
    ddp::with_type(flat_->groups()[unit.group].dtype, memory_->values(u),
                   [&]<class T>(T* numbers) { f(std::span<T>(numbers, unit.count)); });
  }
  static comm::CollectiveOptions of_unit(std::size_t u) {
    return {.traffic = trace::Traffic::parameters, .unit = static_cast<int>(u)};
  }
  void send_rank_0s(std::size_t u) {
    for (const std::size_t i : states_[u].unit.entries) flat_->entries()[i].parameter().touch();
    if (ranks_.size() > 1) with_values(u, [&](auto numbers) { ranks_.broadcast(numbers, 0, of_unit(u)); });
  }
  std::vector<std::uint64_t> versions() const {
    std::vector<std::uint64_t> all;
    for (const auto& entry : flat_->entries()) all.push_back(entry.parameter().version());
    return all;
  }

  const std::string& name(std::size_t u) const { return flat_->entries()[states_[u].unit.entries.front()].named.name; }
  [[noreturn, gnu::cold]] void refuse(std::size_t u) const {
    check<UsageError>(
        flat_ != nullptr,
        "FullyShardedDataParallel: a parameter of a net that was destroyed: its values were sharded over the ranks");
    fail<UsageError>(
        "FullyShardedDataParallel: '", name(u),
        "', or another parameter of its unit, is read outside the net's forward and backward pass, and is sharded over "
        "the ranks: compute with it in the model, or hold net.gathered(), which all ranks call");
  }

  nn::FlatParameters<D>* flat_;
  Communicator& ranks_;
  const bool keeps_unused_, reshard_after_forward_, at_once_;
  Order forward_, aside_, backward_;
  std::vector<State> states_;
  std::optional<UnitMemory<D>> memory_;
  GradsOfUnits grads_{*this};
  Pass pass_ = Pass::none;
  std::size_t next_ = 0;                 // index in the pass's order: gathers that have been started
  std::size_t come_ = 0;                 // the pass's position in its order
  std::vector<std::size_t> touched_;     // in this pass
  std::vector<std::uint64_t> versions_;  // of the parameters, when they were gathered
  std::exception_ptr failure_;           // an error of a function that can't throw
};

}  // namespace chorus::fsdp
