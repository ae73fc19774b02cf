#pragma once
/// `SigpipeBlock`: around libraries that write to sockets without MSG_NOSIGNAL.

#include <chorus/core/held_signal.hpp>

namespace chorus::comm {

/// While it lives, a write of this thread to a connection whose other end is gone fails with EPIPE, and does no more.
class SigpipeBlock : chorus::detail::HeldSignal {
 public:
  SigpipeBlock() : HeldSignal(SIGPIPE) {}
};

}  // namespace chorus::comm
