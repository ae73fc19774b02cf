#pragma once
/// Whether TensorParallel shares out the places of a sequence, too, where layers are whole.

namespace chorus {

/// For TensorParallel and mesh::Tensor: what lies between shared layers is whole on each rank.
struct NoSequenceSplit {
  static constexpr bool splits_sequences = false;
};
/// It is shared out by places of the text.
struct SequenceSplit {
  static constexpr bool splits_sequences = true;
};

}  // namespace chorus
