#pragma once
/// Of what means and sums over the batch a loss is made. Policies that divide a batch weigh each of them by itself.

#include <chorus/autograd/node.hpp>
#include <chorus/core/config.hpp>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string_view>
#include <vector>

namespace chorus::detail {

/// The operation whose value is the whole batch's already: see ops/global_batch.hpp.
inline constexpr const char* global_batch_name = "of_global_batch";

/// What to write where a part's mean or sum is not enough.
inline constexpr const char* whole_batch_line =
    "the whole batch's mean or sum, which ch::of_global_batch(net, ch::mean(x)) is, and in the model "
    "ch::of_global_batch(ch::mean(x)) (#include <chorus/ops/global_batch.hpp>)";

/// A loss is right on any number of devices where it is linear in means and sums over the batch: each part's gradient
/// then counts by its share of the mean, or as it is for a sum. What is not linear in them, such as a root, is another
/// number for a part of the batch.
class LossTerms {
 public:
  /// By which number a term is multiplied, as far as operations with numbers say, and by which numbers and tensors it
  /// is divided among them: of a sum, by its own number of samples?
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
    /// Whether what divides a sum of `count` numbers may be how many of them count. A tensor is one that the program
    /// has computed; a number may as well be the whole batch's.
    bool may_be_own(double count) const {
      const double divisor = by_tensor ? tensors : numbers;
      return (by_tensor || (by_number && divisor == std::round(divisor))) && std::abs(divisor) <= count * (1 + 1e-12);
    }
  };
  /// A part of the loss that is proportional to one mean or sum.
  struct Term {
    Node* node;    ///< where its gradient is to be weighed
    Node* origin;  ///< the mean or the sum
    /// A sum of parameters and of numbers that are not on the tape: it may be a penalty, which is no batch's.
    bool may_be_penalty = false;
    Factor factor = {};
  };

  /// Looks for those of `root`, in an order that depends on the operations alone. Of operations that were recorded
  /// before the number `outside`, in the model, those that make samples of samples are taken for granted.
  void find(Node& root, std::uint64_t outside = std::numeric_limits<std::uint64_t>::max());

  const std::vector<Term>& all() const { return terms_; }
  /// Whether `root`, in which they were found, is proportional to one of them.
  bool is_one_term(const Node& root) const { return root.of_batch_ == reduced; }
  /// Whether there is more in it: parameters, numbers.
  bool has_more() const { return has_more_; }
  /// What the terms give to the value of `root`, in which they were found: what is left of it is not of the batch.
  std::vector<double> values(Node& root, double value) const;
  /// The operation that is not linear in a mean or a sum; null where there is none.
  const char* nonlinear() const { return nonlinear_; }
  /// Throws UsageError where there is one.
  void check_linear(std::string_view policy) const;
  /// An operation that multiplies a sum of terms by what a gradient goes to: right where all count alike.
  const char* needs_alike() const { return needs_alike_; }

 private:
  // How a value depends on the batch; remembered in Node::of_batch_.
  enum Kind : std::uint8_t {
    unknown,
    parameters,  // not at all
    loose,       // it is of parameters and of numbers that are not on the tape
    samples,     // there are values of samples in it
    reduced,     // proportional to a mean or a sum
    mixed,       // a sum of such, perhaps with what is not of the batch
    refused      // in another way
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

  std::uint64_t outside_ = 0;
  std::vector<Term> terms_;
  struct Place {
    Node* node;
    Factor factor;
  };
  std::vector<Node*> stack_, seen_;
  std::vector<Place> places_;
  const char *nonlinear_ = nullptr, *needs_alike_ = nullptr;
  bool has_more_ = false;
};

}  // namespace chorus::detail

#if !CHORUS_COMPILED
#include <chorus/autograd/loss_terms_impl.hpp>
#endif
