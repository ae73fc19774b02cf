#pragma once
/// Common part of DistributedDataParallel, FullyShardedDataParallel and ParameterServer for SameBits: each rank
/// computes its run of the shares, and the sums of all runs are added up in the order of the tree.

#include <chorus/autograd/tape.hpp>
#include <chorus/parallel/distributed_policy.hpp>
#include <chorus/same_bits/bucket_sums.hpp>
#include <chorus/same_bits/checked_shares.hpp>
#include <chorus/same_bits/model.hpp>
#include <chorus/same_bits/model_shares.hpp>
#include <chorus/same_bits/sums_of_ranks.hpp>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

namespace chorus {

struct ReduceScatter;
template <class Communicator>
struct HybridReduceScatter;
namespace ddp {
template <Device D, class Hook, class Communicator>
class Reducer;
}  // namespace ddp
namespace same_bits {
/// Whether each rank of a DistributedDataParallel gets averages of its part only.
template <class OfRanks>
inline constexpr bool averages_in_parts = false;
template <Device D, class Communicator>
inline constexpr bool averages_in_parts<ddp::Reducer<D, ReduceScatter, Communicator>> = true;
template <Device D, class Shards, class Communicator>
inline constexpr bool averages_in_parts<ddp::Reducer<D, HybridReduceScatter<Shards>, Communicator>> = true;
}  // namespace same_bits

template <class Model, int Shares, class Communicator, class OfRanks>
class DistributedPolicy<SameBits<Model, Shares>, Communicator, OfRanks> : public Policy<Model, OfRanks> {
  using Base = Policy<Model, OfRanks>;

 public:
  using typename Base::D;
  static constexpr bool adds_up_in_pass = true;

  int canonical_shares() const { return static_cast<int>(canonical_.shares()); }
  /// A sampler of whole shares.
  template <class Dataset>
  data::Sampler sampler(const Dataset& dataset, const SamplingOptions& options = {}) const {
    auto choices = this->sampler_options(options);
    choices.shares = canonical_shares();
    return data::Sampler(dataset.size(), choices);
  }

 protected:
  template <class... Arguments>
  explicit DistributedPolicy(SameBits<Model, Shares> model, Arguments&&... arguments)
      : Base(std::move(model.model()), std::forward<Arguments>(arguments)...),
        canonical_(this->model_, this->flat_, this->buffers_, this->alive(),
                   same_bits::checked_shares(model.shares(), this->devices(), this->random_.dim),
                   this->communicator_.rank(), this->devices(),
                   {.sum = [this](std::span<double> values) { this->sum(values); },
                    .batch =
                        [this] {
                          this->weigh_unless_weighed(/*refuses_sums=*/false);
                          // Another forward pass of the same backward run has a pass of its own.
                          if (std::exchange(last_run_, backward_run()) == backward_run()) this->backward_is_weighed();
                          return this->shares_.batch();
                        }}) {
    this->whole_passes_ = true;
    this->shares_.add_alike();
  }

  DistributedPolicy(std::string_view title, SameBits<Model, Shares> model, Communicator& communicator, int dim,
                    std::uint64_t seed)
      : DistributedPolicy(std::move(model), title, communicator, dim, seed) {}

  /// Returns the model's output for the inputs, computed in shares.
  template <class... Inputs>
  auto call_model(const Inputs&... inputs) {
    return same_bits::forward(canonical_, this->model_, this->random_, this->on_model_device(inputs)...);
  }

  std::string own_options() const override { return cat("SameBits of ", canonical_shares(), " shares\n"); }

  // The parameters' own hooks run later, with the gradient of the whole batch.
  void on_gradients(std::function<void(std::size_t)> f) override {
    std::unordered_map<const Node*, std::size_t> numbers;
    for (const auto& entry : this->flat_.entries())
      numbers.emplace(entry.named.handle.shared().get(), numbers.size());
    canonical_.on_gradients([f = std::move(f), numbers = std::move(numbers)](Node& leaf) { f(numbers.at(&leaf)); });
  }
  void when_backward_ends(std::function<void()> f) override { canonical_.when_backward_ends(std::move(f)); }

  /// Replaces the hook in summing the ranks' sums. Throws UsageError for options that look at one rank's gradients.
  std::unique_ptr<ddp::BucketSums> bucket_sums(ddp::Core<D, Communicator>& core, bool default_hook) override {
    Communicator *shards = nullptr, *replicas = nullptr;
    constexpr bool in_parts = same_bits::averages_in_parts<OfRanks>;
    if constexpr (in_parts) {
      shards = &core.ranks;
      if constexpr (requires { this->hook().replicas; }) {
        shards = this->hook().shards;
        replicas = this->hook().replicas;
      }
    }
    check<UsageError>(default_hook || in_parts,
                      "DistributedDataParallel: SameBits adds gradients up itself: expected the default hook, "
                      "AllReduce, or ReduceScatter");
    check<UsageError>(!in_parts || std::is_same_v<D, Cpu>,
                      "DistributedDataParallel: SameBits with shards: expected a model on the CPU, got ", D::kind);
    const auto refuse = [](bool chosen, const char* option) {
      check<UsageError>(!chosen, "DistributedDataParallel: SameBits and ", option, " can't be combined");
    };
    refuse(core.options.static_graph, "static_graph");
    refuse(core.options.non_finite != NonFinite::propagate,
           "non_finite, which looks at one pass's gradients alone (a GradScaler looks at all),");
    refuse(!core.options.parameters_and_buffers_to_ignore.empty(), "parameters_and_buffers_to_ignore");
    return std::make_unique<same_bits::BucketSums<D, Communicator>>(core, canonical_.shares(), canonical_.tree(),
                                                                    shards, replicas);
  }
  /// A worker sends its sums to the server, which adds up those of all ranks.
  void push_sums(int server) {
    const auto& tree = canonical_.tree();
    const D device = this->model_device();
    const comm::CollectiveOptions options{.traffic = trace::Traffic::gradients};
    const MemoryScope scope(trace::Memory::buckets);
    const auto of_ranks =
        same_bits::sums_of_ranks(canonical_.shares(), this->ranks(), static_cast<std::size_t>(this->shares_.batch()));
    for (std::size_t g = 0; g < this->flat_.groups().size(); ++g) {
      const auto& group = this->flat_.groups()[g];
      const auto with_numbers = [&](std::byte* place, const auto& f) {
        ddp::with_type(group.dtype, place, [&]<class T>(T* numbers) { f(std::span<T>(numbers, group.count)); });
      };
      if (this->communicator_.rank() != server) {
        for (std::size_t k = 0; k < tree.sums().size(); ++k)
          with_numbers(tree.sum(k, g, 0), [&](auto numbers) { this->communicator_.send(numbers, server, options); });
        continue;
      }
      std::vector<Storage<D>> theirs;
      const auto numbers_of = [&](std::size_t rank, std::size_t k) {
        if (static_cast<int>(rank) == server) return tree.sum(k, g, 0);
        theirs.emplace_back(device, group.count * size_of(group.dtype));
        auto* const sum = static_cast<std::byte*>(theirs.back().data());
        with_numbers(sum, [&](auto numbers) { this->communicator_.recv(numbers, static_cast<int>(rank), options); });
        return sum;
      };
      same_bits::add_up(of_ranks, numbers_of, device, group.dtype, group.count, group.grad(0));
    }
  }

  void begin_join(const detail::JoinFacts& facts) override {
    check<UsageError>(this->communicator_.size() == 1, this->title_,
                      "::join: canonical shares cut each batch for all ranks: expected equally many batches on each");
    Base::begin_join(facts);
  }
  void weigh_losses(std::span<const Ref<Node>> nodes) override {
    if (this->communicator_.size() > 1) same_bits::check_means(nodes);
    this->weigh_run(/*refused=*/false);
  }

  same_bits::ModelShares<Model> canonical_;

 private:
  std::uint64_t last_run_ = 0;  // of backward
};

}  // namespace chorus
