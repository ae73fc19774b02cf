#pragma once
/// Adds up the gradients of a pipeline's micro-batches, which are canonical shares, in the order of the tree.

#include <algorithm>
#include <bit>
#include <chorus/comm/any_communicator.hpp>
#include <chorus/kernels/copy.hpp>
#include <chorus/parallel/ddp/with_type.hpp>
#include <chorus/parallel/pipeline/pass_node.hpp>
#include <chorus/parallel/pipeline/tied.hpp>
#include <chorus/same_bits/batch_cut.hpp>
#include <chorus/same_bits/earlier_gradients.hpp>
#include <chorus/same_bits/gradient_tree.hpp>
#include <chorus/same_bits/micro_batch_losses.hpp>
#include <chorus/same_bits/model_shares.hpp>
#include <chorus/same_bits/share_buffers.hpp>
#include <chorus/same_bits/share_scope.hpp>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <span>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

namespace chorus::same_bits {

/// A parameter that two stages have, maybe on one rank.
template <Device D>
struct SharedByStages {
  const Node* parameter;
  int first, last;               ///< the stages
  comm::AnyCommunicator* group;  ///< of their ranks; null for one rank
  bool has_first;                ///< whether this rank has the first stage
};

/// What all passes of a rank's stages use.
template <Device D>
struct StageSums {
  const nn::FlatParameters<D>& flat;
  ShareBuffers<D> buffers;
  GradientTree<D> tree;
  std::shared_ptr<Processes> processes;
  EarlierGradients<D> earlier = {};
  std::vector<SharedByStages<D>> shared = {};  ///< those of this rank
  std::uint64_t passes = 0;                    ///< the number of passes whose gradients the tree has added up
  std::function<void(Node&)> arrived = {};     ///< see ModelShares
  std::function<void()> ended = {};
};

/// The node of a pass whose result is the model's output.
template <Real T, int Rank, Device D>
class CutPassNode final : public pipeline::PassNode<T, Rank, D>, public CutNode {
 public:
  using Base = pipeline::PassNode<T, Rank, D>;
  CutPassNode(const Tensor<T, Rank, D>& value, std::vector<Ref<Node>> leaves, typename Base::Back back,
              std::shared_ptr<const BatchCut> batch_cut)
      : Base(value, std::move(leaves), std::move(back)), CutNode(std::move(batch_cut)) {}
};

/// One pass: has the members of pipeline::PassGradients. Gradients are in the parameters' own places while backward
/// runs. If the model returns its loss, backward runs within forward; then they are put aside until the user's backward
/// asks for them.
template <Device D>
class MicroBatchSums {
 public:
  /// `of_stages` must outlive calls. `in_order`: in each stage micro-batches go backward in the order of the shares.
  MicroBatchSums(StageSums<D>& of_stages, std::shared_ptr<const BatchCut> batch_cut, std::size_t micro_batches,
                 bool writes_buffers, bool in_order)
      : stages_(of_stages), cut_(std::move(batch_cut)), losses_(cut_), in_order_(in_order) {
    stages_.buffers.begin_pass(micro_batches, writes_buffers);
    for (const auto& entry : stages_.flat.entries())
      if (entry.parameter().wants_grad()) leaves_.insert(entry.named.handle.shared().get());
  }
  /// If an exception has ended the pass, earlier gradients return.
  ~MicroBatchSums() {
    if (!in_forward_) return;
    forget();
    stages_.earlier.give_back();
  }
  MicroBatchSums(const MicroBatchSums&) = delete;
  MicroBatchSums& operator=(const MicroBatchSums&) = delete;

  class ForwardScope {
   public:
    ForwardScope(ShareBuffers<D>& buffers, std::size_t share, std::size_t shares)
        : buffers_(buffers), share_(share), part_(shares) {
      buffers_.enter(share_);
    }
    ~ForwardScope() { buffers_.leave(share_); }
    ForwardScope(const ForwardScope&) = delete;
    ForwardScope& operator=(const ForwardScope&) = delete;

   private:
    ShareBuffers<D>& buffers_;
    std::size_t share_;
    PartScope part_;
  };
  ForwardScope forward_scope(int micro_batch) const {
    return ForwardScope(stages_.buffers, static_cast<std::size_t>(micro_batch), cut_->shares());
  }
  int backward_scope() const { return 0; }
  void forward_ended() { stages_.buffers.end_pass(); }

  const std::unordered_set<const Node*>& leaves() const { return leaves_; }
  MicroBatchLosses& weights() { return losses_; }
  template <class Loss>
  double weigh(const Loss& loss, int micro_batch, Index samples) {
    return losses_.add(loss, static_cast<std::size_t>(micro_batch), samples);
  }

  void begin_backward(bool in_forward) {
    const Index batch = in_forward ? batch_in_forward() : batch_in_backward();
    losses_.begin(batch);
    const auto used = static_cast<std::size_t>(std::min<Index>(batch, static_cast<Index>(cut_->shares())));
    const ShareRange run{std::min(cut_->run().begin, used), std::min(cut_->run().end, used)};
    stages_.earlier.take(stages_.flat);
    in_forward_ = kept_apart_ = in_forward;
    stages_.tree.begin(run, used);
    pass_ = ++stages_.passes;
    complete_.assign(stages_.flat.entries().size(), false);
    early_.assign(run.count(), {});
  }
  /// One device adds up a share's gradients of a parameter from the last use to the first: so the last stage's goes to
  /// the first stage, which adds its own to it.
  void last_gradients_begin(int stage, int) {
    if (early_.empty()) return;  // no samples
    for (const auto& shared : stages_.shared) {
      if (shared.first != stage) continue;
      auto& p = parameter(entry_of(shared));
      std::uint8_t any = 0;
      if (shared.group != nullptr) {
        shared.group->recv(std::span(&any, 1), peer(shared));
        if (any != 0) shared.group->recv(bytes_at(p.grad_place(), p), peer(shared), gradients);
      } else {
        const auto from = std::exchange(handed_over_[shared.parameter], {});
        any = from.bytes() > 0;
        if (any != 0) copy_bytes(p.where(), p.grad_place(), p.where(), from.data(), p.size_bytes());
      }
      if (any != 0) p.set_grad_arrived(true);
    }
  }
  void gradients_arrived(int stage, int micro_batch, bool last) {
    if (early_.empty()) return;
    for (const auto& shared : stages_.shared) {
      auto& p = parameter(entry_of(shared));
      check<UsageError>(last || !p.grad_arrived(), "Pipeline: SameBits: stages share '",
                        shared.parameter->numbers_name(),
                        "', and only a part of its gradients is deferred: expected a schedule that defers none");
      if (shared.last == stage && last) hand_over(shared, p);
    }
    const auto share = static_cast<std::size_t>(micro_batch);
    for (std::size_t i = 0; i < complete_.size(); ++i) {
      auto& p = parameter(i);
      if (!p.grad_arrived()) continue;
      if (in_order_)
        take(i, share, p.grad_place());
      else
        early_[share].push_back({i, copy_of(p)});
      p.set_grad_arrived(false);
    }
  }
  void end_backward(pipeline::TiedParameters<D>&) {
    for (std::size_t share = 0; share < early_.size(); ++share)
      for (const Gradient& early : std::exchange(early_[share], {})) take(early.entry, share, early.numbers.data());
    if (!early_.empty()) stages_.tree.end_share(early_.size() - 1, [](std::size_t) {});
    for (std::size_t i = 0; i < complete_.size(); ++i)
      if (complete_[i]) parameter(i).set_grad_arrived(true);
    if (!early_.empty()) share_sums();
    if (!kept_apart_) return;
    const MemoryScope memory(trace::Memory::gradients);
    for (std::size_t i = 0; i < complete_.size(); ++i)
      if (parameter(i).grad_arrived()) kept_.push_back({i, copy_of(parameter(i))});
    forget();
    in_forward_ = false;
    stages_.earlier.give_back();
  }
  void add_to_parameters(double scale) {
    if (kept_apart_) take_back(scale);
    std::vector<Node*> leaves;
    for (std::size_t i = 0; i < complete_.size(); ++i)
      if (parameter(i).grad_arrived()) leaves.push_back(stages_.flat.entries()[i].named.handle.shared().get());
    if (stages_.arrived)
      for (Node* const leaf : leaves) stages_.arrived(*leaf);
    if (const auto ended = std::exchange(stages_.ended, nullptr)) ended();
    stages_.earlier.give_back();
    for (Node* const leaf : leaves) leaf->set_reached();
  }

  template <bool GivesLoss, Real T, int Rank>
  auto node(const Tensor<T, Rank, D>& value, typename pipeline::PassNode<T, Rank, D>::Back back) const {
    std::vector<Ref<Node>> nodes;
    for (const auto& entry : stages_.flat.entries())
      if (entry.parameter().wants_grad()) nodes.push_back(entry.named.handle.shared());
    using Pass = pipeline::PassNode<T, Rank, D>;
    if constexpr (GivesLoss)
      return Ref<Pass>(new Pass(value, std::move(nodes), std::move(back)));
    else
      return Ref<Pass>(new CutPassNode<T, Rank, D>(value, std::move(nodes), std::move(back), cut_));
  }

 private:
  struct Gradient {
    std::size_t entry;
    Storage<D> numbers;
  };

  /// On its way to another rank.
  struct Message {
    std::uint8_t any;
    Storage<D> numbers;
    comm::Work head, body;
  };
  static constexpr comm::CollectiveOptions gradients{.traffic = trace::Traffic::gradients};

  std::size_t entry_of(const SharedByStages<D>& shared) const { return *stages_.tree.entry_of(*shared.parameter); }
  static int peer(const SharedByStages<D>& shared) { return 1 - shared.group->rank(); }
  static std::span<std::uint8_t> bytes_at(void* numbers, const ParameterOn<D>& p) {
    return {static_cast<std::uint8_t*>(numbers), p.size_bytes()};
  }
  void hand_over(const SharedByStages<D>& shared, ParameterOn<D>& p) {
    Storage<D> numbers = p.grad_arrived() ? copy_of(p) : Storage<D>();
    p.set_grad_arrived(false);
    if (shared.group == nullptr) {
      handed_over_[shared.parameter] = std::move(numbers);
      return;
    }
    auto& message = on_their_way_.emplace_back();
    message.any = numbers.bytes() > 0;
    message.numbers = std::move(numbers);
    message.head = shared.group->send_async(std::span(&message.any, 1), peer(shared));
    if (message.any != 0)
      message.body = shared.group->send_async(bytes_at(message.numbers.data(), p), peer(shared), gradients);
  }
  // Both stages' ranks step with the first one's sums.
  void share_sums() {
    for (Message& message : on_their_way_) {
      message.head.wait();
      if (message.any != 0) message.body.wait();
    }
    on_their_way_.clear();
    for (const auto& shared : stages_.shared) {
      if (shared.group == nullptr) continue;
      const std::size_t i = entry_of(shared);
      auto& p = parameter(i);
      const int root = shared.has_first ? shared.group->rank() : peer(shared);
      std::uint8_t any = p.grad_arrived();
      shared.group->broadcast(std::span(&any, 1), root, {});
      const auto& entry = stages_.flat.entries()[i];
      for (std::size_t k = 0; k < stages_.tree.sums().size() && any != 0; ++k)
        shared.group->broadcast(bytes_at(stages_.tree.sum(k, entry.group, entry.begin), p), root, gradients);
      p.set_grad_arrived(any != 0);
    }
  }

  ParameterOn<D>& parameter(std::size_t i) const { return stages_.flat.entries()[i].parameter(); }
  static Storage<D> copy_of(const ParameterOn<D>& p) {
    Storage<D> copy(p.where(), p.size_bytes());
    copy_bytes(p.where(), copy.data(), p.where(), p.grad_place(), p.size_bytes());
    return copy;
  }
  Index batch_in_forward() const {
    auto samples = static_cast<double>(cut_->samples());
    if (const auto& sum = stages_.processes->sum) sum({&samples, 1});
    return static_cast<Index>(samples);
  }
  Index batch_in_backward() const {
    const auto& batch = stages_.processes->batch;
    return batch ? batch() : cut_->samples();
  }
  void take(std::size_t i, std::size_t share, const void* gradient) {
    stages_.tree.gradient_arrived(i, share, gradient);
    complete_[i] = stages_.tree.is_last(share);
    parameter(i).set_grad_arrived(false);
  }
  void forget() {
    for (std::size_t i = 0; i < stages_.flat.entries().size(); ++i) parameter(i).set_grad_arrived(false);
  }
  // The pass's gradients become the parameters'. Other numbers than powers of two would be rounded in another place
  // than on one device, whose backward begins with them.
  void take_back(double scale) {
    const bool power_of_two = std::isfinite(scale) && scale != 0 && std::bit_cast<std::uint64_t>(scale) << 12 == 0;
    check<UsageError>(power_of_two,
                      "Pipeline: SameBits: the model returns its loss, whose gradients are computed before backward: "
                      "expected backward of the loss times a power of two, got ",
                      scale, ": scale within the model, or return its output");
    check<UsageError>(!stages_.arrived || pass_ == stages_.passes,
                      "Mesh: SameBits: backward of a loss that the model returned before the last pass: expected "
                      "backward before the next forward pass");
    if (stages_.arrived) batch_in_backward();  // a collective
    stages_.earlier.take(stages_.flat);
    for (const auto& [i, numbers] : kept_) {
      auto& p = parameter(i);
      copy_bytes(p.where(), p.grad_place(), p.where(), numbers.data(), p.size_bytes());
      multiply(p.where(), p.dtype(), p.count(), scale, p.grad_place());
      p.set_grad_arrived(true);
    }
    const auto& groups = stages_.flat.groups();  // other sums than the last are in the tree's copies
    for (std::size_t k = 0; k + 1 < stages_.tree.sums().size(); ++k)
      for (std::size_t g = 0; g < groups.size(); ++g)
        multiply(groups[g].grads.device(), groups[g].dtype, static_cast<Index>(groups[g].count), scale / scaled_by_,
                 stages_.tree.sum(k, g, 0));
    scaled_by_ = scale;
  }
  static void multiply(D device, DType dtype, Index count, double factor, void* numbers) {
    if (factor == 1) return;
    ddp::with_type(dtype, static_cast<std::byte*>(numbers),
                   [&]<class T>(T* to) { kernels::scale(device, count, static_cast<T>(factor), to); });
  }

  StageSums<D>& stages_;
  std::shared_ptr<const BatchCut> cut_;
  MicroBatchLosses losses_;
  std::unordered_set<const Node*> leaves_;
  bool in_order_, in_forward_ = false, kept_apart_ = false;
  std::uint64_t pass_ = 0;
  std::vector<char> complete_;                // by entry
  std::vector<std::vector<Gradient>> early_;  // by share with samples: unless in_order_, all gradients wait here
  std::vector<Gradient> kept_;
  std::deque<Message> on_their_way_;
  std::unordered_map<const Node*, Storage<D>> handed_over_;  // from one stage of this rank to another
  double scaled_by_ = 1;
};

}  // namespace chorus::same_bits
