#pragma once
/// The state of optimizers and communication hooks, as checkpoints see it.

#include <chorus/core/dtype.hpp>
#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace chorus {
struct PartOfParameter;
}

namespace chorus::optim {

/// An optimizer's state for a parameter, with its name in checkpoints: `momentum.conv1.weight`.
struct StateTensor {
  std::string name;
  DType dtype;
  std::vector<Index> shape;  ///< of the whole tensor
  void* data;
  bool on_host = false;
  /// If this process has only a part: elements [part_begin, part_begin + *part_count) of the shard described by `part`,
  /// or of the whole.
  std::size_t part_begin = 0;
  std::optional<std::size_t> part_count = {};
  std::shared_ptr<const PartOfParameter> part = {};
};

}  // namespace chorus::optim
