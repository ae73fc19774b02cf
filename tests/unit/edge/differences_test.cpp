#include "differences.hpp"

#include <catch.hpp>
#include <set>
#include <string_view>
#include <utility>

namespace edge {

namespace why {
constexpr std::string_view empty = "the mean of no losses is 0, so that an empty share of a batch contributes nothing";
constexpr std::string_view ignored = "what is ignored gets no gradient, NaN neither";
constexpr std::string_view exact_bce = "exact; PyTorch multiplies infinity by 0 and overflows";
constexpr std::string_view fma =
    "exp(x) overflows: what is left depends on whether the product is rounded before it is subtracted";
constexpr std::string_view soft_margin = "exact; PyTorch overflows in exp";
constexpr std::string_view cosine_embedding =
    "the lengths' product does not overflow here; for double PyTorch's eps is a float";
constexpr std::string_view single = "PyTorch does not square a single number";
constexpr std::string_view alone = "a number by itself is its own mean: no square overflows";
constexpr std::string_view var = "the squares overflow; PyTorch subtracts infinities";
constexpr std::string_view glu = "the gradient times a number overflows before the slope 0 of the sigmoid comes in";
constexpr std::string_view cumprod = "the gradient by a factor does not depend on that factor; PyTorch divides by it";
constexpr std::string_view float_constant = "PyTorch's 1 / 6 is a float";
constexpr std::string_view hardswish = "the limit; PyTorch multiplies infinity by 0";
constexpr std::string_view softsign = "the limit; PyTorch divides infinities";
constexpr std::string_view softplus = "exact; PyTorch overflows below the threshold";
constexpr std::string_view overflow = "squares overflow: NaN, as layer_norm gives, not zeros";
constexpr std::string_view empty_instance = "an empty batch is normalised to an empty one";
constexpr std::string_view equal_lines = "exact; PyTorch subtracts the square of the mean from the mean of squares";
constexpr std::string_view convolution =
    "the kernel's gradient goes over whole rows: what is not finite spoils its neighbours";
constexpr std::string_view ctc_masked = "a class whose probability is 0 gets no gradient, and spoils none";
constexpr std::string_view ctc_double = "computed in double";
constexpr std::string_view query = "PyTorch gives zeros for a query of NaN or infinity";
constexpr std::string_view same_size = "an image of the same size stays as it is; PyTorch adds 0 times the neighbour";
constexpr std::string_view cancel = "two huge numbers cancel: what is left depends on the order";
constexpr std::string_view one_number =
    "refused whatever the batch, so that its shares are as the whole; PyTorch refuses a batch of one alone";
constexpr std::string_view kl =
    "a target of 0 costs nothing, however large x, and gets no gradient; one of infinity is no probability";
}  // namespace why

// clang-format off: a line for each.
constexpr Difference list[] = {
    {"attention: attention", "f32 q edge, k, v: y 8 9", why::query},
    {"attention: attention", "f64 q edge, k, v: y 8 9", why::query},
    {"attention: attention causal", "f32 q edge, k, v: d1 11", why::query},
    {"attention: attention causal", "f32 q edge, k, v: d2 10 11", why::query},
    {"attention: attention causal", "f32 q edge, k, v: y 6 7 8 9", why::query},
    {"attention: attention causal", "f64 q edge, k, v: d1 11", why::query},
    {"attention: attention causal", "f64 q edge, k, v: d2 10 11", why::query},
    {"attention: attention causal", "f64 q edge, k, v: y 6 7 8 9", why::query},
    {"binary: bce_with_logits mean", "f32 none, none: y 0", why::empty},
    {"binary: bce_with_logits mean", "f64 none, none: y 0", why::empty},
    {"binary: bce_with_logits_per_element", "f32 logits, shares: y 49 51 52 53", why::exact_bce},
    {"binary: bce_with_logits_per_element", "f64 logits, shares: y 49 51 52 53", why::exact_bce},
    {"binary: bce_with_logits_per_element weighted", "f32 logits, shares: d1 42", why::exact_bce},
    {"binary: bce_with_logits_per_element weighted", "f32 logits, shares: y 47 49 51 52 53", why::exact_bce},
    {"binary: bce_with_logits_per_element weighted", "f64 logits, shares: d1 42", why::exact_bce},
    {"binary: bce_with_logits_per_element weighted", "f64 logits, shares: y 47 49 51 52 53", why::exact_bce},
    {"binary: cosine_embedding_loss", "f32 logits, signs: dx 42", why::cosine_embedding},
    {"binary: cosine_embedding_loss", "f64 logits, signs: dx 0 2 3 5 42 57 59", why::cosine_embedding},
    {"binary: huber_loss mean", "f32 none, none: y 0", why::empty},
    {"binary: huber_loss mean", "f64 none, none: y 0", why::empty},
    {"binary: kl_div", "f32 no rows, no rows: y 0", why::empty},
    {"binary: kl_div", "f64 no rows, no rows: y 0", why::empty},
    {"binary: kl_div_per_element", "f32 left, right: y 180 195", why::kl},
    {"binary: kl_div_per_element",
     "f32 left, right: d1 0 12 15 27 30 42 45 57 60 72 75 87 90 102 105 117 120 132 135 147 150 162 165 177 180 195 "
     "207 210",
     why::kl},
    {"binary: kl_div_per_element", "f64 left, right: y 180 195", why::kl},
    {"binary: kl_div_per_element",
     "f64 left, right: d1 0 12 15 27 30 42 45 57 60 72 75 87 90 102 105 117 120 132 135 147 150 162 165 177 180 195 "
     "207 210",
     why::kl},
    {"binary: l1_loss mean", "f32 none, none: y 0", why::empty},
    {"binary: l1_loss mean", "f64 none, none: y 0", why::empty},
    {"binary: mse_loss mean", "f32 none, none: y 0", why::empty},
    {"binary: mse_loss mean", "f64 none, none: y 0", why::empty},
    {"binary: poisson_nll_loss mean", "f32 none, none: y 0", why::empty},
    {"binary: poisson_nll_loss mean", "f64 none, none: y 0", why::empty},
    {"binary: poisson_nll_loss_per_element", "f32 left, right: dx 132 162 192", why::fma, false},
    {"binary: poisson_nll_loss_per_element", "f32 left, right: y 160", why::fma, false},
    {"binary: poisson_nll_loss_per_element", "f64 left, right: y 160", why::fma, false},
    {"binary: poisson_nll_loss_per_element full", "f32 left, right: dx 132 162 192", why::fma, false},
    {"binary: poisson_nll_loss_per_element full", "f32 left, right: y 160", why::fma, false},
    {"binary: poisson_nll_loss_per_element full", "f64 left, right: y 160", why::fma, false},
    {"binary: smooth_l1_loss mean", "f32 none, none: y 0", why::empty},
    {"binary: smooth_l1_loss mean", "f64 none, none: y 0", why::empty},
    {"binary: soft_margin_loss mean", "f32 none, none: y 0", why::empty},
    {"binary: soft_margin_loss mean", "f64 none, none: y 0", why::empty},
    {"binary: soft_margin_loss_per_element", "f32 logits, signs: dx 28 30 32 34 37 39 41 43 45 47 49 51 53",
     why::soft_margin},
    {"binary: soft_margin_loss_per_element", "f32 logits, signs: y 28 30 32 34 37 39 41 43 45 47", why::soft_margin},
    {"binary: soft_margin_loss_per_element", "f64 logits, signs: dx 34 37 39 41 43 45 47 49 51 53", why::soft_margin},
    {"binary: soft_margin_loss_per_element", "f64 logits, signs: y 34 37 39 41 43 45 47", why::soft_margin},
    {"classes: cross_entropy all ignored mean", "f32 no rows: y 0", why::empty},
    {"classes: cross_entropy all ignored mean", "f32 one row: y 0", why::empty},
    {"classes: cross_entropy all ignored mean", "f32 others: y 0", why::empty},
    {"classes: cross_entropy all ignored mean", "f64 no rows: y 0", why::empty},
    {"classes: cross_entropy all ignored mean", "f64 one row: y 0", why::empty},
    {"classes: cross_entropy all ignored mean", "f64 others: y 0", why::empty},
    {"classes: cross_entropy all ignored none",
     "f32 rows: dx 28 29 30 31 36 37 38 39 40 41 42 43 44 45 46 47 48 49 50 51 52 53 54 55 56 57 58 59", why::ignored},
    {"classes: cross_entropy all ignored none",
     "f64 rows: dx 28 29 30 31 36 37 38 39 40 41 42 43 44 45 46 47 48 49 50 51 52 53 54 55 56 57 58 59", why::ignored},
    {"classes: cross_entropy ignored mean", "f32 no rows: y 0", why::empty},
    {"classes: cross_entropy ignored mean", "f32 one row: y 0", why::empty},
    {"classes: cross_entropy ignored mean", "f64 no rows: y 0", why::empty},
    {"classes: cross_entropy ignored mean", "f64 one row: y 0", why::empty},
    {"classes: cross_entropy ignored none", "f32 rows: dx 48 49 50 51", why::ignored},
    {"classes: cross_entropy ignored none", "f64 rows: dx 48 49 50 51", why::ignored},
    {"classes: cross_entropy mean", "f32 no rows: y 0", why::empty},
    {"classes: cross_entropy mean", "f64 no rows: y 0", why::empty},
    {"classes: cross_entropy probabilities mean", "f32 no rows, no rows: y 0", why::empty},
    {"classes: cross_entropy probabilities mean", "f64 no rows, no rows: y 0", why::empty},
    {"classes: cross_entropy smooth mean", "f32 no rows: y 0", why::empty},
    {"classes: cross_entropy smooth mean", "f64 no rows: y 0", why::empty},
    {"classes: cross_entropy weighted mean", "f32 no rows: y 0", why::empty},
    {"classes: cross_entropy weighted mean", "f64 no rows: y 0", why::empty},
    {"classes: nll_loss mean", "f32 no rows: y 0", why::empty},
    {"classes: nll_loss mean", "f64 no rows: y 0", why::empty},
    {"classes: nll_loss weighted mean", "f32 no rows: y 0", why::empty},
    {"classes: nll_loss weighted mean", "f64 no rows: y 0", why::empty},
    {"convolutions: conv2d", "f32 dotted, kernel, bias2: d1", why::convolution, false},
    {"convolutions: conv2d", "f64 dotted, kernel, bias2: d1", why::convolution, false},
    {"convolutions: conv2d padded", "f32 dotted, kernel, bias2: d1", why::convolution, false},
    {"convolutions: conv2d padded", "f64 dotted, kernel, bias2: d1", why::convolution, false},
    {"convolutions: conv3d", "f32 volume, kernel vol, bias2: d1", why::convolution, false},
    {"convolutions: conv3d", "f64 volume, kernel vol, bias2: d1", why::convolution, false},
    {"ctc: ctc_loss mean", "f32 a long score: dx 0 1 8 9 10 16 17 18 24 25 26 32 34", why::ctc_double},
    {"ctc: ctc_loss mean", "f32 scores: dx 8 9 10 11", why::ctc_masked},
    {"ctc: ctc_loss mean", "f64 scores: dx 8 9 10 11", why::ctc_masked},
    {"ctc: ctc_loss mean zero", "f32 a long score: dx 0 1 8 9 10 16 17 18 24 25 26 32 34", why::ctc_double},
    {"ctc: ctc_loss mean zero", "f32 scores: dx 8 9 10 11", why::ctc_masked},
    {"ctc: ctc_loss mean zero", "f64 scores: dx 8 9 10 11", why::ctc_masked},
    {"ctc: ctc_loss none", "f32 a long score: dx 0 1 8 9 10 16 17 18 24 25 26 32 34", why::ctc_double},
    {"ctc: ctc_loss none", "f32 scores: dx 8 9 10 11", why::ctc_masked},
    {"ctc: ctc_loss none", "f64 scores: dx 8 9 10 11", why::ctc_masked},
    {"ctc: ctc_loss none zero", "f32 a long score: dx 0 1 8 9 10 16 17 18 24 25 26 32 34", why::ctc_double},
    {"ctc: ctc_loss none zero", "f32 scores: dx 8 9 10 11", why::ctc_masked},
    {"ctc: ctc_loss none zero", "f64 scores: dx 8 9 10 11", why::ctc_masked},
    {"ctc: ctc_loss sum", "f32 a long score: dx 0 1 8 9 10 16 17 18 24 25 26 32 34", why::ctc_double},
    {"ctc: ctc_loss sum", "f32 scores: dx 8 9 10 11", why::ctc_masked},
    {"ctc: ctc_loss sum", "f64 scores: dx 8 9 10 11", why::ctc_masked},
    {"ctc: ctc_loss sum zero", "f32 a long score: dx 0 1 8 9 10 16 17 18 24 25 26 32 34", why::ctc_double},
    {"ctc: ctc_loss sum zero", "f32 scores: dx 8 9 10 11", why::ctc_masked},
    {"ctc: ctc_loss sum zero", "f64 scores: dx 8 9 10 11", why::ctc_masked},
    {"distances: cosine_embedding_loss_per_sample", "f32 others, rows: dx 24 25 26 27", why::cosine_embedding},
    {"distances: cosine_embedding_loss_per_sample", "f32 rows, others: d1 24 25 26 27", why::cosine_embedding},
    {"distances: cosine_embedding_loss_per_sample", "f32 rows, rows: y 5", why::cosine_embedding},
    {"distances: cosine_embedding_loss_per_sample", "f64 others, rows: d1 0 1 2 3 8 9 10 11", why::cosine_embedding},
    {"distances: cosine_embedding_loss_per_sample", "f64 others, rows: dx 24 25 26 27", why::cosine_embedding},
    {"distances: cosine_embedding_loss_per_sample", "f64 rows, others: d1 24 25 26 27", why::cosine_embedding},
    {"distances: cosine_embedding_loss_per_sample", "f64 rows, others: dx 0 1 2 3 8 9 10 11", why::cosine_embedding},
    {"distances: cosine_similarity", "f32 four rows, four rows: y 3", why::single},
    {"distances: cosine_similarity", "f64 four rows, four rows: y 3", why::single},
    {"distances: layer_norm plain", "f32 four rows: dx 3", why::alone},
    {"distances: layer_norm plain", "f32 four rows: y 3", why::alone},
    {"distances: layer_norm plain", "f64 four rows: dx 3", why::alone},
    {"distances: layer_norm plain", "f64 four rows: y 3", why::alone},
    {"images: adaptive_avg_pool2d", "f32 mixed: y 4 10 16", why::cancel},
    {"images: adaptive_avg_pool2d", "f64 mixed: y 4 10 16", why::cancel},
    {"images: upsample_bilinear2d same", "f32 mixed: y 2 7 18 23 34 39", why::same_size},
    {"images: upsample_bilinear2d same", "f64 mixed: y 2 7 18 23 34 39", why::same_size},
    {"normalisations: group_norm",
     "f32 dotted, weight2, bias2: dx 144 145 146 147 148 149 150 151 152 153 154 155 156 157 158 159 160 161 162 163 "
     "164 165 166 167 168 169 170 171 172 173 174 175 176 177 178 179",
     why::overflow},
    {"normalisations: group_norm",
     "f32 dotted, weight2, bias2: y 144 145 146 147 148 149 150 151 152 153 154 155 156 157 158 159 160 161 162 163 "
     "164 165 166 167 168 169 170 171 172 173 174 175 176 177 178 179",
     why::overflow},
    {"normalisations: group_norm 1",
     "f32 dotted, weight2, bias2: dx 144 145 146 147 148 149 150 151 152 153 154 155 156 157 158 159 160 161 162 163 "
     "164 165 166 167 168 169 170 171 172 173 174 175 176 177 178 179 180 181 182 183 184 185 186 187 188 189 190 191 "
     "192 193 194 195 196 197 198 199 200 201 202 203 204 205 206 207 208 209 210 211 212 213 214 215",
     why::overflow},
    {"normalisations: group_norm 1",
     "f32 dotted, weight2, bias2: y 144 145 146 147 148 149 150 151 152 153 154 155 156 157 158 159 160 161 162 163 "
     "164 165 166 167 168 169 170 171 172 173 174 175 176 177 178 179 180 181 182 183 184 185 186 187 188 189 190 191 "
     "192 193 194 195 196 197 198 199 200 201 202 203 204 205 206 207 208 209 210 211 212 213 214 215",
     why::overflow},
    {"normalisations: instance_norm",
     "f32 dotted, weight2, bias2: dx 144 145 146 147 148 149 150 151 152 153 154 155 156 157 158 159 160 161 162 163 "
     "164 165 166 167 168 169 170 171 172 173 174 175 176 177 178 179",
     why::overflow},
    {"normalisations: instance_norm",
     "f32 dotted, weight2, bias2: y 144 145 146 147 148 149 150 151 152 153 154 155 156 157 158 159 160 161 162 163 "
     "164 165 166 167 168 169 170 171 172 173 174 175 176 177 178 179",
     why::overflow},
    {"normalisations: group_norm of points", "f32 points: refused", why::one_number},
    {"normalisations: group_norm of points", "f64 points: refused", why::one_number},
    {"normalisations: group_norm of rows", "f32 rows: refused", why::one_number},
    {"normalisations: group_norm of rows", "f64 rows: refused", why::one_number},
    {"normalisations: instance_norm", "f32 no images, weight2, bias2: not refused", why::empty_instance},
    {"normalisations: instance_norm",
     "f64 dotted, weight2, bias2: dx 144 145 146 147 148 149 150 151 152 153 154 155 156 157 158 159 160 161 162 163 "
     "164 165 166 167 168 169 170 171 172 173 174 175 176 177 178 179",
     why::overflow},
    {"normalisations: instance_norm",
     "f64 dotted, weight2, bias2: y 144 145 146 147 148 149 150 151 152 153 154 155 156 157 158 159 160 161 162 163 "
     "164 165 166 167 168 169 170 171 172 173 174 175 176 177 178 179",
     why::overflow},
    {"normalisations: instance_norm", "f64 no images, weight2, bias2: not refused", why::empty_instance},
    {"normalisations: instance_norm of lines", "f32 equal lines: y 4 5 10 11", why::equal_lines},
    {"normalisations: instance_norm of lines", "f64 equal lines: y 4 5 10 11", why::equal_lines},
    {"rows: cumprod", "f32 factors: dx 8 12 13 19", why::cumprod},
    {"rows: cumprod", "f64 factors: dx 8 12 13 19", why::cumprod},
    {"rows: glu", "f32 rows: dx 62", why::glu},
    {"rows: glu", "f64 rows: dx 62", why::glu},
    {"rows: var", "f64 rows: y 15", why::var},
    {"rows: var 0", "f64 rows: y 15", why::var},
    {"rows: var 0 of columns", "f64 columns: y 15", why::var},
    {"rows: var of columns", "f64 columns: y 15", why::var},
    {"unary: hardsigmoid", "f64 one: dx 0", why::float_constant},
    {"unary: hardsigmoid", "f64 specials: dx 0 1 3 4 5 6 7 8 9 23 24 25 26 27 28 29", why::float_constant},
    {"unary: hardswish", "f32 specials: y 42", why::hardswish},
    {"unary: hardswish", "f64 specials: y 42", why::hardswish},
    {"unary: softplus 1 100", "f32 specials (no gradient): dx 17", why::softplus},
    {"unary: softplus 1 100", "f32 specials: dx 17", why::softplus},
    {"unary: softplus 1 100", "f32 specials: y 17", why::softplus},
    {"unary: softsign", "f32 specials (no gradient): dx 22 42", why::softsign},
    {"unary: softsign", "f32 specials: dx 22 42", why::softsign},
    {"unary: softsign", "f64 specials (no gradient): dx 22 42", why::softsign},
    {"unary: softsign", "f64 specials: dx 22 42", why::softsign},
};
// clang-format on

std::span<const Difference> differences() { return list; }

TEST_CASE("the list of differences names none twice, and a reason for each") {
  std::set<std::pair<std::string_view, std::string_view>> seen;
  for (const Difference& difference : list) {
    CHECK(seen.emplace(difference.name, difference.what).second);
    CHECK_FALSE(difference.reason.empty());
  }
}

}  // namespace edge
