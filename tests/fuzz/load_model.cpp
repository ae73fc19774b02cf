// A model from a file: by name, with conversions, tied tensors, and wrappers' names; what fails changes nothing.
#include <chorus/io/load_model.hpp>
#include <chorus/io/parameters_hash.hpp>
#include <chorus/nn/batch_norm.hpp>
#include <chorus/nn/linear.hpp>

#include "fuzz.hpp"

namespace fuzz_load_model {

struct Model : chorus::nn::Module {
  chorus::nn::Linear<chorus::Cpu> fc1{2, 3}, fc2{3, 2};
  chorus::nn::BatchNorm1d<chorus::Cpu> norm{3};
  CHORUS_MODULE(Model, fc1, fc2, norm)
  int forward() const { return 0; }
};

}  // namespace fuzz_load_model

FUZZ_TARGET(load_model) {
  using namespace chorus;
  static Model model;
  fuzz::Parts parts(input);
  const auto how = parts.number();
  const io::Rename renames[] = {{}, io::without_prefix("model."), io::only_prefix("encoder."), io::with_prefix("fc")};
  const fuzz::MemoryFile file(parts.rest());
  const auto before = io::parameters_sha256(model);
  try {
    const auto report = io::load(model, file.path(), {.strict = (how & 1) == 0, .rename = renames[how / 2 % 4]});
    FUZZ_REQUIRE(report.complete() || (how & 1) != 0);
    FUZZ_REQUIRE(cat(report).empty() == report.complete());
  } catch (const Error&) {
    FUZZ_REQUIRE(io::parameters_sha256(model) == before);
    throw;
  }
}
