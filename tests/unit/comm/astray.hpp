#pragma once
/// Ranks that call different collectives: the error that every backend must raise, and that no data is changed.

#include <chorus/comm/any_communicator.hpp>
#include <functional>
#include <string>
#include <utility>
#include <vector>

namespace test {

namespace ch = chorus;

/// What rank 0 calls while rank 1 is in `all_reduce #1 (min of 100 I32)`, and how the error names that call. `f` has
/// 100 numbers, `g` has 200.
struct Astray {
  using C = ch::comm::AnyCommunicator;
  std::function<void(C&, std::vector<float>& f, std::vector<float>& g, std::vector<int>& i)> call;
  std::string name;
};

inline std::vector<Astray> calls_astray() {
  using C = Astray::C;
  using ch::comm::ReduceOp;
  return {
      {[](C& c, auto& f, auto&, auto&) { c.all_reduce(std::span(f)); }, "all_reduce #1 (sum of 100 F32)"},
      {[](C& c, auto&, auto& g, auto&) { c.all_reduce(std::span(g)); }, "all_reduce #1 (sum of 200 F32)"},
      {[](C& c, auto&, auto&, auto& i) { c.all_reduce(std::span(i)); }, "all_reduce #1 (sum of 100 I32)"},
      {[](C& c, auto& f, auto&, auto&) { c.all_reduce(std::span(f), ReduceOp::max); },
       "all_reduce #1 (max of 100 F32)"},
      {[](C& c, auto&, auto&, auto&) { c.all_reduce(std::span<float>()); }, "all_reduce #1 (sum of 0 F32)"},
      {[](C& c, auto& f, auto&, auto&) { c.broadcast(std::span(f), 0); }, "broadcast #1 (100 F32 from rank 0)"},
      {[](C& c, auto& f, auto& g, auto&) { c.all_gather(f, std::span(g)); }, "all_gather #1 (100 F32)"},
      {[](C& c, auto& f, auto& g, auto&) { c.reduce_scatter(g, std::span(f)); }, "reduce_scatter #1 (sum of 100 F32)"},
      {[](C& c, auto&, auto&, auto&) { c.barrier(); }, "barrier #1"},
      {[](C& c, auto& f, auto&, auto&) { c.send(std::span(f), 1 - c.rank()); }, "message #0 (100 F32)"},
      {[](C& c, auto&, auto&, auto&) { c.barrier(), c.barrier(); }, "barrier #1"},
  };
}

/// One of two ranks; returns the error of its call, with the prefix "moved: " if data was changed.
inline std::string go_astray(ch::comm::AnyCommunicator& c, const Astray& astray) {
  std::vector<float> f(100, 1), g(200, 2);
  std::vector<int> i(100, 3);
  std::string text = "no error";
  c.barrier();
  try {
    if (c.rank() == 0) astray.call(c, f, g, i);
    if (c.rank() == 1) c.all_reduce(std::span(i), ch::comm::ReduceOp::min);
    c.barrier();  // a sender may get the error only here
  } catch (const ch::CommError& error) {
    text = error.what();
  }
  const bool still =
      f == std::vector<float>(100, 1) && g == std::vector<float>(200, 2) && i == std::vector<int>(100, 3);
  return (still ? "" : "moved: ") + text;
}

/// One of three ranks, the last of which passes another number of elements.
inline std::string third_astray(ch::comm::AnyCommunicator& c) {
  std::vector<double> x(1000, c.rank());
  const auto before = x;
  std::string text = "no error";
  c.barrier();
  try {
    c.all_reduce(std::span(x).first(c.rank() == 2 ? 999 : 1000));
  } catch (const ch::CommError& error) {
    text = error.what();
  }
  return (x == before ? "" : "moved: ") + text;
}

}  // namespace test
