#pragma once
/// Refuses operators that mix the places of a sample, which ranks share, or that take one rank's places for all.

#include <algorithm>
#include <array>
#include <chorus/autograd/operation_watch.hpp>
#include <chorus/core/error.hpp>
#include <chorus/core/shared_places.hpp>
#include <chorus/ops/shape.hpp>
#include <chorus/ops/softmax.hpp>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string_view>
#include <utility>
#include <vector>

namespace chorus::sequence {

/// Follows the values of one forward pass: those of this rank's tokens, and tables with a row for each of its places.
/// It keeps all of them in memory, so it watches only the first passes of a model.
class PlacesWatch final : public detail::OperationWatch {
 public:
  /// `in_parts`: a pipeline passes the tokens of some samples at a time from rank to rank: what has as many places as
  /// this rank is taken for tokens.
  PlacesWatch(const SharedPlaces& places, Index samples, bool in_parts)
      : places_(places), own_(places.own()), samples_(samples), in_parts_(in_parts) {}

  /// A part of an input: its first axes are samples and places.
  template <AnyTensor X>
  void add_input(const X& x) {
    kinds_[x.data()] = {Kind::tokens, std::make_shared<X>(x)};
  }

  void ended(const detail::WatchedOperation& operation) override {
    const std::string_view name = operation.name;
    const auto& out = operation.output;
    const auto is = [&](const auto& x, Kind kind) { return kind_of(x) == kind; };
    const auto count = [&](Kind kind) {
      return std::count_if(operation.inputs.begin(), operation.inputs.end(),
                           [&](const auto& x) { return is(x, kind); });
    };
    if (const auto tokens = count(Kind::tokens); tokens > 0) {
      check_tokens(operation, tokens);
      keep(out, Kind::tokens);
    } else if (name == "index_select" && !out.shape.empty() && is_merged(out.shape[0])) {
      keep(out, Kind::tokens);  // an embedding
    } else if (count(Kind::rows) > 0 || (name == "concat" && is_rows_of_places(operation))) {
      keep(out, Kind::rows);
    }
  }

 private:
  enum class Kind : std::uint8_t { other, rows, tokens };
  using Operation = detail::WatchedOperation;
  using Value = detail::WatchedTensor;

  Kind kind_of(const Value& x) const {
    const auto found = kinds_.find(x.data);
    if (found != kinds_.end()) return found->second.first;
    const bool like_tokens = x.shape.size() > 1 && x.shape[1] == own_ && x.shape[0] <= samples_;
    return in_parts_ && like_tokens ? Kind::tokens : Kind::other;
  }
  // Whether an axis holds samples, or the places of all samples.
  bool holds_samples(Index size) const { return in_parts_ ? size <= samples_ : size == samples_; }
  bool is_merged(Index size) const {
    return in_parts_ ? size % own_ == 0 && size <= samples_ * own_ : size == samples_ * own_;
  }
  void keep(const Value& x, Kind kind) {
    if (x.defined()) kinds_[x.data] = {kind, x.keep};
  }
  // See detail::rows_of_places.
  bool is_rows_of_places(const Operation& operation) const {
    const auto& in = operation.inputs;
    return in.size() == 2 && in[0].shape[0] == places_.runs()[0].count && in[1].shape[0] == places_.runs()[1].count;
  }
  // Whether the axis of a value of tokens holds places.
  bool holds_places(const std::vector<Index>& shape, std::size_t axis) const {
    if (axis == 0) return is_merged(shape[0]) && !holds_samples(shape[0]);
    const bool last = axis + 1 == shape.size();
    return shape[axis] == own_ && (!last || (shape.size() == 2 && holds_samples(shape[0])));
  }

  void check_tokens(const Operation& operation, std::ptrdiff_t tokens) const {
    constexpr std::array mixing{"batch_norm",
                                "batch_norm_relu",
                                "sync_batch_norm",
                                "group_norm",
                                "conv2d",
                                "avg_pool2d",
                                "conv_transpose2d",
                                "max_pool2d",
                                "avg_unpool2d",
                                "resample",
                                "pad2d",
                                "cumsum",
                                "cumprod",
                                "gather",
                                "index_select",
                                "index_add",
                                "scatter_add",
                                "scatter_reduce",
                                "put_slice",
                                "ctc_loss",
                                "fft",
                                "ifft",
                                "rfft",
                                "irfft",
                                "sort"};
    constexpr std::array reducing{"sum", "mean", "var", "amax", "amin", "logsumexp", "sum_to"};
    const std::string_view name = operation.name;
    const auto is_one_of = [&](const auto& names) {
      return std::find(names.begin(), names.end(), name) != names.end();
    };
    const Value& in = *std::find_if(operation.inputs.begin(), operation.inputs.end(),
                                    [&](const Value& x) { return kind_of(x) == Kind::tokens; });
    const auto axis_of = [&](Index axis) {
      return static_cast<std::size_t>(axis < 0 ? axis + static_cast<Index>(in.shape.size()) : axis);
    };
    const auto& out = operation.output.shape;
    bool mixes = is_one_of(mixing);
    if (name == "matmul") mixes = tokens > 1;
    if (name == "scaled_dot_product_attention") mixes = tokens < 3;  // keys that are no tokens, but as many
    if (name == "softmax") mixes = holds_places(in.shape, axis_of(facts<operations::Softmax>(operation).axis));
    if (name == "log_softmax") mixes = holds_places(in.shape, axis_of(facts<operations::LogSoftmax>(operation).axis));
    if (name == "slice") mixes = holds_places(in.shape, axis_of(facts<operations::Slice>(operation).axis));
    if (name == "concat") mixes = holds_places(in.shape, axis_of(facts<operations::Concat>(operation).axis));
    if (is_one_of(reducing) && !out.empty())  // a number is a loss: see SequenceParallel
      mixes = out[0] != in.shape[0] || (holds_samples(in.shape[0]) && in.shape.size() > 1 && in.shape[1] == own_ &&
                                        (out.size() < 2 || out[1] != own_));
    check<UsageError>(!mixes, "SequenceParallel: '", name, "' of shape ", in.shape,
                      " mixes the places of a sample, which ranks share: expected operators that treat each token by "
                      "itself, and scaled_dot_product_attention or layers that use it");
    for (const Value& x : operation.inputs) check_rows(name, x, out);
  }
  // A value with a row for each place, but not made for this rank's places.
  void check_rows(std::string_view name, const Value& x, const std::vector<Index>& out) const {
    if (kind_of(x) != Kind::other || own_ == 1 || name == "linear" || name == "matmul" || x.shape.size() > out.size())
      return;
    const std::size_t before = out.size() - x.shape.size();
    for (std::size_t axis = std::max<std::size_t>(before, 1); axis < out.size(); ++axis)
      check<UsageError>(!holds_places(out, axis) || x.shape[axis - before] != own_, "SequenceParallel: '", name,
                        "' of shape ", out, " takes a value of shape ", x.shape, " that may have a row for each of ",
                        own_,
                        " places, and this rank's places are others: expected positions from "
                        "nn::LearnedPositions, SinusoidalPositions or rotary_positions, or an input of the net");
  }
  template <class Facts>
  static const Facts& facts(const Operation& operation) {
    return *static_cast<const Facts*>(operation.facts);
  }

  const SharedPlaces& places_;
  Index own_, samples_;
  bool in_parts_;
  std::map<const void*, std::pair<Kind, std::shared_ptr<const void>>> kinds_;
};

}  // namespace chorus::sequence
