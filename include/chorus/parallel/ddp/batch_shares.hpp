#pragma once
/// What ranks tell each other of a pass: how many samples each has, and what its losses are means over. By that their
/// gradients count.

#include <algorithm>
#include <array>
#include <chorus/autograd/node.hpp>
#include <chorus/comm/communicator.hpp>
#include <chorus/core/error.hpp>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace chorus::ddp {

/// What a rank says of a forward pass that records gradients.
struct ForwardPass {
  std::int64_t samples = 0;
  std::uint32_t number = 0;    ///< among this rank's passes
  bool sync = true;            ///< gradients will be averaged
  bool sends_buffers = false;  ///< rank 0's buffers go out
  bool changed = false;        ///< this rank wants gradients by other parameters than before
};

}  // namespace chorus::ddp

namespace chorus::detail {

/// One message a rank, when backward begins; before, where somebody has to know (random numbers, `join`).
template <class Communicator>
class BatchShares {
 public:
  explicit BatchShares(Communicator& communicator)
      : communicator_(communicator), all_(static_cast<std::size_t>(communicator.size())) {}

  /// From now on ranks' gradients are added as they are: each is by the mean over the whole batch already.
  void add_as_they_are() { as_they_are_ = true; }
  /// How many samples all ranks have in the pass.
  std::int64_t batch() {
    ask();
    std::int64_t samples = 0;
    for (const Message& rank : all_) samples += rank.pass.samples;
    return samples;
  }

  /// A forward pass of this rank begins. `now`: ranks wait for each other here.
  void begin(const ddp::ForwardPass& pass, bool now = false) {
    const bool changed = own_.pass.changed || pass.changed;
    own_ = {.kind = Kind::recorded, .pass = pass};
    own_.pass.changed = changed;
    begin_anew();
    if (now) ask();
  }
  /// This rank has no more batches: it only joins the others' collective calls.
  void begin_joined() {
    own_ = {.kind = Kind::joined};
    begin_anew();
    ask();
  }
  /// A forward pass without gradients. Nobody else needs to know of it, unless, where it `may_ask`, an operation wants
  /// to know this rank's place: then ranks tell each other. A backward pass after it belongs to the last one that
  /// `begin` was called for.
  void begin_aside(const ddp::ForwardPass& pass, bool may_ask) {
    aside_ = true;
    own_aside_ = {.kind = Kind::aside, .pass = pass};
    first_aside_ = may_ask && communicator_.size() > 1 ? not_asked : communicator_.rank() * pass.samples;
    all_aside_.clear();
  }

  /// Backward begins, from losses that are means over these numbers: all ranks call it. Returns what each loss's
  /// gradient is to be multiplied by on its way, so that with this rank's `weight` it counts by its share of its mean;
  /// good until the next call.
  std::span<const double> weigh(std::span<const double> mean_over) {
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
  /// This rank's share of the batch: the weight of its gradient. Those of all ranks add up to 1, also where the batch
  /// is empty: what earlier passes have averaged stays. By samples, until `weigh` knows better.
  double weight() {
    if (as_they_are_) return 1;
    ask();
    return decided_ ? weight_ : weight_by_samples();
  }

  /// The place of this rank's first sample in the global batch: the shares lie in the order of the ranks. In a pass
  /// without gradients that may not ask they are taken to be as large as this rank's.
  std::int64_t first_sample() {
    if (!aside_) {
      ask();
      return samples_before(all_);
    }
    if (first_aside_ == not_asked) first_aside_ = ask_aside();
    return first_aside_;
  }
  /// After `first_sample`: whether a rank has that many samples.
  bool is_share(std::int64_t samples) const {
    return std::any_of(told().begin(), told().end(),
                       [&](const Message& rank) { return rank.kind != Kind::joined && rank.pass.samples == samples; });
  }
  /// After `first_sample`: the pass's number, of all ranks'. They differ where a rank has had passes of its own: the
  /// largest holds.
  std::uint32_t pass() const {
    const std::uint32_t own = (aside_ ? own_aside_ : own_).pass.number;
    std::int32_t ahead = 0;  // numbers may have begun anew at 0
    for (const Message& rank : told())
      if (rank.kind != Kind::joined) ahead = std::max(ahead, static_cast<std::int32_t>(rank.pass.number - own));
    return own + static_cast<std::uint32_t>(ahead);
  }

  /// Whether a pass has been `changed` on any rank since this was asked last.
  bool take_changed() {
    ask();
    return std::exchange(changed_, false);
  }
  /// The ranks that have run out of batches, as text: "1, 3"; empty where none has.
  [[gnu::cold]] std::string joined_ranks() {
    ask();
    std::string out;
    for (std::size_t rank = 0; rank < all_.size(); ++rank)
      if (all_[rank].kind == Kind::joined) out += cat(out.empty() ? "" : ", ", rank);
    return out;
  }
  /// The first rank that still has batches, whose buffers and order hold for all; -1: none.
  int first_active() {
    ask();
    for (std::size_t rank = 0; rank < all_.size(); ++rank)
      if (all_[rank].kind != Kind::joined) return static_cast<int>(rank);
    return -1;
  }
  /// What `begin` was told on that rank.
  ddp::ForwardPass active_pass() {
    const int rank = first_active();
    return rank < 0 ? ddp::ForwardPass{.sync = false} : all_[static_cast<std::size_t>(rank)].pass;
  }

 private:
  enum class Kind : std::uint8_t { recorded, aside, joined };
  struct Message {
    Kind kind = Kind::recorded;
    ddp::ForwardPass pass = {};
    bool at_backward = false;  // else it is said earlier, and will be said again
    std::int32_t losses = 0;   // more of them than there is room for are told in a message of their own
    std::array<double, 4> mean_over{};
  };
  struct Loss {
    std::vector<double> of_rank;  // what each rank's is a mean over
    double sum = 0;
  };
  static constexpr std::int64_t not_asked = -1;
  static constexpr std::string_view of_recorded =
      "; ranks tell each other their batch sizes as backward begins, and before where a forward pass draws random "
      "numbers: all have to be in one that records gradients";
  static constexpr std::string_view of_aside =
      "; ranks tell each other their batch sizes in a forward pass without gradients that draws random numbers: all "
      "have to be in one";

  const std::vector<Message>& told() const { return aside_ ? all_aside_ : all_; }
  void begin_anew() { aside_ = known_ = decided_ = false; }
  void ask() {
    if (!std::exchange(known_, true)) exchange();
  }
  void exchange() {
    known_ = true;
    gather(own_, all_, of_recorded);
    for (std::size_t rank = 0; rank < all_.size(); ++rank) {
      check<UsageError>(all_[rank].kind != Kind::aside, "rank ", communicator_.rank(),
                        " runs a forward pass that records gradients, rank ", rank, " one without");
      changed_ = changed_ || all_[rank].pass.changed;
    }
    own_.pass.changed = false;
  }
  [[gnu::cold]] std::int64_t ask_aside() {
    std::vector<Message> all(all_.size());
    gather(own_aside_, all, of_aside);
    for (std::size_t rank = 0; rank < all.size(); ++rank)
      check<UsageError>(all[rank].kind == Kind::aside, "rank ", communicator_.rank(),
                        " runs a forward pass without gradients, rank ", rank,
                        all[rank].kind == Kind::joined ? " has run out of batches" : " one that records them");
    all_aside_ = std::move(all);
    return samples_before(all_aside_);
  }
  // An error of the communicator says what ranks were about.
  template <class T>
  void gather(const T& own, std::vector<T>& all, std::string_view about) {
    if (communicator_.size() == 1) {
      all[0] = own;
      return;
    }
    try {
      communicator_.all_gather(std::span(reinterpret_cast<const std::uint8_t*>(&own), sizeof own),
                               std::span(reinterpret_cast<std::uint8_t*>(all.data()), sizeof own * all.size()), {});
    } catch (const TimeoutError& error) {
      fail<TimeoutError>(error.what(), about);
    } catch (const CommError& error) {
      fail<CommError>(error.what(), about);
    }
  }
  std::int64_t samples_before(const std::vector<Message>& all) const {
    std::int64_t first = 0;
    for (int rank = 0; rank < communicator_.rank(); ++rank) first += all[static_cast<std::size_t>(rank)].pass.samples;
    return first;
  }

  double weight_by_samples() const {
    std::int64_t all = 0, active = 0;
    for (const Message& rank : all_) {
      all += rank.pass.samples;
      active += rank.kind != Kind::joined;
    }
    if (active == 0) return 1.0 / static_cast<double>(all_.size());  // after a join: no pass has begun since
    if (all == 0) return own_.kind != Kind::joined ? 1.0 / static_cast<double>(active) : 0;
    return static_cast<double>(own_.pass.samples) / static_cast<double>(all);
  }
  // Where all losses are divided alike, as tokens of one text, or samples, are, ranks count by these shares. Else by
  // their samples, and each loss's gradient is scaled to count by its own share.
  void decide(std::span<const double> own) {
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
  // Fills `losses_`; with none where ranks have different numbers of losses: they are not the same ones.
  void gather_losses(std::span<const double> own) {
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

  Communicator& communicator_;
  Message own_, own_aside_;
  std::vector<Message> all_, all_aside_;
  std::vector<Loss> losses_;  // of the last `weigh`
  std::vector<double> scales_;
  bool as_they_are_ = false;
  bool known_ = true;     // what ranks say of this pass
  bool decided_ = false;  // their weights
  double weight_ = 1;
  bool changed_ = false, aside_ = false;
  std::int64_t first_aside_ = 0;
};

}  // namespace chorus::detail
