#pragma once
/// The steps of an LSTM, without the product of its input. Not in chorus.hpp.

#include <chorus/core/config.hpp>
#include <chorus/core/device.hpp>
#include <concepts>

namespace chorus::kernels {

/// States lie in rows of time + 1 steps, the initial one before the first step that is taken: at 0, or at `time` for
/// a sequence that is read backwards.
struct LstmSteps {
  Index time, batch, hidden;
  bool reverse = false;
  /// [time, batch]: the states of a sample pass through steps that are not real; null if all are.
  const bool* real = nullptr;

  Index step(Index number) const { return reverse ? time - 1 - number : number; }
  Index row_before(Index t) const { return reverse ? t + 1 : t; }
  Index row_of(Index t) const { return reverse ? t : t + 1; }
};

/// gates: [time, batch, 4 hidden], the input's contribution, becomes the gates' values; weight: [4 hidden, hidden];
/// states, cells: [time + 1, batch, hidden], which hold the initial ones. `recorded`: for the backward pass, in which a
/// sample's bits don't depend on the batch.
template <std::floating_point T>
void lstm_forward(Cpu device, const LstmSteps& s, const T* weight, T* gates, T* states, T* cells, bool recorded);

/// dstates: [time + 1, batch, hidden], the gradient of all states; dh, dc: [batch, hidden], that of the last cells in
/// `dc`; they become those of the initial states. dgates: [time, batch, 4 hidden], the gradient of the input's
/// contribution. dweight may be null.
template <std::floating_point T>
void lstm_backward(Cpu device, const LstmSteps& s, const T* weight, const T* gates, const T* states, const T* cells,
                   const T* dstates, T* dh, T* dc, T* dgates, T* dweight, bool accumulate_weight);

}  // namespace chorus::kernels

#if !CHORUS_COMPILED
#include <chorus/kernels/cpu/lstm.hpp>
#endif
