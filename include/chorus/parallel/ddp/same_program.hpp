#pragma once
/// Ranks run the same program: their calls on the net since the last comparison are compared, and a difference is an
/// error on all ranks before a gradient is used.

#include <chorus/core/config.hpp>
#include <chorus/core/ledger.hpp>
#include <chorus/nn/module.hpp>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace chorus::ddp {

/// A rank's message about its program.
struct Said {
  std::int64_t batch = 0;              ///< see Ledger
  double lr = 0;                       ///< of the last step
  std::uint64_t numbers = 0;           ///< a hash of the numbers that all steps used
  std::int32_t passes = 0, steps = 0;  ///< since the last comparison
  std::int32_t most_steps = 0;         ///< the largest number of one optimizer's
  std::int32_t optimizers = 0;
  std::int32_t parameters_written = 0, buffers_written = 0;  ///< calls of `assign` and the like
  bool found_writes = false;                                 ///< through a pointer
  bool forgot = false;                                       ///< gradients, by zero_grad
  bool compares = true;                                      ///< false: differences are allowed
  bool together = false;                                     ///< not in a pass, but in eval(), gathered() or the like
};

/// The interface that ranks' comparisons use.
class Program {
 public:
  virtual Said say() = 0;
  /// Throws UsageError on every rank if ranks differ. `all`: by rank. A collective if they differ.
  virtual void compare(std::span<const Said> all) = 0;

 protected:
  ~Program() = default;
};

/// Which facts are equal on all ranks of a policy.
struct Alike {
  bool steps = true;           ///< optimizers step on each rank
  bool zero_grad = true;       ///< only the program drops gradients
  bool all_parameters = true;  ///< each rank has all parameters, hence as many optimizers
  bool contents = false;       ///< values are equal, so they can be compared
  bool rank_0_writes = false;  ///< only rank 0 writes; the others get its values
};

/// One rank's record. Parameters and buffers are those that ranks share; in a pipeline, those of all stages.
template <Device D, class Communicator>
class SameProgram final : public Program {
 public:
  using Parameters = std::vector<nn::NamedParameter<D>>;
  using Buffers = std::vector<nn::NamedBuffer<D>>;

  SameProgram(std::string_view policy, Communicator& communicator) : policy_(policy), communicator_(communicator) {}

  /// Starts recording the net's optimizers and loaders.
  [[gnu::cold]] void listen(Parameters parameters, Buffers buffers, const Alike& alike);
  Alike& alike() { return alike_; }
  const std::shared_ptr<Ledger>& ledger() const { return ledger_; }
  void let_ranks_differ() { compares_ = false; }
  /// Allows different numbers of steps on the ranks, as in a join.
  void forget(bool uneven) {
    ledger_->begin_anew();
    ledger_->uneven = ledger_->uneven || uneven;
    writes_ = count();
  }

  /// A whole number below 2^20, equal on ranks whose optimizers have made the same steps since the last comparison.
  double mark() const {
    if (!compares_ || !alike_.steps || !alike_.all_parameters) return 0;
    std::uint64_t all = 0;
    for (std::size_t i = 0; i < ledger_->optimizers(); ++i) all = Ledger::mixed(all, ledger_->steps(i).numbers);
    return static_cast<double>(all >> 44);
  }

  Said say() override;
  void compare(std::span<const Said> all) override;

  /// A separate comparison: all ranks begin a pass, or are `together` in another call.
  void compare_now(bool together);

 private:
  struct Writes {
    std::uint64_t parameters = 0, buffers = 0, found = 0, forgotten = 0;
  };
  // Parameters to which the program holds pointers are checked for changes.
  Writes count() const;

  bool same_as(const Said& a, const Said& b) const;

  [[gnu::cold]] void find_difference(std::span<const Said> all, const Said& first);
  [[gnu::cold]] static std::string place(std::int64_t batch);
  [[gnu::cold]] static std::uint64_t fingerprint(const ParameterOn<D>& parameter);
  [[noreturn, gnu::cold]] void refuse(const std::string& what) const;

  [[gnu::cold]] void compare_passes(const Said& said, std::size_t rank, const Said& first, std::size_t one) const;
  [[gnu::cold]] void compare_steps(const Said& said, std::size_t rank, const Said& first, std::size_t one) const;
  [[gnu::cold]] void compare_writes(const Said& said, std::size_t rank, const Said& first, std::size_t one) const;

  // Compares the values that have been written or may have been.
  [[gnu::cold]] void compare_contents(std::span<const Said> all);

  const std::string_view policy_;
  Communicator& communicator_;
  Parameters parameters_;
  Buffers buffers_;
  Alike alike_;
  std::shared_ptr<Ledger> ledger_ = std::make_shared<Ledger>();
  Writes writes_;  // at the last comparison
  bool compares_ = true;
  std::vector<Said> all_;
};

}  // namespace chorus::ddp

#if CHORUS_DEFINES_COMMUNICATOR_TEMPLATES
#include <chorus/parallel/ddp/same_program_impl.hpp>
#endif
