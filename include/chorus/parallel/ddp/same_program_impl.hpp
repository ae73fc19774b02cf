#pragma once
/// How ranks compare their programs, and the messages about differences.

#include <algorithm>
#include <chorus/comm/communicator.hpp>
#include <chorus/parallel/ddp/same_program.hpp>
#include <chorus/tensor/writes.hpp>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace chorus::ddp {

template <Device D, class Communicator>
std::string SameProgram<D, Communicator>::place(std::int64_t batch) {
  return cat("batch ", (batch - 1) & 0xffffffff, " of epoch ", (batch - 1) >> 32);
}

template <Device D, class Communicator>
std::uint64_t SameProgram<D, Communicator>::fingerprint(const ParameterOn<D>& parameter) {
  if (parameter.part() != nullptr) return 0;  // each rank has its own part
  if constexpr (std::is_same_v<D, Cpu>) {
    return chorus::Writes::fingerprint(parameter.memory(), parameter.size_bytes());
  } else {
    std::vector<std::byte> numbers(parameter.size_bytes());
    copy_bytes(Cpu{}, numbers.data(), parameter.where(), parameter.memory(), numbers.size());
    return chorus::Writes::fingerprint(numbers.data(), numbers.size());
  }
}

template <Device D, class Communicator>
void SameProgram<D, Communicator>::listen(Parameters parameters, Buffers buffers, const Alike& alike) {
  parameters_ = std::move(parameters);
  buffers_ = std::move(buffers);
  alike_ = alike;
  ledger_->uneven = !alike.all_parameters;
  if (communicator_.size() == 1) return;
  for (const auto& named : parameters_) named.parameter->set_ledger(ledger_);
  writes_ = count();
}

template <Device D, class Communicator>
Said SameProgram<D, Communicator>::say() {
  const auto writes = count();
  Said said{.batch = ledger_->batch,
            .passes = ledger_->passes,
            .optimizers = static_cast<std::int32_t>(ledger_->optimizers()),
            .parameters_written = static_cast<std::int32_t>(writes.parameters - writes_.parameters),
            .buffers_written = static_cast<std::int32_t>(writes.buffers - writes_.buffers),
            .found_writes = writes.found != writes_.found,
            .forgot = alike_.zero_grad && writes.forgotten != writes_.forgotten,
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

template <Device D, class Communicator>
void SameProgram<D, Communicator>::compare(std::span<const Said> all) {
  const auto first = std::find_if(all.begin(), all.end(), [](const Said& rank) { return rank.compares; });
  if (first == all.end()) return;
  bool same = !first->found_writes && first->parameters_written == 0;
  for (const Said& rank : all) same = same && (!rank.compares || same_as(rank, *first));
  if (!same) [[unlikely]]
    find_difference(all, *first);
}

template <Device D, class Communicator>
void SameProgram<D, Communicator>::compare_now(bool together) {
  if (communicator_.size() == 1) return;
  auto own = say();
  own.together = together;
  all_.resize(static_cast<std::size_t>(communicator_.size()));
  communicator_.all_gather(std::span(reinterpret_cast<const std::uint8_t*>(&own), sizeof own),
                           std::span(reinterpret_cast<std::uint8_t*>(all_.data()), sizeof own * all_.size()), {});
  compare(all_);
}

template <Device D, class Communicator>
auto SameProgram<D, Communicator>::count() const -> Writes {
  Writes all;
  for (const auto& named : parameters_) {
    const auto& storage = named.parameter->storage();
    const auto* const writes = storage.writes();
    if (writes == nullptr) continue;
    if (writes->elsewhere.empty()) storage.look();
    all.parameters += writes->by_hand();
    all.found += writes->found();
    all.forgotten += named.parameter->times_forgotten();
  }
  for (const auto& named : buffers_)
    if (const auto* const writes = named.buffer->storage().writes()) all.buffers += writes->by_hand();
  return all;
}

template <Device D, class Communicator>
bool SameProgram<D, Communicator>::same_as(const Said& a, const Said& b) const {
  return a.batch == b.batch && a.passes == b.passes && a.steps == b.steps && a.optimizers == b.optimizers &&
         a.numbers == b.numbers && a.parameters_written == b.parameters_written &&
         a.buffers_written == b.buffers_written && a.found_writes == b.found_writes && a.forgot == b.forgot &&
         a.together == b.together;
}

template <Device D, class Communicator>
void SameProgram<D, Communicator>::find_difference(std::span<const Said> all, const Said& first) {
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

template <Device D, class Communicator>
void SameProgram<D, Communicator>::refuse(const std::string& what) const {
  fail<UsageError>(policy_, ": ", what,
                   "; all ranks must take the same decisions: base them on the same values (net.mean), or call "
                   "net.let_ranks_differ() to allow it");
}

template <Device D, class Communicator>
void SameProgram<D, Communicator>::compare_passes(const Said& said, std::size_t rank, const Said& first,
                                                  std::size_t one) const {
  if (said.together != first.together)
    refuse(cat("rank ", said.together ? rank : one, " is in eval() or gathered(), which all ranks must call, and rank ",
               said.together ? one : rank, " is in a pass: it may have skipped a batch or the rest of the loop"));
  const bool further = said.batch > first.batch;
  if (!said.together && said.batch != 0 && first.batch != 0 && said.batch != first.batch)
    refuse(cat("rank ", further ? rank : one, " skipped a batch: it is at ", place(further ? said.batch : first.batch),
               ", and rank ", further ? one : rank, " at ", place(further ? first.batch : said.batch)));
  if (said.passes != first.passes) {
    const bool more = said.passes > first.passes;
    refuse(cat("rank ", more ? rank : one, " skipped a batch: ", std::max(said.passes, first.passes),
               " forward passes since the last comparison, and rank ", more ? one : rank, " ",
               std::min(said.passes, first.passes), " (run a forward pass without backward under NoGrad)"));
  }
}

template <Device D, class Communicator>
void SameProgram<D, Communicator>::compare_steps(const Said& said, std::size_t rank, const Said& first,
                                                 std::size_t one) const {
  // On a rank with a part of the parameters some optimizers may be missing.
  const bool comparable = alike_.all_parameters || said.optimizers == first.optimizers;
  const std::int32_t own = comparable ? said.steps : said.most_steps;
  const std::int32_t other = comparable ? first.steps : first.most_steps;
  if (own != other)
    refuse(cat("rank ", own < other ? rank : one, " skipped a step: ", std::min(own, other),
               " since the last comparison, and rank ", own < other ? one : rank, " ", std::max(own, other)));
  if (alike_.zero_grad && said.forgot != first.forgot)
    refuse(
        cat("rank ", said.forgot ? rank : one, " called zero_grad, and rank ", said.forgot ? one : rank, " did not"));
  if (!comparable || said.numbers == first.numbers) return;
  if (said.lr != first.lr)
    refuse(cat("rank ", rank, " stepped with lr ", said.lr, ", and rank ", one, " with ", first.lr));
  refuse(cat("rank ", rank, "'s optimizers differ from rank ", one,
             "'s: in an lr, momentum, betas, weight decay, groups, the number of earlier steps (a state loaded on one "
             "rank only), type or order"));
}

template <Device D, class Communicator>
void SameProgram<D, Communicator>::compare_writes(const Said& said, std::size_t rank, const Said& first,
                                                  std::size_t one) const {
  const auto wrote = [&](bool own, bool other, const char* what) {
    if (own != other && !(alike_.rank_0_writes && other))
      refuse(cat("rank ", own ? rank : one, " wrote ", what, " outside of an optimizer, and rank ", own ? one : rank,
                 " did not"));
  };
  if (!alike_.contents) wrote(said.parameters_written != 0, first.parameters_written != 0, "parameters");
  wrote(said.buffers_written != 0, first.buffers_written != 0, "buffers");
}

template <Device D, class Communicator>
void SameProgram<D, Communicator>::compare_contents(std::span<const Said> all) {
  std::vector<std::uint64_t> own;
  for (const auto& named : parameters_) own.push_back(fingerprint(*named.parameter));
  std::vector<std::uint64_t> of_all(own.size() * all.size());
  communicator_.all_gather(std::span<const std::uint64_t>(own), std::span<std::uint64_t>(of_all), {});
  for (std::size_t rank = 1; rank < all.size(); ++rank)
    for (std::size_t i = 0; i < own.size(); ++i) {
      if (of_all[rank * own.size() + i] == of_all[i] || !all[rank].compares || !all[0].compares) continue;
      const auto wrote = [&](std::size_t r) { return all[r].parameters_written != 0 || all[r].found_writes; };
      if (wrote(rank) && wrote(0))
        refuse(cat("rank ", rank, " wrote other values into parameters than rank 0 ('", parameters_[i].name, "')"));
      refuse(cat("rank ", wrote(rank) ? rank : 0, " wrote parameters outside of an optimizer, and rank ",
                 wrote(rank) ? 0 : rank, " did not ('", parameters_[i].name, "')"));
    }
}

}  // namespace chorus::ddp
