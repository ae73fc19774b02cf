#pragma once
/// What ranks tell each other of a pass: how many samples each has, and of what means and sums its loss is made. By
/// that their gradients count.

#include <algorithm>
#include <array>
#include <chorus/autograd/node.hpp>
#include <chorus/comm/communicator.hpp>
#include <chorus/core/config.hpp>
#include <chorus/core/error.hpp>
#include <chorus/parallel/ddp/same_program.hpp>
#include <chorus/parallel/loss_share.hpp>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
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

  /// Ranks compare their programs, too; `program` has to live as long.
  void compare(ddp::Program& program) { program_ = &program; }
  /// All ranks meet in no pass, as in eval(), if they have exchanged a message since they met last; or in any case.
  void meet() {
    if (!met_) meet_now();
  }
  [[gnu::cold]] void meet_now();

  /// From now on ranks' gradients are added as they are: each is by the mean over the whole batch already.
  void add_as_they_are() { as_they_are_ = true; }
  /// How many samples all ranks have in the pass.
  std::int64_t batch();

  /// A forward pass of this rank begins. `now`: ranks wait for each other here.
  void begin(const ddp::ForwardPass& pass, bool now = false);
  /// This rank has no more batches: it only joins the others' collective calls.
  void begin_joined();
  /// A forward pass without gradients. Nobody else needs to know of it, unless, where it `may_ask`, an operation wants
  /// to know this rank's place: then ranks tell each other. A backward pass after it belongs to the last one that
  /// `begin` was called for.
  void begin_aside(const ddp::ForwardPass& pass, bool may_ask);

  /// Backward begins, from a loss that is made of these: all ranks call it. Returns what the gradient of each is to be
  /// multiplied by on its way, so that with this rank's `weight` it counts by its share of its mean, or as a sum's;
  /// good until the next call. Throws UsageError, on all ranks, where one has `refused` its loss, where ranks' losses
  /// are made of other parts, and for sums that are divided by what can't be of the whole batch.
  std::span<const double> weigh(std::span<const LossShare> losses, bool refused = false);
  /// Whether all parts of all ranks counted by their ranks' weights.
  bool counted_alike() const { return alike_; }
  /// This rank's share of the batch: the weight of its gradient. Those of all ranks add up to 1, also where the batch
  /// is empty: what earlier passes have averaged stays. By samples, until `weigh` knows better.
  double weight();

  /// The place of this rank's first sample in the global batch: the shares lie in the order of the ranks. In a pass
  /// without gradients that may not ask they are taken to be as large as this rank's.
  std::int64_t first_sample();
  /// After `first_sample`: whether a rank has that many samples.
  bool is_share(std::int64_t samples) const;
  /// After `first_sample`: the pass's number, of all ranks'. They differ where a rank has had passes of its own: the
  /// largest holds.
  std::uint32_t pass() const;

  /// Whether a pass has been `changed` on any rank since this was asked last.
  bool take_changed();
  /// The ranks that have run out of batches, as text: "1, 3"; empty where none has.
  [[gnu::cold]] std::string joined_ranks();
  /// The first rank that still has batches, whose buffers and order hold for all; -1: none.
  int first_active();
  /// What `begin` was told on that rank.
  ddp::ForwardPass active_pass();

 private:
  enum class Kind : std::uint8_t { recorded, aside, joined, meeting };
  struct Message {
    Kind kind = Kind::recorded;
    ddp::ForwardPass pass = {};
    bool at_backward = false;  // else it is said earlier, and will be said again
    std::int32_t numbers = 0;  // of losses; more of them than there is room for are told in a message of their own
    std::array<double, 4> losses{};
    ddp::Said said = {};
  };
  static constexpr std::int32_t has_refused = -1;
  static constexpr std::int64_t not_asked = -1;
  static constexpr std::string_view of_recorded =
      "; ranks exchange batch sizes when backward begins, or earlier in a forward pass that draws random numbers: all "
      "ranks must run a pass that records gradients";
  static constexpr std::string_view of_aside =
      "; ranks exchange batch sizes in a forward pass without gradients that draws random numbers: all ranks must run "
      "it";

  const std::vector<Message>& told() const { return aside_ ? all_aside_ : all_; }
  void begin_anew() { aside_ = known_ = decided_ = false; }
  void ask();
  void exchange();
  void compare_programs();
  [[gnu::cold]] std::int64_t ask_aside();
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
  std::int64_t samples_before(const std::vector<Message>& all) const;

  double weight_by_samples() const;
  // Where all losses are divided alike, as tokens of one text, or samples, are, ranks count by these shares. Else by
  // their samples, and each loss's gradient is scaled to count by its own share.
  void decide(std::size_t losses);
  // Fills `losses_`.
  void gather_losses();
  [[gnu::cold]] void gather_numbers();

  Communicator& communicator_;
  ddp::Program* program_ = nullptr;
  std::vector<ddp::Said> said_;
  bool met_ = true;
  Message own_, own_aside_;
  std::vector<Message> all_, all_aside_;
  std::vector<double> own_losses_, all_losses_;  // of the last `weigh`
  std::vector<LossShare> shares_;
  std::vector<WholeLoss> losses_;
  std::vector<std::int64_t> samples_;  // by rank
  std::vector<double> counted_;  // of sums with a divisor, in passes whose gradients are added up
  std::vector<double> scales_;
  bool as_they_are_ = false;
  bool known_ = true;     // what ranks say of this pass
  bool decided_ = false;  // their weights
  bool alike_ = true;
  double weight_ = 1;
  bool changed_ = false, aside_ = false;
  std::int64_t first_aside_ = 0;
};

}  // namespace chorus::detail

#if CHORUS_DEFINES_COMMUNICATOR_TEMPLATES
#include <chorus/parallel/ddp/batch_shares_impl.hpp>
#endif
