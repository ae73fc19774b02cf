// Lists, rounding, order, scattered reductions, images, cells of recurrent layers, distributions.
#include <chorus/distributions.hpp>
#include <chorus/nn/recurrent_cells.hpp>
#include <chorus/ops/cumulative.hpp>
#include <chorus/ops/images.hpp>
#include <chorus/ops/lists.hpp>
#include <chorus/ops/order_statistics.hpp>
#include <chorus/ops/rounding.hpp>
#include <chorus/ops/scatter.hpp>
#include <chorus/ops/special_functions.hpp>

#include "module_case.hpp"

namespace golden {
namespace {

template <int Rank>
std::vector<Variable<Rank>> all_inputs(Case& test) {
  std::vector<Variable<Rank>> list;
  for (const auto& [name, tensor] : test.group("in")) list.push_back(test.in<Rank>(name));
  return list;
}
template <class Part>
void parts(Case& test, const std::vector<Part>& list) {
  for (std::size_t i = 0; i < list.size(); ++i) test.out(ch::cat("y", i), list[i]);
  if (test.has(ch::cat("out.y", list.size()))) test.report("y", "has more parts");
}

// The case's place of `name` among `names`.
template <class Enum>
Enum chosen(const Case& test, const char* name, std::initializer_list<std::string_view> names) {
  const auto wanted = test.attr<std::string>(name);
  const auto found = std::find(names.begin(), names.end(), wanted);
  ch::check<ch::UsageError>(found != names.end(), "unknown ", name, " ", wanted);
  return static_cast<Enum>(found - names.begin());
}

// log_prob and entropy of `p`, and its divergence from `q`.
template <class P, class Value>
void compare(Case& test, const P& p, const P& q, const Value& x) {
  test.out("log_prob", p.log_prob(x));
  test.out("entropy", p.entropy());
  test.out("kl", kl_divergence(p, q));
}
// `use(p, q)`, made of logits or of probabilities.
template <template <class> class Distribution, class Use>
void with_kind(Case& test, const Use& use) {
  namespace d = ch::distributions;
  const auto p = test.in<2>("ap"), q = test.in<2>("aq");
  using Of = Distribution<Variable<2>>;
  if (test.attr<std::string>("kind") == "logits")
    use(Of{d::Logits{p}}, Of{d::Logits{q}});
  else
    use(Of{d::Probs{p}}, Of{d::Probs{q}});
}

}  // namespace

void add_further(Operations& operations) {
#define UNARY(NAME) operations[#NAME] = [](Case& test) { unary(test, [](const auto& x) { return ch::NAME(x); }); }
  UNARY(sign);
  UNARY(floor);
  UNARY(ceil);
  UNARY(round);
  UNARY(lgamma);
  UNARY(digamma);
#undef UNARY
  operations["atan2"] = [](Case& test) { test.out("y", ch::atan2(test.in<2>("y"), test.in<1>("x"))); };
  operations["concat_list"] = [](Case& test) {
    test.out("y", ch::concat(test.attr<Index>("axis"), all_inputs<3>(test)));
  };
  operations["stack_list"] = [](Case& test) {
    test.out("y", ch::stack(test.attr<Index>("axis"), all_inputs<2>(test)));
  };
  operations["split"] = [](Case& test) {
    const auto x = test.in<2>("x");
    const auto axis = test.attr<Index>("axis");
    if (const auto sizes = test.attr<std::vector<Index>>("sizes", {}); !sizes.empty())
      parts(test, ch::split(x, sizes, axis));
    else
      parts(test, ch::split(x, test.attr<Index>("size"), axis));
  };
  operations["chunk"] = [](Case& test) {
    parts(test, ch::chunk(test.in<2>("x"), test.attr<Index>("chunks"), test.attr<Index>("axis")));
  };
  operations["unbind"] = [](Case& test) { parts(test, ch::unbind(test.in<2>("x"), test.attr<Index>("axis"))); };
  operations["meshgrid"] = [](Case& test) {
    const auto [p, q] = ch::meshgrid(test.in<1>("a"), test.in<1>("b"));
    test.out("p", p);
    test.out("q", q);
  };
  operations["prod"] = [](Case& test) { test.out("y", ch::prod(test.in<2>("x"), test.attr<Index>("axis"))); };
  operations["median"] = [](Case& test) {
    const auto x = test.in<2>("x");
    if (!test.attrs().contains("axis")) return test.out("y", ch::median(x));
    const auto y = ch::median(x, test.attr<Index>("axis"));
    test.out("y", y.values);
    test.compare_integers("out.index", y.indices.to_vector());
  };
  operations["quantile"] = [](Case& test) {
    const auto between =
        chosen<ch::Interpolation>(test, "interpolation", {"linear", "lower", "higher", "nearest", "midpoint"});
    test.out("y", ch::quantile(test.in<2>("x"), test.attr<double>("q"), test.attr<Index>("axis"), between));
  };
  operations["index_add"] = [](Case& test) {
    test.out("y",
             ch::index_add(test.in<3>("x"), test.attr<Index>("axis"), test.integers<1>("index"), test.in<3>("src")));
  };
  operations["scatter_reduce"] = [](Case& test) {
    const auto how = chosen<ch::ScatterReduction>(test, "how", {"sum", "prod", "mean", "amax", "amin"});
    test.out("y", ch::scatter_reduce(test.in<2>("x"), test.attr<Index>("axis"), test.integers<2>("index"),
                                     test.in<2>("src"), how, test.attr<bool>("include_self")));
  };
  operations["grid_sample"] = [](Case& test) {
    const ch::GridSampleOptions options{
        .mode = chosen<ch::SampleMode>(test, "mode", {"bilinear", "nearest"}),
        .padding = chosen<ch::SamplePadding>(test, "padding", {"zeros", "border", "reflection"}),
        .align_corners = test.attr<bool>("align_corners")};
    test.out("y", ch::grid_sample(test.in<4>("x"), test.in<4>("grid"), options));
  };
  operations["unfold"] = [](Case& test) {
    test.out("y", ch::unfold(test.in<4>("x"), size2d(test, "window", 1),
                             {.dilation = size2d(test, "dilation", 1),
                              .padding = size2d(test, "padding", 0),
                              .stride = size2d(test, "stride", 1)}));
  };
  operations["pixel_shuffle"] = [](Case& test) {
    test.out("y", ch::pixel_shuffle(test.in<4>("x"), test.attr<Index>("factor")));
  };
  operations["max_pool1d"] = [](Case& test) {
    test.out("y", ch::max_pool1d(test.in<3>("x"), test.attr<Index>("window"),
                                 {.stride = test.attr<Index>("stride"),
                                  .padding = test.attr<Index>("padding"),
                                  .dilation = test.attr<Index>("dilation"),
                                  .ceil_mode = test.attr<bool>("ceil")}));
  };
  operations["lstm_cell"] = [](Case& test) {
    ch::nn::LSTMCell<Device> cell(3, 2);
    load_parameters(test, cell);
    const auto x = test.in<2>("x");
    const auto made = test.has("in.h0") ? cell(x, test.in<2>("h0"), test.in<2>("c0")) : cell(x);
    test.out("h", made.hidden);
    test.out("c", made.cell);
  };
  operations["gru_cell"] = [](Case& test) {
    ch::nn::GRUCell<Device> cell(3, 2);
    load_parameters(test, cell);
    const auto x = test.in<2>("x");
    test.out("h", test.has("in.h0") ? cell(x, test.in<2>("h0")) : cell(x));
  };
  operations["distributions.normal"] = [](Case& test) {
    using ch::distributions::Normal;
    compare(test, Normal{test.in<2>("ap"), test.in<2>("bp")}, Normal{test.in<2>("aq"), test.in<2>("bq")},
            test.in<2>("x"));
  };
  operations["distributions.beta"] = [](Case& test) {
    using ch::distributions::Beta;
    compare(test, Beta{test.in<2>("ap"), test.in<2>("bp")}, Beta{test.in<2>("aq"), test.in<2>("bq")}, test.in<2>("x"));
  };
  operations["distributions.bernoulli"] = [](Case& test) {
    with_kind<ch::distributions::Bernoulli>(
        test, [&](const auto& p, const auto& q) { compare(test, p, q, test.tensor<2>("x")); });
  };
  operations["distributions.categorical"] = [](Case& test) {
    with_kind<ch::distributions::Categorical>(
        test, [&](const auto& p, const auto& q) { compare(test, p, q, test.integers<1>("x")); });
  };
}

}  // namespace golden
