#pragma once
/// How ranks find out how many samples the others have.

#include <algorithm>
#include <chorus/autograd/node.hpp>
#include <chorus/comm/communicator.hpp>
#include <chorus/core/error.hpp>
#include <chorus/parallel/ddp/batch_shares.hpp>
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
void BatchShares<Communicator>::begin_aside(const ddp::ForwardPass& pass, bool may_ask) {
  aside_ = true;
  own_aside_ = {.kind = Kind::aside, .pass = pass};
  first_aside_ = may_ask && communicator_.size() > 1 ? not_asked : communicator_.rank() * pass.samples;
  all_aside_.clear();
}

template <class Communicator>
std::span<const double> BatchShares<Communicator>::weigh(std::span<const double> mean_over) {
  own_.losses = static_cast<std::int32_t>(mean_over.size());
  std::copy_n(mean_over.begin(), std::min(mean_over.size(), own_.mean_over.size()), own_.mean_over.begin());
  own_.at_backward = true;
  do exchange();
  while (std::any_of(all_.begin(), all_.end(), [](const Message& rank) { return !rank.at_backward; }));
  if (as_they_are_)
    scales_.assign(mean_over.size(), 1);
  else
    decide(mean_over);
  return scales_;
}

template <class Communicator>
double BatchShares<Communicator>::weight() {
  if (as_they_are_) return 1;
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
  std::int32_t ahead = 0;  // numbers may have begun anew at 0
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
                      " averages gradients: expected as many passes under no_sync on all ranks");
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
  if (active == 0) return 1.0 / static_cast<double>(all_.size());  // after a join: no pass has begun since
  if (all == 0) return own_.kind != Kind::joined ? 1.0 / static_cast<double>(active) : 0;
  return static_cast<double>(own_.pass.samples) / static_cast<double>(all);
}

template <class Communicator>
void BatchShares<Communicator>::decide(std::span<const double> own) {
  decided_ = true;
  weight_ = weight_by_samples();
  scales_.assign(own.size(), 1);
  gather_losses(own);
  const auto me = static_cast<std::size_t>(communicator_.rank());
  const Loss* first = nullptr;
  bool alike = true;
  for (const Loss& loss : losses_) {
    if (loss.sum == 0) continue;  // it is 0, whatever its share
    if (first == nullptr) {
      first = &loss;
      continue;
    }
    for (std::size_t rank = 0; rank < all_.size(); ++rank)
      alike = alike && loss.of_rank[rank] * first->sum == first->of_rank[rank] * loss.sum;
  }
  if (first == nullptr) return;
  if (alike) {
    weight_ = first->of_rank[me] / first->sum;
    return;
  }
  for (std::size_t rank = 0; rank < all_.size(); ++rank)  // a rank that counts for a loss counts
    for (const Loss& loss : losses_)
      if (all_[rank].pass.samples == 0 && loss.of_rank[rank] > 0) weight_ = 1.0 / static_cast<double>(all_.size());
  for (std::size_t i = 0; i < scales_.size(); ++i)
    if (const double share = losses_[i].of_rank[me]; share > 0) scales_[i] = share / losses_[i].sum / weight_;
}

template <class Communicator>
void BatchShares<Communicator>::gather_losses(std::span<const double> own) {
  std::int32_t count = -1;
  bool same = true;
  for (const Message& rank : all_) {
    if (rank.kind == Kind::joined) continue;
    same = same && (count < 0 || rank.losses == count);
    count = rank.losses;
  }
  losses_.resize(same && count > 0 ? static_cast<std::size_t>(count) : 0);
  for (std::size_t i = 0; i < losses_.size(); ++i) {
    Loss& loss = losses_[i];
    loss.of_rank.resize(all_.size());
    if (i >= own_.mean_over.size())
      gather(i < own.size() ? own[i] : 0.0, loss.of_rank, of_recorded);
    else
      for (std::size_t rank = 0; rank < all_.size(); ++rank) loss.of_rank[rank] = all_[rank].mean_over[i];
    loss.sum = std::accumulate(loss.of_rank.begin(), loss.of_rank.end(), 0.0);
  }
}

}  // namespace chorus::detail
