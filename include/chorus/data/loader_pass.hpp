#pragma once
/// One pass of a loader.

#include <algorithm>
#include <chorus/core/error.hpp>
#include <chorus/core/trace.hpp>
#include <chorus/data/loader.hpp>
#include <chorus/data/prefetch.hpp>
#include <iterator>
#include <memory>
#include <optional>
#include <utility>

namespace chorus::data::detail {

/// One pass over a loader's data. Everything that it reads is its own, or immutable.
template <class B>
struct LoaderPass {
  /// A batch, and its position for traces.
  struct Made {
    B batch;
    Index number, samples, global_size;
  };

  std::shared_ptr<const typename Loader<B>::Plan> plan;
  Sampler sampler;
  std::shared_ptr<Index> skip = {};  // where this pass started, until it continues
  bool went_on = false;              // by ++: until then only the first batch was read
  bool in_loop = false;              // the iterator was compared with the end
  bool reads_ahead = false;
  bool aside = false;  // inside of another pass of the loader
  Index next = 0, batches = 0, ahead = 0;
  std::optional<Made> current = {};
  std::optional<Prefetch<Made>> running = {};  // last: its threads read the members above

  /// The pass begins with that batch.
  void begin(Index first) {
    next = first;
    advance(true);
  }
  void advance(bool begins = false) {
    current.reset();  // frees its memory for the next batch
    trace::Span span(trace::Lane::loader, "loader", "next batch");
    bool reads = begins;
    if (auto* const guide = sampler.options().guide.get(); guide != nullptr && !aside && next <= batches)
      reads = follow(*guide, begins);
    if (reads) running.emplace(next, batches, plan->workers, ahead, [this](Index b) { return make(b); });
    if (running) current = running->next();
    next = current ? next + 1 : batches + 1;
    if (span && current)
      span.describe(trace::place(), "next batch",
                    cat("\"samples\":", current->samples, ",\"batch\":", current->global_size));
    if (!current)
      running.reset();
    else if (Ledger* const ledger = sampler.options().ledger.get(); ledger != nullptr && !aside)
      ledger->set_batch(sampler.epoch(), current->number);
  }
  /// Whether it moves the pass, or begins it.
  bool follow(PassGuide& guide, bool begins) {
    const auto place = guide.go_on(next, batches, begins);
    const auto& share = sampler.options();
    const bool moves = place.rank != share.rank || place.world_size != share.world_size;
    if (!begins && !moves && place.batch == next) return false;
    running.reset();
    next = place.batch;
    if (moves) sampler.set_rank(place.rank, place.world_size);
    return true;
  }
  Made make(Index b) const {
    return {plan->make(sampler, b), b, static_cast<Index>(sampler.share(b, plan->batch).size()),
            sampler.global_size(b, plan->batch)};
  }
};

template <class B>
Loader<B>::~Loader() = default;

template <class B>
Loader<B>::Loader(Index dataset_size, Sampler sampler, const LoaderOptions& options, Make make)
    : sampler_(std::move(sampler)) {
  check_loader(dataset_size, sampler_, options);
  batches_ = sampler_.global_batches(options.batch, options.drop_last);
  plan_ = std::make_shared<const Plan>(Plan{std::move(make), options.batch, options.workers, options.prefetch});
}

template <class B>
void Loader<B>::set_epoch(Index epoch) {
  // If epochs are counted, a loop that ended in its first batch counts as an epoch.
  if (epochs_unset_ < 0 && newest_ && newest_->skip && newest_->in_loop && newest_->sampler.epoch() != epoch)
    Iterator(newest_).goes_on();
  epochs_unset_ = -1;
  sampler_.set_epoch(epoch);
}

template <class B>
void Loader<B>::skip(Index batches) {
  check<UsageError>(batches >= 0 && batches <= batches_, "DataLoader: can't skip ", batches, " batches of ", batches_);
  skip_ = std::make_shared<Index>(batches);
}

template <class B>
typename Loader<B>::Iterator Loader<B>::begin() {
  check<UsageError>(plan_ != nullptr, "DataLoader: this loader was moved from");
  const auto epoch = epoch_.lock();
  // A pass inside of another one does not count as an epoch, nor does a pass after one that read only the first batch.
  const bool inside = epoch && epoch->current && epoch.use_count() > (epoch == newest_ ? 2 : 1);
  const bool after_look = epoch && epoch->current && !epoch->went_on;
  // A loop inside of the first batch of the pass that starts at the skipped place is complete.
  const auto at_skip = at_skip_.lock();
  const bool within = at_skip && at_skip->in_loop && at_skip->skip == skip_ &&
                      at_skip.use_count() > 1 + (at_skip == newest_) + (at_skip == epoch);
  const bool goes_on = skip_ && *skip_ > 0 && !within;
  if (!inside && !after_look && epochs_unset_ >= 0 && epochs_unset_ < 2 && ++epochs_unset_ == 2)
    warn_of_one_order(sampler_);
  if (newest_ && newest_.use_count() == 1 + (epoch == newest_) + (at_skip == newest_)) {  // no iterator refers to it
    newest_->running.reset();
    newest_->sampler = sampler_;
    newest_->skip.reset();
    newest_->went_on = newest_->in_loop = newest_->reads_ahead = false;
  } else {
    newest_.reset(new LoaderPass<B>{plan_, sampler_});
  }
  if (!inside) epoch_ = newest_;
  LoaderPass<B>* const pass = newest_.get();
  pass->aside = inside;
  pass->batches = batches_;
  pass->ahead = Index{plan_->prefetch} * std::max(plan_->workers, 1);
  if (goes_on) {
    pass->skip = skip_;
    at_skip_ = newest_;
  }
  pass->begin(goes_on ? *skip_ : 0);
  if (!pass->current) Iterator(newest_).goes_on();  // nothing is left to read
  return Iterator(newest_);
}

template <class B>
B& Loader<B>::Iterator::operator*() const {
  check<UsageError>(pass_->current.has_value(), "DataLoader: the pass has ended, no batch is left");
  return pass_->current->batch;
}

template <class B>
typename Loader<B>::Iterator& Loader<B>::Iterator::operator++() {
  if (!pass_->reads_ahead) goes_on();
  pass_->advance();
  return *this;
}

template <class B>
void Loader<B>::Iterator::reads_ahead() const {
  pass_->reads_ahead = pass_->in_loop = true;
}

template <class B>
void Loader<B>::Iterator::goes_on() const {
  pass_->went_on = true;
  if (const auto skip = std::exchange(pass_->skip, nullptr)) *skip = 0;
}

template <class B>
bool Loader<B>::Iterator::operator==(std::default_sentinel_t) const {
  if (!pass_->reads_ahead) pass_->in_loop = true;
  return !pass_->current;
}

}  // namespace chorus::data::detail
