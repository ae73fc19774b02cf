// golden [DIR]: compares operators, layers, losses, optimizers, schedules and training runs with what PyTorch computed.
// DIR holds the cases (default: the project's own). A line for each case that fails, and last `N passed, M failed`.
#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <string>
#include <vector>

#include "golden_ops/case.hpp"

#ifndef CHORUS_GOLDEN_DIR
#define CHORUS_GOLDEN_DIR "tests/golden"
#endif

namespace {

/// What is wrong with a case; nothing where it passes.
std::vector<std::string> failures_of(const std::string& path, const golden::Operations& operations) {
  std::string op = "unreadable";
  try {
    const auto file = chorus_test::load_golden(path);
    op = file.op;
    const auto operation = operations.find(file.op);
    chorus::check<chorus::UsageError>(operation != operations.end(), "unknown op");
    constexpr double slack = std::is_same_v<golden::Device, chorus::Cpu> ? 1 : 10;  // another order of sums
    golden::Case one(file, slack * (file.op.starts_with("train.") ? 2e-5 : 1e-5));
    operation->second(one);
    auto failures = one.finish();
    for (auto& failure : failures) failure = op + ": " + failure;
    return failures;
  } catch (const std::exception& error) {
    return {op + ": " + error.what()};
  }
}

}  // namespace

int main(int argc, char** argv) {
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
  golden::add_recurrent(operations);
  golden::add_optimizers(operations);
  golden::add_more(operations);
  golden::add_transformer(operations);
  golden::add_training(operations);

  std::size_t failed = 0;
  for (const auto& file : files) {
    const auto failures = failures_of(file.string(), operations);
    failed += failures.empty() ? 0 : 1;
    std::string line;
    for (const auto& failure : failures) line += (line.empty() ? "" : "; ") + failure;
    if (!failures.empty()) std::printf("FAILED %s: %s\n", file.filename().string().c_str(), line.c_str());
  }
  std::printf("%zu passed, %zu failed\n", files.size() - failed, failed);
  return failed == 0 ? 0 : 1;
}
