#pragma once
/// MPI as an engine: `MpiCommunicator`, or Backend::mpi of a program that includes this header. Link chorus::mpi, and
/// start the program with mpirun or srun.
///
/// Calls are MPI's non-blocking ones, tested until they are done: so deadlines hold and abort works. What differs from
/// chorus' own engines: MPI does not compare calls, so ranks that call different things get a timeout at best, wrong
/// numbers at worst; after a timeout or an abort MPI may still write to the buffers of the call that failed, so end the
/// process; where a rank dies, mpirun ends the others; `trace` counts what a ring would send.

#ifndef OMPI_SKIP_MPICXX  // the C++ bindings that MPI has withdrawn
#define OMPI_SKIP_MPICXX
#endif
#ifndef MPICH_SKIP_MPICXX
#define MPICH_SKIP_MPICXX
#endif
#include <mpi.h>

#include <chorus/comm/call_book.hpp>
#include <chorus/comm/connect.hpp>
#include <chorus/comm/queued_engine.hpp>
#include <chorus/comm/reduction.hpp>
#include <cstring>
#include <vector>

namespace chorus::inline CHORUS_ABI::comm {

namespace detail {

/// MPI is initialised at the first use, and finalised when the program ends, unless the program itself did or will.
class MpiLibrary {
 public:
  static MpiLibrary& instance() {
    static MpiLibrary library;
    return library;
  }

 private:
  MpiLibrary() {
    int already = 0;
    MPI_Initialized(&already);
    if (already) return;
    int level = 0;
    check<CommError>(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &level) == MPI_SUCCESS, "mpi: no start");
    ours_ = true;
  }
  ~MpiLibrary() {
    int finished = 0;
    MPI_Finalized(&finished);
    if (ours_ && !finished && !failed_) MPI_Finalize();
  }
  bool ours_ = false;

 public:
  bool failed_ = false;  ///< peers may be gone: finalising would wait for them
};

inline void mpi_check(int code) {
  if (code == MPI_SUCCESS) return;
  char text[MPI_MAX_ERROR_STRING] = {};
  int length = 0;
  MPI_Error_string(code, text, &length);
  fail<CommError>("mpi: ", std::string_view(text, static_cast<std::size_t>(length)));
}

inline MPI_Datatype mpi_type(DType dtype) {
  switch (dtype) {
    case DType::i8:
      return MPI_INT8_T;
    case DType::i16:
      return MPI_INT16_T;
    case DType::u16:
      return MPI_UINT16_T;
    case DType::i32:
      return MPI_INT32_T;
    case DType::u32:
      return MPI_UINT32_T;
    case DType::i64:
      return MPI_INT64_T;
    case DType::u64:
      return MPI_UINT64_T;
    case DType::f32:
      return MPI_FLOAT;
    case DType::f64:
      return MPI_DOUBLE;
    case DType::f16:
    case DType::bfloat16:
      return MPI_UINT16_T;
    default:
      return MPI_UINT8_T;
  }
}

/// Chorus' own reduction as an MPI operator, for what MPI's lack: NaN wins in min and max; bool, bf16, half.
template <class T, class How>
void mpi_combine(void* in, void* inout, int* count, MPI_Datatype*) {
  combine<T, How>(inout, in, inout, static_cast<std::size_t>(*count), 1);
}
template <class T>
MPI_Op mpi_operator(ReduceOp op) {
  static MPI_Op made[3] = {MPI_OP_NULL, MPI_OP_NULL, MPI_OP_NULL};
  auto& mine = made[static_cast<std::size_t>(op)];
  if (mine == MPI_OP_NULL)
    mpi_check(MPI_Op_create(op == ReduceOp::sum   ? &mpi_combine<T, Sum>
                            : op == ReduceOp::min ? &mpi_combine<T, Min>
                                                  : &mpi_combine<T, Max>,
                            1, &mine));
  return mine;
}
inline MPI_Op mpi_operator(const Reduction& reduction) {
  switch (reduction.dtype) {
    case DType::boolean:
      return mpi_operator<bool>(reduction.op);
    case DType::f16:
      return mpi_operator<half>(reduction.op);
    case DType::bfloat16:
      return mpi_operator<bf16>(reduction.op);
    case DType::f32:
      return reduction.op == ReduceOp::sum ? MPI_SUM : mpi_operator<float>(reduction.op);
    case DType::f64:
      return reduction.op == ReduceOp::sum ? MPI_SUM : mpi_operator<double>(reduction.op);
    default:
      return reduction.op == ReduceOp::sum ? MPI_SUM : reduction.op == ReduceOp::min ? MPI_MIN : MPI_MAX;
  }
}

class MpiRunner {
 public:
  explicit MpiRunner(const World& world) : book_(world.rank), timeout_(world.timeout) {
    MpiLibrary::instance();
    int rank = 0, size = 0;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    check<UsageError>(rank == world.rank && size == world.size, "mpi: this process is rank ", world.rank, " of ",
                      world.size, ", but MPI says rank ", rank, " of ", size, ": start the program with mpirun");
    rank_ = rank, size_ = size;
    mpi_check(MPI_Comm_dup(MPI_COMM_WORLD, &comm_));
    mpi_check(MPI_Comm_dup(MPI_COMM_WORLD, &news_));
    MPI_Comm_set_errhandler(comm_, MPI_ERRORS_RETURN);
    MPI_Comm_set_errhandler(news_, MPI_ERRORS_RETURN);
  }
  ~MpiRunner() {
    if (book_.broken()) MpiLibrary::instance().failed_ = true;
    if (book_.broken()) return;  // requests may be pending
    MPI_Comm_free(&comm_);
    MPI_Comm_free(&news_);
  }

  Failure run(const Call& call, const std::atomic<bool>&) {
    book_.begin(call);
    if (book_.broken()) return book_.fail("");
    try {
      start(call);
      book_.end();
      return {};
    } catch (const TimeoutError& error) {
      return failed(error.what(), true);
    } catch (const std::exception& error) {
      return failed(error.what());
    }
  }

  void abort(std::string_view why) noexcept {
    if (book_.abort(why)) tell_all(why);
  }
  std::string record() const { return book_.record(); }

 private:
  /// MPI counts in int.
  static constexpr std::size_t most = std::size_t{1} << 30;

  void start(const Call& call) {
    const auto type = mpi_type(call.reduction.dtype);
    const auto n = static_cast<std::size_t>(size_), element = call.reduction.element;
    const auto in = static_cast<const std::byte*>(call.in);
    const auto out = static_cast<std::byte*>(call.out);
    const auto parts = [&](std::size_t count, auto f) {
      for (std::size_t at = 0; at < count; at += most) f(at * element, static_cast<int>(std::min(most, count - at)));
    };
    MPI_Request request = MPI_REQUEST_NULL;
    switch (call.op) {
      case Op::all_reduce:
        if (call.reduction.scale != 1) call.reduction.scaled(out, out, call.count, call.reduction.scale);
        parts(call.count, [&](std::size_t at, int count) {
          mpi_check(MPI_Iallreduce(MPI_IN_PLACE, out + at, count, type, mpi_operator(call.reduction), comm_, &request));
          await(request);
        });
        return count_sent(call, 2 * (n - 1) * call.count / n);
      case Op::reduce_scatter: {
        const void* from = in;
        if (call.reduction.scale != 1) {
          scratch_.resize(n * call.count * element);
          call.reduction.scaled(scratch_.data(), in, n * call.count, call.reduction.scale);
          from = scratch_.data();
        }
        check<UsageError>(call.count < most, "mpi: reduce_scatter of ", call.count, " numbers, fewer than ", most,
                          " are possible");
        mpi_check(MPI_Ireduce_scatter_block(from, out, static_cast<int>(call.count), type,
                                            mpi_operator(call.reduction), comm_, &request));
        await(request);
        return count_sent(call, (n - 1) * call.count);
      }
      case Op::broadcast:
        parts(call.count, [&](std::size_t at, int count) {
          mpi_check(MPI_Ibcast(out + at, count, type, call.peer, comm_, &request));
          await(request);
        });
        return count_sent(call, (rank_ + 1) % size_ == call.peer ? 0 : call.count);
      case Op::all_gather: {
        check<UsageError>(call.count < most, "mpi: all_gather of ", call.count, " numbers, fewer than ", most,
                          " are possible");
        const bool in_place = in == out + static_cast<std::size_t>(rank_) * call.count * element;
        mpi_check(MPI_Iallgather(in_place ? MPI_IN_PLACE : in, static_cast<int>(call.count), type, out,
                                 static_cast<int>(call.count), type, comm_, &request));
        await(request);
        return count_sent(call, (n - 1) * call.count);
      }
      case Op::message:
        parts(call.count, [&](std::size_t at, int count) {
          mpi_check(call.receives ? MPI_Irecv(out + at, count, type, call.peer, 0, comm_, &request)
                                  : MPI_Isend(in + at, count, type, call.peer, 0, comm_, &request));
          await(request);
        });
        return count_sent(call, call.receives ? 0 : call.count);
      case Op::barrier:
      case Op::monitored_barrier:
        mpi_check(MPI_Ibarrier(comm_, &request));
        return await(request);
    }
  }

  void count_sent(const Call& call, std::size_t numbers) const {
    trace::sent(rank_, call.traffic, numbers * call.reduction.element);
  }

  void await(MPI_Request& request) {
    const auto deadline = Clock::now() + timeout_;
    for (std::uint32_t round = 1;; ++round) {
      int done = 0;
      mpi_check(MPI_Test(&request, &done, MPI_STATUS_IGNORE));
      if (done) return;
      if (round % 64 != 0) continue;
      if (book_.aborted()) fail<CommError>("");  // the book says why
      hear();
      check<TimeoutError>(Clock::now() < deadline, "mpi: waited ", timeout_.count(), " ms for the other ranks");
      sched_yield();
    }
  }

  /// Throws what another rank says that gives up.
  void hear() {
    int there = 0;
    MPI_Status status;
    mpi_check(MPI_Iprobe(MPI_ANY_SOURCE, 0, news_, &there, &status));
    if (!there) return;
    char why[reason_bytes] = {};
    mpi_check(MPI_Recv(why, reason_bytes - 1, MPI_CHAR, status.MPI_SOURCE, 0, news_, MPI_STATUS_IGNORE));
    fail<CommError>("rank ", status.MPI_SOURCE, " gave up: ", static_cast<const char*>(why));
  }

  Failure failed(std::string_view why, bool timed_out = false) {
    const bool first = !book_.broken();
    const auto failure = book_.fail(why, timed_out);
    if (first) tell_all(failure.what);
    return failure;
  }

  /// Short messages leave at once; nobody waits for them.
  void tell_all(std::string_view why) noexcept {
    const int length = static_cast<int>(std::min<std::size_t>(why.size(), reason_bytes - 1));
    for (int rank = 0; rank < size_; ++rank) {
      if (rank == rank_) continue;
      MPI_Request request = MPI_REQUEST_NULL;
      if (MPI_Isend(why.data(), length, MPI_CHAR, rank, 0, news_, &request) != MPI_SUCCESS) continue;
      int done = 0;
      for (int i = 0; i < 1000 && !done; ++i) MPI_Test(&request, &done, MPI_STATUS_IGNORE);
    }
  }

  static constexpr std::size_t reason_bytes = 1024;

  CallBook book_;
  std::chrono::milliseconds timeout_;
  int rank_ = 0, size_ = 1;
  MPI_Comm comm_ = MPI_COMM_NULL, news_ = MPI_COMM_NULL;
  std::vector<std::byte> scratch_;
};

inline std::shared_ptr<Engine> mpi_engine(const World& world) {
  return std::make_shared<QueuedEngine<MpiRunner>>(world.rank, world.size, "mpi", world);
}

inline const bool mpi_registered = register_backend(Backend::mpi, mpi_engine);

}  // namespace detail

/// A Communicator over MPI.
class MpiCommunicator : public AnyCommunicator {
 public:
  /// The rank that mpirun says. `timeout`: how long a call waits for the other ranks. Throws CommError.
  explicit MpiCommunicator(std::chrono::milliseconds timeout = std::chrono::milliseconds(60'000))
      : AnyCommunicator(detail::mpi_engine(place(timeout))) {}

 private:
  static World place(std::chrono::milliseconds timeout) {
    detail::MpiLibrary::instance();
    World world;
    MPI_Comm_rank(MPI_COMM_WORLD, &world.rank);
    MPI_Comm_size(MPI_COMM_WORLD, &world.size);
    world.timeout = timeout;
    return world;
  }
};

static_assert(Communicator<MpiCommunicator>);

}  // namespace chorus::inline CHORUS_ABI::comm
