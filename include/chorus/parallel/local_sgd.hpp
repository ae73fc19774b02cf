#pragma once
/// LocalSgd: ranks step by themselves and average their parameters every few steps.

#include <algorithm>
#include <array>
#include <chorus/comm/any_communicator.hpp>
#include <chorus/parallel/access.hpp>
#include <chorus/parallel/distributed_policy.hpp>
#include <chorus/parallel/elsewhere.hpp>
#include <chorus/parallel/join.hpp>
#include <chorus/parallel/local_steps.hpp>
#include <chorus/parallel/no_sync.hpp>
#include <chorus/parallel/placed.hpp>
#include <cmath>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

namespace chorus {

/// Options of LocalSgd.
struct LocalSgdOptions {
  /// Optimizer steps between averages. 1: after every one.
  int period = 8;
  /// The axis of the inputs that holds their samples.
  int dim = 0;
};

/// The default outer optimizer of LocalSgd: all ranks take the average of their parameters. Others are in outer/.
struct AverageParameters {
  template <Device D, class Communicator>
  struct Steps : detail::LocalSteps {
    Steps(const AverageParameters&, const nn::FlatParameters<D>&, Communicator&, int) {}
    static constexpr int fragments = 1;
    static constexpr std::size_t kept_numbers = 0;
  };
};

/// Local SGD, also known as federated or parameter averaging (Stich, "Local SGD converges fast and communicates
/// little", ICLR 2019). Each rank trains alone on its share of the data. After every `period` steps, at the start of
/// the next forward pass, all ranks average their parameters and floating-point buffers. A rank's weight is the number
/// of elements in its losses' means (samples, tokens) since the last average. Other buffers become rank 0's. Optimizer
/// state stays local. All ranks freeze the same parameters.
///
/// Per `period` steps each of n ranks sends 2 (n - 1) / n of the model's bytes, and 88 bytes per rank for the counts: 1
/// / `period` of DistributedDataParallel's traffic. With period 1 and plain SGD the steps are those of one device. If a
/// loss is a sum, or not linear in means, backward throws UsageError.
///
/// Between averages, and after the last step, ranks have different parameters: `eval()`, `gathered()`, `synchronise()`
/// and `io::save`, called by all ranks, average them. A checkpoint, saved by all ranks at any step, has each rank's
/// model and optimizer. Its plain names, which `io::load` reads, are rank 0's.
///
/// `Outer` is another way to combine what ranks have done: Nesterov (DiLoCo), Streaming, Quantised. An outer optimizer
/// steps under a single rank, too.
template <class Model, class Outer, class Communicator>
class LocalSgd : public DistributedPolicy<Model, Communicator> {
  using Base = DistributedPolicy<Model, Communicator>;
  using typename Base::All;

 public:
  using D = typename Base::device_type;
  using policy_type = LocalSgd;
  static constexpr const char* name = "local_sgd";
  /// Whether ranks take more than an average.
  static constexpr bool has_outer = !std::is_same_v<Outer, AverageParameters>;
  /// The same policy around another model, for programs with several: `ch::Rebind<Net, Other>`.
  template <class Other>
  using rebind = LocalSgd<Other, Outer, Communicator>;
  static_assert(!Base::adds_up_in_pass, "LocalSgd: each rank steps on its own samples, so SameBits is not supported");

  /// Compares the models of all ranks and takes rank 0's parameters and buffers, as DistributedDataParallel does.
  /// Throws UsageError for a period below 1, and for options of `outer` out of range. The communicator must outlive
  /// this.
  LocalSgd(Model model, Communicator& communicator, const LocalSgdOptions& options = {},
           std::uint64_t seed = initial_seed(), const Outer& outer = {})
      : Base("LocalSgd", std::move(model), communicator, options.dim, seed),
        options_(checked(options)),
        local_(outer, this->flat_, communicator, options.period) {
    this->check_same(cat("options: period ", options.period, ", dim ", options.dim, text_of_outer(), "\n"), All{});
    this->broadcast_parameters(0, All{});
    this->broadcast_buffers(0);
    this->program_.alike().contents = false;
    this->program_.ledger()->own_gradients = true;
    if (auto* const trace = trace::step_counter()) [[unlikely]]
      trace->note("period", cat(options.period));
    // Ranks don't exchange the sizes of their shares: all are assumed to be as large as this rank's.
    this->random_.first_sample = [this] { return this->communicator_.rank() * rows_; };
    this->random_.is_share = nullptr;
    this->on_gradients([this](std::size_t) {
      if (!in_backward_) begin_backward();
    });
  }
  /// For `launch`: takes communicator and seed from `run`. The model moves to the device that `run` names, if any.
  template <detail::LaunchedRun Run>
  LocalSgd(Model model, Run& run, const LocalSgdOptions& options = {}, const Outer& outer = {})
      : LocalSgd(detail::placed(std::move(model), run), run.communicator(), options, run.seed(), outer) {
    run.check_options();
  }

  /// Returns the model's output for this rank's share of the batch.
  template <class... Inputs>
  auto operator()(const Inputs&... inputs) {
    rows_ = detail::samples_of(options_.dim, inputs...);
    if (grad_enabled()) {
      in_backward_ = false;  // after a backward that ended early
      samples_ = rows_;
      counts_ = static_cast<double>(rows_);
      // Without this exchange, ranks that have ended would communicate only at the next average.
      this->begin_pass({.samples = samples_, .number = this->forward_passes(), .sync = sync_}, this->throw_early_);
      local_.begin_pass(this->flat_, All{}, local_.steps >= options_.period / Steps::fragments,
                        [this] { take_mean(false); });
      if (sync_) ++passes_;
    }
    this->begin_forward(rows_);
    if (grad_enabled()) return this->forward_recorded(inputs...);
    return this->forward(true, inputs...);
  }

  /// While it lives, backward passes accumulate gradients and don't count as steps.
  [[nodiscard]] NoSync no_sync() { return NoSync(sync_); }

  /// Runs `body`, a loop over batches whose number may differ between ranks: see chorus::join. A rank that has ended
  /// has weight in the next average for its steps since the last one, and none later; when all have ended, all take the
  /// average. No rank steps for another.
  template <class Body>
  void join(const Body& body, const JoinOptions& options = {}) {
    chorus::join(body, options, *this);
  }
  /// All ranks average their parameters and buffers now, or take the outer step of all fragments. Throws UsageError on
  /// all ranks if their numbers of steps, or of recorded forward passes outside of no_sync, since the last average
  /// differ: a rank that skips a backward pass would average later than the others.
  void synchronise() {
    for (int fragment = 0; fragment < Steps::fragments; ++fragment) take_mean(true);
    if constexpr (has_outer)
      if (!this->joining_) local_.come_together();  // ranks that have ended don't know what the program does next
  }
  /// See PolicyOn::gathered. All ranks average first, unless they are inside `join`.
  [[nodiscard]] typename Base::Gathered gathered(const GatheredOptions& options = {}) {
    this->meet();
    if (!this->joining_) synchronise();
    return PolicyOn<D>::gathered(options);
  }
  template <class F>
  requires std::invocable<const F&, Model&>
  void gathered(const F& f) {
    const auto whole = gathered();
    f(this->model_);
  }

  /// For a GradScaler. Within `join` ranks don't communicate, as ended ranks make no steps: each rank skips steps by
  /// itself and has its own scale.
  void make_largest(std::int32_t* number) {
    if (!this->joining_) Base::make_largest(number);
  }

  /// For checkpoints: steps since the last average, this rank's weight in the next, and what an outer optimizer keeps.
  static constexpr std::string_view kept_as = has_outer ? "outer" : "local_sgd";
  using Kept = std::array<double, 2 + Outer::template Steps<D, Communicator>::kept_numbers>;
  Kept kept() const {
    Kept kept{static_cast<double>(local_.steps), seen_};
    if constexpr (has_outer) local_.kept(std::span(kept).subspan(2));
    return kept;
  }
  static bool can_keep(const Kept& kept) {
    if constexpr (has_outer)
      if (!Steps::can_keep(std::span(kept).subspan(2))) return false;
    return kept[0] >= 0 && kept[0] < 1e9 && kept[1] >= 0 && kept[1] < 0x1p53;
  }
  void keep(const Kept& kept) {
    local_.steps = passes_ = static_cast<int>(kept[0]);
    seen_ = kept[1];
    if constexpr (has_outer) local_.keep(std::span(kept).subspan(2));
  }

 private:
  using Steps = typename Outer::template Steps<D, Communicator>;
  friend class detail::Access<LocalSgd>;

  // Elements in the losses' means, steps, and passes since the last average; and all forward passes, whose number may
  // differ between ranks.
  using Counts = std::array<double, 4>;
  static constexpr double unlike = std::numeric_limits<double>::quiet_NaN();  // means over different numbers
  static constexpr double ended = -1;  // the steps of a rank that has run out of batches

  // Each rank's loss is its own: nothing is exchanged.
  std::span<const double> weigh(std::span<const detail::LossShare> losses, bool refused) override {
    ones_.assign(refused ? 0 : losses.size(), 1);
    const double samples = std::max(1.0, static_cast<double>(samples_));
    const auto is_multiple = [samples](double x) { return x == samples * std::round(x / samples); };
    const double* first = nullptr;
    for (const detail::LossShare& loss : losses) {
      if (loss.has_factor() && !std::isnan(loss.value())) continue;  // a penalty
      check<UsageError>(
          loss.is_mean() || loss.may_be_own() || loss.is_divided_by_tensor(),
          "LocalSgd: the loss is a sum over the batch; each rank steps by its own part, so averaging the parameters "
          "averages the parts: expected ch::mean(x), or another loss with Reduction::mean and no mean_over");
      overs_[first != nullptr] = loss.is_mean() ? loss.over() : loss.factor() == 0 ? 0 : 1 / std::abs(loss.factor());
      if (first != nullptr && overs_[0] != overs_[1] && !(is_multiple(overs_[0]) && is_multiple(overs_[1])))
        return counts_ = unlike, ones_;
      if (first == nullptr) first = &overs_[0];
    }
    if (first != nullptr) counts_ = *first;
    return ones_;
  }

  void synchronize() override { synchronise(); }
  void run_out_of_batches() override { ended_ = true; }
  [[gnu::cold]] JoinedPass take_part_in_pass() override {
    if (this->throw_early_) this->begin_shadow_pass();  // throws unless all have ended
    if (take_mean(false)) return JoinedPass::passed;
    for (int fragment = 1; fragment < Steps::fragments; ++fragment) take_mean(true);
    if constexpr (has_outer) local_.come_together();
    return JoinedPass::none;
  }
  [[gnu::cold]] void all_have_run_out() override { this->end_shadow_passes(); }
  void end_join() override {
    ended_ = false;
    Base::end_join();
  }

  static const LocalSgdOptions& checked(const LocalSgdOptions& options) {
    check<UsageError>(options.period >= 1, "LocalSgd: expected a period of at least 1 step, got ", options.period);
    return options;
  }
  std::string text_of_outer() const {
    if constexpr (has_outer)
      return local_.text();
    else
      return {};
  }

  // Of all parameters, or of an outer optimizer's next fragment. `together`: ranks shall have equal ones then. Returns
  // whether any rank continues.
  bool take_mean(bool together) {
    bool any_on = !ended_;
    if (has_outer || this->communicator_.size() > 1) {
      if constexpr (has_outer) local_.arrive();
      const auto ranks = static_cast<std::size_t>(this->communicator_.size());
      struct Message {
        Counts counts;
        ddp::Said said;
      } own{{seen_in_fragment(), ended_ ? ended : static_cast<double>(local_.steps), static_cast<double>(passes_),
             static_cast<double>(this->forward_passes())},
            this->program_.say()};
      own.said.compares = own.said.compares && !ended_;
      std::vector<Counts> all;
      std::vector<ddp::Said> said;
      for (const Message& rank : comm::all_gather_structs(this->communicator_, own)) {
        all.push_back(rank.counts);
        said.push_back(rank.said);
      }
      for (std::size_t rank = 0; rank < ranks; ++rank)
        if (std::isnan(all[rank][0])) {
          seen_ = 0;
          fail<UsageError>("LocalSgd: rank ", rank,
                           " had a loss of means over different counts: expected all means over samples");
        }
      any_on = check_same_steps(all);
      this->program_.compare(said);
      double sum = 0, passes = 0;
      bool any_ended = false;
      for (const Counts& counts : all) {
        sum += counts[0];
        passes = std::max(passes, counts[3]);
        any_ended = any_ended || counts[1] == ended;
      }
      this->set_forward_passes(static_cast<std::uint32_t>(passes));
      if (any_ended) local_.unite(this->flat_, this->communicator_);  // ended ranks don't know the other ranks' steps
      const double weight = sum == 0 ? 1.0 / static_cast<double>(ranks)  // optimizers may step without samples
                                     : own.counts[0] / sum;
      if constexpr (has_outer) {
        local_.send(weight, {.samples = sum > 0, .now = together || ended_, .together = together || !any_on});
        average_buffers(weight);
      } else if (!local_.empty()) {
        local_.average(this->flat_, this->communicator_, weight);
        average_buffers(weight);
      }
    }
    seen_ = 0;
    local_.steps = passes_ = 0;
    return any_on;
  }

  double seen_in_fragment() {
    if constexpr (has_outer)
      return local_.seen(seen_);
    else
      return seen_;
  }

  // Ranks that continue must have the same counts. Returns whether any continues.
  static bool check_same_steps(const std::vector<Counts>& all) {
    std::string list;
    bool same = true;
    const Counts* first = nullptr;
    for (std::size_t rank = 0; rank < all.size(); ++rank) {
      const Counts& counts = all[rank];
      if (counts[1] == ended) continue;
      if (first == nullptr) first = &counts;
      same = same && counts[1] == (*first)[1] && counts[2] == (*first)[2];
      list += cat(list.empty() ? "" : ", ", "rank ", rank, ": ", counts[1], " in ", counts[2]);
    }
    check<UsageError>(same, "LocalSgd: expected the same number of steps and forward passes on all ranks, got ", list,
                      " since the last mean; give a rank without samples an empty batch, or use join");
    return first != nullptr;
  }

  // In double, so that the average of equal numbers is exact; integers become rank 0's.
  void average_buffers(double weight) {
    this->broadcast_buffers(0, [](DType type) { return type != DType::f32 && type != DType::f64; });
    std::vector<double> all;
    const auto for_each_real = [&](const auto& f) {
      for (const auto& named : this->buffers_) {
        const auto count = static_cast<std::size_t>(named.buffer->count());
        if (named.buffer->dtype() == DType::f32) f(*named.buffer, std::vector<float>(count));
        if (named.buffer->dtype() == DType::f64) f(*named.buffer, std::vector<double>(count));
      }
    };
    for_each_real([&](const auto& buffer, auto values) {
      copy_bytes(Cpu{}, values.data(), buffer.where(), buffer.memory(), buffer.size_bytes());
      all.insert(all.end(), values.begin(), values.end());
    });
    if (all.empty()) return;
    this->communicator_.all_reduce(std::span<double>(all), comm::ReduceOp::sum,
                                   {.scale = weight, .traffic = trace::Traffic::buffers});
    auto next = all.begin();
    for_each_real([&]<class T>(const auto& buffer, std::vector<T> values) {
      for (T& value : values) value = static_cast<T>(*next++);
      copy_bytes(buffer.where(), buffer.memory(), Cpu{}, values.data(), buffer.size_bytes());
    });
  }

  void begin_backward() {
    in_backward_ = true;
    this->when_backward_ends([this] {
      in_backward_ = false;
      seen_ += counts_;
      if (sync_) ++local_.steps;
    });
  }

  LocalSgdOptions options_;
  Steps local_;
  std::int64_t rows_ = 0;     // of the last forward pass
  std::int64_t samples_ = 0;  // of the last pass that recorded gradients
  double counts_ = 0;         // elements in its loss's mean
  double seen_ = 0;           // their sum since the last average
  double overs_[2] = {};
  std::vector<double> ones_;
  int passes_ = 0;            // since the last average: recorded passes outside of no_sync
  bool sync_ = true, in_backward_ = false;
  bool ended_ = false;  // this rank has run out of batches
};

/// For checkpoints.
template <class Model, class Outer, class Communicator>
class detail::Access<LocalSgd<Model, Outer, Communicator>> {
  using Net = LocalSgd<Model, Outer, Communicator>;

 public:
  explicit Access(Net& net) : net_(net) {}
  /// From the first step on models differ, and momenta for good.
  static constexpr bool ranks_may_differ = true;
  bool ranks_differ() const { return net_.communicator().size() > 1; }
  /// The parameters that ranks have stepped by themselves since all ranks last had equal ones.
  std::vector<std::string> parameters_apart() const { return net_.local_.names(net_.flat_); }
  void set_parameters_apart(std::span<const std::string> names) { net_.local_.set(net_.flat_, names); }
  /// What an outer optimizer keeps, the same on all ranks.
  static constexpr bool hook_state_is_alike = true;
  auto hook_state(bool full = false) requires Net::has_outer { return net_.local_.state(full); }
  template <class Tensors>
  void set_hook_state(const Tensors& tensors) requires Net::has_outer {
    net_.local_.set_state(tensors);
  }

 private:
  Net& net_;
};

}  // namespace chorus
