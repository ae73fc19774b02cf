/// The C++ side of tests/python/quantized_check.py.
///   quantized_tool MODEL BATCH   writes a quantised model with a step of each kind, and a batch with what the model
///   makes of it

#include <chorus/io/tensor_file.hpp>
#include <chorus/quantization/quantized_file.hpp>
#include <cstdio>
#include <exception>
#include <int8_program.hpp>

int main(int argc, char** argv) {
  try {
    chorus::check<chorus::UsageError>(argc == 3, "usage: quantized_tool MODEL BATCH");
    const test::Program model({0.01f, 120, {}}, test::steps_of_each_kind());
    const auto x = test::some_images(4);
    const auto y = model(x);
    chorus::io::save(model, argv[1]);
    const chorus::io::TensorView tensors[] = {chorus::io::view_of("x", x), chorus::io::view_of("y", y)};
    chorus::io::write_safetensors(argv[2], tensors);
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "quantized_tool: %s\n", error.what());
    return 1;
  }
}
