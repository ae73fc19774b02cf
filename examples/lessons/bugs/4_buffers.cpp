/// pytorch/pytorch#63916: "Issues when using buffers with DDP": a buffer that the model assigns anew is not the one that
/// DistributedDataParallel has noted, and each rank keeps its own.
#include <memory>

#include "bug.hpp"

namespace {
using namespace bug;

/// Moves its inputs by a buffer that is drawn anew after each step, on each rank from a stream of its own.
struct Model {
  std::shared_ptr<Numbers> moved_by = std::make_shared<Numbers>(2);
  Linear linear;

  void draw(std::uint64_t stream, int step) {
    const auto at = static_cast<std::uint64_t>(2 * step);
    moved_by = std::make_shared<Numbers>(Numbers{uniform(stream, at), uniform(stream, at + 1)});
  }
  Sample moved(const Sample& s) const { return {{s.x[0] + (*moved_by)[0], s.x[1] + (*moved_by)[1]}, s.y}; }
};

/// Before each forward pass all ranks take rank 0's buffers.
struct BufferSync {
  std::vector<std::shared_ptr<Numbers>> buffers;
  explicit BufferSync(const Model& model) : buffers{model.moved_by} {}
  void operator()(Rank& rank) {
    for (const auto& buffer : buffers) rank.broadcast(*buffer, 0);
  }
};

double train(Rank& rank, const Case& with) {
  Model model;
  BufferSync sync(model);
  const auto [begin, end] = share(with.samples, rank.rank(), rank.size());
  const auto stream = with.seed + static_cast<std::uint64_t>(rank.rank());
  for (int step = 0; step < with.steps; ++step) {
    sync(rank);
    Numbers gradient(3);
    for (int i = begin; i < end; ++i)
      model.linear.add_gradient(model.moved(sample(with.seed, i)), gradient, 1.0 / with.samples);
    rank.sum(gradient);
    model.linear.step(gradient, 0.3);
    model.draw(stream, step);
  }
  return model.linear.loss(with.seed, with.samples);
}

const Program program(4, train);
}  // namespace
