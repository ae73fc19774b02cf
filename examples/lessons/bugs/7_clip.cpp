/// ByteDance-Seed/VeOmni#184: "fsdp2 based hsdp, caculate grad_norm error in clip_grad_norm": parameters are cut in two
/// shards, each of which several ranks have, and the norm counts all of them.
#include "bug.hpp"

namespace {
using namespace bug;

/// The parameters of shard s: every shards-th one.
Numbers shard(const Numbers& all, int s, int shards) {
  Numbers mine;
  for (auto i = static_cast<std::size_t>(s); i < all.size(); i += static_cast<std::size_t>(shards))
    mine.push_back(all[i]);
  return mine;
}

/// Scales the gradient of which `mine` is a shard so that its norm is at most `most`.
void clip(Rank& rank, Numbers& mine, double most) {
  Numbers squares = {0};
  for (const double g : mine) squares[0] += g * g;
  rank.sum(squares);
  const double norm = std::sqrt(squares[0]);
  if (norm > most)
    for (auto& g : mine) g *= most / norm;
}

double train(Rank& rank, const Case& with) {
  Linear net;
  const int shards = rank.size() == 1 ? 1 : 2;
  Rank& shard_group = rank.part(shards);  // ranks that have all shards of one replica
  const auto [begin, end] = share(with.samples, rank.rank(), rank.size());
  for (int step = 0; step < with.steps; ++step) {
    Numbers gradient(3);
    for (int i = begin; i < end; ++i) net.add_gradient(sample(with.seed, i), gradient, 1.0 / with.samples);
    rank.sum(gradient);
    auto mine = shard(gradient, shard_group.rank(), shards);
    clip(rank, mine, 0.5);
    for (std::size_t i = 0; i < mine.size(); ++i)
      net.w[static_cast<std::size_t>(shard_group.rank()) + i * static_cast<std::size_t>(shards)] -= 0.5 * mine[i];
    for (int i = 0; i < 3; ++i) shard_group.broadcast({&net.w[static_cast<std::size_t>(i)], 1}, i % shards);
  }
  return net.loss(with.seed, with.samples);
}

const Program program(7, train);
}  // namespace
