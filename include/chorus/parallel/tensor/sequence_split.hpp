#pragma once
/// Whether TensorParallel also divides activations along the sequence between divided layers.

namespace chorus {

/// For TensorParallel and mesh::Tensor: activations between divided layers are whole on each rank.
struct NoSequenceSplit {
  static constexpr bool splits_sequences = false;
};
/// Activations between divided layers are divided along the sequence.
struct SequenceSplit {
  static constexpr bool splits_sequences = true;
};

}  // namespace chorus
