#pragma once
/// Whether TensorParallel shares out the places of a sequence, too, where layers are whole.

namespace chorus {

struct NoSequenceSplit {
  static constexpr bool splits_sequences = false;
};
struct SequenceSplit {
  static constexpr bool splits_sequences = true;
};

}  // namespace chorus
