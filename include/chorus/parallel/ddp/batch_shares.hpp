#pragma once
/// Ranks tell each other the number of samples of a pass, and the means and sums in its loss. These give the weights of
/// their gradients.

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

/// A rank's message about a forward pass that records gradients.
struct ForwardPass {
  std::int64_t samples = 0;
  std::uint32_t number = 0;    ///< among this rank's passes
  bool sync = true;            ///< gradients will be averaged
  bool sends_buffers = false;  ///< rank 0's buffers go out
  bool changed = false;        ///< this rank wants gradients of other parameters than before
};

}  // namespace chorus::ddp

namespace chorus::detail {

/// Each rank sends one message when backward begins; earlier if random numbers or `join` need it.
template <class Communicator>
class BatchShares {
 public:
  explicit BatchShares(Communicator& communicator)
      : communicator_(communicator), all_(static_cast<std::size_t>(communicator.size())) {}

  /// Makes ranks compare their programs, too; `program` must live as long as this.
  void compare(ddp::Program& program) { program_ = &program; }
  /// All ranks meet outside a pass, as in eval(), if they exchanged messages since the last one; `meet_now`: always.
  void meet() {
    if (!met_) meet_now();
  }
  [[gnu::cold]] void meet_now();

  /// From now on ranks' gradients are added with that weight, by default as they are: each is a gradient of the mean
  /// over the whole batch already. 0: as `weigh` decides.
  void add_alike(double weight = 1) { given_weight_ = weight; }
  /// The number of samples of all ranks in the pass.
  std::int64_t batch();

  /// A forward pass of this rank begins. `now`: ranks exchange their messages here.
  void begin(const ddp::ForwardPass& pass, bool now = false);
  /// This rank has no more batches: it only joins the other ranks' collective calls.
  void begin_joined();
  /// A forward pass without gradients. Other ranks need not know of it, unless it `may_ask` and an operation asks for
  /// this rank's position in the batch: then ranks exchange messages. A backward pass after it belongs to the last pass
  /// given to `begin`.
  void begin_without_grad(const ddp::ForwardPass& pass, bool may_ask);

  /// Backward begins, from a loss that is made of these parts: all ranks call it. Returns a factor for the gradient of
  /// each part: multiplied by it and by this rank's `weight`, the gradient counts by its share of its mean, or fully if
  /// it is a sum's. Valid until the next call. Throws UsageError on all ranks if one has `refused` its loss, if ranks'
  /// losses are made of different parts, and for divisors of sums that can't be the whole batch's.
  std::span<const double> weigh(std::span<const LossShare> losses, bool refused = false);
  /// Whether each rank's `weight` applied to all parts of its loss.
  bool counted_alike() const { return alike_; }
  /// This rank's share of the batch, the weight of its gradient. The weights of all ranks sum to 1, also for an empty
  /// batch, so that averages of earlier passes are kept. Given by samples, until `weigh` replaces it.
  double weight();

  /// The index of this rank's first sample in the global batch: shares lie in rank order. In a pass without gradients
  /// that may not ask, all shares are assumed to be as large as this rank's.
  std::int64_t first_sample();
  /// After `first_sample`: whether some rank has that many samples.
  bool is_share(std::int64_t samples) const;
  /// After `first_sample`: the pass's number for all ranks. If a rank has had passes of its own, numbers differ, and
  /// the largest is used.
  std::uint32_t pass() const;

  /// Whether a pass was `changed` on any rank since the last call.
  bool take_changed();
  /// The ranks that have run out of batches, as text: "1, 3"; empty if there are none.
  [[gnu::cold]] std::string joined_ranks();
  /// The first rank that still has batches; its buffers and parameter order hold for all ranks. -1: none.
  int first_active();
  /// The argument of `begin` on that rank.
  ddp::ForwardPass active_pass();

 private:
  enum class Kind : std::uint8_t { recorded, aside, joined, meeting };
  struct Message {
    Kind kind = Kind::recorded;
    ddp::ForwardPass pass = {};
    bool at_backward = false;  // otherwise it is sent earlier, and again at backward
    std::int32_t numbers = 0;  // of losses; if there are more than fit here, a second message has them
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
  // Adds to an error of the communicator what the ranks were exchanging.
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
  // If all losses are divided in the same proportion, such as tokens of one text or samples, ranks are weighted by
  // these shares. Otherwise by samples, and each loss's gradient is scaled to count by its own share.
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
  std::vector<double> counted_;  // of sums with a divisor, in passes whose gradients accumulate
  std::vector<double> scales_;
  double given_weight_ = 0;  // see add_alike
  bool known_ = true;     // the ranks' messages of this pass
  bool decided_ = false;  // the ranks' weights
  bool alike_ = true;
  double weight_ = 1;
  bool changed_ = false, aside_ = false;
  std::int64_t first_aside_ = 0;
};

}  // namespace chorus::detail

#if CHORUS_DEFINES_COMMUNICATOR_TEMPLATES
#include <chorus/parallel/ddp/batch_shares_impl.hpp>
#endif
