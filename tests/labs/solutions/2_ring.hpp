// Lab 2: a solution that replaces the student's `Mine`.

/// `first`: the chunk that rank 0 sends first.
inline void go_around(ch::comm::AnyCommunicator& ranks, std::span<float> data, std::size_t first) {
  const auto n = static_cast<std::size_t>(ranks.size()), me = static_cast<std::size_t>(ranks.rank());
  if (n == 1) return;
  const int next = static_cast<int>((me + 1) % n), previous = static_cast<int>((me + n - 1) % n);
  const auto chunk = [&](std::size_t i) {
    const auto begin = data.size() * (i % n) / n;
    return data.subspan(begin, data.size() * (i % n + 1) / n - begin);
  };
  std::vector<float> in(data.size() / n + 1);
  const auto pass_on = [&](std::span<float> out, std::span<float> into) {
    if (me % 2 == 0) ranks.send(out, next);
    ranks.recv(into, previous);
    if (me % 2 == 1) ranks.send(out, next);
  };
  for (std::size_t s = 0; s + 1 < n; ++s) {
    const auto mine = chunk(me + first + 2 * n - 1 - s);
    pass_on(chunk(me + first + 2 * n - s), std::span(in).first(mine.size()));
    for (std::size_t i = 0; i < mine.size(); ++i) mine[i] += in[i];
  }
  for (std::size_t s = 0; s + 1 < n; ++s) pass_on(chunk(me + first + 2 * n + 1 - s), chunk(me + first + 2 * n - s));
}
struct Solution {
  static void all_reduce(ch::comm::AnyCommunicator& ranks, std::span<float> data) {
    go_around(ranks, data, static_cast<std::size_t>(ranks.size()) - 1);
  }
};
