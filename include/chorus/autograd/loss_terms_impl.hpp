#pragma once
/// How the terms of a loss are found.

#include <algorithm>
#include <atomic>
#include <chorus/autograd/loss_terms.hpp>
#include <chorus/core/config.hpp>
#include <chorus/core/error.hpp>
#include <cmath>
#include <cstdint>
#include <string_view>
#include <utility>
#include <vector>

namespace chorus::detail {

CHORUS_INLINE void LossTerms::find(Node& root, std::uint64_t outside) {
  terms_.clear();
  nonlinear_ = needs_alike_ = nullptr;
  has_more_ = false;
  outside_ = outside;
  static std::atomic<std::uint64_t> searches{1};
  found_ = ~std::uint64_t{0} - 2 * searches.fetch_add(1, std::memory_order_relaxed);
  settle(root);
  walk(root);
}

CHORUS_INLINE void LossTerms::check_linear(std::string_view policy) const {
  check<UsageError>(nonlinear_ == nullptr, policy, ": the loss goes through '", nonlinear_,
                    "', which is not linear in a mean or a sum over the batch: a part of the batch gives a different "
                    "value. Expected sums of means and sums, times numbers, or ",
                    whole_batch_line);
}

CHORUS_INLINE bool LossTerms::looks_through(const Node& node) const {
  return !node.is_leaf() && std::string_view(node.operation()) != global_batch_name &&
         (node.is_scalar() || node.form() != Node::Form::other || node.sequence() >= outside_);
}

// Visits inputs before their users. Not recursive: a loss may be a sum of thousands of terms.
CHORUS_INLINE void LossTerms::settle(Node& root) {
  stack_.assign(1, &root);
  while (!stack_.empty()) {
    Node& node = *stack_.back();
    if (node.of_batch_ != unknown) {
      stack_.pop_back();
      continue;
    }
    const std::size_t before = stack_.size();
    if (looks_through(node))
      node.for_each_input(
          [](Node& input, void* stack) {
            if (input.of_batch_ == unknown) static_cast<std::vector<Node*>*>(stack)->push_back(&input);
          },
          &stack_);
    if (stack_.size() == before) {
      node.of_batch_ = kind_of(node);
      stack_.pop_back();
    }
  }
}

CHORUS_INLINE LossTerms::Inputs LossTerms::inputs_of(const Node& node) {
  Inputs inputs;
  node.for_each_input(
      [](Node& input, void* to) {
        auto& all = *static_cast<Inputs*>(to);
        const auto kind = static_cast<Kind>(input.of_batch_);
        const bool is_reduced = kind == reduced || kind == mixed;
        if (all.count++ == 0) all.first = &input, all.first_reduced = is_reduced;
        if (is_reduced) ++all.reduced, all.reduced_input = &input;
        all.samples = all.samples || kind == samples;
        all.loose = all.loose || kind == loose;
        all.loose_rows = all.loose_rows || (kind == loose && !input.is_scalar());
        all.mixed = all.mixed || kind == mixed;
        all.refused = all.refused || kind == refused;
      },
      &inputs);
  return inputs;
}

CHORUS_INLINE LossTerms::Kind LossTerms::kind_of(const Node& node) const {
  const Kind of_samples = node.may_be_of_data() ? samples : parameters;
  if (node.is_leaf()) return node.is_scalar() ? parameters : of_samples;
  if (std::string_view(node.operation()) == global_batch_name) return parameters;
  if (!looks_through(node)) return of_samples;
  const Inputs in = inputs_of(node);
  const bool reduces = node.is_mean() || node.is_sum();
  if (in.count == 0) return reduces ? reduced : node.is_scalar() && node.may_be_of_data() ? refused : of_samples;
  if (in.refused) return refused;
  if (in.reduced == 0) {
    if (in.samples) return reduces ? reduced : node.is_scalar() ? refused : samples;
    if (!in.loose && !node.has_loose_operand() && !node.may_be_of_data()) return parameters;
    if (reduces) return reduced;
    if (node.form() == Node::Form::other) return node.is_scalar() ? refused : of_samples;
    return loose;
  }
  if (in.samples || in.loose_rows) return refused;
  const Kind same = in.mixed ? mixed : reduced;
  const bool has_more = in.count > in.reduced || node.has_loose_operand();
  switch (node.form()) {
    case Node::Form::linear: {
      const std::string_view name = node.operation();
      const bool adds = name == "add" || name == "sub" || name == "rsub";
      return in.reduced > 1 || in.count > in.reduced || (adds && (in.count == 1 || has_more)) ? mixed : same;
    }
    case Node::Form::product:
      return in.reduced == 1 ? same : refused;
    case Node::Form::quotient:
      return in.reduced == 1 && in.first_reduced && !node.first_operand_is_loose() ? same : refused;
    default:
      return refused;
  }
}

// Walks from the root down to the terms.
CHORUS_INLINE void LossTerms::walk(Node& root) {
  places_.assign(1, {&root, {}});
  while (!places_.empty()) {
    const auto [node, factor] = places_.back();
    places_.pop_back();
    if (node->of_batch_ == reduced) add(*node, factor);
    if (node->of_batch_ != mixed && node->of_batch_ != refused) continue;
    if (std::exchange(node->visited_by_, found_) == found_) continue;
    const Inputs in = inputs_of(*node);
    if (node->of_batch_ == refused && !in.refused) {
      nonlinear_ = node->operation();
      return;
    }
    has_more_ = has_more_ || in.count == 1 || in.count > in.reduced || node->has_loose_operand();
    if (node->form() != Node::Form::linear && in.count > 1) needs_alike_ = node->operation();
    struct Next {
      std::vector<Place>& places;
      Factor factor;
    } next{places_, factor};
    next.factor *= own_factor(*node, in);
    node->for_each_input(
        [](Node& input, void* to) {
          const auto& all = *static_cast<Next*>(to);
          all.places.push_back({&input, all.factor});
        },
        &next);
  }
}

// For an operation with one reduced input: the constant factor, or the divisor. Tensor factors of the program are not
// counted.
CHORUS_INLINE LossTerms::Factor LossTerms::own_factor(const Node& node, const Inputs& in) {
  const std::string_view name = node.operation();
  const double number = node.operand_number();
  if (number != 0 && name == "mul") return {.all = number};
  if (name != "div" || in.count != 1) return {};
  if (number != 0) return {.all = 1 / number, .numbers = number, .by_number = true};
  const double before = in.first->number(), own = before == 0 ? 0 : node.number() / before;
  return {.all = own, .tensors = own == 0 ? 0 : 1 / own, .by_tensor = true};
}

CHORUS_INLINE std::vector<double> LossTerms::values(Node& root, double value) const {
  std::vector<double> out(terms_.size());
  if (root.of_batch_ == reduced) out.front() = value;
  if (root.of_batch_ != mixed || terms_.empty()) return out;
  struct Share {
    Node* node;
    double factor;
  };
  std::vector<Share> places{{&root, 1}};
  std::size_t at = 0;  // in terms_
  while (!places.empty()) {
    const auto [node, factor] = places.back();
    places.pop_back();
    if (node->of_batch_ == reduced) {
      // Terms come in the order in which they were found, except for repeated ones.
      const Node* const term = term_of(*node).node;
      std::size_t tried = 0;
      while (terms_[at].node != term && ++tried < terms_.size()) at = (at + 1) % terms_.size();
      if (terms_[at].node == term) out[at] += factor * node->number();
    }
    if (node->of_batch_ != mixed) continue;
    const std::string_view name = node->operation();
    const Inputs in = inputs_of(*node);
    double own = name == "rsub" || (name == "sub" && node->first_operand_is_loose()) ? -1 : own_factor(*node, in).all;
    if (name != "add" && name != "sub" && name != "rsub" && own == 1 && in.reduced_input->number() != 0)
      own = node->number() / in.reduced_input->number();
    struct Next {
      std::vector<Share>& places;
      double factor;
      bool subtracts;
    } next{places, factor * own, name == "sub"};
    node->for_each_input(
        [](Node& input, void* to) {
          auto& all = *static_cast<Next*>(to);
          all.places.push_back({&input, all.factor});
          if (all.subtracts) all.factor = -all.factor;
        },
        &next);
  }
  return out;
}

// A term is weighted at the last node that only it uses, so that a mean used twice is weighted once.
CHORUS_INLINE LossTerms::Term LossTerms::term_of(Node& node) {
  Term term{nullptr, &node};
  while (true) {
    Node& now = *term.origin;
    const Inputs in = inputs_of(now);
    if (in.reduced == 0) {
      term.may_be_penalty = now.is_sum() && in.count > 0 && !in.samples;
      break;
    }
    // The library's losses divide their own sum.
    if (now.is_loss() && in.reduced_input->is_sum() && inputs_of(*in.reduced_input).reduced == 0) break;
    if (term.node == nullptr && in.count > 1) term.node = &now;
    term.factor *= own_factor(now, in);
    term.origin = in.reduced_input;
  }
  if (term.node == nullptr) term.node = term.origin;
  return term;
}

CHORUS_INLINE void LossTerms::add(Node& node, const Factor& factor) {
  Term found = term_of(node);
  found.factor *= factor;
  if (found.node->visited_by_ == found_) return;
  const std::uint64_t as_origin = found_ + 1;
  if (found.origin->visited_by_ == found_ || found.origin->visited_by_ == as_origin) {  // of an earlier term
    const auto same = [&](const Term& term) { return term.origin == found.origin; };
    needs_alike_ = found.node == found.origin ? std::find_if(terms_.begin(), terms_.end(), same)->node->operation()
                                              : found.node->operation();
  } else {
    found.origin->visited_by_ = as_origin;
  }
  found.node->visited_by_ = found_;
  terms_.push_back(found);
}

}  // namespace chorus::detail
