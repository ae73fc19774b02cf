#pragma once
/// DetectAnomaly: finds the operation that produces the first NaN or infinity.

#include <chorus/autograd/node.hpp>

namespace chorus {

/// While an object lives, every recorded operation in every thread checks its output and the gradients that it sends
/// back. The first NaN or infinity throws a NonFiniteError that names the operation. `masked_fill` may produce
/// infinities. Slow: use it for debugging only.
///   const ch::DetectAnomaly detect;
///   loss_of(net, batch).backward();
class DetectAnomaly {
 public:
  DetectAnomaly() { ++detail::anomaly_detectors(); }
  ~DetectAnomaly() { --detail::anomaly_detectors(); }
  DetectAnomaly(const DetectAnomaly&) = delete;
  DetectAnomaly& operator=(const DetectAnomaly&) = delete;
};

}  // namespace chorus
