#pragma once
/// DetectAnomaly: finds the operation that makes the first NaN or infinity.

#include <chorus/autograd/node.hpp>

namespace chorus {

/// While one lives, in any thread, every recorded operation's output and every gradient that it sends back is searched,
/// and the first NaN or infinity becomes a NonFiniteError that names the operation. `masked_fill` may give infinities.
/// Slow: for looking for a mistake.
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
