#include <catch.hpp>
#include <chorus/autograd/checkpoint.hpp>
#include <chorus/autograd/grad.hpp>
#include <chorus/ops/class_losses.hpp>
#include <chorus/ops/ctc_loss.hpp>
#include <chorus/ops/elementary.hpp>
#include <chorus/ops/higher_order.hpp>
#include <chorus/ops/more_losses.hpp>
#include <memory>
#include <thread>

#include "../message_of.hpp"

namespace mean_over_test {

namespace ch = chorus;
using ch::Reduction;
using Matrix = ch::Variable<double, 2>;
using Labels = ch::Tensor<std::int64_t, 1>;

ch::Tensor<double, 2> ramp(ch::Index rows, ch::Index columns) {
  auto x = ch::Tensor<double, 2>::empty({rows, columns});
  for (ch::Index i = 0; i < x.numel(); ++i) x.data()[i] = 0.3 * static_cast<double>((5 * i + 2) % 7) - 0.8;
  return x;
}
Matrix scores(ch::Index rows = 4, ch::Index columns = 3) { return Matrix(ramp(rows, columns), true); }
Labels labels(std::vector<std::int64_t> numbers) {
  const auto count = static_cast<ch::Index>(numbers.size());
  return Labels::from(numbers, {count});
}

struct Mean {
  double over;
  bool is_loss;
  friend bool operator==(const Mean&, const Mean&) = default;
};

// Records the means of each run, and scales their gradients.
struct Watch : ch::BackwardWatch {
  std::vector<std::vector<Mean>> runs;
  std::vector<std::size_t> nodes;
  std::vector<std::thread::id> threads;
  double scale = 1;
  bool angry = false;
  void backward_begins(std::span<const ch::Ref<ch::Node>> all) override {
    runs.emplace_back();
    nodes.push_back(all.size());
    threads.push_back(std::this_thread::get_id());
    for (std::size_t i = 1; i < all.size(); ++i) CHECK(all[i - 1]->sequence() > all[i]->sequence());
    for (const auto& node : all) {
      if (!node->is_mean()) continue;
      runs.back().push_back({node->mean_over(), node->is_loss()});
      node->set_scale(scale);
    }
    if (angry) ch::fail<ch::Error>("angry");
  }
};

// The means behind a loss, as a policy sees them.
template <class Loss>
std::vector<Mean> means_of(const Loss& loss) {
  const auto watch = std::make_shared<Watch>();
  ch::watch_backward(watch);
  loss.backward();
  REQUIRE(watch->runs.size() == 1);
  return watch->runs.front();
}
using Means = std::vector<Mean>;

TEST_CASE("a loss over classes is a mean over the labels that count") {
  const auto y = labels({2, -100, 0, 1});
  CHECK(means_of(ch::cross_entropy(scores(), y)) == Means{{3, true}});
  CHECK(means_of(ch::cross_entropy(scores(), y) * 0.5 + 1) == Means{{3, true}});
  CHECK(means_of(ch::cross_entropy(scores(), labels({2, 2, 0, 1}), {.ignore_index = 2})) == Means{{2, true}});
  CHECK(means_of(ch::cross_entropy(scores(), labels({-100, -100, -100, -100}))) == Means{{0, true}});
  CHECK(means_of(ch::cross_entropy(scores(), y, {.label_smoothing = 0.1})) == Means{{3, true}});
  CHECK(means_of(ch::cross_entropy(scores(), y, {.reduction = Reduction::sum})).empty());
  CHECK(means_of(ch::sum(ch::cross_entropy_per_sample(scores(), y))).empty());
  CHECK(means_of(ch::nll_loss(scores(), y)) == Means{{3, true}});
  CHECK(means_of(ch::nll_loss(scores(), y, {.reduction = Reduction::sum})).empty());

  // Non-contiguous labels: columns of a larger tensor.
  const auto both = ch::Tensor<std::int64_t, 2>::from({0, -100, 1, -100, -100, -100, 1, 1}, {4, 2});
  CHECK(means_of(ch::cross_entropy(scores(), both.select(1, 0))) == Means{{3, true}});
  CHECK(means_of(ch::cross_entropy(scores(), both.select(1, 1))) == Means{{1, true}});
}

TEST_CASE("the same of scores with more axes, of bf16, and on another device") {
  const auto x = ch::Variable(ramp(2, 12).view(ch::Shape<3>{2, 3, 4}), true);
  const auto y = ch::Tensor<std::int64_t, 2>::from({0, 1, 2, -100, -100, 1, 1, 1}, {2, 4});
  CHECK(means_of(ch::cross_entropy(x, y)) == Means{{6, true}});
  CHECK(means_of(ch::nll_loss(x, y)) == Means{{6, true}});
  CHECK(means_of(ch::cross_entropy(ch::to<ch::bf16>(scores()), labels({2, -100, 0, 1}))) == Means{{3, true}});
  CHECK(means_of(ch::nll_loss(ch::to<ch::half>(scores()), labels({2, -100, 0, 1}))) == Means{{3, true}});
  const Matrix far(ch::to_device(ramp(4, 3), ch::Cpu{1}), true);
  CHECK(means_of(ch::cross_entropy(far, labels({2, -100, 0, 1}))) == Means{{3, true}});
}

TEST_CASE("with weights of classes it is one over the sum of the labels' weights") {
  const auto weight = ch::Tensor<double, 1>::from({1, 5, 0.5}, {3});
  const auto y = labels({2, -100, 0, 1});
  CHECK(means_of(ch::cross_entropy(scores(), y, weight)) == Means{{6.5, true}});
  CHECK(means_of(ch::cross_entropy(scores(), y, weight, {.label_smoothing = 0.1})) == Means{{6.5, true}});
  CHECK(means_of(ch::nll_loss(scores(), y, weight)) == Means{{6.5, true}});
  CHECK(means_of(ch::nll_loss(scores(), y, weight, {.reduction = Reduction::sum})).empty());
  CHECK(means_of(ch::cross_entropy(scores(), labels({-100, -100, -100, -100}), weight)) == Means{{0, true}});
  const auto x = ch::Variable(ramp(2, 12).view(ch::Shape<3>{2, 3, 4}), true);
  const auto places = ch::Tensor<std::int64_t, 2>::from({0, 1, 2, -100, -100, 1, 1, 1}, {2, 4});
  CHECK(means_of(ch::cross_entropy(x, places, weight)) == Means{{21.5, true}});
}

TEST_CASE("other losses are means over elements, samples or rows") {
  const auto x = scores(), target = Matrix(ramp(4, 3) * 0.5);
  const Means elements{{12, true}}, samples{{4, true}};
  CHECK(means_of(ch::mse_loss(x, target)) == elements);
  CHECK(means_of(ch::mse_loss(x, target, Reduction::sum)).empty());
  CHECK(means_of(ch::l1_loss(x, target)) == elements);
  CHECK(means_of(ch::bce_with_logits(x, target)) == elements);
  CHECK(means_of(ch::smooth_l1_loss(x, target)) == elements);
  CHECK(means_of(ch::huber_loss(x, target)) == elements);
  CHECK(means_of(ch::kl_div(x, ch::softmax(target, 1))) == samples);
  CHECK(means_of(ch::cross_entropy(x, ch::softmax(target, 1))) == samples);
  CHECK(means_of(ch::cross_entropy(x, ch::softmax(target, 1), {.reduction = Reduction::sum})).empty());
  CHECK(means_of(ch::triplet_margin_loss(x, target, target * 2)) == samples);
  const auto one = ch::Tensor<double, 1>::ones({4});
  CHECK(means_of(ch::cosine_embedding_loss(x, target, one)) == samples);
  CHECK(means_of(ch::soft_margin_loss(x, target)) == elements);
  CHECK(means_of(ch::soft_margin_loss(x, target, Reduction::sum)).empty());
  CHECK(means_of(ch::gaussian_nll_loss(x, target, ch::square(target) + 1)) == elements);
  CHECK(means_of(ch::poisson_nll_loss(x, target)) == elements);
  CHECK(means_of(ch::mse_loss(ch::to<ch::bf16>(x), ch::to<ch::bf16>(target))) == elements);

  const ch::Variable log_probabilities(ch::log_softmax(ramp(5, 6).view(ch::Shape<3>{5, 2, 3}), 2), true);
  const auto text = ch::Tensor<std::int64_t, 2>::from({1, 2, 2, 0}, {2, 2});
  const auto lengths = labels({5, 4}), text_lengths = labels({2, 1});
  CHECK(means_of(ch::ctc_loss(log_probabilities, text, lengths, text_lengths)) == Means{{2, true}});
  CHECK(means_of(ch::ctc_loss(log_probabilities, text, lengths, text_lengths, {.reduction = Reduction::sum})).empty());
}

TEST_CASE("a plain mean to a scalar says so, and one along an axis does not") {
  CHECK(means_of(ch::mean(scores())) == Means{{12, false}});
  CHECK(means_of(ch::mean(ch::sum(scores(), 1), 0)) == Means{{4, false}});
  CHECK(means_of(ch::sum(ch::mean(scores(), 1))).empty());
  CHECK(means_of(ch::sum(scores())).empty());
  // Several means in one run, the last recorded first.
  const auto x = scores();
  const auto norm = ch::mean(ch::square(x));
  CHECK(means_of(ch::cross_entropy(x, labels({2, -100, 0, 1})) + norm) == Means{{3, true}, {12, false}});
}

TEST_CASE("a checkpointed function that returns its loss, and recorded gradients") {
  const auto y = labels({2, -100, 0, 1});
  CHECK(means_of(ch::checkpoint([&](const auto& x) { return ch::cross_entropy(x, y); }, scores())) == Means{{3, true}});
  CHECK(means_of(ch::cross_entropy(ch::GraphVariable(ramp(4, 3), true), y)) == Means{{3, true}});
  const ch::GraphVariable<double, 2> x(ramp(4, 3), true);
  const auto by_x = ch::grad(ch::mse_loss(x, ch::Tensor<double, 2>::zeros({4, 3})), x, {.create_graph = true});
  CHECK(ch::grad(ch::sum(by_x), x).value()(0, 0) == Approx(2.0 / 12));
}

TEST_CASE("without a tape nothing is said, and nothing is counted twice") {
  const ch::NoGrad no_grad;
  CHECK_FALSE(ch::cross_entropy(scores(), labels({2, -100, 0, 1})).requires_grad());
  CHECK(ch::cross_entropy(ramp(4, 3), labels({2, -100, 0, 1})).item() > 0);
}

TEST_CASE("a number that is not at hand is asked for once, and known from then on") {
  const auto loss = ch::sum(scores());
  int asked = 0;
  loss.node()->set_mean_later([&asked] { return 10 * ++asked; });
  CHECK(loss.node()->is_loss());
  CHECK(asked == 0);
  CHECK(loss.node()->mean_over() == 10);
  CHECK(loss.node()->mean_over() == 10);
  const auto other = ch::sum(scores());
  loss.node()->set_mean_later([&asked] { return 10 * ++asked; });
  other.node()->take_mean(*loss.node());
  CHECK_FALSE(loss.node()->is_mean());
  CHECK(loss.node()->mean_over() == 0);
  CHECK(other.node()->mean_over() == 20);
  other.node()->set_mean_later([] { return 1; });  // replaced before it is called
}

TEST_CASE("a scale multiplies the gradient that comes into a node, in one run") {
  const auto gradient = [](double scale, bool checkpointed) {
    const auto x = scores();
    const auto watch = std::make_shared<Watch>();
    watch->scale = scale;
    ch::watch_backward(watch);
    const auto part = [](const auto& in) { return ch::cross_entropy(in * 2, labels({2, -100, 0, 1})); };
    const auto loss = checkpointed ? ch::checkpoint(part, x) : part(x);
    ((loss + 1) * loss).backward();
    return x.grad().to_vector();
  };
  for (const bool checkpointed : {false, true}) {
    CAPTURE(checkpointed);
    const auto plain = gradient(1, checkpointed), scaled = gradient(0.75, checkpointed);
    for (std::size_t i = 0; i < plain.size(); ++i) CHECK(scaled[i] == Approx(0.75 * plain[i]));
  }
}

TEST_CASE("a scale is gone when its run has ended, and the seed is not touched") {
  const auto x = scores();
  auto watch = std::make_shared<Watch>();
  watch->scale = 3;
  ch::watch_backward(watch);
  const auto loss = ch::mean(x);
  const auto seed = ch::Tensor<double, 0>::full({}, 1);
  loss.backward(seed, true);
  CHECK(seed.item() == 1);
  CHECK(x.grad()(0, 0) == Approx(3.0 / 12));
  CHECK(ch::grad(loss, x, {.retain_graph = true})(0, 0) == Approx(1.0 / 12));
  watch->angry = true;
  CHECK(message_of<ch::Error>([&] { loss.backward(true); }) == "angry");
  watch.reset();
  x.zero_grad();
  loss.backward();
  CHECK(x.grad()(0, 0) == Approx(1.0 / 12));  // the seed of the failed run is gone, too
}

TEST_CASE("a watch is told once of each run of its thread, as long as it lives") {
  const auto x = scores();
  auto watch = std::make_shared<Watch>();
  ch::watch_backward(watch);
  ch::watch_backward(watch);
  const auto run = [&] { ch::checkpoint([](const auto& in) { return ch::mean(ch::square(in)); }, x).backward(); };
  run();  // has a nested run
  CHECK(watch->runs == std::vector<Means>{{{12, false}}});
  CHECK(watch->nodes == std::vector<std::size_t>{2});
  CHECK(watch->threads == std::vector{std::this_thread::get_id()});
  std::thread(run).join();
  const auto loss = ch::sum(x);
  loss.node()->add(ch::Tensor<double, 0>::full({}, 1));
  const ch::Ref<ch::Node> root = loss.node();
  ch::run_backward({&root, 1}, {.hooks = false});
  CHECK(watch->runs.size() == 1);

  const auto other = std::make_shared<Watch>();
  std::thread([ended = std::move(watch)] { CHECK(ended->runs.size() == 1); }).join();  // destroyed in that thread
  CHECK(watch == nullptr);
  ch::watch_backward(other);  // replaces it
  run();
  CHECK(other->runs.size() == 1);
}

TEST_CASE("a run that a hook begins is told to nobody, and the means are those of the run around it") {
  const auto x = scores(), other = scores();
  std::vector<Mean> seen;
  other.register_hook([&] {
    for (const auto& node : ch::means_of_backward()) seen.push_back({node->mean_over(), node->is_loss()});
  });
  const auto inner = ch::mean(other);
  x.register_hook([&] { inner.backward(); });
  const auto watch = std::make_shared<Watch>();
  watch->scale = 2;
  ch::watch_backward(watch);
  ch::cross_entropy(x, labels({2, -100, 0, 1})).backward();
  CHECK(watch->runs == std::vector<Means>{{{3, true}}});
  CHECK(seen == Means{{3, true}});
  CHECK(other.grad()(0, 0) == Approx(1.0 / 12));
}

TEST_CASE("a watch may add another one, and have something done at the end") {
  struct Adds final : Watch {
    std::shared_ptr<Watch> other = std::make_shared<Watch>();
    int ended = 0;
    void backward_begins(std::span<const ch::Ref<ch::Node>> all) override {
      Watch::backward_begins(all);
      ch::watch_backward(other);
      ch::at_backward_end([this] { ++ended; });
    }
  };
  const auto watch = std::make_shared<Adds>();
  ch::watch_backward(watch);
  ch::mean(scores()).backward();
  CHECK(watch->runs.size() == 1);
  CHECK(watch->other->runs.size() == 1);
  CHECK(watch->ended == 1);
}

TEST_CASE("what a watch throws comes out of backward, which has changed nothing") {
  const auto x = scores();
  x.backward(ch::Tensor<double, 2>::ones({4, 3}));
  int hooks = 0;
  x.register_hook([&hooks] { ++hooks; });
  const auto watch = std::make_shared<Watch>();
  ch::watch_backward(watch);
  watch->angry = true;
  const auto loss = ch::sum(x * 2);
  CHECK(message_of<ch::Error>([&] { loss.backward(); }) == "angry");
  CHECK(message_of<ch::UsageError>([] { ch::at_backward_end([] {}); }) != "");
  CHECK(x.grad()(0, 0) == 1);
  CHECK(hooks == 0);
  watch->angry = false;
  loss.backward();  // as the first run
  CHECK(x.grad()(0, 0) == 3);
  CHECK(hooks == 1);
}

TEST_CASE("each backward run has a number of its own, also after one that throws") {
  CHECK(ch::backward_run() == 0);
  const auto x = scores();
  std::vector<std::uint64_t> seen;
  bool broken = true;
  x.register_hook([&] {
    seen.push_back(ch::backward_run());
    if (broken) ch::fail<ch::Error>("broken");
  });
  const auto loss = ch::sum(x * 2);
  CHECK(message_of<ch::Error>([&] { loss.backward(true); }) == "broken");
  CHECK(ch::backward_run() == 0);
  broken = false;
  loss.backward();
  REQUIRE(seen.size() == 2);
  CHECK(seen[0] != 0);
  CHECK(seen[1] > seen[0]);
}

TEST_CASE("hooks can ask for the means of the run that they are in") {
  CHECK(ch::means_of_backward().empty());
  const auto x = scores();
  std::vector<Mean> seen;
  x.register_hook([&] {
    for (const auto& node : ch::means_of_backward()) seen.push_back({node->mean_over(), node->is_loss()});
  });
  ch::checkpoint([](const auto& in) { return ch::cross_entropy(in * 2, labels({2, -100, 0, 1})); }, x).backward();
  CHECK(seen == Means{{3, true}});
  CHECK(ch::means_of_backward().empty());
}

}  // namespace mean_over_test
