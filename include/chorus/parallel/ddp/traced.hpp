#pragma once
/// Events of DistributedDataParallel in a trace, besides spans: each gradient ready, each bucket full.

#include <chorus/core/json_object.hpp>
#include <chorus/core/trace_listener.hpp>
#include <chorus/parallel/ddp/extension.hpp>
#include <cstddef>
#include <string>

namespace chorus::ddp {

template <Device D, class Communicator>
class Traced final : public Extension<D> {
 public:
  explicit Traced(Core<D, Communicator>& core) : core_(core) {}
  /// Whether this run is traced.
  static bool wanted() { return trace::step_counter() != nullptr || trace::listening() != nullptr; }

  void gradient_arrived(std::size_t i) override {
    auto* const listener = trace::listening();
    if (listener == nullptr) return;
    chorus::detail::JsonObject args;
    args.field("parameter", core_.name(i)).field("bytes", core_.parameter(i).size_bytes());
    if (const Bucket* const bucket = core_.buckets.bucket_of(i)) args.field("bucket", bucket->index);
    tell(*listener, "gradient", cat("gradient ready: ", core_.name(i)), args.fields());
  }
  void bucket_is_full(const Bucket& bucket) override {
    if (auto* const listener = trace::listening())
      tell(*listener, "bucket", cat("bucket full: ", bucket.index),
           chorus::detail::JsonObject()
               .field("bucket", bucket.index)
               .field("bytes", core_.bytes(bucket))
               .field("parameters", bucket.parameters.size())
               .fields());
  }

 private:
  void tell(trace::Listener& listener, const char* category, const std::string& name, const std::string& args) const {
    const auto now = listener.now();
    listener.instant({trace::place(), trace::Lane::backward, category, name, now, now, args});
  }

  Core<D, Communicator>& core_;
};

}  // namespace chorus::ddp
