#pragma once
/// Elastic: ranks may be lost, and may come, while a net trains. The loop stays: a step in which a rank is lost runs
/// out without effect, and the loader gives its batch once more, in the shares of those who live.

#include <algorithm>
#include <chorus/comm/any_communicator.hpp>
#include <chorus/comm/objects.hpp>
#include <chorus/core/error.hpp>
#include <chorus/parallel/distributed_data_parallel.hpp>
#include <chorus/parallel/elastic/members.hpp>
#include <chorus/parallel/elastic/processes.hpp>
#include <chorus/parallel/elastic/state.hpp>
#include <chorus/parallel/elastic/void_engine.hpp>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace chorus {

namespace elastic {

/// A place in a program: a pass of a loader, by their order, and how many of its batches are done.
struct Position {
  std::int64_t pass = -1, batch = 0;
  friend auto operator<=>(const Position&, const Position&) = default;
};

/// What ranks tell each other when they meet.
struct Standing {
  Position done;
  std::int64_t began = 0;  ///< the epoch in which it came
  std::int64_t steps = 0;
  std::uint64_t seed = 0;
};

/// Drops the gradients of passes in which somebody was lost.
template <Device D>
class VoidPasses final : public ddp::Extension<D> {
 public:
  explicit VoidPasses(std::function<void()> ended) : ended_(std::move(ended)) {}
  void pass_ended() override { ended_(); }

 private:
  std::function<void()> ended_;
};

}  // namespace elastic

/// For other policies: see the message.
template <class Net>
class Elastic {
  static_assert(sizeof(Net) == 0,
                "Elastic: expected ch::DistributedDataParallel, whose ranks all have the whole model and its state: "
                "under other policies a lost rank takes with it what nobody else has");
};

/// A DistributedDataParallel that goes on when ranks are lost, and lets others in:
///
///     using Net = ch::Elastic<ch::DistributedDataParallel<ch::SameBits<Model, 8>>>;
///     Net net{Model{}, run};
///     ch::optim::Sgd optimizer{net.parameters(), {.lr = 0.01}};
///     net.keep(optimizer);             // and all else that a checkpoint has: a GradScaler, a ParameterAverage, ...
///     for (auto& [images, labels] : loader) { ... }   // of net.sampler(data): as under any policy
///
/// When a call fails, since a rank was lost, the iteration runs out: calls return at once, gradients are dropped, and
/// the optimizer's step changes nothing. At the loader's next batch the ranks that live meet (see Members), take over
/// the lost shares, and get that batch again. A rank that had stepped already gives its state to the others. A newcomer
/// waits until the ranks let it in, which they do every eight steps, and takes the state of one of them; its loops over
/// earlier epochs end at once. Under SameBits the run ends with one device's bits, whoever was lost.
///
/// A void iteration counts in a program's own counters (`repeats` is their number; a step of several batches runs to
/// its end, so that a count modulo their number stays right). The loss and `mean` are 0 in it, and in an evaluation in
/// which a rank is lost. Not for `join`, GPUs, captured steps, steps in backward, or hooks with state of each rank. The
/// loader throws TooFewRanks, and Evicted on a rank that the others gave up.
template <class Model, class Hook, class Communicator>
class Elastic<DistributedDataParallel<Model, Hook, Communicator>> {
  using Net = DistributedDataParallel<Model, Hook, Communicator>;
  using Traits = ddp::HookTraits<Hook, typename Net::D, Communicator>;
  static_assert(std::is_same_v<typename Net::device_type, Cpu> && std::is_same_v<Communicator, comm::AnyCommunicator>,
                "Elastic: expected a model on the CPU and chorus' own communicator");
  static_assert(!Traits::remembers_parameters && !Traits::remembers_numbers && !Traits::ranks_may_differ &&
                    !Traits::averages_parameters && !Traits::in_parts,
                "Elastic: expected a hook without state, such as AllReduce: a lost rank's state can't be had again");

 public:
  using D = typename Net::device_type;
  using device_type = D;
  using model_type = typename Net::model_type;
  using policy_type = Elastic;
  static constexpr bool distributed = true;
  static constexpr const char* name = "elastic";
  static constexpr bool adds_up_in_pass = Net::adds_up_in_pass;
  template <class Other>
  using rebind = Elastic<typename Net::template rebind<Other>>;

  /// For `launch`: a job of processes. `run`'s rank, size and communicator follow those of the net.
  template <detail::LaunchedRun Run>
  Elastic(Model model, Run& run, const elastic::Options& how = {}, DistributedDataParallelOptions options = {},
          Hook hook = {})
      : Elastic(std::move(model), std::make_unique<elastic::Processes>(run.world(), how), std::move(options),
                run.seed(), std::move(hook),
                [&run](comm::AnyCommunicator ranks) { run.regroup(std::move(ranks)); }) {
    run.check_options();
  }
  /// Begins or joins the job of `members`. `told` gets each epoch's communicator. Throws UsageError if models, options
  /// or seeds differ, on every rank at the beginning, later on the newcomer; and the errors of Members::regroup.
  Elastic(Model model, std::unique_ptr<elastic::Members> members, DistributedDataParallelOptions options = {},
          std::uint64_t seed = initial_seed(), Hook hook = {},
          std::function<void(comm::AnyCommunicator)> told = {})
      : told_(std::move(told)),
        options_(std::move(options)),
        seed_(seed),
        hook_(std::move(hook)),
        members_(std::move(members)) {
    check<UsageError>(options_.non_finite == NonFinite::propagate && !options_.static_graph &&
                          options_.parameters_and_buffers_to_ignore.empty(),
                      "Elastic: expected DistributedDataParallel's options non_finite, static_graph and "
                      "parameters_and_buffers_to_ignore as they are by default");
    set_aside(std::move(model));
    regroup("");
  }
  ~Elastic() {
    guide_->net = nullptr;
    if (std::uncaught_exceptions() > exceptions_before_) members_->fail(comm::why_it_unwinds());
  }
  Elastic(const Elastic&) = delete;
  Elastic& operator=(const Elastic&) = delete;

  /// The objects that belong to the state of the run, beside the model: optimizers, and what else a checkpoint takes.
  /// Call it before the loop, with the same kinds in the same order on all ranks. They must outlive the loop.
  template <class... Objects>
  void keep(Objects&... objects) {
    (state_.keep(objects), ...);
  }

  /// DistributedDataParallel's pass.
  template <class... Inputs>
  auto operator()(const Inputs&... inputs) {
    return (*net_)(inputs...);
  }
  [[nodiscard]] NoSync no_sync() { return net_->no_sync(); }

  /// The sampler of a loader: the loop over it is what ranks repeat, and where they meet.
  template <class Dataset>
  data::Sampler sampler(const Dataset& dataset, const SamplingOptions& options = {}) const {
    check<UsageError>(!options.padding, "Elastic: expected a sampler without padding");
    auto choices = net_->sampler(dataset, options).options();
    choices.ledger = nullptr;
    choices.guide = guide_;
    return data::Sampler(dataset.size(), choices);
  }

  /// The present epoch's.
  int devices() const { return net_->devices(); }
  comm::AnyCommunicator& communicator() { return communicator_; }
  /// How often the ranks have met.
  std::int64_t epoch() const { return members_->epoch; }
  /// Optimizer steps of the run.
  std::int64_t steps() const { return steps_; }
  /// Iterations of this rank that ran out without effect, since somebody was lost.
  std::int64_t repeats() const { return repeats_; }
  /// Whether the present iteration has no effect.
  bool is_void() const { return engine_->is_void(); }

  model_type& module() { return net_->module(); }
  const model_type& module() const { return net_->module(); }
  std::vector<nn::NamedParameter<D>> parameters() const { return net_->parameters(); }
  const nn::FlatParameters<D>& flat_parameters() const { return net_->flat_parameters(); }
  std::vector<std::string> parameter_order() const { return net_->parameter_order(); }
  const DistributedDataParallelOptions& options() const { return net_->options(); }
  int canonical_shares() const requires(Net::adds_up_in_pass) { return net_->canonical_shares(); }
  std::uint64_t seed() const { return net_->seed(); }
  std::uint32_t forward_passes() const { return net_->forward_passes(); }
  void set_forward_passes(std::uint32_t passes) { net_->set_forward_passes(passes); }
  std::weak_ptr<void> alive() const { return alive_; }
  double clip_grad_norm(double max_norm, const optim::ClipGradNormOptions& options = {}) {
    return net_->clip_grad_norm(max_norm, options);
  }
  double mean(double value, Index samples) { return net_->mean(value, samples); }
  void sum(std::span<double> values) { net_->sum(values); }
  void eval() { net_->eval(); }
  void train(bool training = true) { net_->train(training); }
  bool training() const { return net_->training(); }
  [[nodiscard]] auto gathered(const GatheredOptions& options = {}) { return net_->gathered(options); }
  template <class F>
  requires std::invocable<const F&, model_type&>
  void gathered(const F& f) {
    net_->gathered(f);
  }
  template <AnyVariable Loss>
  const Loss& mean_loss(const Loss& loss) const {
    return loss;
  }
  std::shared_ptr<BatchGroup> global_batch() const { return net_->global_batch(); }
  void let_ranks_differ() { net_->let_ranks_differ(); }
  bool same_on_all_ranks(std::string_view text) { return net_->same_on_all_ranks(text); }

 private:
  using Position = elastic::Position;

  /// Samplers have it, and may live longer than the net.
  struct Guide final : data::PassGuide {
    explicit Guide(Elastic& owner) : net(&owner) {}
    Place go_on(Index next, Index batches, bool begins) override {
      check<UsageError>(net != nullptr, "Elastic: a loader of net.sampler() is read, and its net was destroyed");
      return net->go_on(next, batches, begins);
    }
    Elastic* net;
  };
  /// What a void iteration may change, as it was after the last step.
  struct Snapshot {
    std::vector<std::byte> numbers;
    std::uint32_t passes = 0;
  };
  struct OneSample {
    Index size() const { return 1; }
  };

  static constexpr std::int64_t steps_between_doors = 8;
  static constexpr int most_epochs_without_step = 16;

  // Before a batch, or at a pass's end.
  data::PassGuide::Place go_on(Index next, Index batches, bool begins) {
    if (begins) begin_pass(next);
    if (engine_->is_away()) {
      engine_->look();
      if (engine_->lost()) regroup(engine_->why());
    } else if (!trains_) {
      return here(next, batches);
    } else {
      settle(next, batches, begins);
      if (engine_->lost()) {
        repeats_ += void_;
        if (runs_on()) return here(next < batches ? next : done_.batch, batches);
        regroup(engine_->why());
      } else if (knocked_) {
        regroup({});
      } else {
        return here(next, batches);
      }
    }
    if (pass_ < done_.pass) return here(batches, batches);  // runs on to where the others are
    check<UsageError>(pass_ == done_.pass, "Elastic: rank ", communicator_.rank(), " is in pass ", pass_,
                      " of its loaders, and a step of pass ", done_.pass,
                      " must be repeated: expected loops that read a loader to its end");
    engine_->set_away(false);
    return here(done_.batch, batches);
  }
  data::PassGuide::Place here(Index batch, Index batches) {
    done_ends_ = done_.pass == pass_ && done_.batch == batches;
    return {batch, communicator_.rank(), communicator_.size()};
  }

  void begin_pass(Index first) {
    ++pass_;
    trains_ = net_->training();
    if (pending_) {
      state_.restore(*pending_, /*all=*/true);
      pending_.reset();
      remember();
      written_ = count_writes();
    }
    // Between the end of a pass and the beginning of the next one the state stays as it is.
    if (trains_ && done_ends_ && !engine_->is_away()) done_ = {pass_, first};
  }
  /// Counts what this rank has done.
  void settle(Index next, Index batches, bool begins) {
    const bool stepped = has_stepped() && !void_;
    steps_ += stepped;
    if (!void_ && (stepped || (!accumulates_ && (begins || next == batches)))) {
      accumulates_ = false;
      if (stepped) epochs_without_step_ = 0;
      done_ = {pass_, next};
      remember();
    }
    knocked_ = stepped && steps_ % steps_between_doors == 0 && !engine_->lost() && someone_knocks();
  }
  /// Whether parameters have been written since the last call.
  bool has_stepped() {
    for (std::size_t i = 0; i < ledger_->optimizers(); ++i)
      check<UsageError>(state_.keeps(ledger_->steps(i).optimizer),
                        "Elastic: an optimizer has stepped whose state is not kept: expected net.keep(optimizer) "
                        "before the loop");
    const auto before = std::exchange(written_, count_writes());
    return written_ != before;
  }
  std::uint64_t count_writes() const {
    std::uint64_t all = 0;
    for (const auto& entry : net_->flat_parameters().entries()) all += entry.parameter().version();
    return all;
  }
  /// A void step of several batches goes on until the program has called its optimizer: if it counts batches, it counts
  /// whole steps twice.
  bool runs_on() {
    if (!accumulates_ || ledger_->optimizers() > 0 || done_.pass != pass_) return false;
    check<UsageError>(++runs_on_ < 1000, "Elastic: expected a step of the optimizer, got 1000 batches without one");
    return true;
  }
  bool someone_knocks() {
    std::int32_t knocks = members_->knocked();
    communicator_.all_reduce(std::span(&knocks, 1), comm::ReduceOp::max, {});
    return knocks != 0;
  }
  void remember() { snapshot_ = {state_.copy(/*all=*/false), net_->forward_passes()}; }

  // A pass has ended in which somebody was lost.
  void drop_gradients() {
    void_ = true;
    for (const auto& entry : net_->flat_parameters().entries()) {
      entry.parameter().set_grad_arrived(false);
      entry.parameter().set_grad_sent(true);  // a step that finds none is no mistake
    }
  }
  void pass_ended() {
    accumulates_ = true;
    if (!engine_->is_void()) return;
    drop_gradients();
    if constexpr (Net::adds_up_in_pass)  // earlier gradients come back after this moment
      at_backward_end([this, alive = alive()] {
        if (!alive.expired()) drop_gradients();
      });
  }

  /// Ends the epoch and begins the next one. `why`: as for Members::regroup.
  void regroup(std::string why) {
    leave_epoch();
    try {
      do {
        check<CommError>(++epochs_without_step_ <= most_epochs_without_step, "Elastic: ", most_epochs_without_step,
                         " epochs in a row have ended before a step was done; the last one: ", why);
        auto epoch = members_->regroup(why);
        try {
          enter_epoch(std::move(epoch));
          why = engine_->why();
        } catch (const elastic::Evicted&) {
          throw;
        } catch (const CommError& lost) {
          why = lost.what();
        }
        if (!why.empty()) leave_epoch();
      } while (!why.empty());
    } catch (...) {
      if (aside_) enter({}, /*begins=*/false);  // for a last save
      throw;
    }
  }
  void leave_epoch() {
    if (!net_) return;  // it was not entered
    state_.restore(snapshot_.numbers, /*all=*/false);
    aside_.emplace(std::move(net_->module()));
    state_.set_model(*aside_);
    net_.reset();
    engine_->lose("the ranks meet again");
    engine_.reset();
    communicator_ = {};
  }
  void enter_epoch(comm::AnyCommunicator epoch) {
    std::vector<elastic::Standing> all(static_cast<std::size_t>(epoch.size()));
    if (began_ == 0) began_ = members_->epoch;
    const elastic::Standing own{done_, began_, steps_, seed_};
    epoch.all_gather(std::span(reinterpret_cast<const std::uint8_t*>(&own), sizeof own),
                     std::span(reinterpret_cast<std::uint8_t*>(all.data()), sizeof own * all.size()), {});
    const auto ahead = std::max_element(all.begin(), all.end(),
                                        [](const auto& a, const auto& b) { return a.done < b.done; });
    const bool begins = ahead->done.pass < 0;
    check<elastic::Evicted>(!begins || std::any_of(all.begin(), all.end(), [](const auto& r) { return r.began == 1; }),
                            "Elastic: the ranks with the state of the run ended before they could give it to this one");
    const int donor = static_cast<int>(ahead - all.begin());
    check_same(epoch, all, donor, begins);
    if (!begins) share_state(epoch, all, donor);
    done_ = ahead->done;
    steps_ = ahead->steps;
    enter(std::move(epoch), begins);
  }
  void enter(comm::AnyCommunicator epoch, bool begins) {
    engine_ = std::make_shared<elastic::VoidEngine>(std::move(epoch));
    communicator_ = comm::AnyCommunicator(engine_);
    auto options = options_;
    options.init_sync = options.init_sync && begins;
    const auto before = begins ? state_.copy(/*all=*/true) : std::vector<std::byte>();
    net_.emplace(taken_back(), communicator_, options, seed_, hook_);
    state_.set_model(net_->module());
    if (begins && engine_->lost()) state_.restore(before, /*all=*/true);  // rank 0's may have come in part
    net_->set_forward_passes(snapshot_.passes);
    net_->extend(std::make_unique<elastic::VoidPasses<D>>([this] { pass_ended(); }));
    ledger_ = net_->sampler(OneSample{}).options().ledger;
    for (const auto& entry : net_->flat_parameters().entries()) {
      auto& parameter = entry.parameter();
      parameter.set_grad_arrived(false);
      parameter.set_grad_sent(false);
      parameter.set_ledger(ledger_);  // a net of one rank has none by itself
    }
    if (told_) told_(comm::AnyCommunicator(engine_));
    engine_->set_away(pass_ < done_.pass);
    void_ = knocked_ = accumulates_ = false;
    runs_on_ = 0;
    if (!pending_) remember();
    written_ = count_writes();
  }
  /// Ranks that differ from the one that is ahead throw UsageError; the others go on without them.
  void check_same(comm::AnyCommunicator& epoch, const std::vector<elastic::Standing>& all, int donor, bool begins) {
    auto text = cat("seed ", seed_, '\n', detail::model_description<D>(*aside_, [](const auto&) { return true; }));
    if constexpr (Net::adds_up_in_pass) text += cat(shares_, " canonical shares\n");
    const auto texts = comm::all_gather_object(epoch, text + options_.template describe<D>());
    const auto& first = texts[static_cast<std::size_t>(donor)];
    for (std::size_t rank = 0; rank < all.size(); ++rank) {
      if (texts[rank] == first) continue;
      const auto [theirs, right] = detail::first_difference(texts[rank], first);
      const auto what = cat("Elastic: expected one model and one seed: rank ", rank, " has ", theirs, ", and rank ",
                            donor, ' ', right);
      check<UsageError>(!begins && static_cast<int>(rank) != epoch.rank(), what);
      fail<CommError>(what);
    }
  }
  /// The donor gives its state to ranks that are behind, and its counters to all. If it is lost before a rank has all
  /// of it, that rank is as before.
  void share_state(comm::AnyCommunicator& epoch, const std::vector<elastic::Standing>& all, int donor) {
    const Position front = all[static_cast<std::size_t>(donor)].done;
    const bool gives = epoch.rank() == donor;
    Snapshot given;
    if (gives) given = {state_.copy(/*all=*/false), snapshot_.passes};
    std::int64_t facts[] = {static_cast<std::int64_t>(given.numbers.size()), given.passes};
    epoch.broadcast(std::span(facts), donor, {});
    given.numbers.resize(static_cast<std::size_t>(facts[0]));
    given.passes = static_cast<std::uint32_t>(facts[1]);
    epoch.broadcast(as_numbers(given.numbers), donor, {});
    std::vector<std::byte> whole;
    for (int rank = 0; rank < epoch.size(); ++rank) {
      if (all[static_cast<std::size_t>(rank)].done == front || (!gives && rank != epoch.rank())) continue;
      if (gives && whole.empty()) whole = state_.copy(/*all=*/true);
      std::int64_t bytes[] = {static_cast<std::int64_t>(whole.size())};
      if (gives) {
        epoch.send(std::span(bytes), rank, {});
        epoch.send(as_numbers(whole), rank, {.traffic = trace::Traffic::parameters});
      } else {
        epoch.recv(std::span(bytes), donor, {});
        whole.resize(static_cast<std::size_t>(bytes[0]));
        epoch.recv(as_numbers(whole), donor, {.traffic = trace::Traffic::parameters});
      }
    }
    snapshot_ = std::move(given);
    if (gives) return;
    if (whole.empty())
      state_.restore(snapshot_.numbers, /*all=*/false);
    else if (done_.pass < 0)
      pending_ = std::move(whole);  // its program has not made all objects yet
    else
      state_.restore(whole, /*all=*/true);
  }
  static std::span<std::uint8_t> as_numbers(std::vector<std::byte>& bytes) {
    return {reinterpret_cast<std::uint8_t*>(bytes.data()), bytes.size()};
  }

  void set_aside(Model model) {
    if constexpr (std::is_same_v<Model, model_type>) {
      aside_.emplace(std::move(model));
    } else {
      shares_ = model.shares();
      aside_.emplace(std::move(model.model()));
    }
    state_.set_model(*aside_);
  }
  /// The model as the inner net takes it.
  Model taken_back() {
    auto inner = std::move(*aside_);
    aside_.reset();
    if constexpr (std::is_convertible_v<model_type, Model>)
      return Model(std::move(inner));
    else
      return Model(std::move(inner), shares_);
  }

  const std::function<void(comm::AnyCommunicator)> told_;
  const DistributedDataParallelOptions options_;
  const std::uint64_t seed_;
  const Hook hook_;
  const int exceptions_before_ = std::uncaught_exceptions();
  std::unique_ptr<elastic::Members> members_;
  int shares_ = 0;
  std::optional<model_type> aside_;  // between two epochs
  std::shared_ptr<elastic::VoidEngine> engine_;
  comm::AnyCommunicator communicator_;
  std::optional<Net> net_;
  elastic::State<D> state_;
  std::shared_ptr<Ledger> ledger_;
  Position done_;  // up to here the state has the steps of the run
  std::int64_t began_ = 0, steps_ = 0, repeats_ = 0;
  Snapshot snapshot_;
  std::optional<std::vector<std::byte>> pending_;  // a newcomer's state
  std::int64_t pass_ = -1;  // that this rank's program is in
  std::uint64_t written_ = 0;  // versions of all parameters
  int epochs_without_step_ = 0, runs_on_ = 0;
  bool accumulates_ = false;  // there were passes since the last step
  bool trains_ = false, void_ = false, done_ends_ = false, knocked_ = false;
  std::shared_ptr<Guide> guide_ = std::make_shared<Guide>(*this);
  std::shared_ptr<void> alive_ = std::make_shared<int>();
};

}  // namespace chorus
