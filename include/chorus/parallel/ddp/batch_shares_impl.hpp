#pragma once
/// How ranks learn each other's number of samples.

#include <algorithm>
#include <chorus/autograd/node.hpp>
#include <chorus/comm/communicator.hpp>
#include <chorus/core/error.hpp>
#include <chorus/parallel/ddp/batch_shares.hpp>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace chorus::detail {

template <class Communicator>
std::int64_t BatchShares<Communicator>::batch() {
  ask();
  std::int64_t samples = 0;
  for (const Message& rank : all_) samples += rank.pass.samples;
  return samples;
}

template <class Communicator>
void BatchShares<Communicator>::begin(const ddp::ForwardPass& pass, bool now) {
  const bool changed = own_.pass.changed || pass.changed;
  own_ = {.kind = Kind::recorded, .pass = pass};
  own_.pass.changed = changed;
  begin_anew();
  if (now) ask();
}

template <class Communicator>
void BatchShares<Communicator>::begin_joined() {
  own_ = {.kind = Kind::joined};
  begin_anew();
  ask();
}

template <class Communicator>
void BatchShares<Communicator>::begin_without_grad(const ddp::ForwardPass& pass, bool may_ask) {
  aside_ = true;
  own_aside_ = {.kind = Kind::aside, .pass = pass};
  first_aside_ = may_ask && communicator_.size() > 1 ? not_asked : communicator_.rank() * pass.samples;
  all_aside_.clear();
}

template <class Communicator>
std::span<const double> BatchShares<Communicator>::weigh(std::span<const LossShare> losses, bool refused) {
  own_losses_.clear();
  for (const LossShare& loss : losses)
    for (const double number : loss.numbers()) own_losses_.push_back(number);
  own_.numbers = refused ? has_refused : static_cast<std::int32_t>(own_losses_.size());
  std::copy_n(own_losses_.begin(), std::min(own_losses_.size(), own_.losses.size()), own_.losses.begin());
  own_.at_backward = true;
  do exchange();
  while (std::any_of(all_.begin(), all_.end(), [](const Message& rank) { return !rank.at_backward; }));
  if (refused) return {};
  for (std::size_t rank = 0; rank < all_.size(); ++rank)
    check<UsageError>(all_[rank].numbers != has_refused, "rank ", rank,
                      " refused its loss, whose operations differ from this rank's");
  if (given_weight_ != 0)
    scales_.assign(losses.size(), 1);
  else
    decide(losses.size());
  return scales_;
}

template <class Communicator>
double BatchShares<Communicator>::weight() {
  if (given_weight_ != 0) return given_weight_;
  ask();
  return decided_ ? weight_ : weight_by_samples();
}

template <class Communicator>
std::int64_t BatchShares<Communicator>::first_sample() {
  if (!aside_) {
    ask();
    return samples_before(all_);
  }
  if (first_aside_ == not_asked) first_aside_ = ask_aside();
  return first_aside_;
}

template <class Communicator>
bool BatchShares<Communicator>::is_share(std::int64_t samples) const {
  return std::any_of(told().begin(), told().end(),
                     [&](const Message& rank) { return rank.kind != Kind::joined && rank.pass.samples == samples; });
}

template <class Communicator>
std::uint32_t BatchShares<Communicator>::pass() const {
  const std::uint32_t own = (aside_ ? own_aside_ : own_).pass.number;
  std::int32_t ahead = 0;  // numbers may have wrapped around to 0
  for (const Message& rank : told())
    if (rank.kind != Kind::joined) ahead = std::max(ahead, static_cast<std::int32_t>(rank.pass.number - own));
  return own + static_cast<std::uint32_t>(ahead);
}

template <class Communicator>
bool BatchShares<Communicator>::take_changed() {
  ask();
  return std::exchange(changed_, false);
}

template <class Communicator>
std::string BatchShares<Communicator>::joined_ranks() {
  ask();
  std::string out;
  for (std::size_t rank = 0; rank < all_.size(); ++rank)
    if (all_[rank].kind == Kind::joined) out += cat(out.empty() ? "" : ", ", rank);
  return out;
}

template <class Communicator>
int BatchShares<Communicator>::first_active() {
  ask();
  for (std::size_t rank = 0; rank < all_.size(); ++rank)
    if (all_[rank].kind != Kind::joined) return static_cast<int>(rank);
  return -1;
}

template <class Communicator>
ddp::ForwardPass BatchShares<Communicator>::active_pass() {
  const int rank = first_active();
  return rank < 0 ? ddp::ForwardPass{.sync = false} : all_[static_cast<std::size_t>(rank)].pass;
}

template <class Communicator>
void BatchShares<Communicator>::ask() {
  if (!std::exchange(known_, true)) exchange();
}

template <class Communicator>
void BatchShares<Communicator>::exchange() {
  known_ = true;
  met_ = false;
  if (program_ != nullptr && communicator_.size() > 1) own_.said = program_->say();
  gather(own_, all_, of_recorded);
  compare_programs();
  for (std::size_t rank = 0; rank < all_.size(); ++rank) {
    check<UsageError>(all_[rank].kind != Kind::aside, "rank ", communicator_.rank(),
                      " runs a forward pass that records gradients, rank ", rank, " one without");
    changed_ = changed_ || all_[rank].pass.changed;
  }
  own_.pass.changed = false;
}

template <class Communicator>
void BatchShares<Communicator>::compare_programs() {
  if (program_ == nullptr || communicator_.size() == 1) return;
  said_.clear();
  for (const Message& rank : all_) {
    said_.push_back(rank.said);
    said_.back().together = rank.kind == Kind::meeting;
    said_.back().compares = rank.said.compares && (rank.kind == Kind::recorded || rank.kind == Kind::meeting);
  }
  program_->compare(said_);
  if (own_.kind != Kind::recorded) return;
  for (std::size_t rank = 0; rank < all_.size(); ++rank)
    check<UsageError>(all_[rank].kind != Kind::recorded || all_[rank].pass.sync == own_.pass.sync, "rank ",
                      own_.pass.sync ? static_cast<int>(rank) : communicator_.rank(), " is in no_sync where rank ",
                      own_.pass.sync ? communicator_.rank() : static_cast<int>(rank),
                      " averages gradients: expected the same number of passes under no_sync on all ranks");
}

template <class Communicator>
void BatchShares<Communicator>::meet_now() {
  const Message pass = std::exchange(own_, {.kind = Kind::meeting});
  const bool known = known_;
  auto all = all_;
  exchange();
  met_ = true;
  all_ = std::move(all);
  own_ = pass;
  known_ = known;
}

template <class Communicator>
std::int64_t BatchShares<Communicator>::ask_aside() {
  std::vector<Message> all(all_.size());
  gather(own_aside_, all, of_aside);
  for (std::size_t rank = 0; rank < all.size(); ++rank)
    check<UsageError>(all[rank].kind == Kind::aside, "rank ", communicator_.rank(),
                      " runs a forward pass without gradients, rank ", rank,
                      all[rank].kind == Kind::joined ? " has run out of batches" : " one that records them");
  all_aside_ = std::move(all);
  return samples_before(all_aside_);
}

template <class Communicator>
std::int64_t BatchShares<Communicator>::samples_before(const std::vector<Message>& all) const {
  std::int64_t first = 0;
  for (int rank = 0; rank < communicator_.rank(); ++rank) first += all[static_cast<std::size_t>(rank)].pass.samples;
  return first;
}

template <class Communicator>
double BatchShares<Communicator>::weight_by_samples() const {
  std::int64_t all = 0, active = 0;
  for (const Message& rank : all_) {
    all += rank.pass.samples;
    active += rank.kind != Kind::joined;
  }
  if (active == 0) return 1.0 / static_cast<double>(all_.size());  // after a join, before any pass
  if (all == 0) return own_.kind != Kind::joined ? 1.0 / static_cast<double>(active) : 0;
  return static_cast<double>(own_.pass.samples) / static_cast<double>(all);
}

template <class Communicator>
void BatchShares<Communicator>::decide(std::size_t losses) {
  decided_ = alike_ = true;
  weight_ = weight_by_samples();
  scales_.assign(losses, 1);
  gather_losses();
  const auto me = static_cast<std::size_t>(communicator_.rank());
  const WholeLoss* first = nullptr;
  for (const WholeLoss& loss : losses_) {
    if (loss.sum == 0) continue;  // a zero sum: its share has no effect
    if (first == nullptr) first = &loss;
    alike_ = alike_ && (!loss.is_sum || all_.size() == 1);
    for (std::size_t rank = 0; rank < all_.size(); ++rank)
      alike_ = alike_ && loss.of_rank[rank] * first->sum == first->of_rank[rank] * loss.sum;
  }
  if (first == nullptr) return;
  if (alike_) {
    weight_ = first->of_rank[me] / first->sum;
    return;
  }
  for (std::size_t rank = 0; rank < all_.size(); ++rank)  // a rank that counts in some loss gets a weight
    for (const WholeLoss& loss : losses_)
      if (!loss.is_sum && all_[rank].pass.samples == 0 && loss.of_rank[rank] > 0)
        weight_ = 1.0 / static_cast<double>(all_.size());
  if (weight_ == 0) return;
  for (std::size_t i = 0; i < losses_.size(); ++i)
    if (const double share = losses_[i].share(me); share > 0) scales_[i] = share / weight_;
}

template <class Communicator>
void BatchShares<Communicator>::gather_numbers() {
  if (communicator_.size() == 1) {
    all_losses_ = own_losses_;
    return;
  }
  communicator_.all_gather(std::span<const double>(own_losses_), std::span<double>(all_losses_), {});
}

template <class Communicator>
void BatchShares<Communicator>::gather_losses() {
  const std::size_t ranks = all_.size();
  std::size_t first = ranks;  // the first rank that has a loss
  for (std::size_t rank = 0; rank < ranks; ++rank) {
    if (all_[rank].kind == Kind::joined) continue;
    if (first == ranks) first = rank;
    check<UsageError>(all_[rank].numbers == all_[first].numbers, "backward: the losses of rank ", first, " and rank ",
                      rank,
                      " differ in means and sums: expected the same operations on all ranks, also if nothing counts");
  }
  const auto count = first < ranks ? static_cast<std::size_t>(all_[first].numbers) : 0;
  const bool apart = count > own_.losses.size();
  if (apart) {
    own_losses_.resize(count);  // a rank without batches has none
    all_losses_.resize(count * ranks);
    gather_numbers();
  }
  samples_.clear();
  for (const Message& rank : all_) samples_.push_back(rank.pass.samples);
  std::size_t made = 0;
  for (std::size_t at = 0; at < count; ++made) {
    const auto of = [&](std::size_t rank) {
      const std::span<const double> numbers =
          apart ? std::span<const double>(all_losses_).subspan(rank * count, count) : all_[rank].losses;
      return LossShare::first_of(numbers.subspan(at));
    };
    const LossShare example = of(first);
    if (made == losses_.size()) losses_.emplace_back();
    shares_.clear();
    for (std::size_t rank = 0; rank < ranks; ++rank)
      shares_.push_back(all_[rank].kind == Kind::joined ? LossShare::none() : of(rank));
    losses_[made].add_up(shares_, "rank", samples_);
    if (example.has_divisor()) {
      if (counted_.size() <= made) counted_.resize(made + 1);
      for (const LossShare& share : shares_)
        if (!share.is_none()) counted_[made] += share.counted();
      const double counted = counted_[made];
      if (own_.pass.sync || counted > example.divisor() * (1 + 1e-9)) counted_[made] = 0;
      check<UsageError>(counted <= example.divisor() * (1 + 1e-9), "mean_over is ", example.divisor(), ", and ",
                        counted, " counted on all ranks", one_divisor);
    }
    at += example.numbers().size();
  }
  losses_.resize(made);
}

}  // namespace chorus::detail
