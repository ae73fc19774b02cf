// golden [DIR]: compares operators, layers, losses, optimizers, schedules and training runs with what PyTorch computed.
// DIR holds the cases (default: the project's own). A line for each case that fails, and last `N passed, M failed`.
// golden_bf16 computes the same cases in bf16, as far as they are of operators that one calls with bf16: `, K left out`
// counts the others, after a line that names them.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "golden_ops/case.hpp"

#ifndef CHORUS_GOLDEN_DIR
#define CHORUS_GOLDEN_DIR "tests/golden"
#endif

namespace {

/// What is left out, and how often.
using LeftOut = std::map<std::string, int>;

double tolerance_of(const std::string& op) {
  if (!golden::in_float) return 2e-2;
  constexpr double slack = std::is_same_v<golden::Device, chorus::Cpu> ? 1 : 10;  // another order of sums
  return slack * (op.starts_with("train.") ? 2e-5 : 1e-5);
}

/// Cases whose numbers move by more than the tolerance as soon as their inputs are rounded to bf16 (largest ones become
/// ties, sums cancel), or the result that their gradient is made of (PyTorch's logsumexp in bf16 errs as much).
constexpr std::string_view too_fine_for_bf16[] = {"amax_axis0", "logsumexp", "max_pool2d", "sum_all", "var_offset"};

/// What is wrong with a case; nothing where it passes.
std::vector<std::string> failures_of(const std::string& path, const golden::Operations& operations, LeftOut& left_out) {
  std::string op = "unreadable";
  try {
    const auto file = chorus_test::load_golden(path);
    op = file.op;
    const auto operation = operations.find(file.op);
    if (!golden::in_float) {
      if (operation == operations.end()) throw golden::LeftOut("");
      const auto name = std::filesystem::path(path).stem().string();
      if (std::ranges::count(too_fine_for_bf16, name) > 0) throw golden::LeftOut(": " + name);
    }
    chorus::check<chorus::UsageError>(operation != operations.end(), "unknown op");
    golden::Case one(file, tolerance_of(op));
    operation->second(one);
    auto failures = one.finish();
    for (auto& failure : failures) failure = op + ": " + failure;
    return failures;
  } catch (const golden::LeftOut& why) {
    ++left_out[op + why.what()];
    return {};
  } catch (const std::exception& error) {
    return {op + ": " + error.what()};
  }
}

}  // namespace

int main(int argc, char** argv) {
#if CHORUS_USE_CUDA
  if (std::is_same_v<golden::Device, chorus::Cuda> && chorus::cuda::device_count() == 0) {
    std::puts("SKIPPED: no CUDA device");
    return std::getenv("CHORUS_REQUIRE_GPU") == nullptr ? 77 : 1;
  }
#endif
  const std::string directory = argc > 1 ? argv[1] : CHORUS_GOLDEN_DIR;
  std::vector<std::filesystem::path> files;
  std::error_code problem;
  for (const auto& entry : std::filesystem::directory_iterator(directory, problem))
    if (entry.path().extension() == ".safetensors") files.push_back(entry.path());
  if (problem || files.empty()) {
    std::fprintf(stderr, "golden: no .safetensors files in %s%s%s\n", directory.c_str(), problem ? ": " : "",
                 problem ? problem.message().c_str() : "");
    return 2;
  }
  std::sort(files.begin(), files.end());

  golden::Operations operations;
  golden::add_pointwise(operations);
  golden::add_reductions(operations);
  golden::add_shapes(operations);
  golden::add_layers(operations);
  golden::add_losses(operations);
#if !CHORUS_GOLDEN_OPERATORS_ONLY
  golden::add_recurrent(operations);
  golden::add_optimizers(operations);
  golden::add_more(operations);
  golden::add_transformer(operations);
  golden::add_functions(operations);
  golden::add_further(operations);
  golden::add_training(operations);
  golden::add_quantized(operations);
  golden::add_quantization(operations);
#endif

  LeftOut left_out;
  std::size_t failed = 0;
  for (const auto& file : files) {
    const auto failures = failures_of(file.string(), operations, left_out);
    failed += failures.empty() ? 0 : 1;
    std::string line;
    for (const auto& failure : failures) line += (line.empty() ? "" : "; ") + failure;
    if (!failures.empty()) std::printf("FAILED %s: %s\n", file.filename().string().c_str(), line.c_str());
  }
  std::size_t absent = 0;
  for (const auto& [op, times] : left_out) {
    std::printf("%s%s (%d)", absent == 0 ? "LEFT OUT: " : ", ", op.c_str(), times);
    absent += static_cast<std::size_t>(times);
  }
  if (absent > 0) std::printf("\n");
  std::printf("%zu passed, %zu failed", files.size() - failed - absent, failed);
  if (!golden::in_float) std::printf(", %zu left out", absent);
  std::printf("\n");
  return failed == 0 ? 0 : 1;
}
