#include <catch.hpp>
#include <chorus/core/threads.hpp>
#include <chorus/ops/attention.hpp>
#include <chorus/parallel/data_parallel.hpp>

#include "../counted_new.hpp"
#include "benchmarks/cases.hpp"

namespace steady_state_test {

namespace ch = chorus;

struct Net : ch::nn::Module {
  ch::nn::Conv2d<ch::Cpu> conv1{3, 32, {.kernel = 3, .padding = 1}}, conv2{32, 40, {.kernel = 3, .padding = 1}};
  ch::nn::BatchNorm2d<ch::Cpu> norm{40};
  ch::nn::Linear<ch::Cpu> head{640, 10};
  CHORUS_MODULE(Net, conv1, conv2, norm, head)
  auto forward(const auto& images) const {
    const auto x = ch::max_pool2d(ch::relu(norm(conv2(ch::relu(conv1(images))))), 2);
    const auto rows = ch::reshape(x, ch::Shape<3>{x.size(0), 40, 16});
    return head(ch::flatten(ch::scaled_dot_product_attention(rows, rows, rows, {.causal = true, .dropout = 0.1})));
  }
};

/// Trains for some steps: those after the first allocate neither device memory nor heap memory.
template <class Optimizer, class Model, class Images>
void check_second_step(Model model, const Images& images, ch::Index rows, typename Optimizer::options_type options) {
  auto& allocator = ch::CachingAllocator<ch::Cpu>::of(ch::Cpu{});
  allocator.empty_cache();  // frees cached blocks of earlier models
  ch::SingleDevice<Model> net{std::move(model)};
  Optimizer optimizer(net.parameters(), options);
  const auto step = bench::make_step(net, optimizer, images, bench::labels(rows, 10));
  const auto at_first = allocator.system_allocations();
  step();
  const auto before = allocator.system_allocations();
  CHECK(before > at_first);
  const int heap = heap_allocations;
  for (int i = 0; i < 3; ++i) step();
  const int asked = heap_allocations - heap;
  CHECK(allocator.system_allocations() == before);
  CHECK(asked == 0);
}

TEST_CASE("from the second step on, training asks the system and the heap for no memory") {
  using D = ch::Cpu;
  using ch::optim::Sgd, ch::optim::Adam, ch::optim::AdamW;
  constexpr ch::optim::SgdOptions momentum{.lr = 0.01, .momentum = 0.9};
  SECTION("a small CNN") { check_second_step<Sgd<D>>(bench::Toy<D>{}, bench::normal<4>({4, 3, 32, 32}), 4, momentum); }
  SECTION("perceptrons") { check_second_step<Adam<D>>(bench::Mlp<D>{}, bench::normal<2>({4, 784}), 4, {}); }
  SECTION("a ResNet") {
    check_second_step<Sgd<D>>(bench::ResNet18<D>{}, bench::normal<4>({2, 3, 16, 16}), 2, momentum);
  }
  SECTION("a ResNet on two threads") {
    ch::set_num_threads(2);
    check_second_step<Sgd<D>>(bench::ResNet18<D>{}, bench::normal<4>({4, 3, 32, 32}), 4, momentum);
    ch::set_num_threads(1);
  }
  SECTION("a small CNN on two threads") {
    ch::set_num_threads(2);
    check_second_step<Sgd<D>>(bench::Toy<D>{}, bench::normal<4>({64, 3, 32, 32}), 64, momentum);
    ch::set_num_threads(1);
  }
  SECTION("a GPT") {
    const auto text = bench::labels(64, 65).view(ch::Shape<2>{2, 32});
    check_second_step<AdamW<D>>(bench::Gpt<D>{}, text, 64, {});
  }
  SECTION("batch norm, attention with dropout") {
    check_second_step<Sgd<D>>(Net{}, bench::normal<4>({6, 3, 8, 8}), 6, momentum);
  }
}

/// With many operations.
struct Deep : ch::nn::Module {
  ch::nn::Linear<ch::Cpu, double> fc{5, 5};
  CHORUS_MODULE(Deep, fc)
  auto forward(const auto& x) const {
    auto h = fc(x);
    for (int i = 0; i < 50; ++i) h = tanh(h);
    return h;
  }
};

TEST_CASE("under DataParallel the heap does not grow, whichever thread makes and frees what passes remember") {
  ch::DataParallel<Deep> net(Deep{}, {.device_ids = {0, 0, 0, 0}}, 3);
  const auto x = ch::Tensor<double, 2>::ones({4, 5});
  const auto passes = [&](int count) {
    for (int i = 0; i < count; ++i) {
      net(x);  // its graph has no backward
      sum(net(x)).backward(i % 2 == 0);
    }
  };
  passes(300);
  const int before = heap_allocations - heap_releases;
  passes(300);
  CHECK(heap_allocations - heap_releases - before < 10'000);
}

}  // namespace steady_state_test
