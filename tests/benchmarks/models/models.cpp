/// Training steps of whole models: cases that operators/main.cpp times, and that
/// `operators/compare.py --torch models/torch_models.py` runs beside PyTorch.

#include <array>
#include <chorus/ops/class_losses.hpp>

#include "../models.hpp"
#include "../operators/cases.hpp"
#include "image_models.hpp"
#include "text_models.hpp"

namespace {

using bench::D;

/// One training step: zero_grad, `loss(net)`, backward, maybe clipping, the optimizer. To check: the losses of three.
template <class Opt, class Make, class Loss>
Run train(const Make& make, typename Opt::options_type options, Loss loss, double clip = 0) {
  struct State {
    ch::SingleDevice<decltype(make())> net;
    std::unique_ptr<Opt> optimizer;
    explicit State(decltype(make()) model) : net{std::move(model)} {}
  };
  const auto state = std::make_shared<State>(make());
  fill_parameters(state->net.module());
  state->optimizer = std::make_unique<Opt>(state->net.parameters(), options);
  const auto step = [state, loss, clip] {
    state->optimizer->zero_grad();
    const auto l = loss(state->net);
    l.backward();
    if (clip > 0) ch::optim::clip_grad_norm(state->net.parameters(), clip);
    state->optimizer->step();
    return static_cast<double>(l.item());
  };
  return {[step] { step(); },
          [step](Sums& sums) {
            for (int i = 0; i < 3; ++i) {
              const double l = step();
              sums.push_back({l, l, std::abs(l)});
            }
          }};
}

template <class Opt, int Rank, int Labels, class Make>
Run classify(const Make& make, const typename Opt::options_type& options, const S<Rank>& images,
             const S<Labels>& labels, std::uint32_t classes) {
  const auto x = rnd<Rank>(images, 1);
  const auto t = ints<Labels>(labels, 5, classes);
  return train<Opt>(make, options, [=](auto& net) { return ch::cross_entropy(net(x), t); });
}
/// Of texts: `length` words of `words`, each of which is to be told from `classes`.
template <class Opt, class Make>
Run predict(const Make& make, const typename Opt::options_type& options, const S<2>& text, std::uint32_t words,
            double clip = 0) {
  const auto x = ints<2>(text, 1, words);
  const Index count = text[0] * text[1];
  const auto t = ints<1>({count}, 5, words);
  return train<Opt>(
      make, options,
      [=](auto& net) {
        return ch::cross_entropy(ch::reshape(net(x), S<2>{count, static_cast<Index>(words)}), t);
      },
      clip);
}
Run bert(double dropout) {
  const auto x = ints<2>({8, 128}, 1, 30522);
  const auto t = ints<1>({8}, 5, 2);
  return train<ch::optim::AdamW<D>>([=] { return bench::Bert(dropout); }, {.lr = 1e-4, .weight_decay = 0.01},
                                    [=](auto& net) { return ch::cross_entropy(net(x), t); });
}

Run dcgan() {
  using Adam = ch::optim::Adam<D>;
  struct State {
    ch::SingleDevice<bench::Generator> g{bench::Generator{}};
    ch::SingleDevice<bench::Discriminator> d{bench::Discriminator{}};
    std::unique_ptr<Adam> of_g, of_d;
    Ten<4> z = rnd<4>({16, 100, 1, 1}, 1, 1.7), real = rnd<4>({16, 3, 64, 64}, 2);
  };
  const auto s = std::make_shared<State>();
  fill_parameters(s->g.module());
  fill_parameters(s->d.module());
  const ch::optim::AdamOptions options{.lr = 2e-4, .beta1 = 0.5};
  s->of_g = std::make_unique<Adam>(s->g.parameters(), options);
  s->of_d = std::make_unique<Adam>(s->d.parameters(), options);
  const auto step = [s] {
    const auto ones = Ten<1>::ones({16}), zeros = Ten<1>::zeros({16});
    s->of_d->zero_grad();
    const auto fake = s->g(s->z);
    const auto l1 = ch::bce_with_logits(s->d(s->real), ones);
    l1.backward();
    const auto l2 = ch::bce_with_logits(s->d(fake.detach()), zeros);
    l2.backward();
    s->of_d->step();
    s->of_g->zero_grad();
    const auto l3 = ch::bce_with_logits(s->d(fake), ones);
    l3.backward();
    s->of_g->step();
    return std::array<double, 2>{l1.item() + l2.item(), l3.item()};
  };
  return {[step] { step(); },
          [step](Sums& sums) {
            for (int i = 0; i < 3; ++i) {
              const auto l = step();
              sums.push_back({l[0], l[1], l[0] + l[1]});
            }
          }};
}

ch::nn::ResNet18<D> resnet18() { return ch::nn::ResNet18<D>{}; }
ch::nn::ResNet50<D> resnet50() { return ch::nn::ResNet50<D>{}; }
bench::MobileNetV2 mobilenetv2() { return {}; }
bench::Toy<D> toy() { return {}; }
bench::ResNet18<D> resnet18_of_32() { return {}; }
/// GPT-2's width and vocabulary, four of its twelve blocks.
ch::nn::GPT<D> gpt2() {
  return ch::nn::GPT<D>({.n_positions = 256, .n_layer = 4, .dropout = 0, .tie_word_embeddings = false});
}

using Sgd = ch::optim::Sgd<D>;
using Adam = ch::optim::Adam<D>;
using AdamW = ch::optim::AdamW<D>;
const ch::optim::SgdOptions momentum{.lr = 0.001, .momentum = 0.9}, faster{.lr = 0.01, .momentum = 0.9};
const AdamW::options_type decaying{.lr = 1e-4, .weight_decay = 0.01};

const Reg all[] = {
    {"resnet50_b4_224", [] { return classify<Sgd, 4, 1>(resnet50, momentum, {4, 3, 224, 224}, {4}, 1000); }},
    {"resnet18_b4_224", [] { return classify<Sgd, 4, 1>(resnet18, momentum, {4, 3, 224, 224}, {4}, 1000); }},
    {"mobilenetv2_b4_224", [] { return classify<Sgd, 4, 1>(mobilenetv2, momentum, {4, 3, 224, 224}, {4}, 1000); }},
    {"unet_b4_128",
     [] {
       return classify<Adam, 4, 3>([] { return bench::UNet{}; }, {.lr = 1e-4}, {4, 3, 128, 128}, {4, 128, 128}, 5);
     }},
    {"dcgan_b16_64", dcgan},
    {"toy_b16", [] { return classify<Sgd, 4, 1>(toy, faster, {16, 3, 32, 32}, {16}, 10); }},
    {"resnet18_b32_32", [] { return classify<Sgd, 4, 1>(resnet18_of_32, faster, {32, 3, 32, 32}, {32}, 10); }},
    {"bert_d512_l4_t128_b8", [] { return bert(0); }},
    {"bert_dropout_d512_l4_t128_b8", [] { return bert(0.1); }},
    {"lstm_lm_v10k_h512_b20_t35",
     [] { return predict<Sgd>([] { return bench::LstmLanguageModel{}; }, {.lr = 0.1}, {20, 35}, 10000, 0.25); }},
    {"gpt2_d768_l4_t256_b2", [] { return predict<AdamW>(gpt2, decaying, {2, 256}, 50257); }},
    {"gpt_small_b16",
     [] {
       return predict<AdamW>([] { return bench::Gpt<D>{}; }, {.lr = 1e-3, .weight_decay = 0.01}, {16, 128}, 65);
     }},
};

}  // namespace
