// The tree of canonical shares compared with its definition: all numbers of shares, runs of devices, and splits.
#include <algorithm>
#include <bit>
#include <catch.hpp>
#include <chorus/same_bits/share_tree.hpp>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <string>
#include <vector>

#include "../random_draw.hpp"

namespace share_tree_test {

using namespace chorus;
using namespace chorus::same_bits;
using Draw = test::DrawFrom<0x74726565>;

constexpr std::size_t most = most_shares;

std::string leaf(std::size_t share) { return std::to_string(share); }
std::string node(const std::string& left, const std::string& right) { return "(" + left + " " + right + ")"; }

/// By definition, a node of shares [begin, end) is split at the largest power of two below their number.
std::size_t split_of(std::size_t begin, std::size_t end) { return begin + std::bit_floor(end - begin - 1); }
std::string tree_of(std::size_t begin, std::size_t end) {
  if (end - begin == 1) return leaf(begin);
  const std::size_t middle = split_of(begin, end);
  return node(tree_of(begin, middle), tree_of(middle, end));
}
double sum_of(const std::vector<double>& numbers, std::size_t begin, std::size_t end) {
  if (end - begin == 1) return numbers[begin];
  const std::size_t middle = split_of(begin, end);
  return sum_of(numbers, begin, middle) + sum_of(numbers, middle, end);
}

/// A device's part of the tree as text, pushed from left to right like its sums.
struct Text {
  std::vector<std::string> sums;
  ShareTree tree;

  void add(std::size_t depth) {
    REQUIRE(depth + 1 == sums.size());
    sums[depth - 1] = node(sums[depth - 1], sums[depth]);
    sums.resize(depth);
  }
  void push(ShareRange shares, const std::string& text) {
    sums.push_back(text);
    tree.push(shares, [this](std::size_t depth) { add(depth); });
  }
  void finish() {
    tree.finish([this](std::size_t depth) { add(depth); });
  }
};

/// A device adds its run of shares; if it has all shares, down to a single sum.
Text of_run(ShareRange run, std::size_t shares) {
  Text text;
  for (std::size_t share = run.begin; share < run.end; ++share) text.push({share, share + 1}, leaf(share));
  if (run == ShareRange{0, shares}) text.finish();
  return text;
}

TEST_CASE("share tree: the order of additions is the definition's, for all numbers of shares") {
  CHECK(tree_of(0, 7) == "(((0 1) (2 3)) ((4 5) 6))");
  for (std::size_t shares = 1; shares <= most; ++shares) {
    const auto text = of_run({0, shares}, shares);
    REQUIRE(text.sums.size() == 1);
    CHECK(text.sums[0] == tree_of(0, shares));
    CHECK(text.tree.sums() == std::vector{ShareRange{0, shares}});
    CHECK(sums_of({0, shares}, shares) == text.tree.sums());
  }
}

TEST_CASE(
    "share tree: what devices have of their runs, one after the other, makes the same tree on any number of them") {
  for (std::size_t shares = 1; shares <= most; ++shares)
    for (std::size_t devices = 1; devices <= shares; ++devices) {
      Text whole;
      std::size_t next = 0;
      for (std::size_t i = 0; i < devices; ++i) {
        const ShareRange run = shares_of_device(shares, devices, i);
        REQUIRE(run.begin == next);
        REQUIRE(run.count() > 0);
        next = run.end;
        const auto own = of_run(run, shares);
        REQUIRE(own.tree.sums() == sums_of(run, shares));
        for (std::size_t k = 0; k < own.sums.size(); ++k) whole.push(own.tree.sums()[k], own.sums[k]);
      }
      REQUIRE(next == shares);
      whole.finish();
      REQUIRE(whole.sums == std::vector{tree_of(0, shares)});
    }
}

TEST_CASE("share tree: a run leaves at most 2 log2 sums, one where it is a node, and its sums are nodes") {
  for (std::size_t shares = 1; shares <= most; ++shares)
    for (std::size_t begin = 0; begin < shares; ++begin)
      for (std::size_t end = begin + 1; end <= shares; ++end) {
        const auto sums = sums_of({begin, end}, shares);
        const auto limit = std::max<std::size_t>(1, 2 * (std::bit_width(end - begin) - 1));
        REQUIRE(sums.size() <= limit);
        REQUIRE(sums.front().begin == begin);
        REQUIRE(sums.back().end == end);
        for (std::size_t k = 0; k < sums.size(); ++k) {
          REQUIRE((k == 0 || sums[k].begin == sums[k - 1].end));
          if (sums.size() > 1) REQUIRE(std::has_single_bit(sums[k].count()));
          if (std::has_single_bit(sums[k].count())) REQUIRE(sums[k].begin % sums[k].count() == 0);
        }
        if (std::has_single_bit(end - begin) && begin % (end - begin) == 0) REQUIRE(sums.size() == 1);
      }
  CHECK(sums_of({3, 3}, 8).empty());
}

TEST_CASE("share tree: while a device adds up its run it holds as many sums as log2(shares) + 2, or one") {
  for (std::size_t shares = 1; shares <= most; ++shares)
    for (std::size_t devices = 1; devices <= shares; ++devices)
      for (std::size_t i = 0; i < devices; ++i) {
        const ShareRange run = shares_of_device(shares, devices, i);
        ShareTree tree;
        std::size_t held = 0;
        for (std::size_t share = run.begin; share < run.end; ++share) {
          held = std::max(held, tree.sums().size() + 1);
          tree.push({share, share + 1}, [](std::size_t) {});
        }
        const std::size_t log2 = std::bit_width(shares - 1);  // rounded up
        REQUIRE(held <= log2 + 1 + (run.begin % 2));          // the run may begin within a pair
        if (devices == shares) REQUIRE(held == 1);
      }
}

TEST_CASE("share tree: numbers of shares are added with the bits of the definition, which a sum in a row has not") {
  Draw d(1);
  bool order_shows = false;
  for (std::size_t shares = 1; shares <= most; ++shares) {
    std::vector<double> numbers;
    for (std::size_t i = 0; i < shares; ++i)
      numbers.push_back((static_cast<double>(d.below(1000001)) - 5e5) * std::pow(10.0, d.below(12)) / 7);
    const double sum = add_shares(numbers);
    CHECK(std::bit_cast<std::uint64_t>(sum) == std::bit_cast<std::uint64_t>(sum_of(numbers, 0, shares)));
    order_shows = order_shows || sum != std::accumulate(numbers.begin(), numbers.end(), 0.0);
    // For every distribution of shares over devices.
    for (std::size_t devices = 1; devices <= shares; ++devices) {
      std::vector<double> sums;
      ShareTree tree;
      const auto add = [](std::vector<double>& of) {
        return [&of](std::size_t depth) {
          of[depth - 1] += of[depth];
          of.resize(depth);
        };
      };
      for (std::size_t i = 0; i < devices; ++i) {
        const ShareRange run = shares_of_device(shares, devices, i);
        std::vector<double> own;
        ShareTree of_device;
        for (std::size_t share = run.begin; share < run.end; ++share) {
          own.push_back(numbers[share]);
          of_device.push({share, share + 1}, add(own));
        }
        for (std::size_t k = 0; k < own.size(); ++k) {
          sums.push_back(own[k]);
          tree.push(of_device.sums()[k], add(sums));
        }
      }
      tree.finish(add(sums));
      REQUIRE(sums.size() == 1);
      REQUIRE(std::bit_cast<std::uint64_t>(sums[0]) == std::bit_cast<std::uint64_t>(sum));
    }
  }
  CHECK(order_shows);
  CHECK(add_shares({}) == 0);
}

TEST_CASE("share tree: shares are consecutive, differ by one sample at most, and the first ones are the larger ones") {
  for (std::size_t shares = 1; shares <= most; ++shares)
    for (std::int64_t count = 0; count <= 150; ++count) {
      REQUIRE(share_begin(count, shares, 0) == 0);
      REQUIRE(share_begin(count, shares, shares) == count);
      std::int64_t before = count;
      for (std::size_t i = 0; i < shares; ++i) {
        const auto size = share_begin(count, shares, i + 1) - share_begin(count, shares, i);
        REQUIRE(size <= before);
        REQUIRE((size == count / static_cast<std::int64_t>(shares) ||
                 size == count / static_cast<std::int64_t>(shares) + 1));
        before = size;
      }
    }
}

}  // namespace share_tree_test
