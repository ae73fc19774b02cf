#pragma once
/// The MPI library: its start and end, its scalar types, and chorus' reductions as MPI operators.

#ifndef OMPI_SKIP_MPICXX  // MPI's deprecated C++ bindings
#define OMPI_SKIP_MPICXX
#endif
#ifndef MPICH_SKIP_MPICXX
#define MPICH_SKIP_MPICXX
#endif
#include <mpi.h>

#include <chorus/comm/algorithms/reduction.hpp>
#include <chorus/comm/world.hpp>
#include <chorus/core/blocked_signals.hpp>
#include <chorus/core/say.hpp>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdlib>
#include <mutex>
#include <stop_token>
#include <string_view>
#include <thread>

namespace chorus::comm::detail {

/// Ends the process, with a message, if the scope has not ended by the deadline: MPI_Init waits for all ranks of the
/// job, and can't be interrupted. mpirun then ends the others.
class StartBy {
 public:
  explicit StartBy(std::chrono::milliseconds timeout)
      : thread_(chorus::detail::start_thread<std::jthread>("mpi", [timeout](std::stop_token started) {
          std::mutex mutex;
          std::unique_lock lock(mutex);
          std::condition_variable_any condition;
          condition.wait_for(lock, started, timeout, [] { return false; });
          if (started.stop_requested()) return;
          chorus::detail::say(
              cat("mpi: not all ranks of the job called MPI_Init within ", timeout.count(), " ms; this process exits"));
          std::_Exit(1);
        })) {}

 private:
  std::jthread thread_;
};

/// MPI is initialised at the first use, and finalised when the program ends, unless the program does that itself.
class MpiLibrary {
 public:
  /// `timeout`: how long the first call waits for the other ranks. Throws UsageError for a value out of range.
  static MpiLibrary& instance(std::chrono::milliseconds timeout = World{}.timeout) {
    check_timeout("mpi", timeout);
    static MpiLibrary library(timeout);
    return library;
  }

 private:
  explicit MpiLibrary(std::chrono::milliseconds timeout) {
    int already = 0, level = 0;
    MPI_Initialized(&already);
    if (!already) {
      const StartBy deadline(timeout);
      check<CommError>(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &level) == MPI_SUCCESS,
                       "mpi: MPI_Init_thread failed");
    }
    ours_ = !already;
    MPI_Query_thread(&level);
    // A background call, a call of the caller's thread and an abort may be inside MPI at once.
    check<CommError>(level == MPI_THREAD_MULTIPLE, "mpi: ",
                     already ? "this program has started MPI without MPI_THREAD_MULTIPLE: call MPI_Init_thread with "
                               "it, or let chorus start MPI"
                             : "this MPI does not support MPI_THREAD_MULTIPLE");
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
  const MPI_Datatype types[] = {MPI_UINT8_T,  MPI_UINT8_T,  MPI_INT8_T,  MPI_INT16_T,  MPI_UINT16_T,
                                MPI_INT32_T,  MPI_UINT32_T, MPI_INT64_T, MPI_UINT64_T, MPI_UINT16_T,
                                MPI_UINT16_T, MPI_FLOAT,    MPI_DOUBLE};
  return types[static_cast<std::size_t>(dtype)];
}

/// Chorus' own reduction as an MPI operator, where MPI's operators differ: NaN wins in min and max; bool, bf16, half.
/// Open MPI's sums of narrow integers saturate if the CPU has such additions; these wrap around.
template <class T, class How>
void mpi_combine(void* in, void* inout, int* count, MPI_Datatype*) {
  combine<T, How>(inout, in, inout, static_cast<std::size_t>(*count));
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
  if (reduction.op == ReduceOp::sum && reduction.element >= 4) return MPI_SUM;
  constexpr MPI_Op (*own[])(ReduceOp) = {
      &mpi_operator<bool>,          &mpi_operator<std::uint8_t>,  &mpi_operator<std::int8_t>,
      &mpi_operator<std::int16_t>,  &mpi_operator<std::uint16_t>, &mpi_operator<std::int32_t>,
      &mpi_operator<std::uint32_t>, &mpi_operator<std::int64_t>,  &mpi_operator<std::uint64_t>,
      &mpi_operator<half>,          &mpi_operator<bf16>,          &mpi_operator<float>,
      &mpi_operator<double>};
  return own[static_cast<std::size_t>(reduction.dtype)](reduction.op);
}

}  // namespace chorus::comm::detail
