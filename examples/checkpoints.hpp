#pragma once
/// Checkpoints of train_classifier: where a run resumes, and what it saves.

#include <chorus/io/checkpoint.hpp>
#include <filesystem>
#include <string>

#include "training.hpp"

struct CheckpointOptions : TrainingOptions {
  std::string resume{};
  chorus::Index save_every = 0;
};

/// Loads net and optimizer from the checkpoint of --resume, and returns its position; without one, the beginning.
template <class Net>
Position resume(chorus::Run& run, Net& net, NamedOptimizer<Net>& optimizer, const CheckpointOptions& options) {
  auto path = options.resume;
  if (path == "auto") {  // rank 0 decides for all
    path = run.is_main() && !options.save.empty() && std::filesystem::exists(options.save) ? options.save : "";
    if constexpr (Net::distributed) path = chorus::comm::broadcast_object(net.communicator(), path);
  }
  if (path.empty()) return {};
  const auto at = chorus::io::load_checkpoint(net, optimizer.plain(), path);
  return {.epoch = at.epoch, .batch = at.batch, .step = at.step};
}

/// Throws if --save can't be written: before training, not after an epoch.
inline void check_save(chorus::Run& run, const CheckpointOptions& options) {
  if (run.is_main() && !options.save.empty()) chorus::io::AtomicFile{options.save};
}

/// Writes a checkpoint to --save. All ranks call it.
template <class Net>
void save(Net& net, NamedOptimizer<Net>& optimizer, const CheckpointOptions& options, const Position& at) {
  if (options.save.empty()) return;
  chorus::io::save_checkpoint(net, optimizer.plain(), {.epoch = at.epoch, .batch = at.batch, .step = at.step},
                              options.save);
}
