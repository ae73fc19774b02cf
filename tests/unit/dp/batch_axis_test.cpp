// DataParallel: inputs and outputs whose samples lie along another axis than the policy's, such as the states of an
// LSTM.
#include <catch.hpp>
#include <chorus/nn/recurrent.hpp>
#include <chorus/ops/higher_order.hpp>
#include <chorus/parallel/data_parallel.hpp>
#include <span>
#include <tuple>
#include <unit/parallel/policies.hpp>
#include <vector>

namespace dp_batch_axis_test {

using namespace test::names;

constexpr Index layers = 2, hidden = 4;

/// x: [batch, time, 3].
template <class D>
struct Rnn : nn::Module {
  nn::LSTM<D, double> lstm{3, hidden, {.num_layers = layers, .batch_first = true}};
  nn::GRU<D, double> gru{3, hidden, {.num_layers = layers, .batch_first = true}};
  CHORUS_MODULE(Rnn, lstm, gru)
  auto forward(const auto& x) const {
    const auto r = lstm(x);
    return std::tuple(r.output, r.hidden, r.cell);
  }
  auto forward(const auto& x, const auto& h, const auto& c) const {
    const auto r = lstm(x, h, c);
    return std::tuple(r.output, r.hidden, r.cell);
  }
  auto forward(const auto& x, int) const { return gru(x); }  // the whole result
};

Tensor<double, 3> texts(Index batch, std::uint32_t key) {
  return contiguous(reshape(numbers(batch, 5 * 3, key), Shape<3>{batch, 5, 3}));
}

const std::vector<std::vector<int>> devices{{0}, {0, 1}, {1, 0, 2}};

/// Runs `body(policy, batch)` on one device and on several, for batches whose shares equal the number of layers and
/// others, and compares the results.
template <class Body>
void check_as_one_device(const Body& body) {
  for (const Index batch : {1, 2, 3, 4, 5, 6, 7})
    for (const auto& ids : devices) {
      INFO(batch << " samples on " << ids.size() << " devices");
      SingleDevice<Rnn<Cpu>> single{make<Rnn<Cpu>>(), 3};
      DataParallel<Rnn<Cpu>> net{make<Rnn<Cpu>>(), {.device_ids = ids}, 3};
      CHECK(distance(body(net, batch), body(single, batch)) < rounding);
    }
}

void collect(std::vector<double>& out, const auto&... operands) {
  const auto one = [&](const auto& x) {
    for (const Index size : value_of(x).shape()) out.push_back(static_cast<double>(size));
    for (const double v : contiguous(value_of(x)).to_vector()) out.push_back(v);
  };
  (one(operands), ...);
}

TEST_CASE("dp batch axis: the states of recurrent layers are joined as one device returns them") {
  check_as_one_device([](auto& policy, Index batch) {
    std::vector<double> out;
    const auto [output, h, c] = policy(texts(batch, 1));
    CHECK(h.shape() == Shape<3>{layers, batch, hidden});
    collect(out, output, h, c);
    (sum(square(output)) + sum(square(h)) * 2.0 + sum(c)).backward();
    const auto whole = policy(texts(batch, 2), 0);
    collect(out, whole.output, whole.hidden);
    for (const double g : test::gradients(policy.module())) out.push_back(g);
    return out;
  });
}

TEST_CASE("dp batch axis: states go on to the next stretch of the text, with and without their gradients") {
  for (const bool cut_off : {true, false})
    check_as_one_device([&](auto& policy, Index batch) {
      std::vector<double> out;
      auto [output, h, c] = policy(texts(batch, 1));
      for (std::uint32_t stretch = 2; stretch < 4; ++stretch) {
        if (cut_off) h = h.detach(), c = c.detach();
        std::tie(output, h, c) = policy(texts(batch, stretch), cut_off ? h.detach() : h, c);
      }
      collect(out, output, h, c);
      (sum(square(output)) + sum(h * c)).backward();
      for (const double g : test::gradients(policy.module())) out.push_back(g);
      return out;
    });
}

TEST_CASE("dp batch axis: first states are cut along the axis that they say, and get their gradients") {
  check_as_one_device([](auto& policy, Index batch) {
    std::vector<double> out;
    const auto first = reshape(numbers(layers * batch, hidden, 7), Shape<3>{layers, batch, hidden});
    const Variable<double, 3> h0(first, true);
    const auto [output, h, c] = policy(texts(batch, 1), batch_axis<1>(h0), batch_axis<1>(first));
    collect(out, output, h, c);
    (sum(square(output)) + sum(square(h))).backward();
    collect(out, h0.grad());
    return out;
  });
}

TEST_CASE("dp batch axis: recorded passes have the same states, and gradients of gradients") {
  check_as_one_device([](auto& policy, Index batch) {
    std::vector<double> out;
    const GraphVariable<double, 3> x(texts(batch, 1), true);
    const auto [output, h, c] = policy(x);
    collect(out, output, h, c);
    const auto slope = grad(sum(square(h)) + sum(output), x, {.create_graph = true});
    sum(square(slope)).backward();
    for (const double g : test::gradients(policy.module())) out.push_back(g);
    return out;
  });
}

TEST_CASE("dp batch axis: first states that don't say their axis are refused, whatever the sizes are") {
  DataParallel<Rnn<Cpu>> net{make<Rnn<Cpu>>(), {.device_ids = {0, 1}}, 3};
  for (const Index batch : {2, 4, 6}) {
    const auto zero = Tensor<double, 3>::zeros({layers, batch, hidden});
    CHECK_THROWS_AS(net(texts(batch, 1), zero, zero), ShapeError);
  }
}

/// Returns the given form of its share [samples, 3].
enum class Form { state, wide_state, mean, means, rows, square_rows, said, said_wrongly };
template <class D>
struct Returns : nn::Module {
  nn::Linear<D, double> fc{3, 3};
  CHORUS_MODULE(Returns, fc)
  auto forward(const auto& x, Form form) const {
    const auto y = fc(x);
    const Index samples = y.size(0);
    const auto state = [&](Index rows) {
      const std::vector list(static_cast<std::size_t>(rows), reshape(y, Shape<3>{1, samples, 3}));
      return concat(0, std::span<const typename decltype(list)::value_type>(list));
    };
    if (form == Form::state) return state(1);
    if (form == Form::wide_state) return state(5);
    if (form == Form::mean) return reshape(mean(y), Shape<3>{1, 1, 1});
    if (form == Form::means) return reshape(mean(y, 0), Shape<3>{1, 3, 1});
    if (form == Form::rows) return reshape(y, Shape<3>{3 * samples, 1, 1});
    return reshape(state(samples), Shape<3>{samples, samples, 3});
  }
  auto forward(const auto& x, const Index& rows) const {
    const auto y = fc(x);
    return batch_axis<1>(reshape(slice(y, 0, 0, rows), Shape<3>{1, rows, 3}));
  }
};

TEST_CASE("dp batch axis: an output with its samples along another axis is refused where it doesn't say so") {
  DataParallel<Returns<Cpu>> net{make<Returns<Cpu>>(), {.device_ids = {0, 1}}, 3};
  const auto error = [&](Index batch, Form form) {
    return message_of<ShapeError>([&] { net(numbers(batch, 3, 1), form); });
  };
  CHECK(error(8, Form::state) ==
        "DataParallel: replica 0's output of shape [1, 4, 3] has its 4 samples along axis 1, but outputs are joined "
        "along axis 0: return batch_axis<1>(output) from the model, or a vector from each device");
  CHECK_THAT(error(9, Form::state), Contains("[1, 5, 3] has its 5 samples along axis 1"));
  CHECK_THAT(error(5, Form::wide_state), Contains("[5, 3, 3] has its 3 samples along axis 1"));
  // On one device, and if one does all the work, nothing is joined.
  CHECK(net(numbers(1, 3, 1), Form::state).shape() == Shape<3>{1, 1, 3});
  DataParallel<Returns<Cpu>> alone{make<Returns<Cpu>>(), {.device_ids = {0}}, 3};
  CHECK(alone(numbers(8, 3, 1), Form::state).shape() == Shape<3>{1, 8, 3});
}

TEST_CASE("dp batch axis: numbers of each device, and several rows of each sample, are joined as ever") {
  DataParallel<Returns<Cpu>> net{make<Returns<Cpu>>(), {.device_ids = {0, 1}}, 3};
  const auto shape = [&](Index batch, Form form) { return net(numbers(batch, 3, 1), form).shape(); };
  for (const Index batch : {2, 4, 5, 8, 9}) {
    INFO(batch << " samples");
    CHECK(shape(batch, Form::mean) == Shape<3>{2, 1, 1});
    CHECK(shape(batch, Form::means) == Shape<3>{2, 3, 1});
    CHECK(shape(batch, Form::rows) == Shape<3>{3 * batch, 1, 1});
  }
  CHECK(shape(8, Form::square_rows) == Shape<3>{8, 4, 3});  // samples along both axes: along `dim`, as requested
}

TEST_CASE("dp batch axis: who says an axis along which there are not the samples is told") {
  DataParallel<Returns<Cpu>> net{make<Returns<Cpu>>(), {.device_ids = {0, 1}}, 3};
  CHECK(net(numbers(8, 3, 1), Index{4}).shape() == Shape<3>{1, 8, 3});
  CHECK(message_of<ShapeError>([&] { net(numbers(8, 3, 1), Index{2}); }) ==
        "DataParallel: expected the samples of an output along axis 1: replica 0's, of 4 samples, has shape [1, 2, 3]");
}

}  // namespace dp_batch_axis_test
