/// How the cost of a thing grows with its size: growth KIND SIZE
/// One line: seconds=S mib=M, the median of the runs within half a second, after one to warm up, and the peak of the
/// account of tensors on this process's device. The seconds are processor time, of all ranks together, so that programs
/// beside it matter little; but by the clock for ranks that meet. growth.py runs every kind over many sizes.

#include <chorus/data/datasets.hpp>
#include <cmath>
#include <ctime>
#include <map>

#include "ranks.hpp"

namespace ch = chorus;
using ch::Index;

namespace {

/// SIZE layers, each on the input itself, so that no number vanishes or grows behind a thousand of them.
struct Deep : ch::nn::Module {
  ch::nn::ModuleList<ch::nn::Linear<ch::Cpu>> layers;
  CHORUS_MODULE(Deep, layers)
  explicit Deep(Index count) {
    for (Index i = 0; i < count; ++i) layers.push_back(ch::nn::Linear<ch::Cpu>(16, 16));
  }
  auto forward(const auto& x) const {
    auto y = ch::relu(layers[0](x));
    for (std::size_t i = 1; i < layers.size(); ++i) y = y + ch::relu(layers[i](x));
    return y;
  }
};

/// Four square layers with SIZE parameters in all.
struct Wide : ch::nn::Module {
  ch::nn::Linear<ch::Cpu> fc1, fc2, fc3, fc4;
  CHORUS_MODULE(Wide, fc1, fc2, fc3, fc4)
  explicit Wide(Index width)
      : fc1{width, width, {.bias = false}},
        fc2{width, width, {.bias = false}},
        fc3{width, width, {.bias = false}},
        fc4{width, width, {.bias = false}} {}
  auto forward(const auto& x) const { return fc4(ch::relu(fc3(ch::relu(fc2(ch::relu(fc1(x))))))); }
};

constexpr ch::optim::SgdOptions sgd{.lr = 1e-6, .momentum = 0.9};

/// The processor time of this process, in seconds.
double processor_time() {
  timespec now{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

/// Median of the processor time of `run` behind a first one, which gets its memory. One of over two seconds is enough.
template <class Run>
double median_seconds(const Run& run) {
  std::vector<double> times;
  const auto once = [&] {
    const double begin = processor_time();
    run();
    return processor_time() - begin;
  };
  once();
  double sum = 0;
  while (sum < 0.5 ? times.size() < 1000 : sum < 2 && times.size() < 3) sum += times.emplace_back(once());
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

void print(double seconds) {
  std::printf("seconds=%.9f mib=%.3f\n", seconds,
              static_cast<double>(ch::trace::memory(0).peak) / (1 << 20));
  std::fflush(stdout);
}

/// Runs `body(run)` on several ranks of this machine.
template <class Body>
void on_ranks(int argc, char** argv, Index ranks, const Body& body) {
  ch::launch<bench::AnyNet>(argc, argv, {.devices = static_cast<int>(ranks), .seed = 0, .timeout = {}}, body);
}

/// Prints the median of five blocks of as many runs, behind a first one.
template <class Step>
void time_ranks(ch::Run& run, int runs, const Step& step) {
  std::vector<double> times;
  for (int block = 0; block < 6; ++block) {
    double seconds = -processor_time();
    for (int i = 0; i < runs; ++i) step();
    seconds += processor_time();
    run.communicator().all_reduce(std::span<double>(&seconds, 1));
    if (block > 0) times.push_back(seconds / runs);
  }
  std::sort(times.begin(), times.end());
  if (run.is_main()) print(times[times.size() / 2]);
}

template <class Net>
void time_step(Net& net, const auto& images, const ch::Tensor<std::int64_t, 1>& targets) {
  ch::optim::Sgd optimizer{net.parameters(), sgd};
  print(median_seconds(bench::make_step(net, optimizer, images, targets)));
}

/// A step of DDP on a global batch that does not depend on the number of ranks.
template <class Net>
void time_rank_step(ch::Run& run, Net& net, const ch::Tensor<float, 2>& images, int classes) {
  ch::optim::Sgd optimizer{net.parameters(), sgd};
  const auto [share, targets] =
      bench::share_of(images, bench::labels(images.size(0), classes), run.rank(), run.world_size());
  time_ranks(run, 5, bench::make_step(net, optimizer, share, targets));
}

void time_all_reduce(ch::Run& run, std::size_t count) {
  std::vector<float> numbers(count);
  time_ranks(run, 20, [&] { run.communicator().all_reduce(std::span<float>(numbers)); });
}

/// A step whose loss is a sum of that many means of the net's output.
void time_terms(ch::Run& run, Index terms) {
  ch::DistributedDataParallel<Deep> net{Deep(1), run};
  ch::optim::Sgd optimizer{net.parameters(), sgd};
  const auto x = bench::normal<2>({4, 16});
  time_ranks(run, 2, [&] {
    optimizer.zero_grad();
    const auto y = net(x);
    auto loss = ch::mean(y);
    for (Index i = 1; i < terms; ++i) loss = loss + ch::mean(y);
    loss.backward();
    optimizer.step();
  });
}

void attention(Index length) {
  const auto operand = [&] { return ch::Variable<float, 4>(bench::normal<4>({1, 1, length, 64}), true); };
  const auto q = operand(), k = operand(), v = operand();
  print(median_seconds([&] {
    for (const auto* x : {&q, &k, &v}) x->zero_grad();
    ch::sum(ch::scaled_dot_product_attention(q, k, v, ch::AttentionOptions{.causal = true})).backward();
  }));
}

/// SIZE additions one behind the other, all of one leaf.
auto chain(const ch::Variable<float, 1>& x, Index nodes) {
  auto y = x + x;
  for (Index i = 1; i < nodes; ++i) y = y + x;
  return y;
}

void sampler(Index samples) {
  ch::data::Sampler order{samples, {.rank = 1, .world_size = 4}};
  Index epoch = 0, seen = 0;
  print(median_seconds([&] {
    order.set_epoch(++epoch);
    for (Index b = 0; b < order.global_batches(64); ++b) seen += static_cast<Index>(order.share(b, 64).size());
  }));
}

void loader(Index samples) {
  const ch::data::TensorDataset data{bench::normal<2>({samples, 16}), bench::labels(samples, 10)};
  ch::data::DataLoader batches{data, ch::data::Sampler{samples}, {.batch = 64}};
  Index epoch = 0, seen = 0;
  print(median_seconds([&] {
    batches.set_epoch(++epoch);
    for (auto& [x, y] : batches) seen += y.numel();
  }));
}

using Kind = void (*)(int argc, char** argv, Index size);
const std::map<std::string_view, Kind> kinds = {
    {"layers",
     [](int, char**, Index n) {
       ch::SingleDevice<Deep> net{Deep(n)};
       time_step(net, bench::normal<2>({4, 16}), bench::labels(4, 16));
     }},
    {"layers_dp",
     [](int, char**, Index n) {
       ch::DataParallel<Deep> net{Deep(n), {.device_ids = {0, 1}}};
       time_step(net, bench::normal<2>({4, 16}), bench::labels(4, 16));
     }},
    {"layers_ddp",
     [](int argc, char** argv, Index n) {
       on_ranks(argc, argv, 2, [n](ch::Run& run) {
         ch::DistributedDataParallel<Deep> net{Deep(n), run};
         time_rank_step(run, net, bench::normal<2>({4, 16}), 16);
       });
     }},
    {"layers_built",
     [](int, char**, Index n) {
       print(median_seconds([n] {
         ch::SingleDevice<Deep> net{Deep(n)};
         ch::optim::Sgd optimizer{net.parameters(), sgd};
       }));
     }},
    {"layers_built_ddp",
     [](int argc, char** argv, Index n) {
       on_ranks(argc, argv, 2, [n](ch::Run& run) {
         time_ranks(run, 2, [&] { ch::DistributedDataParallel<Deep>{Deep(n), run}; });
       });
     }},
    {"parameters",
     [](int, char**, Index n) {
       const auto width = static_cast<Index>(std::sqrt(static_cast<double>(n) / 4));
       ch::SingleDevice<Wide> net{Wide(width)};
       time_step(net, bench::normal<2>({1, width}), bench::labels(1, static_cast<int>(width)));
     }},
    {"batch",
     [](int, char**, Index n) {
       ch::SingleDevice<bench::Toy<ch::Cpu>> net{{}};
       time_step(net, bench::normal<4>({n, 3, 32, 32}), bench::labels(n, 10));
     }},
    {"batch_mlp",
     [](int, char**, Index n) {
       ch::SingleDevice<bench::Mlp<ch::Cpu>> net{{}};
       time_step(net, bench::normal<2>({n, 784}), bench::labels(n, 10));
     }},
    {"devices",
     [](int, char**, Index n) {
       std::vector<int> ids;
       for (int i = 0; i < n; ++i) ids.push_back(i);
       ch::DataParallel<bench::Mlp<ch::Cpu>> net{{}, {.device_ids = ids}};
       time_step(net, bench::normal<2>({64, 784}), bench::labels(64, 10));
     }},
    {"ranks",
     [](int argc, char** argv, Index n) {
       on_ranks(argc, argv, n, [](ch::Run& run) {
         ch::DistributedDataParallel<bench::Mlp<ch::Cpu>> net{{}, run};
         time_rank_step(run, net, bench::normal<2>({64, 784}), 10);
       });
     }},
    {"ranks_1mib",
     [](int argc, char** argv, Index n) {
       on_ranks(argc, argv, n, [](ch::Run& run) { time_all_reduce(run, 1 << 18); });
     }},
    {"ranks_8bytes",
     [](int argc, char** argv, Index n) {
       on_ranks(argc, argv, n, [](ch::Run& run) { time_all_reduce(run, 2); });
     }},
    {"ranks_meet",
     [](int argc, char** argv, Index n) {
       const bool is_rank = std::getenv("WORLD_SIZE") != nullptr;
       const auto begin = std::chrono::steady_clock::now();
       ch::launch<bench::AnyNet>(argc, argv, {.devices = static_cast<int>(n), .seed = 0, .timeout = {}},
                                 [](ch::Run& run) { run.communicator().barrier(); });
       const std::chrono::duration<double> time = std::chrono::steady_clock::now() - begin;
       if (!is_rank) print(time.count());
     }},
    {"terms",
     [](int argc, char** argv, Index n) { on_ranks(argc, argv, 2, [n](ch::Run& run) { time_terms(run, n); }); }},
    {"attention", [](int, char**, Index n) { attention(n); }},
    {"sampler", [](int, char**, Index n) { sampler(n); }},
    {"loader", [](int, char**, Index n) { loader(n); }},
    {"tape",
     [](int, char**, Index n) {
       const ch::Variable<float, 1> x(bench::normal<1>({1}), true);
       print(median_seconds([&] {
         x.zero_grad();
         ch::sum(chain(x, n)).backward();
       }));
     }},
    {"tape_dropped",
     [](int, char**, Index n) {
       const ch::Variable<float, 1> x(bench::normal<1>({1}), true);
       print(median_seconds([&] { chain(x, n); }));
     }},
};

}  // namespace

int main(int argc, char** argv) {
  const auto kind = argc == 3 ? kinds.find(argv[1]) : kinds.end();
  const Index size = argc == 3 ? std::atoll(argv[2]) : 0;
  if (kind == kinds.end() || size < 1) {
    std::fprintf(stderr, "usage: growth KIND SIZE, where SIZE is at least 1 and KIND one of:");
    for (const auto& [name, run] : kinds) std::fprintf(stderr, " %s", std::string(name).c_str());
    std::fprintf(stderr, "\n");
    return 2;
  }
  kind->second(argc, argv, size);
}
