#pragma once
/// `NcclCommunicator`: NCCL as a Communicator of device memory, over any table of NCCL's functions.

#include <chorus/comm/any_communicator.hpp>
#include <chorus/comm/engine/ring_traffic.hpp>
#include <chorus/comm/nccl/nccl_queue.hpp>

namespace chorus::comm {

struct NcclApi;

namespace detail {

/// Turns a communicator's calls into NCCL's.
template <class Api>
class NcclEngine final : public Engine {
 public:
  NcclEngine(AnyCommunicator& control, int device, std::chrono::milliseconds timeout, Api api)
      : Engine(control.rank(), control.size(), control.engine().members),
        control_(control),
        api_(api),
        queue_(std::make_shared<NcclQueue<Api>>(
            api, rank, device, timeout, [&control](const Failure& failure) { control.abort(failure.what); },
            [&control] { return Failure{control.engine().trouble()}; }, members)) {
    check<UsageError>(control.engine().all_reduce() == Algorithm::automatic, "rank ", rank, ": all-reduce ",
                      control.engine().all_reduce(), " is unknown to nccl, expected auto");
    typename Api::UniqueId id{};
    int code = rank == 0 ? api.unique_id(id) : Api::success;
    // The other ranks wait for the id, so they must learn if there is none.
    control.broadcast(std::span(&code, 1), 0);
    check<CommError>(code == Api::success, "rank 0: nccl: ncclGetUniqueId failed: ", api.nccl_error(code, {}));
    control.broadcast(std::span(reinterpret_cast<std::uint8_t*>(&id), sizeof id), 0);
    queue_->join(size, id);
  }
  ~NcclEngine() override { queue_->stop(); }

  void now(const Call& call) override {
    if (is_empty(call)) return;
    if (is_barrier(call)) queue_->synchronize();
    if (is_on_host(call)) return control_.engine().now(call);
    queue_->wait(enqueue(call));
  }
  Work later(const Call& call) override {
    if (is_empty(call)) return {};
    if (is_on_host(call)) return control_.engine().later(call);
    return {queue_, enqueue(call)};
  }
  bool takes_device_memory() const override { return true; }
  void launch(const char* what, const std::function<void()>& start) override { queue_->launch(what, start); }
  void abort(std::string_view why) noexcept override { queue_->abort(why); }
  std::string_view name() const override { return "nccl"; }
  std::chrono::nanoseconds busy() const override { return not_measured; }
  /// Calls on host memory, and barriers, go over `control`.
  std::string record() const override { return control_.engine().record() + queue_->record(); }

  NcclQueue<Api>& queue() { return *queue_; }

 private:
  using Comm = typename Api::Comm;
  using Stream = typename Api::Stream;
  using RedOp = typename Api::RedOp;

  // The same on all ranks, independent of memory: an empty call may have no memory to decide by.
  static bool is_empty(const Call& call) { return call.count == 0 && !is_barrier(call); }
  static bool is_barrier(const Call& call) { return call.op == Op::barrier || call.op == Op::monitored_barrier; }
  bool is_on_host(const Call& call) const {
    return is_barrier(call) || !api_.on_device(call.in != nullptr ? call.in : call.out);
  }

  std::uint64_t enqueue(const Call& call) {
    const bool reduces = call.op == Op::all_reduce || call.op == Op::reduce_scatter;
    if (reduces) check_reduction(call);
    count_ring_traffic(call, rank, size, members);  // an estimate: NCCL chooses its algorithm itself
    const Envelope envelope{
        .op = call.op,
        .dtype = call.reduction.dtype,
        .detail = static_cast<std::uint8_t>(reduces ? static_cast<int>(call.reduction.op) : call.peer),
        .count = call.count};
    const NamedCall named{.envelope = envelope,
                          .bucket = call.bucket,
                          .peer = call.peer,
                          .receives = call.receives,
                          .part_of = call.part_of};
    return queue_->enqueue(named, [&](Api& api, Comm comm, Stream stream, std::vector<RedOp>& operators) {
      return reduces ? reduce(call, api, comm, stream, operators) : move(call, api, comm, stream);
    });
  }

  static int reduce(const Call& call, Api& api, Comm comm, Stream stream, std::vector<RedOp>& operators) {
    // On bool, sum and max are "or" and min is "and": on the bytes 0 and 1 these are max and min.
    const bool logical = call.reduction.dtype == DType::boolean;
    const DType type = logical ? DType::u8 : call.reduction.dtype;
    RedOp op = api.reduce_op(logical && call.reduction.op == ReduceOp::sum ? ReduceOp::max : call.reduction.op);
    if (call.reduction.scale != 1) {
      if (const int code = api.scaled_sum(op, call.reduction.scale, type, comm); code != Api::success) return code;
      operators.push_back(op);
    }
    return call.op == Op::all_reduce ? api.all_reduce(call.in, call.out, call.count, type, op, comm, stream)
                                     : api.reduce_scatter(call.in, call.out, call.count, type, op, comm, stream);
  }

  static int move(const Call& call, Api& api, Comm comm, Stream stream) {
    const std::size_t bytes = call.count * call.reduction.element;
    if (call.op == Op::broadcast) return api.broadcast(call.in, call.out, bytes, call.peer, comm, stream);
    if (call.op == Op::all_gather) return api.all_gather(call.in, call.out, bytes, comm, stream);
    return call.receives ? api.recv(call.out, bytes, call.peer, comm, stream)
                         : api.send(call.in, bytes, call.peer, comm, stream);
  }

  static void check_reduction(const Call& call) {
    const auto& reduction = call.reduction;
    check<UsageError>(reduction.dtype != DType::i16 && reduction.dtype != DType::u16, comm::name(call.op),
                      ": nccl does not reduce ", reduction.dtype);
    check<UsageError>(reduction.scale == 1 || reduction.op == ReduceOp::sum, comm::name(call.op),
                      ": nccl does not scale contributions to a ", reduction.op);
  }

  AnyCommunicator& control_;
  Api api_;
  std::shared_ptr<NcclQueue<Api>> queue_;
};

}  // namespace detail

/// A Communicator for numbers in one device's memory; `comm/nccl.hpp` has the real Api. Calls on host memory, and
/// barriers, go over `control`. Calls run on a stream of the communicator, after the present work of the calling
/// thread's compute stream. Waiting, in a blocking call or for a Work, makes the compute stream wait, not the host;
/// only `barrier` blocks the host. The host learns of a failure at the next call. A thread that waits for the device
/// continues, as a failed communicator is aborted. Reductions of 16-bit integers, and of scaled minima and maxima, are
/// UsageErrors. A scale is rounded to the type of the numbers.
///
/// Crossing messages (both ranks send before they receive) need a `group`.
template <class Api = NcclApi>
class NcclCommunicator : public AnyCommunicator {
 public:
  /// Every rank calls it with its own device. `control` joins the same ranks over host memory and must outlive this;
  /// the ranks tell each other over it when one aborts or dies. `timeout`: how long a call waits for the other ranks.
  /// Throws CommError.
  NcclCommunicator(AnyCommunicator& control, int device,
                   std::chrono::milliseconds timeout = std::chrono::milliseconds(60'000), Api api = {})
      : NcclCommunicator(std::make_shared<detail::NcclEngine<Api>>(control, device, timeout, std::move(api))) {}

  /// Runs the collectives of `calls` as one launch; the compute stream waits for its end. It must not contain a
  /// barrier.
  template <class Calls>
  void group(const Calls& calls) const {
    auto& queue = nccl_->queue();
    queue.wait(queue.group(calls));
  }

  /// Blocks the host until all calls so far have ended; throws the failure of one of them.
  void synchronize() const { nccl_->queue().synchronize(); }

 private:
  explicit NcclCommunicator(std::shared_ptr<detail::NcclEngine<Api>> engine)
      : AnyCommunicator(engine), nccl_(engine.get()) {}
  detail::NcclEngine<Api>* nccl_;
};

}  // namespace chorus::comm
