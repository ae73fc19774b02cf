// NumPy's archives, stored and deflated.
#include <chorus/io/npz.hpp>

#include "fuzz.hpp"

FUZZ_TARGET(npz) {
  using namespace chorus;
  const fuzz::MemoryFile file(input);
  const io::NpzReader archive(file.path());
  for (const auto& name : archive.names()) {
    try {
      archive.read<float, 2>(name);
    } catch (const FileError&) {
    }
    try {
      archive.read<std::int64_t, 1>(name);
    } catch (const FileError&) {
    }
  }
}
