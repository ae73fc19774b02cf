// Losses of distances and distributions, sorting, scattering, Einstein sums.
#include <chorus/ops/einsum.hpp>
#include <chorus/ops/more_losses.hpp>
#include <chorus/ops/scatter.hpp>
#include <chorus/ops/sort.hpp>

#include "case.hpp"

namespace golden {
namespace {

// `whole(options)` where the case reduces, else `parts(options)`.
template <class Options, class Whole, class Parts>
void whole_or_parts(Case& test, Options options, const Whole& whole, const Parts& parts) {
  options.reduction = reduction_of(test);
  if (options.reduction == ch::Reduction::none)
    test.out_numbers("y", parts(options));
  else
    test.out("y", whole(options));
}
struct Margin {
  double margin;
  ch::Reduction reduction = ch::Reduction::mean;
};

template <ch::Equation equation, int A, int B>
bool einsum_if(Case& test, std::string_view wanted) {
  if (wanted != equation.view()) return false;
  test.out("y", ch::einsum<equation>(test.in<A>("a"), test.in<B>("b")));
  return true;
}

// `f(x)` along axis 1.
template <class F>
void sorted(Case& test, const F& f) {
  const auto y = f(test.in("x", test.around("x", test.attr<Index>("axis", -1))));
  test.compare_integers("out.index", y.indices.to_vector());
  test.out_numbers("y", y.values);
}

}  // namespace

void add_more(Operations& operations) {
  operations["triplet_margin_loss"] = [](Case& test) {
    const auto a = test.in("anchor", test.stacked<2>("anchor")), p = test.in("positive", test.stacked<2>("positive")),
               n = test.in("negative", test.stacked<2>("negative"));
    whole_or_parts(
        test, ch::TripletOptions{.margin = test.attr("margin", 1.0), .swap = test.attr("swap", false)},
        [&](const auto& options) { return ch::triplet_margin_loss(a, p, n, options); },
        [&](const auto& options) { return ch::triplet_margin_loss_per_sample(a, p, n, options); });
  };
  operations["cosine_embedding_loss"] = [](Case& test) {
    const auto a = test.in("a", test.stacked<2>("a")), b = test.in("b", test.stacked<2>("b"));
    const auto target = test.tensor("target", flat(test, "target"));
    whole_or_parts(
        test, Margin{test.attr("margin", 0.0)},
        [&](const auto& o) { return ch::cosine_embedding_loss(a, b, target, o.margin, o.reduction); },
        [&](const auto& o) { return ch::cosine_embedding_loss_per_sample(a, b, target, o.margin); });
  };
  operations["margin_ranking_loss"] = [](Case& test) {
    const auto a = test.in("a", flat(test, "a")), b = test.in("b", flat(test, "b"));
    const auto target = test.tensor("target", flat(test, "target"));
    whole_or_parts(
        test, Margin{test.attr("margin", 0.0)},
        [&](const auto& o) { return ch::margin_ranking_loss(a, b, target, o.margin, o.reduction); },
        [&](const auto& o) { return ch::margin_ranking_loss_per_element(a, b, target, o.margin); });
  };
  operations["hinge_embedding_loss"] = [](Case& test) {
    const auto x = test.in("x", flat(test, "x"));
    const auto target = test.tensor("target", flat(test, "target"));
    whole_or_parts(
        test, Margin{test.attr("margin", 1.0)},
        [&](const auto& o) { return ch::hinge_embedding_loss(x, target, o.margin, o.reduction); },
        [&](const auto& o) { return ch::hinge_embedding_loss_per_element(x, target, o.margin); });
  };
  operations["soft_margin_loss"] = [](Case& test) {
    const auto x = test.in("x", flat(test, "x"));
    const auto target = test.tensor("target", flat(test, "target"));
    whole_or_parts(
        test, Margin{}, [&](const auto& o) { return ch::soft_margin_loss(x, target, o.reduction); },
        [&](const auto&) { return ch::soft_margin_loss_per_element(x, target); });
  };
  operations["gaussian_nll_loss"] = [](Case& test) {
    with_rank<1>(test.rank("x"), [&]<int Rank>(std::integral_constant<int, Rank>) {
      const auto x = test.in<Rank>("x"), target = test.in<Rank>("target"), var = test.in<Rank>("var");
      whole_or_parts(
          test, ch::GaussianNllOptions{.full = test.attr("full", false), .eps = test.attr("eps", 1e-6)},
          [&](const auto& o) { return ch::gaussian_nll_loss(x, target, var, o); },
          [&](const auto& o) { return ch::gaussian_nll_loss_per_element(x, target, var, o); });
    });
  };
  operations["poisson_nll_loss"] = [](Case& test) {
    const auto x = test.in("x", flat(test, "x"));
    const auto target = test.tensor("target", flat(test, "target"));
    whole_or_parts(
        test, ch::PoissonNllOptions{.log_input = test.attr("log_input", true), .full = test.attr("full", false)},
        [&](const auto& o) { return ch::poisson_nll_loss(x, target, o); },
        [&](const auto& o) { return ch::poisson_nll_loss_per_element(x, target, o); });
  };
  operations["cosine_similarity"] = [](Case& test) {
    const auto axis = test.attr<Index>("axis", 1);
    test.out_numbers(
        "y", ch::cosine_similarity(test.in("a", test.around("a", axis)), test.in("b", test.around("b", axis)), 1));
  };
  operations["where"] = [](Case& test) {
    test.out_numbers("y", ch::where(test.mask("mask", test.widened("mask")), test.in("a", test.widened("a")),
                                    test.in("b", test.widened("b"))));
  };
  operations["sort"] = [](Case& test) {
    sorted(test, [&](const auto& x) { return ch::sort(x, 1, test.attr("descending", false)); });
  };
  operations["topk"] = [](Case& test) {
    sorted(test, [&](const auto& x) { return ch::topk(x, test.attr<Index>("k"), 1, test.attr("largest", true)); });
  };
  operations["scatter_add"] = [](Case& test) {
    with_rank<1>(test.rank("x"), [&]<int Rank>(std::integral_constant<int, Rank>) {
      test.out("y", ch::scatter_add(test.in<Rank>("x"), test.attr<Index>("axis"), test.integers<Rank>("index"),
                                    test.in<Rank>("src")));
    });
  };
  operations["scatter"] = [](Case& test) {
    with_rank<1>(test.rank("x"), [&]<int Rank>(std::integral_constant<int, Rank>) {
      test.out("y", ch::scatter(test.in<Rank>("x"), test.attr<Index>("axis"), test.integers<Rank>("index"),
                                test.in<Rank>("src")));
    });
  };
  // The equation is part of the program: these are the ones that cases may have.
  operations["einsum"] = [](Case& test) {
    const auto wanted = test.attr<std::string>("equation");
    const bool known = einsum_if<"ij,jk->ik", 2, 2>(test, wanted) || einsum_if<"bij,bjk->bik", 3, 3>(test, wanted) ||
                       einsum_if<"bij,jk->bik", 3, 2>(test, wanted) || einsum_if<"i,j->ij", 1, 1>(test, wanted) ||
                       einsum_if<"bi,bi->b", 2, 2>(test, wanted) || einsum_if<"bhqd,bhkd->bhqk", 4, 4>(test, wanted) ||
                       einsum_if<"ij,ij->", 2, 2>(test, wanted) || einsum_if<"ij,kj->ki", 2, 2>(test, wanted) ||
                       einsum_if<"bij,bkj->kib", 3, 3>(test, wanted) || einsum_if<"ij,k->jk", 2, 1>(test, wanted);
    ch::check<ch::UsageError>(known, "unknown equation ", wanted);
  };
}

}  // namespace golden
