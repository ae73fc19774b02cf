// LocalSgd with outer optimizers: DiLoCo, Streaming DiLoCo and quantised messages, beside their formulas in one process
// that plays all ranks.
#include <catch.hpp>
#include <chorus/core/trace.hpp>
#include <chorus/io/model_file.hpp>
#include <chorus/io/safetensors_reader.hpp>
#include <chorus/optim/adam.hpp>
#include <chorus/parallel/local_sgd.hpp>
#include <chorus/parallel/outer/nesterov.hpp>
#include <chorus/parallel/outer/quantised.hpp>
#include <chorus/parallel/outer/streaming.hpp>
#include <csignal>

#include <unit/io/files.hpp>
#include <unit/parallel/ranks.hpp>

namespace outer_test {

using namespace test::names;
using trace::Traffic;
using Model = test::Smooth<Cpu>;
constexpr std::uint64_t model_numbers = 111;
constexpr Index batch = 7;

/// All parameters' numbers, in memory order.
template <class Net>
std::vector<double> flat(const Net& net) {
  std::vector<double> all;
  for (const auto& named : net.parameters()) {
    const auto* const numbers = static_cast<const double*>(named.parameter->value_data());
    all.insert(all.end(), numbers, numbers + named.parameter->count());
  }
  return all;
}
template <class Net>
void set_flat(const Net& net, const std::vector<double>& all) {
  for (auto from = all.begin(); const auto& named : net.parameters()) {
    std::copy_n(from, named.parameter->count(), static_cast<double*>(named.parameter->value_data()));
    from += named.parameter->count();
    named.parameter->touch();
  }
}

/// Each of `batches` (by rank) steps on its share of the batch; a rank without one has ended.
struct Plan {
  int ranks = 2, period = 4, steps = 11;
  OuterSchedule outer{0.7, 0.9};
  std::vector<std::size_t> cuts = {};  // first numbers of fragments but the first
  bool adam = false;
  int steps_of(int rank) const { return rank == uneven ? steps - 3 : steps; }
  int uneven = -1;  // a rank with fewer batches
};
constexpr optim::SgdOptions sgd{.lr = 0.3, .momentum = 0.9};
constexpr optim::AdamOptions adam{.lr = 0.02};

std::unique_ptr<optim::Optimizer<Cpu>> optimizer_of(const Plan& plan, std::vector<nn::NamedParameter<Cpu>> parameters) {
  if (plan.adam) return std::make_unique<optim::Adam<Cpu>>(std::move(parameters), adam);
  return std::make_unique<optim::Sgd<Cpu>>(std::move(parameters), sgd);
}
template <class Net>
void inner_step(Net& net, optim::Optimizer<Cpu>& optimizer, int number, const World& world) {
  const auto key = static_cast<std::uint32_t>(number);
  optimizer.zero_grad();
  cross_entropy(net(test::share(numbers(batch, 5, key), world)), test::share(labels(batch, 3, key), world)).backward();
  optimizer.step();
}

/// Plays all ranks, one after the other.
class Reference {
 public:
  explicit Reference(const Plan& plan) : plan_(plan) {
    for (int rank = 0; rank < plan.ranks; ++rank) {
      nets_.push_back(std::make_unique<SingleDevice<Model>>(make<Model>(), 3));
      optimizers_.push_back(optimizer_of(plan, nets_.back()->parameters()));
    }
    theta_ = flat(*nets_[0]);
    v_.resize(theta_.size());
    bounds_ = {0};
    bounds_.insert(bounds_.end(), plan.cuts.begin(), plan.cuts.end());
    bounds_.push_back(theta_.size());
    seen_.assign(fragments(), std::vector<double>(nets_.size()));
  }
  /// Each rank's numbers after its last step, then those of all after `synchronise`.
  std::vector<std::vector<double>> run() {
    std::vector<std::vector<double>> out(nets_.size());
    for (int step = 0; step < plan_.steps; ++step) {
      if (sent_ && since_ >= plan_.outer.overlap) apply(plan_.outer.alpha);
      if (since_ == plan_.period / static_cast<int>(fragments())) {
        send();
        if (plan_.outer.overlap == 0) apply(plan_.outer.alpha);
      }
      for (std::size_t r = 0; r < nets_.size(); ++r) {
        const World world{.rank = static_cast<int>(r), .size = plan_.ranks};
        if (step >= plan_.steps_of(world.rank)) continue;
        inner_step(*nets_[r], *optimizers_[r], step, world);
        const auto rows = test::share(labels(batch, 3, 0), world).numel();
        for (auto& fragment : seen_) fragment[r] += static_cast<double>(rows);
        out[r] = flat(*nets_[r]);
      }
      ++since_;
    }
    if (sent_) apply(plan_.outer.alpha);
    for (std::size_t fragment = 0; fragment < fragments(); ++fragment) send(), apply(0);
    out.push_back(theta_);
    return out;
  }

 private:
  std::size_t fragments() const { return bounds_.size() - 1; }
  void send() {
    begin_ = bounds_[next_], end_ = bounds_[next_ + 1];
    auto& seen = seen_[next_];
    double all = 0;
    for (const double each : seen) all += each;
    delta_.assign(theta_.size(), 0);
    for (std::size_t r = 0; r < nets_.size(); ++r) {
      const auto own = flat(*nets_[r]);
      for (std::size_t i = begin_; i < end_; ++i) delta_[i] += seen[r] / all * (theta_[i] - own[i]);
    }
    std::fill(seen.begin(), seen.end(), 0.0);
    next_ = (next_ + 1) % fragments();
    since_ = 0;
    sent_ = true;
  }
  void apply(double alpha) {
    for (std::size_t i = begin_; i < end_; ++i) {
      v_[i] = plan_.outer.momentum * v_[i] + delta_[i];
      theta_[i] -= plan_.outer.lr * (delta_[i] + plan_.outer.momentum * v_[i]);
    }
    for (auto& net : nets_) {
      auto own = flat(*net);
      for (std::size_t i = begin_; i < end_; ++i) own[i] = alpha * own[i] + (1 - alpha) * theta_[i];
      set_flat(*net, own);
    }
    sent_ = false;
  }

  const Plan plan_;
  std::vector<std::unique_ptr<SingleDevice<Model>>> nets_;
  std::vector<std::unique_ptr<optim::Optimizer<Cpu>>> optimizers_;
  std::vector<double> theta_, v_, delta_;
  std::vector<std::size_t> bounds_;
  std::vector<std::vector<double>> seen_;  // by fragment and rank
  std::size_t next_ = 0, begin_ = 0, end_ = 0;
  int since_ = 0;
  bool sent_ = false;
};

/// Each rank's numbers after the last step, then after `synchronise`, under the policy.
template <class Outer>
std::vector<std::string> on_ranks(const Plan& plan, const Outer& outer) {
  return Ranks(plan.ranks,
               [&](const World& world) {
                 auto communicator = comm::connect(world);
                 LocalSgd<Model, Outer> net{make<Model>(world.rank == 0 ? 1 : 2), communicator,
                                            {.period = plan.period}, 3, outer};
                 set_flat(net, flat(SingleDevice<Model>{make<Model>(), 3}));
                 const auto optimizer = optimizer_of(plan, net.parameters());
                 std::string own;
                 const auto train = [&] {
                   for (int step = 0; step < plan.steps_of(world.rank); ++step)
                     inner_step(net, *optimizer, step, world);
                   own = test::text_of(flat(net));
                 };
                 plan.uneven < 0 ? train() : net.join(train);
                 net.synchronise();
                 return own + "|" + test::text_of(flat(net));
               })
      .texts();
}
std::string own_of(const std::string& text) { return text.substr(0, text.find('|')); }
std::string common_of(const std::string& text) { return text.substr(text.find('|') + 1); }

template <class Outer>
void check_against_formulas(Plan plan, const Outer& outer) {
  plan.outer = outer.schedule();
  const auto texts = on_ranks(plan, outer);
  const auto expected = Reference(plan).run();
  for (std::size_t r = 0; r < texts.size(); ++r) {
    INFO("rank " << r << " of " << plan.ranks << ", overlap " << plan.outer.overlap << ": " << texts[r].substr(0, 300));
    CHECK(distance(test::numbers_in(own_of(texts[r])), expected[r]) < rounding);
    CHECK(distance(test::numbers_in(common_of(texts[r])), expected.back()) < rounding);
    CHECK(common_of(texts[r]) == common_of(texts[0]));  // to the bit
  }
}

TEST_CASE("outer: with a period of 1, lr 1 and no momentum DiLoCo's steps are those of DDP with SGD") {
  const Plan plan{.steps = 6};
  for (const int ranks : {1, 2, 3}) {
    INFO(ranks << " ranks");
    const auto trained = [&](const auto& make_net) {
      return common_text(ranks, [&](const World& world) {
        auto communicator = comm::connect(world);
        auto net = make_net(communicator);
        optim::Sgd optimizer{net.parameters(), {.lr = 0.3, .weight_decay = 0.01}};
        for (int step = 0; step < plan.steps; ++step) inner_step(net, optimizer, step, world);
        net.eval();
        return test::text_of(test::values(net.module()));
      });
    };
    const auto outer = trained([](auto& communicator) {
      return LocalSgd<Model, Nesterov>{make<Model>(), communicator, {.period = 1}, 3, {.lr = 1, .momentum = 0}};
    });
    const auto ddp =
        trained([](auto& communicator) { return DistributedDataParallel<Model>{make<Model>(), communicator, {}, 3}; });
    CHECK(test::numbers_in(ddp).size() == model_numbers);
    CHECK(distance(test::numbers_in(outer), test::numbers_in(ddp)) < rounding);
  }
}

/// The cut between parameters, in memory order, that is nearest to a half.
std::vector<std::size_t> half() {
  SingleDevice<Model> net{make<Model>(), 3};
  std::size_t before = 0, best = 0;
  const auto off = [](std::size_t at) { return std::abs(static_cast<double>(at) - model_numbers / 2.0); };
  for (const auto& named : net.parameters()) {
    before += static_cast<std::size_t>(named.parameter->count());
    if (off(before) < off(best)) best = before;
  }
  return {best};
}

TEST_CASE("outer: DiLoCo and Streaming DiLoCo are their formulas") {
  for (const int ranks : {1, 2, 3}) check_against_formulas({.ranks = ranks}, Nesterov{});
  check_against_formulas({.ranks = 2, .period = 3, .adam = true}, Nesterov{.lr = 0.5, .momentum = 0});
  check_against_formulas({.ranks = 4, .period = 3, .cuts = {}}, Streaming<1>{.overlap = 2, .alpha = 0});
  for (const int overlap : {0, 1, 2})
    check_against_formulas({.ranks = 2, .period = 6, .steps = 16, .cuts = half()}, Streaming<2>{.overlap = overlap});
  check_against_formulas({.ranks = 3, .period = 4, .steps = 15, .cuts = half(), .adam = true},
                         Streaming<2>{.lr = 0.7, .overlap = 1, .alpha = 0});
}

TEST_CASE("outer: ranks that run out of batches stay in the others' outer steps") {
  check_against_formulas({.ranks = 3, .period = 2, .uneven = 1}, Nesterov{});
  check_against_formulas({.ranks = 3, .period = 6, .steps = 16, .cuts = half(), .uneven = 2},
                         Streaming<2>{.overlap = 2});
  // The outer step of the last moment is taken by all, whoever ended when.
  for (const int uneven : {0, 1}) {
    const auto texts = on_ranks({.ranks = 2, .period = 4, .uneven = uneven}, Quantised<Streaming<2>>{});
    CHECK(test::numbers_in(common_of(texts[0])).size() == model_numbers);
    CHECK(common_of(texts[0]) == common_of(texts[1]));
  }
}

template <class Outer>
std::vector<std::uint64_t> bytes_by_step(int ranks, int period, int steps, const Outer& outer = {}) {
  const auto text = common_text(ranks, [&](const World& world) {
    auto communicator = comm::connect(world);
    LocalSgd<Model, Outer> net{make<Model>(), communicator, {.period = period}, 3, outer};
    optim::Sgd optimizer{net.parameters(), sgd};
    std::vector<double> sent;
    for (int step = 0; step < steps; ++step) inner_step(net, optimizer, step, world);
    for (int step = steps; step < steps + period; ++step) {
      communicator.barrier();
      trace::reset_traffic();
      inner_step(net, optimizer, step, world);
      communicator.barrier();  // after the messages of this step
      sent.push_back(static_cast<double>(trace::bytes_sent(world.rank, Traffic::parameters)));
    }
    net.sum(sent);
    return test::text_of(sent);
  });
  std::vector<std::uint64_t> out;
  for (const double each : test::numbers_in(text)) out.push_back(static_cast<std::uint64_t>(each));
  return out;
}

TEST_CASE("outer: bytes are the formulas'") {
  const std::uint64_t n = 3, all = 2 * (n - 1) * model_numbers * sizeof(double);
  CHECK(bytes_by_step<Nesterov>(n, 3, 3) == std::vector<std::uint64_t>{all, 0, 0});
  const auto streamed = bytes_by_step<Streaming<3>>(n, 6, 6);
  REQUIRE(streamed.size() == 6);
  CHECK(streamed[0] + streamed[2] + streamed[4] == all);
  for (const std::size_t i : {0u, 2u, 4u}) CHECK((streamed[i] > all / 5 && streamed[i] < all / 2));
  for (const std::size_t i : {1u, 3u, 5u}) CHECK(streamed[i] == 0);
  const std::uint64_t chunk = (model_numbers + n - 1) / n;
  static_assert(detail::QuantisedNumbers<4>::bytes(37) == 19 + 4 && detail::QuantisedNumbers<8>::bytes(129) == 129 + 8);
  const auto quantised = [&](std::uint64_t bytes) { return std::vector<std::uint64_t>{n * 2 * (n - 1) * bytes, 0}; };
  CHECK(bytes_by_step<Quantised<>>(n, 2, 2) == quantised((chunk + 1) / 2 + 4));
  CHECK(bytes_by_step<Quantised<Nesterov, 8>>(n, 2, 2) == quantised(chunk + 4));
}

TEST_CASE("outer: quantised messages give all ranks one result, to the bit, near to the sum") {
  const auto check = [](auto bits, int ranks, Index count) {
    using Message = detail::QuantisedMessage<decltype(bits)::value>;
    const double weight = 1.0 / ranks;
    const auto of = [&](int rank) { return numbers(1, count, static_cast<std::uint32_t>(50 + rank)).to_vector(); };
    const auto text = common_text(ranks, [&](const World& world) {
      auto communicator = comm::connect(world);
      auto mine = of(world.rank);
      auto finish = Message::start(Cpu{}, std::span(mine), weight, communicator);
      while (!finish()) {
      }
      return test::text_of(mine);
    });
    std::vector<double> exact(static_cast<std::size_t>(count));
    for (int rank = 0; rank < ranks; ++rank)
      for (std::size_t i = 0; i < exact.size(); ++i) exact[i] += weight * of(rank)[i];
    INFO(ranks << " ranks, " << count << " numbers");
    const auto got = test::numbers_in(text);
    REQUIRE(got.size() == exact.size());
    // Half a unit of each message, and half of the sum's; numbers lie in [-1, 1].
    CHECK(distance(got, exact) <= (ranks == 1 ? 0 : 2 * 0.5 / Message::Numbers::most + 1e-9));
    if (ranks > 1) CHECK(distance(got, exact) > 0);
  };
  for (const int ranks : {1, 2, 3, 4}) check(std::integral_constant<int, 4>{}, ranks, 333);
  check(std::integral_constant<int, 8>{}, 3, 1000);
  check(std::integral_constant<int, 8>{}, 4, 2);  // ranks without a chunk
  // What isn't a number does not become one.
  const auto text = common_text(2, [&](const World& world) {
    auto communicator = comm::connect(world);
    std::vector<float> mine(3, world.rank == 0 ? 1.0f : INFINITY);
    auto finish = detail::QuantisedMessage<4>::start(Cpu{}, std::span(mine), 0.5, communicator);
    while (!finish()) {
    }
    return cat(std::isfinite(mine[0]), std::isfinite(mine[2]));
  });
  CHECK(text == "falsefalse");
  for (const auto& texts :
       {on_ranks({.ranks = 3}, Quantised<>{}), on_ranks({.ranks = 3}, Quantised<Streaming<2>, 8>{})})
    for (const auto& one : texts) CHECK((common_of(one) == common_of(texts[0]) && own_of(one) != common_of(one)));
}

TEST_CASE("outer: theta follows what the program writes where ranks are together, and frozen parameters stay") {
  const auto text = common_text(2, [](const World& world) {
    auto communicator = comm::connect(world);
    LocalSgd<Model, Nesterov> net{make<Model>(), communicator, {.period = 2}, 3};
    optim::Sgd optimizer{net.parameters(), {.lr = 0}};
    const auto of_first = [&] { return test::values(net.module())[0]; };
    const auto is_at = [&](double place) {
      for (int step = 0; step < 5; ++step) inner_step(net, optimizer, step, world);
      net.eval();
      net.train();
      return of_first() == place;
    };
    std::string log;
    net.gathered([](Model& model) { model.fc1.weight.value().data()[0] = 5; });
    log += cat(is_at(5));
    // After steps the momentum would move it on; a frozen one stays, though passes go on.
    optimizer.set_lr(0.3);
    for (int step = 0; step < 4; ++step) inner_step(net, optimizer, step, world);
    net.synchronise();
    net.module().fc1.weight.set_requires_grad(false);
    const double moved = of_first();
    log += cat(moved != 5, is_at(moved));
    // Passes that record but make no step move nothing.
    const auto before = flat(net);
    for (int pass = 0; pass < 3; ++pass) net(test::share(numbers(batch, 5, 1), world));
    net.eval();
    return log + cat(flat(net) == before);
  });
  CHECK(text == "truetruetruetrue");
}

TEST_CASE("outer: gathered() and save() have the common model after the last step") {
  const chorus_test::TemporaryFolder folder;
  const auto check = [&]<class Outer>(const Outer& outer) {
    const auto texts = Ranks(2, [&](const World& world) {
                         auto communicator = comm::connect(world);
                         LocalSgd<Model, Outer> net{make<Model>(), communicator, {.period = 4}, 3, outer};
                         optim::Sgd optimizer{net.parameters(), sgd};
                         std::string log;
                         for (const bool saves : {false, true}) {
                           for (int step = 0; step < 6; ++step) inner_step(net, optimizer, step, world);
                           const auto own = flat(net);
                           if (saves)
                             io::save(net, folder / "model");
                           else
                             net.gathered([&](Model&) { log += cat(flat(net) != own, " ", test::text_of(flat(net))); });
                         }
                         return log + test::text_of(flat(net));
                       }).texts();
    CHECK(texts[0] == texts[1]);
    CHECK(texts[0].substr(0, 5) == "true ");
    const io::SafetensorsReader file(folder / "model");
    std::vector<double> saved(static_cast<std::size_t>(file.at("fc1.weight").bytes / sizeof(double)));
    file.read(file.at("fc1.weight"), std::as_writable_bytes(std::span(saved)));
    CHECK(texts[0].find(test::text_of(saved)) != std::string::npos);
  };
  check(AverageParameters{});
  check(Nesterov{});
  check(Streaming<2>{});
}

TEST_CASE("outer: options that make no sense are refused") {
  comm::AnyCommunicator alone;
  const auto refused = [&]<class Outer>(const Outer& outer, int period = 4) {
    return message_of<UsageError>([&] { LocalSgd<Model, Outer>(make<Model>(), alone, {.period = period}, 3, outer); });
  };
  CHECK(refused(Nesterov{}) == "nothing");
  CHECK(refused(Nesterov{}, 0) == "LocalSgd: expected a period of at least 1 step, got 0");
  CHECK(refused(Nesterov{.lr = 0}) == "LocalSgd: expected an outer lr above 0, got 0");
  CHECK(refused(Nesterov{.momentum = 1}) == "LocalSgd: expected an outer momentum in [0, 1), got 1");
  CHECK(refused(Quantised<>{{.lr = NAN}}) == "LocalSgd: expected an outer lr above 0, got nan");
  CHECK(refused(Streaming<2>{.alpha = 1}) == "LocalSgd: expected an alpha in [0, 1), got 1");
  CHECK(refused(Streaming<3>{}) == "LocalSgd: expected a period that 3 fragments divide, got 4 steps");
  CHECK(refused(Streaming<2>{.overlap = 2}) ==
        "LocalSgd: expected an overlap of 0 to 1 steps, which ends before the next fragment's message, got 2");
  CHECK(refused(Streaming<40>{}, 80) == "LocalSgd: expected at most a fragment for each of 6 parameters, got 40");
  const auto texts = Ranks(2, [](const World& world) {
                       auto communicator = comm::connect(world);
                       return message_of<UsageError>([&] {
                         LocalSgd<Model, Nesterov>(make<Model>(), communicator, {}, 3, {.lr = 0.5 + world.rank});
                       });
                     }).texts();
  for (const auto& text : texts) CHECK_THAT(text, Contains("outer lr 0.5") && Contains("outer lr 1.5"));
}

/// A link that fails in the midst of a sum.
struct Failing {
  int size() const { return 2; }
  template <class T>
  void all_reduce(std::span<T>, comm::ReduceOp, comm::CollectiveOptions) {}
  template <class T>
  comm::Work all_reduce_async(std::span<T> data, comm::ReduceOp, comm::CollectiveOptions) {
    std::fill(data.begin(), data.end(), T{99});
    fail<CommError>("the link fails");
  }
};
TEST_CASE("outer: where a message fails parameters are theta, not half a difference") {
  SingleDevice<Model> net{make<Model>(), 3};
  const auto theta = flat(net);
  Failing link;
  detail::OuterSteps<Cpu, Failing, Nesterov> steps(Nesterov{}, net.flat_parameters(), link, 4);
  steps.begin_pass(net.flat_parameters(), 0, false, [] {});
  set_flat(net, std::vector<double>(theta.size(), 5));
  steps.seen(7);
  CHECK(message_of<CommError>([&] { steps.send(1, {.samples = true, .now = false, .together = false}); }) ==
        "the link fails");
  CHECK(flat(net) == theta);
}

TEST_CASE("outer: if a rank dies or throws, the others soon have an error, with a message on its way or not") {
  const auto check = [](const auto& outer, bool dies, int at) {
    const auto start = comm::Clock::now();
    const auto texts = Ranks(3, [&](const World& world) {
                         auto communicator = comm::connect(world);
                         LocalSgd net{make<Model>(), communicator, {.period = 4}, 3, outer};
                         optim::Sgd optimizer{net.parameters(), sgd};
                         for (int step = 0; step < 20; ++step) {
                           if (world.rank == 1 && step == at) {
                             if (dies) std::raise(SIGKILL);
                             fail<Error>("the program's own error");
                           }
                           inner_step(net, optimizer, step, world);
                         }
                         return std::string("ended");
                       }).texts();
    for (const std::size_t rank : {0u, 2u}) {
      INFO(texts[rank]);
      CHECK_THAT(texts[rank], Contains("rank 1"));
    }
    CHECK(comm::Clock::now() - start < 5s);
  };
  for (const int at : {4, 5}) {
    check(Nesterov{}, true, at);
    check(Streaming<2>{}, at == 4, at);
    check(Quantised<Streaming<2>>{}, true, at);
  }
}

}  // namespace outer_test
