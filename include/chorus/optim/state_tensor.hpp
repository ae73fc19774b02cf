#pragma once
/// What optimizers and communication hooks keep beside a parameter, as checkpoints see it.

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

/// State that an optimizer keeps for a parameter, under the name by which checkpoints know it: `momentum.conv1.weight`.
struct StateTensor {
  std::string name;
  DType dtype;
  std::vector<Index> shape;  ///< of the whole
  void* data;
  bool on_host = false;
  /// Where this process has only a part of it, as a parameter: elements [part_begin, part_begin + *part_count) of what
  /// `part` leaves it, or of the whole.
  std::size_t part_begin = 0;
  std::optional<std::size_t> part_count = {};
  std::shared_ptr<const PartOfParameter> part = {};
};

}  // namespace chorus::optim
