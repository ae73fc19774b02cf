#pragma once
/// Ranks run one program: what each has done with the net since they compared last is the same on all, or is refused on
/// all, before a gradient is used.

#include <chorus/comm/communicator.hpp>
#include <chorus/comm/objects.hpp>
#include <chorus/core/error.hpp>
#include <chorus/core/ledger.hpp>
#include <chorus/nn/module.hpp>
#include <chorus/tensor/writes.hpp>
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

namespace chorus::ddp {

/// What a rank says of its program.
struct Said {
  std::int64_t batch = 0;              ///< see Ledger
  double lr = 0;                       ///< of the last step
  std::uint64_t numbers = 0;           ///< a hash of what all steps went by
  std::int32_t passes = 0, steps = 0;  ///< since ranks compared last
  std::int32_t most_steps = 0;         ///< of one optimizer
  std::int32_t optimizers = 0;
  std::int32_t parameters_written = 0, buffers_written = 0;  ///< calls of `assign` and the like
  bool found_writes = false;                                 ///< through a pointer
  bool compares = true;                                      ///< else it may be anything
  bool together = false;                                     ///< in no pass, but in eval(), gathered or the like
};

/// What ranks ask of it.
class Program {
 public:
  virtual Said say() = 0;
  /// Throws UsageError, on every rank, where they differ. `all`: by rank. A collective where they do.
  virtual void compare(std::span<const Said> all) = 0;

 protected:
  ~Program() = default;
};

/// What the ranks of a policy have alike.
struct Alike {
  bool steps = true;          ///< optimizers step on each
  bool all_parameters = true; ///< each has all, so that there are as many optimizers
  bool contents = false;      ///< they have the same numbers, which can be looked at
  bool rank_0_writes = false; ///< what rank 0 alone writes becomes all ranks'
};

template <Device D, class Communicator>
class SameProgram final : public Program {
 public:
  /// `parameters()` and `buffers()` are those that ranks share.
  using Parameters = std::vector<nn::NamedParameter<D>>;
  using Buffers = std::vector<nn::NamedBuffer<D>>;

  SameProgram(std::string_view policy, Communicator& communicator) : policy_(policy), communicator_(communicator) {}

  /// From now on the net's optimizers and loaders are heard of.
  [[gnu::cold]] void listen(Parameters parameters, Buffers buffers, const Alike& alike) {
    parameters_ = std::move(parameters);
    buffers_ = std::move(buffers);
    alike_ = alike;
    if (communicator_.size() == 1) return;
    for (const auto& named : parameters_) named.parameter->set_ledger(ledger_);
    writes_ = count();
  }
  Alike& alike() { return alike_; }
  const std::shared_ptr<Ledger>& ledger() const { return ledger_; }
  void let_ranks_differ() { compares_ = false; }
  /// Ranks have made different numbers of steps, as they may in a join.
  void forget(bool uneven) {
    ledger_->begin_anew();
    ledger_->uneven = ledger_->uneven || uneven;
    writes_ = count();
  }

  /// A whole number below 2^20, the same on ranks whose optimizers have made the same steps since they compared last.
  double mark() const {
    if (!compares_ || !alike_.steps || !alike_.all_parameters) return 0;
    std::uint64_t all = 0;
    for (std::size_t i = 0; i < ledger_->optimizers(); ++i) all = Ledger::mixed(all, ledger_->steps(i).numbers);
    return static_cast<double>(all >> 44);
  }

  Said say() override {
    const auto writes = count();
    Said said{.batch = ledger_->batch,
              .passes = ledger_->passes,
              .optimizers = static_cast<std::int32_t>(ledger_->optimizers()),
              .parameters_written = static_cast<std::int32_t>(writes.parameters - writes_.parameters),
              .buffers_written = static_cast<std::int32_t>(writes.buffers - writes_.buffers),
              .found_writes = writes.found != writes_.found,
              .compares = compares_};
    for (std::size_t i = 0; i < ledger_->optimizers(); ++i) {
      const Ledger::Steps& steps = ledger_->steps(i);
      said.lr = steps.lr;
      said.numbers = Ledger::mixed(said.numbers, steps.numbers);
      said.steps += steps.count;
      said.most_steps = std::max(said.most_steps, steps.count);
    }
    writes_ = writes;
    ledger_->begin_anew();
    return said;
  }

  void compare(std::span<const Said> all) override {
    const Said* const first = first_of(all);
    if (first == nullptr) return;
    bool same = !first->found_writes && first->parameters_written == 0;
    for (const Said& rank : all) same = same && (!rank.compares || same_as(rank, *first));
    if (!same) [[unlikely]]
      find_difference(all, *first);
  }

  /// A comparison by itself: all ranks begin a pass, or are `together` in something else.
  void compare_now(bool together) {
    if (communicator_.size() == 1) return;
    auto own = say();
    own.together = together;
    all_.resize(static_cast<std::size_t>(communicator_.size()));
    communicator_.all_gather(std::span(reinterpret_cast<const std::uint8_t*>(&own), sizeof own),
                             std::span(reinterpret_cast<std::uint8_t*>(all_.data()), sizeof own * all_.size()), {});
    compare(all_);
  }

 private:
  struct Writes {
    std::uint64_t parameters = 0, buffers = 0, found = 0;
  };
  // The numbers of parameters that somebody has a pointer to are looked at.
  Writes count() const {
    Writes all;
    for (const auto& named : parameters_) {
      const auto& storage = named.parameter->storage();
      const auto* const writes = storage.writes();
      if (writes == nullptr) continue;
      if (writes->elsewhere.empty()) storage.look();
      all.parameters += writes->by_hand();
      all.found += writes->found();
    }
    for (const auto& named : buffers_)
      if (const auto* const writes = named.buffer->storage().writes()) all.buffers += writes->by_hand();
    return all;
  }

  static const Said* first_of(std::span<const Said> all) {
    const auto first = std::find_if(all.begin(), all.end(), [](const Said& rank) { return rank.compares; });
    return first == all.end() ? nullptr : &*first;
  }
  bool same_as(const Said& a, const Said& b) const {
    return a.batch == b.batch && a.passes == b.passes && a.steps == b.steps && a.optimizers == b.optimizers &&
           a.numbers == b.numbers && a.parameters_written == b.parameters_written &&
           a.buffers_written == b.buffers_written && a.found_writes == b.found_writes && a.together == b.together;
  }

  [[gnu::cold]] void find_difference(std::span<const Said> all, const Said& first) {
    const auto one = static_cast<std::size_t>(&first - all.data());
    bool any_wrote = false;
    for (std::size_t rank = one; rank < all.size(); ++rank) {
      if (!all[rank].compares) continue;
      compare_passes(all[rank], rank, first, one);
      if (alike_.steps) compare_steps(all[rank], rank, first, one);
      compare_writes(all[rank], rank, first, one);
      any_wrote = any_wrote || all[rank].parameters_written != 0 || all[rank].found_writes;
    }
    if (alike_.contents && any_wrote) compare_contents(all);
  }
  template <class... Parts>
  [[noreturn]] void refuse(const Parts&... parts) const {
    fail<UsageError>(policy_, ": ", parts...,
                     ". All ranks run one program: what decides otherwise has to be the same on each (net.mean), or "
                     "net.let_ranks_differ() says that it is wanted");
  }

  void compare_passes(const Said& said, std::size_t rank, const Said& first, std::size_t one) const {
    if (said.together != first.together)
      refuse("rank ", said.together ? rank : one, " is in eval() or gathered(), which all ranks call, where rank ",
             said.together ? one : rank, " is in a pass: has it left out a batch, or the rest of the loop?");
    const bool further = said.batch > first.batch;
    if (!said.together && said.batch != 0 && first.batch != 0 && said.batch != first.batch)
      refuse("rank ", further ? rank : one, " has left out a batch: it is at ",
             place(further ? said.batch : first.batch), ", and rank ", further ? one : rank, " at ",
             place(further ? first.batch : said.batch));
    if (said.passes != first.passes) {
      const bool more = said.passes > first.passes;
      refuse("rank ", more ? rank : one, " has left out a batch: ", std::max(said.passes, first.passes),
             " forward passes since ranks compared last, and rank ", more ? one : rank, " ",
             std::min(said.passes, first.passes), " (a forward pass that backward doesn't follow goes under NoGrad)");
    }
  }
  static std::string place(std::int64_t batch) {
    return cat("batch ", (batch - 1) & 0xffffffff, " of epoch ", (batch - 1) >> 32);
  }

  void compare_steps(const Said& said, std::size_t rank, const Said& first, std::size_t one) {
    // Of a part of the parameters some optimizers may have none.
    const bool comparable = alike_.all_parameters || said.optimizers == first.optimizers;
    const std::int32_t own = comparable ? said.steps : said.most_steps, other = comparable ? first.steps
                                                                                           : first.most_steps;
    if (own != other)
      refuse("rank ", own < other ? rank : one, " has left out a step: ", std::min(own, other),
             " since ranks compared last, and rank ", own < other ? one : rank, " ", std::max(own, other));
    if (!comparable || said.numbers == first.numbers) return;
    if (said.lr != first.lr) refuse("rank ", rank, " stepped with lr ", said.lr, " where rank ", one, " had ", first.lr);
    refuse("rank ", rank, "'s optimizers stepped with other numbers than rank ", one,
           "'s: the lr of one of several, momentum, betas, weight decay, groups, numbers of earlier steps (state that "
           "one rank alone has loaded), or another type or order");
  }

  void compare_writes(const Said& said, std::size_t rank, const Said& first, std::size_t one) const {
    const auto wrote = [&](bool own, bool other, const char* what) {
      if (own != other && !(alike_.rank_0_writes && other))
        refuse("rank ", own ? rank : one, " has written ", what, " by hand where rank ", own ? one : rank, " has not");
    };
    if (!alike_.contents) wrote(said.parameters_written != 0, first.parameters_written != 0, "parameters");
    wrote(said.buffers_written != 0, first.buffers_written != 0, "buffers");
  }

  // Whether the numbers are the same on all ranks, that have been written or may have been.
  void compare_contents(std::span<const Said> all) {
    std::vector<std::uint64_t> own;
    for (const auto& named : parameters_) own.push_back(fingerprint(*named.parameter));
    std::vector<std::uint64_t> of_all(own.size() * all.size());
    communicator_.all_gather(std::span<const std::uint64_t>(own), std::span<std::uint64_t>(of_all), {});
    for (std::size_t rank = 1; rank < all.size(); ++rank)
      for (std::size_t i = 0; i < own.size(); ++i) {
        if (of_all[rank * own.size() + i] == of_all[i] || !all[rank].compares || !all[0].compares) continue;
        const auto wrote = [&](std::size_t r) { return all[r].parameters_written != 0 || all[r].found_writes; };
        if (wrote(rank) && wrote(0))
          refuse("rank ", rank, " has written other numbers into parameters by hand than rank 0 has ('",
                 parameters_[i].name, "')");
        refuse("rank ", wrote(rank) ? rank : 0, " has written parameters by hand where rank ", wrote(rank) ? 0 : rank,
               " has not ('", parameters_[i].name, "')");
      }
  }
  static std::uint64_t fingerprint(const ParameterOn<D>& parameter) {
    if (parameter.part() != nullptr) return 0;  // each rank has its own
    if constexpr (std::is_same_v<D, Cpu>) {
      return chorus::Writes::fingerprint(parameter.memory(), parameter.size_bytes());
    } else {
      std::vector<std::byte> numbers(parameter.size_bytes());
      copy_bytes(Cpu{}, numbers.data(), parameter.where(), parameter.memory(), numbers.size());
      return chorus::Writes::fingerprint(numbers.data(), numbers.size());
    }
  }

  const std::string_view policy_;
  Communicator& communicator_;
  Parameters parameters_;
  Buffers buffers_;
  Alike alike_;
  std::shared_ptr<Ledger> ledger_ = std::make_shared<Ledger>();
  Writes writes_;  // when ranks compared last
  bool compares_ = true;
  std::vector<Said> all_;
};

}  // namespace chorus::ddp
