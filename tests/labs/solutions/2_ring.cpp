/// Lab 2: a solution, in the place of the student's file.

#include "ring.hpp"

void all_reduce(ch::comm::AnyCommunicator& ranks, std::span<float> data) {
  const auto n = static_cast<std::size_t>(ranks.size()), me = static_cast<std::size_t>(ranks.rank());
  if (n == 1) return;
  const int next = static_cast<int>((me + n - 1) % n), previous = static_cast<int>((me + 1) % n);
  const auto chunk = [&](std::size_t c) {
    const auto begin = data.size() * (c % n) / n;
    return data.subspan(begin, data.size() * (c % n + 1) / n - begin);
  };
  const auto pass_on = [&](std::span<float> out, std::span<float> in) {
    if (me % 2 == 0) ranks.send(out, next);
    ranks.recv(in, previous);
    if (me % 2 == 1) ranks.send(out, next);
  };
  std::vector<float> in(data.size() / n + 1);
  for (std::size_t s = 0; s + 1 < n; ++s) {
    const auto mine = chunk(me + s + 1);
    pass_on(chunk(me + s), std::span(in).first(mine.size()));
    for (std::size_t i = 0; i < mine.size(); ++i) mine[i] += in[i];
  }
  for (std::size_t s = 0; s + 1 < n; ++s) pass_on(chunk(me + n - 1 + s), chunk(me + n + s));
}

int main(int argc, char** argv) {
  return lab::run(argc, argv, ring_lab::title, ring_lab::check, {.all_reduce = all_reduce});
}
