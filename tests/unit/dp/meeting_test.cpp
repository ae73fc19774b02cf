// The threads of DataParallel's devices meet in SyncBatchNorm: the effect on the others if one fails, ends without the
// layer, or comes late or never.
#include <atomic>
#include <catch.hpp>
#include <chorus/parallel/data_parallel.hpp>
#include <chrono>
#include <condition_variable>
#include <csignal>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include <unit/comm/processes.hpp>
#include <unit/parallel/policies.hpp>

namespace dp_meeting_test {

using namespace test::names;
using namespace std::chrono_literals;

/// What a device does with its first number before the synchronised layer.
using Act = std::function<bool(double)>;

/// Enters the synchronised layer if `act` returns true; in backward, `act_back` comes before it.
template <class D>
struct Acting : nn::Module {
  nn::Linear<D, double> fc{5, 3};
  nn::SyncBatchNorm<D, double> norm{3};
  Act act;
  std::function<void(double)> act_back = [](double) {};
  CHORUS_MODULE(Acting, fc, norm)
  auto forward(const auto& x) const {
    const auto y = fc(x);
    const double device = value_of(x)(0, 0);
    if (!act(device)) return y;
    const auto normed = norm(y);
    normed.register_hook([this, device](const auto&) { act_back(device); });
    return normed;
  }
};

using Net = DataParallel<Acting<Cpu>>;
Net net_that(Act act, std::chrono::milliseconds timeout = 10s) {
  auto model = make<Acting<Cpu>>();
  model.act = std::move(act);
  return Net{std::move(model), {.device_ids = {0, 1, 2}, .timeout = timeout}, 3};
}

/// Two samples for each of three devices; the first number of each sample is the device's number.
Tensor<double, 2> batch() {
  auto x = contiguous(numbers(6, 5, 1));
  for (Index i = 0; i < 6; ++i) x(i, 0) = static_cast<double>(i / 2);
  return x;
}

double seconds_of(const std::function<void()>& work) {
  const auto begin = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

TEST_CASE("dp meeting: where a device fails its own error is thrown, whichever device it is") {
  for (const int who : {0, 1, 2}) {
    auto net = net_that([who](double device) {
      check<ShapeError>(device != who, "device ", device, " has had enough");
      return true;
    });
    std::string message;
    CHECK(seconds_of([&] { message = message_of<ShapeError>([&] { net(batch()); }); }) < 5);
    CHECK(message == cat("DataParallel: replica ", who, " on device cpu:", who, ": device ", who, " has had enough"));
  }
}

TEST_CASE("dp meeting: the error of a device that fails after the others' deadline comes before theirs") {
  auto net = net_that(
      [](double device) {
        if (device == 2) {
          std::this_thread::sleep_for(800ms);
          fail<ShapeError>("too late");
        }
        return true;
      },
      500ms);
  CHECK(message_of<ShapeError>([&] { net(batch()); }) == "DataParallel: replica 2 on device cpu:2: too late");
}

TEST_CASE("dp meeting: devices that end without the layer are named, at once") {
  for (const int who : {0, 1, 2}) {
    auto net = net_that([who](double device) { return device == who; });  // the others don't
    std::string message;
    CHECK(seconds_of([&] { message = message_of<UsageError>([&] { net(batch()); }); }) < 5);
    CHECK_THAT(message, Contains(cat("replica ", who, " on device cpu:", who, ": SyncBatchNorm: replica ")));
    CHECK_THAT(message, Contains("ended without calling this layer"));
    CHECK_THAT(message, Contains(cat("replica ", (who + 1) % 3, " on")) || Contains(cat("replica ", (who + 2) % 3)));
  }
}

TEST_CASE(
    "dp meeting: devices that come late, but before the pass is given up, are named, and the next pass is as ever") {
  std::atomic<bool> slow = true;
  auto net = net_that(
      [&slow](double device) {
        if (slow && device > 0) std::this_thread::sleep_for(800ms);
        return true;
      },
      500ms);
  CHECK(message_of<TimeoutError>([&] { net(batch()); }) ==
        "DataParallel: replica 0 on device cpu:0: SyncBatchNorm: replica 1 on device cpu:1, replica 2 on device cpu:2 "
        "did not join within 500 ms");
  slow = false;
  auto other = net_that([](double) { return true; });
  for (int pass = 0; pass < 2; ++pass) CHECK(net(batch()).value().to_vector() == other(batch()).value().to_vector());
}

TEST_CASE("dp meeting: a device that doesn't come in time in backward is named, too") {
  auto model = make<Acting<Cpu>>();
  model.act = [](double) { return true; };
  model.act_back = [](double device) {
    if (device == 1) std::this_thread::sleep_for(1500ms);
  };
  Net net{std::move(model), {.device_ids = {0, 1, 2}, .timeout = 500ms}, 3};
  const auto loss = sum(net(batch()));
  CHECK_THAT(message_of<TimeoutError>([&] { loss.backward(); }),
             Contains(": SyncBatchNorm: replica 1 on device cpu:1 did not join within 500 ms") &&
                 Contains("DataParallel: replica 1 on device cpu:1 did not return"));
}

/// Blocks threads in a model until it is opened. It may outlive the test.
struct Gate {
  std::mutex mutex;
  std::condition_variable change;
  bool open = false;
  int inside = 0;

  void pass() {
    std::unique_lock lock(mutex);
    ++inside;
    change.wait(lock, [&] { return open; });
    --inside;
    change.notify_all();
  }
  /// Opens the gate, and returns when all threads have left.
  void let_go() {
    std::unique_lock lock(mutex);
    open = true;
    change.notify_all();
    change.wait(lock, [&] { return inside == 0; });
  }
};

/// A device that waits at a gate, without a layer in which others would wait for it.
template <class D>
struct Gated : nn::Module {
  nn::Linear<D, double> fc{5, 3};
  std::shared_ptr<Gate> gate = std::make_shared<Gate>();
  std::shared_ptr<int> token = std::make_shared<int>();  // each copy of the model shares it
  int who = 2;
  bool backward = false;
  CHORUS_MODULE(Gated, fc)
  auto forward(const auto& x) const {
    const auto y = fc(x);
    const bool mine = value_of(x)(0, 0) == who;
    if (mine && !backward) gate->pass();
    y.register_hook([gate = gate, waits = mine && backward](const auto&) {
      if (waits) gate->pass();
    });
    return y;
  }
};

TEST_CASE("dp meeting: a device that doesn't come back is named at the deadline; the model can be saved, and used") {
  for (const bool backward : {false, true}) {
    auto model = make<Gated<Cpu>>();
    const auto gate = model.gate;
    model.backward = backward;
    DataParallel<Gated<Cpu>> net{std::move(model), {.device_ids = {0, 1, 2}, .timeout = 300ms}, 3};
    const auto step = [&] { sum(net(batch())).backward(); };
    std::string message;
    const double seconds = seconds_of([&] { message = message_of<TimeoutError>(step); });
    CHECK(seconds > 0.25);
    CHECK(seconds < 5);
    CHECK_THAT(message, Contains("DataParallel: replica 2 on device cpu:2 did not return within 300 ms of the first"));
    CHECK(test::values(net.module()) == test::values(*std::make_unique<Gated<Cpu>>(make<Gated<Cpu>>())));
    CHECK_THAT(message_of<TimeoutError>(step), Contains("replica 2 on device cpu:2 has not returned from an earlier"));
    gate->let_go();
    for (const auto& named : net.parameters()) named.parameter->set_grad_arrived(false);
    step();
    SingleDevice<Gated<Cpu>> single{make<Gated<Cpu>>(), 3};
    single.module().who = -1;
    sum(single(batch())).backward();
    CHECK(distance(test::gradients(net.module()), test::gradients(single.module())) < rounding);
  }
}

TEST_CASE("dp meeting: a net may go before the device that it waited for in vain comes back") {
  for (const bool backward : {false, true}) {
    const auto held = [] { return trace::memory(40, trace::Memory::parameters); };
    const auto before = held();
    std::shared_ptr<Gate> gate;
    std::shared_ptr<int> token;
    {
      auto model = make<Gated<Cpu>>();
      gate = model.gate;
      token = model.token;
      model.backward = backward;
      DataParallel<Gated<Cpu>> net{std::move(model), {.device_ids = {0, 1, 40}, .timeout = 200ms}, 3};
      const auto x = batch();
      CHECK_THROWS_AS(sum(net(x)).backward(), TimeoutError);
    }
    CHECK(held() > before);  // the thread still has the copies
    CHECK(token.use_count() == 3);
    gate->let_go();
    for (int wait = 0; wait < 500 && held() != before; ++wait) std::this_thread::sleep_for(10ms);
    CHECK(held() == before);
    CHECK(token.use_count() == 1);
  }
}

/// Runs `work` in a process that the library ends; returns its stderr.
std::string last_words(const std::function<void()>& work) {
  int ends[2];
  REQUIRE(pipe(ends) == 0);
  const int child = fork();
  if (child == 0) {
    std::set_terminate([] { _exit(77); });  // without Catch's handlers and without a core file
    std::signal(SIGALRM, SIG_DFL);
    alarm(20);
    dup2(ends[1], STDERR_FILENO);
    work();
    _exit(0);
  }
  close(ends[1]);
  std::string text;
  char buffer[1024];
  for (ssize_t n; (n = read(ends[0], buffer, sizeof buffer)) > 0;) text.append(buffer, static_cast<std::size_t>(n));
  close(ends[0]);
  int status = 0;
  waitpid(child, &status, 0);
  return cat(WIFEXITED(status) ? WEXITSTATUS(status) : -1, ": ", text);
}

/// A net whose copy on that device never returns.
auto net_stuck_on(double which) {
  return net_that(
      [which](double device) {
        while (device == which) std::this_thread::sleep_for(1s);
        return true;
      },
      150ms);
}

TEST_CASE("dp meeting: where a device never comes back the process can save and end by itself") {
  const auto words = last_words([] {
    auto net = net_stuck_on(1);
    try {
      net(batch());
    } catch (const TimeoutError& error) {
      detail::say(error.what());
      detail::say(io::parameters_sha256(net.module()) ==
                          io::parameters_sha256(*std::make_unique<Acting<Cpu>>(make<Acting<Cpu>>()))
                      ? "saved"
                      : "other parameters");
    }
  });
  CHECK_THAT(words, Catch::Matchers::StartsWith("0: chorus: DataParallel: replica 1 on device cpu:1 did not return "
                                                "within 150 ms of the first device; replica ") &&
                        Contains(": SyncBatchNorm: replica 1 on device cpu:1 did not join within 150 ms; its thread") &&
                        Catch::Matchers::EndsWith("waits for the thread\nchorus: saved\n"));
}

TEST_CASE("dp meeting: where the calling thread's device never comes back the process ends, and says why") {
  const auto words = last_words([] {
    auto net = net_stuck_on(0);
    net(batch());
  });
  CHECK(words ==
        "77: chorus: warning: SyncBatchNorm under DataParallel: replica 0 on device cpu:0 did not join within 150 ms; "
        "the error is thrown when it ends\nchorus: error: DataParallel: replica 0 on device cpu:0, in the calling "
        "thread, does not end: the process exits\n");
}

}  // namespace dp_meeting_test
