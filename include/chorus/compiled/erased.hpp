#pragma once
/// How the sources of chorus::compiled have kernels emitted: by naming them in tables, which nobody reads.

namespace chorus::kernels {

using Erased = void (*)();
template <class Kernel>
Erased erased(Kernel* kernel) {
  return reinterpret_cast<Erased>(kernel);
}

}  // namespace chorus::kernels
