#pragma once
/// Extensions of DistributedDataParallel: each option is one; the core calls it at a few moments.

#include <chorus/core/error.hpp>
#include <chorus/parallel/ddp/batch_shares.hpp>
#include <chorus/parallel/ddp/buckets.hpp>
#include <chorus/parallel/ddp/cut_buckets.hpp>
#include <chorus/parallel/ddp/ddp_options.hpp>
#include <cstddef>
#include <memory>
#include <numeric>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace chorus::ddp {

/// The moments of a pass, in their order. By default each does nothing.
template <Device D>
class Extension {
 public:
  Extension() = default;
  Extension(const Extension&) = delete;
  Extension& operator=(const Extension&) = delete;
  virtual ~Extension() = default;

  /// Gradients are being cut into buckets; the argument says by entry whether each is sent.
  virtual void choose(std::span<char>) {}
  virtual void buckets_will_change() {}
  virtual void buckets_changed() {}

  /// A forward pass that records gradients begins. All ranks receive the changes to its message.
  virtual void forward_begins(ForwardPass&) {}
  virtual void ready_for_forward() {}
  virtual void forward_ended() {}

  /// The ranks' weights in the backward pass that begins are known, also under no_sync.
  virtual void weighed() {}
  /// The first gradient of a backward pass has arrived.
  virtual void backward_begins() {}
  /// The gradient of entry `i` has arrived, also under no_sync.
  virtual void gradient_arrived(std::size_t /*i*/) {}
  /// Before this rank sends a bucket.
  virtual void bucket_is_full(const Bucket&) {}
  /// Backward's thread begins (true) or ends (false) communication.
  virtual void communicates(bool) {}
  /// All gradients of this rank have arrived.
  virtual void backward_ended() {}
  /// All buckets are back.
  virtual void averaged() {}
  virtual void pass_ended() {}
};

/// How buckets are summed, if not by a hook.
class BucketSums {
 public:
  virtual ~BucketSums() = default;
  /// `start`: the bucket is full. `finish`: replaces it by the sum over all ranks.
  virtual void start(Bucket&) = 0;
  virtual void finish(Bucket&) = 0;
};

/// A rank's contribution to a pass of other ranks, within `join`.
enum class Contribution { samples, zeros, accumulated_gradients };

/// The core's state and functions that extensions use.
template <Device D, class Communicator>
class Core {
 public:
  Core(nn::FlatParameters<D>& flat_parameters, Communicator& communicator,
       detail::BatchShares<Communicator>& batch_shares, const DistributedDataParallelOptions& ddp_options)
      : flat(flat_parameters),
        ranks(communicator),
        shares(batch_shares),
        options(ddp_options),
        entry_of_(flat.entries().size()) {
    std::iota(entry_of_.begin(), entry_of_.end(), std::size_t{0});
    number_of_ = entry_of_;
  }

  nn::FlatParameters<D>& flat;
  Communicator& ranks;
  detail::BatchShares<Communicator>& shares;
  const DistributedDataParallelOptions options;
  Buckets buckets;
  double weight = 1;         // of this rank's gradients in the average
  bool sync = true;          // whether backward averages
  bool in_backward = false;  // buckets are under way
  Contribution contribution = Contribution::samples;
  std::unique_ptr<BucketSums> sums = nullptr;
  CutBuckets begins_bucket = options.buckets ? options.buckets : options.template caps<D>();

  std::size_t entries() const { return flat.entries().size(); }
  ParameterOn<D>& parameter(std::size_t i) const { return flat.entries()[i].parameter(); }
  const std::string& name(std::size_t i) const { return flat.entries()[i].named.name; }
  /// A parameter's number stays the same when its entry moves.
  std::size_t entry_of(std::size_t number) const { return entry_of_[number]; }
  std::size_t number_of(std::size_t i) const { return number_of_[i]; }
  std::byte* gradients(const Bucket& bucket) const {
    return static_cast<std::byte*>(parameter(bucket.parameters.front()).grad_place());
  }
  DType dtype(const Bucket& bucket) const { return flat.groups()[bucket.group].dtype; }
  std::size_t bytes(const Bucket& bucket) const { return bucket.count * size_of(dtype(bucket)); }

  /// Makes the parameter's gradient valid: zeros if neither backward nor an earlier pass has left one.
  void fill(std::size_t i) const {
    auto& p = parameter(i);
    if (!p.grad_arrived()) zero_bytes(p.where(), p.grad_place(), p.size_bytes());
  }
  /// The start of a message to the user.
  [[gnu::cold]] std::string where() const { return cat("DistributedDataParallel: rank ", ranks.rank(), ": "); }

  /// Whether ranks share its gradient, even if it is not sent now.
  bool is_shared(std::size_t i) const {
    return buckets.sends(i) || (parameter(i).wants_grad() && !options.ignores(name(i)));
  }
  /// The number of entries up to the last shared one: equal on all ranks, in the same order. Each rank's own entries
  /// lie after them.
  [[gnu::cold]] std::size_t common_entries() const {
    std::size_t common = 0;
    for (std::size_t i = 0; i < entries(); ++i)
      if (is_shared(i)) common = i + 1;
    return common;
  }
  /// By entry: whether its gradient is sent at present.
  std::span<const char> chosen() {
    chosen_.resize(entries());
    for (std::size_t i = 0; i < chosen_.size(); ++i) chosen_[i] = parameter(i).wants_grad();
    notify(&Extension<D>::choose, std::span(chosen_));
    return chosen_;
  }
  /// The names of the gradients that buckets still wait for; gradients that have not come at all become 0.
  [[gnu::cold]] std::string fill_missing() const {
    std::string names;
    for (const Bucket& bucket : buckets.all())
      for (const std::size_t i : bucket.parameters) {
        if (bucket.missing == 0 || buckets.left(i) == 0) continue;
        names += cat(names.empty() ? "" : ", ", name(i));
        fill(i);
      }
    return names;
  }
  [[noreturn, gnu::cold]] void refuse_second_arrival(std::size_t i) const {
    fail<UsageError>(where(), name(i),
                     " received its gradient in several parts in one backward pass (backward within backward); if it "
                     "always does, set static_graph");
  }
  [[noreturn, gnu::cold]] void refuse_missing() const {
    fail<UsageError>("DistributedDataParallel: on rank ", ranks.rank(), " no gradient arrived for ", fill_missing(),
                     "; set find_unused_parameters if some passes skip them, set_requires_grad(false) if all do");
  }
  /// Cuts the buckets anew.
  [[gnu::cold]] void cut_buckets() {
    change_buckets([] {});
  }
  /// Lays the flat buffers out anew: `order[i]` is the present number of the entry that becomes number i.
  [[gnu::cold]] void reorder(std::span<const std::size_t> order) {
    change_buckets([&] {
      flat.reorder(order);
      const auto before = number_of_;
      for (std::size_t i = 0; i < order.size(); ++i) {
        number_of_[i] = before[order[i]];
        entry_of_[number_of_[i]] = i;
      }
    });
  }

  /// Sends full buckets.
  virtual void send_full() = 0;
  /// Waits for the next buckets.
  virtual void finalize_buckets(std::span<Bucket>) = 0;
  /// A backward pass on a rank that has none of its own.
  virtual void begin_backward() = 0;
  virtual void finalize_backward() = 0;

  /// Calls one moment of all extensions.
  template <class... Parameters, class... Arguments>
  void notify(void (Extension<D>::*moment)(Parameters...), Arguments&&... arguments) {
    // By index: a moment may add an extension.
    for (std::size_t e = 0; e < extensions_.size(); ++e) ((*extensions_[e]).*moment)(arguments...);
  }
  template <class E, class... Arguments>
  E& add(Arguments&&... arguments) {
    auto made = std::make_unique<E>(std::forward<Arguments>(arguments)...);
    E& extension = *made;
    extend(std::move(made));
    return extension;
  }
  void extend(std::unique_ptr<Extension<D>> extension) { extensions_.push_back(std::move(extension)); }
  /// The extension of type E; null if there is none.
  template <class E>
  E* find() const {
    for (const auto& extension : extensions_)
      if (auto* const found = dynamic_cast<E*>(extension.get())) return found;
    return nullptr;
  }

 protected:
  ~Core() = default;

 private:
  template <class Change>
  void change_buckets(const Change& change) {
    notify(&Extension<D>::buckets_will_change);
    change();
    flat.count_generation();
    buckets.replace(cut_into_buckets(flat, begins_bucket, chosen()), entries());
    notify(&Extension<D>::buckets_changed);
  }

  std::vector<std::size_t> entry_of_, number_of_;
  std::vector<char> chosen_;
  std::vector<std::unique_ptr<Extension<D>>> extensions_;
};

}  // namespace chorus::ddp
