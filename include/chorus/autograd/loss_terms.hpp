#pragma once
/// Finds the means and sums over the batch in a loss. Policies that split a batch weight each of them separately.

#include <chorus/autograd/node.hpp>
#include <chorus/core/config.hpp>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string_view>
#include <vector>

namespace chorus::detail {

/// The operation whose value already belongs to the global batch: see ops/global_batch.hpp.
inline constexpr const char* global_batch_name = "of_global_batch";

/// Advice for error messages, if a part's mean or sum is not enough.
inline constexpr const char* whole_batch_line =
    "the whole batch's mean or sum, which ch::of_global_batch(net, ch::mean(x)) is, and in the model "
    "ch::of_global_batch(ch::mean(x)) (#include <chorus/ops/global_batch.hpp>)";

/// A loss is correct on any number of devices if it is linear in means and sums over the batch. The gradient of each
/// part is then weighted by its share of the mean, or taken as it is for a sum. A nonlinear function of them, such as a
/// root, has another value on a part of the batch.
class LossTerms {
 public:
  /// The factor of a term as far as constants tell, and the divisors (numbers and tensors) in it. A sum may be divided
  /// by its own number of samples.
  struct Factor {
    double all = 1, numbers = 1, tensors = 1;
    bool by_number = false, by_tensor = false;
    Factor& operator*=(const Factor& other) {
      all *= other.all;
      numbers *= other.numbers;
      tensors *= other.tensors;
      by_number = by_number || other.by_number;
      by_tensor = by_tensor || other.by_tensor;
      return *this;
    }
    /// Whether the divisor of a sum of `count` elements may be the part's own count. The program computed a tensor from
    /// the part; a number may be the global batch's.
    bool may_be_own(double count) const {
      const double divisor = by_tensor ? tensors : numbers;
      return (by_tensor || (by_number && divisor == std::round(divisor))) && std::abs(divisor) <= count * (1 + 1e-12);
    }
  };
  /// A part of the loss that is proportional to one mean or sum.
  struct Term {
    Node* node;    ///< where its gradient is weighted
    Node* origin;  ///< the mean or the sum
    /// A sum of parameters and of values off the tape. It may be a penalty, which does not depend on the batch.
    bool may_be_penalty = false;
    Factor factor = {};
  };

  /// Finds the terms of `root` in an order that depends only on the operations. Operations inside of the model,
  /// recorded before sequence number `outside`, are not checked if they map samples to samples.
  void find(Node& root, std::uint64_t outside = std::numeric_limits<std::uint64_t>::max());

  const std::vector<Term>& all() const { return terms_; }
  /// Whether `root`, which was searched, is proportional to one term.
  bool is_one_term(const Node& root) const { return root.of_batch_ == reduced; }
  /// Whether the loss has other parts: parameters, constants.
  bool has_more() const { return has_more_; }
  /// The contribution of each term to the value of `root`. The rest of the value does not depend on the batch.
  std::vector<double> values(Node& root, double value) const;
  /// The operation that is not linear in a mean or a sum; null if there is none.
  const char* nonlinear() const { return nonlinear_; }
  /// Throws UsageError if there is one.
  void check_linear(std::string_view policy) const;
  /// An operation that multiplies a sum of terms by a tracked value. It is right only if all terms have equal weights.
  const char* needs_alike() const { return needs_alike_; }

 private:
  // How a value depends on the batch; cached in Node::of_batch_.
  enum Kind : std::uint8_t {
    unknown,
    parameters,  // not at all
    loose,       // on parameters and on values off the tape
    samples,     // has a value for each sample
    reduced,     // proportional to a mean or a sum
    mixed,       // a sum of such, maybe with terms that don't depend on the batch
    refused      // any other way
  };
  struct Inputs {
    Node* first = nullptr;
    int count = 0, reduced = 0;
    bool samples = false, loose = false, loose_rows = false, refused = false, mixed = false, first_reduced = false;
    Node* reduced_input = nullptr;
  };

  void settle(Node& root);
  Kind kind_of(const Node& node) const;
  static Inputs inputs_of(const Node& node);
  bool looks_through(const Node& node) const;
  void walk(Node& root);
  static Term term_of(Node& node);
  static Factor own_factor(const Node& node, const Inputs& in);
  void add(Node& node, const Factor& factor);

  // Marks in Node::visited_by_ of this search, which no backward run has as its number: of terms and of sums of terms;
  // found_ + 1: of a term's origin.
  std::uint64_t outside_ = 0, found_ = 0;
  std::vector<Term> terms_;
  struct Place {
    Node* node;
    Factor factor;
  };
  std::vector<Node*> stack_;
  std::vector<Place> places_;
  const char *nonlinear_ = nullptr, *needs_alike_ = nullptr;
  bool has_more_ = false;
};

}  // namespace chorus::detail

#if !CHORUS_COMPILED
#include <chorus/autograd/loss_terms_impl.hpp>
#endif
