/// Measurements of lab 16: deaths in virtual time, and a training that is started again. SPOILERS: read this when your
/// lab is right.

#include <algorithm>
#include <atomic>
#include <chorus/chorus.hpp>
#include <chorus/io/checkpoint.hpp>
#include <chorus/simulate/tasks.hpp>
#include <cmath>
#include <cstdlib>
#include <deque>
#include <filesystem>
#include <limits>
#include <optional>
#include <string>

#include "rank_dies.hpp"

namespace rank_dies_lab {
namespace {

namespace simulated = ch::comm::simulated;
using simulated::Time;

// ------------------------------------------------------------------------------------------------- the ring

enum class Fate { lives, killed, stopped };

/// What happens in a ring of 8.
struct Plan {
  const char* what;
  std::vector<std::pair<int, Fate>> fates;  ///< of ranks in the third of four sums
  int busy = -1;                            ///< computes for 0.9 s before the third
};
constexpr int ring_size = 8, sums = 4, fateful_sum = 2;
constexpr double link_end = 0.01;  // seconds until the end of a link is seen

struct Ended {};  // this rank's process
struct Hangs : std::exception {
  const char* what() const noexcept override { return "it waits for ever"; }
};

/// The ring, of which one rank runs at a time, in the order of virtual time.
class Ring {
 public:
  struct Result {
    int named = -1;
    double at = 0;  ///< when it gave up or ended
    std::string error;
  };

  Ring(const Plan& plan, const std::function<int(Rank&, int, double&)>& hear) : plan_(plan), hear_(hear) {
    for (int rank = 0; rank < ring_size; ++rank) members_.emplace_back(*this, rank);
    for (int rank = 0; rank < ring_size; ++rank)
      tasks_.add(simulated::RunsOn::thread, [this, rank] { members_[static_cast<std::size_t>(rank)].live(); });
    tasks_.run([this] {
      hang_ = true;
      for (auto& member : members_) member.wake(Time{});
    });
  }

  /// When the first rank died; 0 if none did.
  double died_at() const { return died_at_; }
  const Result& result(int rank) const { return members_[static_cast<std::size_t>(rank)].result; }

 private:
  static constexpr double hop = 1e-4, call = 1e-3, end_of_time = 10;
  static Time time(double seconds) { return simulated::time_of("lab", seconds); }

  class Member final : public Rank {
   public:
    Member(Ring& of, int number) : ring(of), rank(number) {}

    void live() {
      try {
        for (int sum = 0; sum < sums; ++sum) {
          compute(sum == fateful_sum && rank == ring.plan_.busy ? 0.9 : 0.01 + 0.001 * rank);
          for (int round = 1; round < ring_size; ++round) {
            if (sum == fateful_sum && round == 3) meet_fate();
            send((rank + 1) % ring_size, 1000 * sum + round);
            double number = -1;
            result.named = ring.hear_(*this, (rank + ring_size - 1) % ring_size, number);
            if (result.named >= 0) {
              result.at = seconds();
              return end();
            }
            if (number != 1000 * sum + round) ch::fail<ch::UsageError>("hear: it returned -1 without the next number");
          }
        }
      } catch (const Ended&) {
      } catch (const std::exception& error) {
        result.error = error.what();
      }
      if (!stopped) end();
    }

    double now() override {
      spend();
      return seconds();
    }
    Heard receive(int from, double until, double& number) override {
      auto& link = ring.links_[static_cast<std::size_t>(from)];
      spend();
      ch::check<ch::UsageError>(from == (rank + ring_size - 1) % ring_size, "receive: rank ", rank,
                                " has no link from rank ", from);
      const Time limit = time(std::clamp(until, 0.0, end_of_time));
      for (;;) {
        if (!link.numbers.empty() && link.numbers.front().first <= clock()) {
          number = link.numbers.front().second;
          link.numbers.pop_front();
          return Heard::number;
        }
        if (link.numbers.empty() && link.closed && *link.closed <= clock()) return Heard::closed;
        if (clock() >= limit) return Heard::nothing;
        auto next = limit;
        if (!link.numbers.empty()) next = std::min(next, link.numbers.front().first);
        if (link.numbers.empty() && link.closed) next = std::min(next, *link.closed);
        sleep(next);
      }
    }
    void sign(int whom) override {
      spend();
      own_sign = {seconds(), whom};
    }
    Sign last_sign(int of) override {
      spend();
      ch::check<ch::UsageError>(of >= 0 && of < ring_size, "last_sign: expected a rank in [0, 8), got ", of);
      return ring.members_[static_cast<std::size_t>(of)].own_sign;
    }
    int named() override {
      spend();
      return ring.named_;
    }
    int name(int dead) override {
      spend();
      if (ring.named_ < 0) ring.named_ = dead;
      return ring.named_;
    }

    /// Ends its sleep at that time, if it sleeps.
    void wake(Time at) {
      if (!asleep) return;
      asleep = false;
      woken = at;
      ring.tasks_.wake(task(), at);
    }

    Ring& ring;
    const int rank;
    Result result;

   private:
    int task() const { return rank; }
    Time& clock() { return ring.tasks_.clock(); }
    double seconds() { return simulated::seconds(clock()); }
    /// Others run until so much virtual time has passed.
    void compute(double more) {
      const Time until = simulated::later(clock(), time(more));
      while (clock() < until) sleep(until);
    }
    /// The same, or until something has come.
    void sleep(Time until) {
      if (until > clock()) {
        const auto nap = ++naps;
        ring.tasks_.at(until, [this, nap, until] {
          if (nap == naps) wake(until);
        });
        asleep = true;
        ring.tasks_.block();
        clock() = std::max(clock(), woken);
      }
      if (ring.hang_ || clock() >= time(end_of_time)) throw Hangs();
    }
    // Each call takes a moment, so that a loop of calls ends.
    void spend() { compute(call); }
    void send(int to, double number) {
      auto& link = ring.links_[static_cast<std::size_t>(rank)];
      link.numbers.emplace_back(simulated::later(clock(), time(hop)), number);
      tell(to, link.numbers.back().first);
    }
    void tell(int to, Time at) {
      ring.tasks_.at(at, [this, to, at] { ring.members_[static_cast<std::size_t>(to)].wake(at); });
    }
    void end() {
      if (result.at == 0) result.at = seconds();
      auto& link = ring.links_[static_cast<std::size_t>(rank)];
      link.closed = simulated::later(clock(), time(link_end));
      tell((rank + 1) % ring_size, *link.closed);
    }
    void meet_fate() {
      for (const auto& [who, fate] : ring.plan_.fates) {
        if (who != rank) continue;
        if (ring.died_at_ == 0) ring.died_at_ = seconds();
        stopped = fate == Fate::stopped;
        throw Ended();
      }
    }

    Sign own_sign{0, -1};
    bool asleep = false, stopped = false;
    std::uint64_t naps = 0;
    Time woken{};
  };
  struct Link {
    std::deque<std::pair<Time, double>> numbers;  // when each arrives
    std::optional<Time> closed;
  };

  const Plan& plan_;
  const std::function<int(Rank&, int, double&)>& hear_;
  simulated::Tasks tasks_{true};
  std::deque<Member> members_;
  std::vector<Link> links_ = std::vector<Link>(ring_size);  // by sender
  int named_ = -1;
  double died_at_ = 0;
  bool hang_ = false;
};

bool dies(const Plan& plan, int rank) {
  return std::any_of(plan.fates.begin(), plan.fates.end(), [&](const auto& fate) { return fate.first == rank; });
}
/// Survivors that name a rank that is alive.
int accusers(const Plan& plan, const Ring& ring) {
  int count = 0;
  for (int rank = 0; rank < ring_size; ++rank)
    count += !dies(plan, rank) && ring.result(rank).named >= 0 && !dies(plan, ring.result(rank).named);
  return count;
}
double last_knows(const Plan& plan, const Ring& ring) {
  double last = 0;
  for (int rank = 0; rank < ring_size; ++rank)
    if (!dies(plan, rank)) last = std::max(last, ring.result(rank).at - ring.died_at());
  return last;
}
std::string ms(double seconds) { return ch::cat(std::lround(1e3 * seconds), " ms"); }

/// What is wrong with the survivors' answers; empty if nothing is.
std::string fault(const Plan& plan, const Ring& ring) {
  int name = -1;
  // An accusation of an innocent rank tells more than what follows from it.
  for (const bool only_accusers : {true, false})
    for (int rank = 0; rank < ring_size; ++rank) {
      const auto& [named, at, error] = ring.result(rank);
      if (dies(plan, rank)) continue;
      const auto says = ch::cat("rank ", rank, " names rank ", named, " ");
      if (named >= 0 && !dies(plan, named)) {
        if (plan.fates.empty()) return says + "while all ranks are alive, and one computes";
        if (named >= ring_size) return says + "of 8";
        const bool links_end = plan.fates.front().second == Fate::killed;
        if (named == plan.busy) return says + "which is alive: it computes";
        return says + (links_end ? "which is alive: it had given up" : "which is alive: it waited, too");
      }
      if (only_accusers) continue;
      if (!error.empty()) return ch::cat("rank ", rank, ": ", error);
      if (plan.fates.empty()) continue;
      if (named < 0) return ch::cat("rank ", rank, " names none");
      if (at - ring.died_at() > deadline) return says + "only " + ms(at - ring.died_at()) + " after its death";
      if (name >= 0 && name != named) return says + ch::cat("and a different rank names rank ", name);
      name = named;
    }
  return "";
}

const Plan killed{"rank 2 is killed", {{2, Fate::killed}}};
const Plan stopped{"rank 2 is stopped", {{2, Fate::stopped}}};

void check_hear(lab::Lab& lab, const Code& code) {
  for (const auto& plan : {Plan{"a rank computes for 0.9 s", {}, 3}, killed, stopped,
                           Plan{"ranks 5 and 1 are killed at once", {{5, Fate::killed}, {1, Fate::killed}}},
                           Plan{"rank 6 is stopped, and a different one computes for 0.9 s", {{6, Fate::stopped}}, 2},
                           Plan{"rank 0 is killed, and a different one computes for 0.9 s", {{0, Fate::killed}}, 4}}) {
    std::string why;
    if (!lab.run(plan.what, [&] {
          const Ring ring(plan, code.hear);
          for (int rank = 0; rank < ring_size; ++rank)
            if (ring.result(rank).error.starts_with("lab: ")) ch::fail<ch::UsageError>(ring.result(rank).error);
          why = fault(plan, ring);
        }))
      return;
    if (!lab.require(plan.what, why.empty(), why)) return;
  }
}

// ------------------------------------------------------------------------------------------------- the training

struct Model : ch::nn::Module {
  ch::nn::Linear<ch::Cpu> fc1{6, 16}, fc2{16, 3};
  CHORUS_MODULE(Model, fc1, fc2)
  auto forward(const auto& x) const { return fc2(ch::dropout(ch::relu(fc1(x)), 0.3, this->training())); }
};
constexpr ch::Index batch = 8, samples = batch * Training::steps_of_epoch;
constexpr std::uint64_t seed = 5;

/// A rank's share of a batch: each sample's features and class.
auto share(std::span<const ch::Index> of_rank) {
  const auto count = static_cast<ch::Index>(of_rank.size());
  auto x = ch::Tensor<float, 2>::empty({count, 6});
  auto labels = ch::Tensor<std::int64_t, 1>::empty({count});
  for (ch::Index i = 0; i < count; ++i) {
    const ch::Index sample = of_rank[static_cast<std::size_t>(i)];
    for (ch::Index j = 0; j < 6; ++j) x.data()[i * 6 + j] = static_cast<float>(std::sin(double(sample * 6 + j)));
    labels.data()[i] = sample % 3;
  }
  return std::pair{x, labels};
}

/// What a step was made with.
struct Made {
  int epoch, batch, pass;
};
struct Death : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// One process of the job.
class Process final : public Training {
 public:
  /// `dies_after`: steps of the job, -1: never.
  Process(ch::comm::AnyCommunicator& ranks, const Model& model, std::string checkpoint, int dies_after)
      : net_(ch::nn::copy_of(model), ranks, {}, seed),
        optimizer_(net_.parameters(), {.lr = 0.05, .momentum = 0.9}),
        sampler_(samples, {.rank = ranks.rank(), .world_size = ranks.size(), .seed = seed}),
        path_(std::move(checkpoint)),
        dies_after_(dies_after) {}

  bool has_checkpoint() override { return std::filesystem::exists(path_); }
  int load() override {
    ch::check<ch::UsageError>(has_checkpoint(), "load: a checkpoint does not exist");
    done_ = began_with = static_cast<int>(ch::io::load_checkpoint(net_, optimizer_, path_).step);
    net_.set_forward_passes(0);
    return done_;
  }
  void save(int after_steps) override {
    ch::check<ch::UsageError>(after_steps == done_, "save: expected ", done_, " steps, as made, got ", after_steps);
    net_.communicator().barrier();  // no rank still asks for the earlier one
    ch::io::save_checkpoint(net_, optimizer_, {.step = after_steps}, path_);
    net_.communicator().barrier();
    saved.push_back(after_steps);
  }
  void begin_epoch(int epoch, int first) override {
    ch::check<ch::UsageError>(epoch >= 0 && first >= 0, "begin_epoch: expected epoch and batch of at least 0, got ",
                              epoch, " and ", first);
    epoch_ = epoch;
    batch_ = first;
    sampler_.set_epoch(epoch);
  }
  void next_pass(int number) override { net_.set_forward_passes(static_cast<std::uint32_t>(number)); }
  void step() override {
    ch::check<ch::UsageError>(epoch_ >= 0, "step: begin_epoch comes first");
    ch::check<ch::UsageError>(batch_ < steps_of_epoch, "step: epoch ", epoch_, " has no more batches");
    ch::check<ch::UsageError>(made.size() < 2 * steps, "train: it makes more than ", 2 * steps, " steps");
    if (done_ == dies_after_) throw Death("killed");
    const Made with{epoch_, batch_, static_cast<int>(net_.forward_passes())};
    const auto [x, labels] = share(sampler_.share(batch_++, batch));
    optimizer_.zero_grad();
    ch::cross_entropy(net_(x), labels).backward();
    optimizer_.step();
    made.push_back(with);
    ++done_;
  }
  std::vector<float> parameters() {
    std::vector<float> all;
    const auto add = [&](const auto& parameter) {
      const auto& numbers = parameter.value();
      all.insert(all.end(), numbers.data(), numbers.data() + numbers.numel());
    };
    auto& model = net_.module();
    add(model.fc1.weight);
    add(model.fc1.bias);
    add(model.fc2.weight);
    add(model.fc2.bias);
    return all;
  }

  std::vector<Made> made;
  std::vector<int> saved;
  int began_with = 0;

 private:
  ch::DistributedDataParallel<Model> net_;
  ch::optim::Sgd<ch::Cpu> optimizer_;
  ch::data::Sampler sampler_;
  const std::string path_;
  const int dies_after_;
  int epoch_ = -1, batch_ = 0, done_ = 0;
};

/// What rank 0 did.
struct Run {
  std::vector<Made> made;
  std::vector<int> saved;
  int began_with = 0;
  std::vector<float> parameters;
};
/// A start of the job, in which rank 1 dies after so many steps.
Run start(int n, const std::string& checkpoint, int dies_after, const std::function<void(Training&)>& train) {
  Run out;
  std::atomic<bool> died = false;
  ch::manual_seed(seed);
  const Model model;
  const auto body = [&](ch::comm::AnyCommunicator& ranks) {
    Process process(ranks, model, checkpoint, ranks.rank() == 1 ? dies_after : -1);
    const auto keep = [&] {
      if (ranks.rank() == 0) out = {process.made, process.saved, process.began_with, process.parameters()};
    };
    try {
      train(process);
    } catch (const Death&) {
      died = true;
      keep();
      throw;
    } catch (const ch::CommError&) {
      keep();
      throw;
    }
    keep();
  };
  try {
    lab::on_ranks(n, body, std::chrono::seconds(5));
  } catch (const std::exception&) {
    if (!died) throw;
  }
  return out;
}

/// The right way.
void undisturbed(Training& run) {
  int step = run.has_checkpoint() ? run.load() : 0;
  run.next_pass(step);
  run.begin_epoch(step / run.steps_of_epoch, step % run.steps_of_epoch);
  while (step < run.steps) {
    run.step();
    if (++step % 10 == 0) run.save(step);
    if (step % run.steps_of_epoch == 0) run.begin_epoch(step / run.steps_of_epoch, 0);
  }
}

/// Folder of checkpoints, removed at the end.
struct Folder {
  std::string path = "/tmp/chorus_lab_XXXXXX";
  Folder() { ch::check<ch::Error>(mkdtemp(path.data()) != nullptr, "lab: no temporary folder"); }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;
  ~Folder() { std::filesystem::remove_all(path); }
  std::string file(const char* name) const { return path + "/" + name; }
};
constexpr int death = 27;

/// What a run's steps, of which the first is the job's step `first`, were made with instead; empty if all is right.
std::string difference(const std::vector<Made>& made, int first) {
  for (std::size_t i = 0; i < made.size(); ++i) {
    const int step = first + static_cast<int>(i), epoch = step / Training::steps_of_epoch;
    const int at = made[i].epoch * Training::steps_of_epoch + made[i].batch;
    const auto after = ch::cat("after ", step, " steps it ");
    if (made[i].batch == 0 && i == 0 && at != step)
      return ch::cat(after, "reads the samples from the beginning of epoch ", made[i].epoch);
    if (at == step - 1) return after + "trains with the batch of the step before: that step is made twice";
    if (at == step + 1) return after + "trains with the batch of the step after: one step is left out";
    if (at != step)
      return ch::cat(after, "trains with batch ", made[i].batch, " of epoch ", made[i].epoch,
                     "; it must train with batch ", step % Training::steps_of_epoch, " of epoch ", epoch);
    if (made[i].pass != step)
      return ch::cat(after, "draws dropout's masks of pass ", made[i].pass, "; it must draw those of pass ", step);
  }
  return "";
}

void check_train(lab::Lab& lab, const Code& code, const Run& truth) {
  const Folder folder;
  const auto run = [&](const char* name, int dies_after, Run& out) {
    return lab.run(name, [&] { out = start(3, folder.file("c"), dies_after, code.train); });
  };
  const auto judge = [&](const std::string& name, const Run& is, int steps) {
    auto why = difference(is.made, is.began_with);
    const int end = is.began_with + static_cast<int>(is.made.size());
    if (why.empty() && end != steps) why = ch::cat("it ends after ", end, " steps of ", steps);
    for (int step = is.began_with + 10 - is.began_with % 10; why.empty() && step <= steps; step += 10)
      if (std::find(is.saved.begin(), is.saved.end(), step) == is.saved.end())
        why = ch::cat("it has not saved after ", step, " steps");
    return lab.require(name, why.empty(), why);
  };
  Run first, second;
  if (!run("train, until a rank dies", death, first) || !judge("train, until a rank dies", first, death)) return;
  if (!run("train, started again", -1, second)) return;
  if (second.began_with == 0) {
    lab.require("train, started again", false, "it doesn't load the checkpoint");
    return;
  }
  if (!judge("train, started again", second, Training::steps)) return;
  lab.require("train, started again: the bits of a run that nobody disturbed", second.parameters == truth.parameters,
              "they differ, although each step had the right samples and masks");
}

}  // namespace

void check(lab::Lab& lab, const Code& code) {
  const auto whose_link_closed = [](Rank& me, int from, double& number) {
    return me.receive(from, std::numeric_limits<double>::infinity(), number) == Heard::number ? -1 : from;
  };
  const auto waited_for = [](Rank& me, int from, double& number) {
    return me.receive(from, me.now() + silence, number) == Heard::number ? -1 : from;
  };
  const Ring by_links(killed, whose_link_closed), by_time(stopped, waited_for);
  lab.compare("killed: survivors that name an innocent rank, if each names the rank whose link closed",
              accusers(killed, by_links), 0, "Who closes the link to rank 4, and is it dead?");
  lab.compare("killed: ms until the last survivor knows, if word goes from link to link",
              1e3 * last_knows(killed, by_links), 1, "How many links end, one after the other?");
  lab.compare("stopped: survivors that name an innocent rank, if each waits for 1 s and names the rank it waits for",
              accusers(stopped, by_time), 0, "For whom does each rank wait in a ring?");
  const Folder folder;
  const auto file = folder.file("c");
  const auto truth = start(3, folder.file("whole"), -1, undisturbed);
  const auto first = start(3, file, death, undisturbed);
  std::filesystem::copy_file(file, folder.file("d"));
  const auto again = start(3, file, -1, undisturbed), fewer = start(2, folder.file("d"), -1, undisturbed);
  lab.compare("steps made twice", static_cast<double>(first.made.size() + again.made.size()) - Training::steps, 0,
              "After which step was the newest checkpoint written?");
  lab.compare("2 ranks in place of 3 end with the same bits", fewer.parameters == truth.parameters,
              "In which order are the gradients of a batch added?");
  ch::check<ch::Error>(again.parameters == truth.parameters, "lab: the reference differs from an undisturbed run");
  check_hear(lab, code);
  check_train(lab, code, truth);
}

}  // namespace rank_dies_lab
