#pragma once
/// How many samples each rank has in the current global batch.

#include <algorithm>
#include <chorus/comm/communicator.hpp>
#include <chorus/core/error.hpp>
#include <cstdint>
#include <numeric>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace chorus::detail {

/// What a rank says of a forward pass that records gradients.
struct ForwardPass {
  std::int64_t samples = 0;
  std::uint32_t number = 0;    ///< among this rank's passes
  bool sync = true;            ///< gradients will be averaged
  bool sends_buffers = false;  ///< rank 0's buffers go out
  bool changed = false;        ///< this rank wants gradients by other parameters than before
};

/// Each forward pass tells all ranks how many samples this one has: one number a rank.
template <class Communicator>
class BatchShares {
 public:
  /// `in_place`: the exchange is done when `begin` returns, else it is on its way meanwhile. On the CPU, where ranks
  /// begin their passes together, a message takes less time than waking the thread that would send it.
  BatchShares(Communicator& communicator, bool in_place)
      : communicator_(communicator), messages_(static_cast<std::size_t>(communicator.size())), in_place_(in_place) {}

  /// A forward pass of this rank begins.
  void begin(const ForwardPass& pass) {
    pass_ = pass.number;
    exchange(packed(pass.samples, pass.number) + (pass.changed ? 4 : 0) + (pass.sync ? 2 : 0) +
             (pass.sends_buffers ? 1 : 0));
  }
  /// A forward pass of which ranks tell each other when its weight is asked for, by all of them or by none.
  void begin_unasked(std::int64_t samples) {
    message_ = packed(samples, 0);
    unasked_ = true;
  }
  /// This rank has no more batches: it only keeps the others company.
  void begin_joined() { exchange(joined); }
  /// A forward pass without gradients. Nobody else needs to know of it, unless, where it `may_ask`, an operation wants
  /// to know this rank's place: then ranks tell each other. A backward pass behind it belongs to the last one that
  /// `begin` was called for.
  void begin_aside(std::int64_t samples, bool may_ask, std::uint32_t pass) {
    aside_ = true;
    pass_ = pass;
    first_aside_ = may_ask && communicator_.size() > 1 ? not_asked : communicator_.rank() * samples;
    of_aside_.clear();
    aside_message_ = packed(samples, pass);
  }

  void wait() {
    explaining(of_recorded, [&] { counting_.wait(); });
  }
  bool done() const { return counting_.done(); }

  /// The place of this rank's first sample in the global batch: the shares lie in the order of the ranks. In a pass
  /// without gradients that may not ask they are taken to be as large as this rank's.
  std::int64_t first_sample() {
    if (aside_) {
      if (first_aside_ == not_asked) first_aside_ = ask_aside();
      return first_aside_;
    }
    wait();
    std::int64_t first = 0;
    for (int rank = 0; rank < communicator_.rank(); ++rank) first += samples(rank);
    return first;
  }
  /// After `first_sample`: whether a rank has that many samples.
  bool is_share(std::int64_t samples) const {
    const auto& all = aside_ ? of_aside_ : messages_;
    return std::any_of(all.begin(), all.end(),
                       [&](std::int64_t message) { return message != joined && samples_in(message) == samples; });
  }
  /// After `first_sample`: the pass's number, of all ranks'. They differ where a rank has had passes of its own: the
  /// largest holds.
  std::uint32_t pass() const {
    std::int32_t ahead = 0;
    for (const auto message : aside_ ? of_aside_ : messages_)
      if (message != joined) {
        constexpr int unused = 32 - pass_bits;  // the difference of two numbers that may have begun anew at 0
        const auto difference = (static_cast<std::uint32_t>(message >> samples_end) - pass_) << unused;
        ahead = std::max(ahead, static_cast<std::int32_t>(difference) >> unused);
      }
    return pass_ + static_cast<std::uint32_t>(ahead);
  }
  /// This rank's part of the global batch: the weight of its mean gradient. Those of all ranks add up to 1, also where
  /// the batch is empty: what earlier passes have averaged stays.
  double weight() {
    if (unasked_) exchange(message_);
    wait();
    std::int64_t all = 0, active = 0;
    for (int rank = 0; rank < communicator_.size(); ++rank) {
      all += samples(rank);
      active += is_active(rank);
    }
    if (active == 0) return 1.0 / static_cast<double>(messages_.size());  // behind a join: no pass has begun since
    if (all == 0) return is_active(communicator_.rank()) ? 1.0 / static_cast<double>(active) : 0;
    return static_cast<double>(samples(communicator_.rank())) / static_cast<double>(all);
  }

  /// Whether `begin` was told of a change on any rank since this was asked last.
  bool take_changed() {
    wait();
    note_changed();
    return std::exchange(changed_, false);
  }

  /// The ranks that have run out of batches, as text: "1, 3"; empty where none has.
  [[gnu::cold]] std::string joined_ranks() {
    wait();
    std::string out;
    for (std::size_t rank = 0; rank < messages_.size(); ++rank)
      if (messages_[rank] == joined) out += cat(out.empty() ? "" : ", ", rank);
    return out;
  }
  /// The first rank that still has batches, whose buffers and order hold for all; -1: none.
  int first_active() {
    wait();
    for (std::size_t rank = 0; rank < messages_.size(); ++rank)
      if (messages_[rank] != joined) return static_cast<int>(rank);
    return -1;
  }
  /// What `begin` was told on the first active rank.
  bool sync() { return (of_first_active() & 2) != 0; }
  bool sends_buffers() { return (of_first_active() & 1) != 0; }

 private:
  static constexpr std::int64_t joined = -1, not_asked = -1;
  // Three flags, the samples, the last bits of the pass's number.
  static constexpr int samples_end = 35, pass_bits = 28;
  static std::int64_t packed(std::int64_t samples, std::uint32_t pass) {
    constexpr std::uint32_t last_bits = (std::uint32_t{1} << pass_bits) - 1;
    return std::int64_t{pass & last_bits} << samples_end | samples << 3;
  }
  static std::int64_t samples_in(std::int64_t message) {
    return (message & ((std::int64_t{1} << samples_end) - 1)) >> 3;
  }

  static constexpr std::string_view of_recorded =
      "; ranks tell each other their batch sizes as a forward pass that records gradients begins: all have to begin "
      "one";
  static constexpr std::string_view of_aside =
      "; ranks tell each other their batch sizes in a forward pass without gradients that draws random numbers: all "
      "have to be in one";

  // Calls `f()`; an error of the communicator says what ranks were about.
  template <class F>
  static void explaining(std::string_view about, const F& f) {
    try {
      f();
    } catch (const TimeoutError& error) {
      fail<TimeoutError>(error.what(), about);
    } catch (const CommError& error) {
      fail<CommError>(error.what(), about);
    }
  }

  void exchange(std::int64_t message) {
    wait();
    note_changed();
    aside_ = unasked_ = false;
    message_ = message;
    const std::span<const std::int64_t> mine(&message_, 1);
    const std::span<std::int64_t> all(messages_);
    if (communicator_.size() == 1)
      messages_[0] = message;
    else if (in_place_)
      explaining(of_recorded, [&] { communicator_.all_gather(mine, all, {}); });
    else
      counting_ = communicator_.all_gather_async(mine, all, {});
  }
  // These messages are below `joined`, which tells them from those of passes with gradients.
  [[gnu::cold]] std::int64_t ask_aside() {
    const std::int64_t mine = joined - 1 - aside_message_;
    std::vector<std::int64_t> all(messages_.size());
    explaining(of_aside, [&] { communicator_.all_gather(std::span(&mine, 1), std::span(all), {}); });
    std::int64_t first = 0;
    for (std::size_t rank = 0; rank < all.size(); ++rank) {
      check<UsageError>(all[rank] < joined, "rank ", communicator_.rank(),
                        " runs a forward pass without gradients, rank ", rank,
                        all[rank] == joined ? " has run out of batches" : " one that records them");
      all[rank] = joined - 1 - all[rank];
      if (rank < static_cast<std::size_t>(communicator_.rank())) first += samples_in(all[rank]);
    }
    of_aside_ = std::move(all);
    return first;
  }
  std::int64_t samples(int rank) const {
    const auto message = messages_[static_cast<std::size_t>(rank)];
    check<UsageError>(message >= joined, "rank ", communicator_.rank(),
                      " runs a forward pass that records gradients, rank ", rank, " one without");
    return message == joined ? 0 : samples_in(message);
  }
  void note_changed() {
    for (auto& message : messages_)
      if (message > joined && (message & 4) != 0) {
        changed_ = true;
        message &= ~std::int64_t{4};
      }
  }
  bool is_active(int rank) const { return messages_[static_cast<std::size_t>(rank)] != joined; }
  std::int64_t of_first_active() {
    const int rank = first_active();
    return rank < 0 ? 0 : messages_[static_cast<std::size_t>(rank)];
  }

  Communicator& communicator_;
  std::int64_t message_ = 0;
  std::vector<std::int64_t> messages_;  // of all ranks, once counting_ has ended
  bool in_place_, aside_ = false, changed_ = false, unasked_ = false;
  std::uint32_t pass_ = 0;
  std::int64_t aside_message_ = 0, first_aside_ = 0;
  std::vector<std::int64_t> of_aside_;  // of all ranks, where they have been asked
  comm::Work counting_;
};

}  // namespace chorus::detail
