/// Placement types: what programs of split and partial values compute on several ranks is one device's.

#include "placement_programs.hpp"

#include <catch.hpp>
#include <string>
#include <vector>

#include "models.hpp"

namespace test {

using bugs::T, bugs::CopiedT;

// A transformer's block with a split sequence, by hand.
template <class D>
struct OwnTransformer : ch::nn::Module {
  bugs::Split<0, 2> words{bugs::numbers<2>({7, 8})}, query{bugs::numbers<2>({8, 8}), 2},
      key{bugs::numbers<2>({8, 8}), 2}, value{bugs::numbers<2>({8, 8}), 2}, up{bugs::numbers<2>({9, 8})};
  bugs::Split<0, 1> up_bias{bugs::numbers<1>({9})};
  bugs::Split<1, 2> out{bugs::numbers<2>({8, 8}), 2}, down{bugs::numbers<2>({8, 9})}, aside{bugs::numbers<2>({8, 8})};
  bugs::Summed<1> norm_weight{bugs::numbers<1>({8})}, norm_bias{bugs::numbers<1>({8})}, bias{bugs::numbers<1>({8})};
  bugs::Summed<2> gate{bugs::numbers<2>({8, 8})};
  ch::nn::Dropout drop{0.2};
  CHORUS_MODULE(OwnTransformer, words, query, key, value, up, up_bias, out, down, aside, norm_weight, norm_bias, bias,
                gate, drop)

  auto forward(const ch::Tensor<std::int64_t, 2>& tokens) const {
    const auto own = ch::take_part<T, 1>(ch::all_reduce<T>(ch::embedding(words, tokens)));
    const auto all = ch::all_gather<CopiedT>(ch::layer_norm(own, norm_weight, norm_bias));
    const auto heads = [&](const auto& weight) {
      return ch::transpose<1, 2>(ch::reshape<2>(ch::linear(all, weight), {4, 3, 4, 2}));
    };
    const auto weights = ch::softmax<-1>(ch::matmul(heads(query), ch::transpose<2, 3>(heads(key))) / 1.5);
    const auto seen = ch::reshape<2>(ch::transpose<1, 2>(ch::matmul(weights, heads(value))), {4, 3, 8});
    auto y = own + drop(ch::reduce_scatter<T, 1>(ch::linear(seen, out)) + bias);
    y = y * ch::sigmoid(ch::linear(y, gate));
    y = ch::all_to_all<T, 1>(ch::tanh(ch::all_to_all<T, 2>(y, 2)));
    const auto in = ch::all_gather<CopiedT>(y);
    const auto inner = ch::dropout(ch::gelu(ch::linear(in, up, up_bias)), 0.3, this->training());
    const auto terms = ch::linear(inner, down) - ch::linear(ch::take_part<T, -1>(in), aside);
    const auto balance = ch::all_reduce<T>(ch::mean(ch::square(y)) + ch::sum(ch::mean<1>(y)));
    const auto last = ch::all_gather<T>(y) + ch::all_reduce<T>(terms * 0.5) + balance;
    return ch::reshape(ch::linear(ch::copy<T>(last), words), ch::Shape<2>{12, 7});
  }
};

}  // namespace test

namespace {

namespace ch = chorus;
using namespace test::names;
using bugs::Own, bugs::T;
using test::Shared;

// A step of each program: losses, then the parameters.
template <class Net>
std::vector<double> results(Net& net) {
  ch::optim::Sgd optimizer{net.parameters(), {.lr = 0.1}};
  std::vector<double> out;
  for (std::size_t i = 0; i < bugs::programs().size(); ++i) {
    net.module().index = i;
    optimizer.zero_grad();
    const auto loss = net(numbers(12, 5, static_cast<std::uint32_t>(i)).view(ch::Shape<3>{4, 3, 5}));
    loss.backward();
    optimizer.step();
    out.push_back(loss.item());
  }
  net.gathered([&](auto& whole) {
    const auto last = test::values(whole);
    out.insert(out.end(), last.begin(), last.end());
  });
  return out;
}

TEST_CASE("Placement types: the mended programs of public bugs are one device's", "[tensor_parallel]") {
  ch::SingleDevice<Own> one{make<Own>(), 3};
  const auto expected = results(one);
  for (const int ranks : {2, 3, 4}) {
    const auto found = test::numbers_in(common_text(ranks, [](const World& world) {
      Shared<Own> rank(world, {.check_every = 1});
      return test::text_of(results(rank.net));
    }));
    REQUIRE(found.size() == expected.size());
    for (std::size_t i = 0; i < found.size(); ++i) {
      INFO(ranks << " ranks, " << (i < bugs::programs().size() ? bugs::programs()[i].report : "a parameter"));
      CHECK(found[i] == Approx(expected[i]).epsilon(1e-9).margin(1e-12));
    }
  }
}

TEST_CASE("Placement types: a transformer of one's own is trained as on one device, dropout included",
          "[tensor_parallel]") {
  for (const int ranks : {2, 3, 4}) test::check_same_as_one_device<test::OwnTransformer<Cpu>>(ranks);
}

TEST_CASE("Placement types: what only the run knows is refused", "[tensor_parallel]") {
  const auto says = [](const auto& use) {
    return common_text(2, [&](const World& world) {
      Shared<Own> rank(world);
      return message_of<ch::Error>([&] {
        const ch::TensorGroupScope group(rank.net.module().up.parameter().template on<Cpu>().part()->group);
        use(rank.net.module(), ch::Variable<double, 3>(numbers(12, 8, 1).view(ch::Shape<3>{4, 3, 8}), true));
      });
    });
  };
  CHECK_THAT(common_text(2,
                         [](const World& world) {
                           Shared<Own> rank(world);
                           return message_of<UsageError>([&] { rank.net.module().up.placed(); });
                         }),
             Contains("of 10 entries, which are not its part in this pass: list"));
  CHECK_THAT(says([](const Own&, const auto&) { Own{}.up.placed(); }),
             Contains("this rank has 10 of 10 entries, which are not its part in this pass: list"));
  CHECK_THAT(says([](const Own&, const auto& x) { ch::take_part<T, 2>(x) + ch::take_part<T, 2>(x, 4); }),
             Contains("+: columns of shapes [4, 3, 8] and [4, 3, 8] are split in different ways"));
  CHECK_THAT(says([](const Own&, const auto& x) { ch::take_part<T, 2>(x) * ch::copy<T>(x); }),
             Contains("*: a value of shape [4, 3, 8] is split along axis -1, which the other one has whole"));
  CHECK_THAT(says([](const Own& m, const auto& x) { ch::linear(ch::take_part<T, 2>(x), m.out); }),
             Contains("linear: columns of shapes [4, 3, 8] and [8, 8] are split in different ways"));
  CHECK_THAT(says([](const Own&, const auto& x) { ch::take_part<T, 2>(x, 3); }),
             Contains("take_part: units of 3 do not divide axis 2"));
  CHECK_THAT(says([](const Own&, const auto& x) { ch::reshape<2>(ch::take_part<T, 2>(x), {4, 3, 2, 4}); }),
             Contains("reshape: expected a shape in which ranks have whole entries of axis 2"));
  CHECK_THAT(says([](const Own&, const auto& x) {
               const auto part = ch::take_part<T, 2>(x);
               const ch::TensorGroupScope none(nullptr);
               ch::sum(part);
             }),
             Contains("sum: expected a value that the ranks of this pass split, got one of another pass"));
}

}  // namespace
