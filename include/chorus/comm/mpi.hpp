#pragma once
/// MPI as an engine: `MpiCommunicator`, or Backend::mpi of a program that includes this header. Link chorus::mpi, and
/// start the program with mpirun or srun.
///
/// Calls are MPI's non-blocking ones, tested until they are done, so that deadlines and abort work. Ranks compare their
/// calls before any data moves. Without the comparison (CHORUS_COMPARE_CALLS=0), ranks that call different collectives
/// get a timeout at best, wrong numbers at worst. Differences from chorus' own engines: after a timeout or an abort MPI
/// may still write to the buffers of the failed call, so end the process; if a rank dies, mpirun ends the others;
/// `trace` counts a ring's bytes.

#include <atomic>
#include <chorus/comm/connect.hpp>
#include <chorus/comm/engine/compare_calls.hpp>
#include <chorus/comm/engine/mpi_library.hpp>
#include <chorus/comm/engine/queued_engine.hpp>
#include <chorus/comm/engine/ring_traffic.hpp>
#include <chorus/comm/transport/socket.hpp>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

namespace chorus::comm {

namespace detail {

class MpiEngine final : public QueuedEngine {
 public:
  explicit MpiEngine(const World& world)
      : QueuedEngine(world.rank, world.size, world.members, "mpi"), timeout_(world.timeout) {
    MpiLibrary::instance(timeout_);
    int started_as = 0, started = 0;
    MPI_Comm_rank(MPI_COMM_WORLD, &started_as);
    MPI_Comm_size(MPI_COMM_WORLD, &started);
    const bool all = members.empty();
    const int in_job = all ? rank : members[static_cast<std::size_t>(rank)];
    check<UsageError>(started_as == in_job && (!all || started == size), "mpi: this process is rank ", in_job, " of ",
                      size, ", but MPI says rank ", started_as, " of ", started, ": start the program with mpirun");
    join();
    mpi_check(MPI_Comm_dup(comm_, &news_));
    mpi_check(MPI_Comm_dup(comm_, &envelopes_));
    for (const auto comm : {comm_, news_, envelopes_}) MPI_Comm_set_errhandler(comm, MPI_ERRORS_RETURN);
  }
  ~MpiEngine() override {
    stop();
    if (broken()) MpiLibrary::instance().failed_ = true;
    if (broken()) return;  // requests may be pending
    for (auto* comm : {&comm_, &news_, &envelopes_}) MPI_Comm_free(comm);
  }

  // For compare_calls. Envelopes are short: MPI buffers them, even without a waiting receiver.
  static constexpr bool sends_wait = false;
  Envelope exchange(int to, Envelope envelope, int from) {
    MPI_Request sent = MPI_REQUEST_NULL;
    mpi_check(MPI_Isend(&envelope, sizeof envelope, MPI_BYTE, to, 0, envelopes_, &sent));
    const auto theirs = receive(from);
    await(sent);
    return theirs;
  }
  void send(int to, Envelope envelope) {
    MPI_Request sent = MPI_REQUEST_NULL;
    mpi_check(MPI_Isend(&envelope, sizeof envelope, MPI_BYTE, to, 0, envelopes_, &sent));
    await(sent);
  }
  Envelope receive(int from) {
    MPI_Request request = MPI_REQUEST_NULL;
    mpi_check(MPI_Irecv(&theirs_, sizeof theirs_, MPI_BYTE, from, 0, envelopes_, &request));
    await(request);
    return theirs_;
  }

 private:
  /// MPI's counts are int.
  static constexpr std::size_t most = std::size_t{1} << 30;

  void run(const Call& call, const Envelope& envelope) override {
    if (compares_) compare_calls(*this, call, envelope, rank, size);
    start(call);
    count_ring_traffic(call, rank, size, members);
  }

  void start(const Call& call) {
    const auto type = mpi_type(call.reduction.dtype);
    const auto n = static_cast<std::size_t>(size), element = call.reduction.element;
    const auto in = static_cast<const std::byte*>(call.in);
    const auto out = static_cast<std::byte*>(call.out);
    const auto in_pieces = [&](std::size_t count, auto f) {
      for (std::size_t at = 0; at < count; at += most) f(at * element, static_cast<int>(std::min(most, count - at)));
    };
    MPI_Request request = MPI_REQUEST_NULL;
    switch (call.op) {
      case Op::all_reduce:
        if (call.reduction.scale != 1) call.reduction.scaled(out, out, call.count, call.reduction.scale);
        in_pieces(call.count, [&](std::size_t at, int count) {
          mpi_check(MPI_Iallreduce(MPI_IN_PLACE, out + at, count, type, mpi_operator(call.reduction), comm_, &request));
          await(request);
        });
        return;
      case Op::reduce_scatter: {
        const void* from = in;
        if (call.reduction.scale != 1) {
          scratch_.resize(n * call.count * element);
          call.reduction.scaled(scratch_.data(), in, n * call.count, call.reduction.scale);
          from = scratch_.data();
        }
        check<UsageError>(call.count < most, "mpi: reduce_scatter of ", call.count, " numbers, fewer than ", most,
                          " are possible");
        mpi_check(MPI_Ireduce_scatter_block(from, out, static_cast<int>(call.count), type, mpi_operator(call.reduction),
                                            comm_, &request));
        return await(request);
      }
      case Op::broadcast:
        in_pieces(call.count, [&](std::size_t at, int count) {
          mpi_check(MPI_Ibcast(out + at, count, type, call.peer, comm_, &request));
          await(request);
        });
        return;
      case Op::all_gather: {
        check<UsageError>(call.count < most, "mpi: all_gather of ", call.count, " numbers, fewer than ", most,
                          " are possible");
        const bool in_place = in == out + static_cast<std::size_t>(rank) * call.count * element;
        mpi_check(MPI_Iallgather(in_place ? MPI_IN_PLACE : in, static_cast<int>(call.count), type, out,
                                 static_cast<int>(call.count), type, comm_, &request));
        return await(request);
      }
      case Op::message:
        in_pieces(call.count, [&](std::size_t at, int count) {
          mpi_check(call.receives ? MPI_Irecv(out + at, count, type, call.peer, 0, comm_, &request)
                                  : MPI_Isend(in + at, count, type, call.peer, 0, comm_, &request));
          await(request);
        });
        return;
      case Op::barrier:
      case Op::monitored_barrier:
        if (compares_) return;  // the comparison was a barrier
        mpi_check(MPI_Ibarrier(comm_, &request));
        return await(request);
    }
  }

  /// Makes a communicator of these ranks of the job, or of all if none is named.
  void join() {
    meet();
    if (members.empty()) return mpi_check(MPI_Comm_dup(MPI_COMM_WORLD, &comm_));
    MPI_Group job, group;
    mpi_check(MPI_Comm_group(MPI_COMM_WORLD, &job));
    mpi_check(MPI_Group_incl(job, static_cast<int>(members.size()), members.data(), &group));
    mpi_check(MPI_Comm_create_group(MPI_COMM_WORLD, group, members.front(), &comm_));
    MPI_Group_free(&group);
    MPI_Group_free(&job);
  }

  /// Returns when all of them are here, because creating a communicator waits without a deadline. The first rank asks
  /// each of the others; a rank that has aborted does not answer. Then the first rank reports whether all are here.
  void meet() const {
    static std::atomic<std::int64_t> meetings{0};
    const int leader = members.empty() ? 0 : members.front();
    const auto patience = Clock::now() + timeout_;
    if (rank != 0) {
      const auto question = hear_from(leader, leader, patience);
      check<TimeoutError>(question != 0, "rank ", rank, ": mpi: rank ", leader, " of the job did not arrive within ",
                          timeout_.count(), " ms");
      say_to(leader, leader, question);
      const auto verdict = hear_from(leader, leader, Clock::now() + timeout_ + std::chrono::seconds(1));
      return check<CommError>(verdict == question, "rank ", rank, ": mpi: rank ", leader,
                              " of the job gave up before all ranks had arrived");
    }
    std::vector<int> others, missing;
    for (int other = 1; other < size; ++other)
      others.push_back(members.empty() ? other : members[static_cast<std::size_t>(other)]);
    const auto question = ++meetings;
    for (const int other : others) say_to(other, leader, question);
    for (const int other : others) {
      std::int64_t answer = -1;
      while (answer != question && answer != 0) answer = hear_from(other, leader, patience);  // not to an earlier one
      if (answer == 0) missing.push_back(other);
    }
    for (const int other : others) say_to(other, leader, missing.empty() ? question : -question);
    check<TimeoutError>(missing.empty(), "rank 0: mpi: ranks ", std::span<const int>(missing),
                        " of the job did not arrive within ", timeout_.count(), " ms");
  }

  /// The tag of messages between ranks of the job that will form a group with this leader.
  static int tag_of(int leader) { return 32'000 + leader % 700; }  // MPI allows tags up to 32767 at least
  static void say_to(int to, int leader, std::int64_t number) {    // short: MPI buffers it
    mpi_check(MPI_Send(&number, 1, MPI_INT64_T, to, tag_of(leader), MPI_COMM_WORLD));
  }
  /// Returns 0 at the deadline.
  static std::int64_t hear_from(int from, int leader, Deadline deadline) {
    for (int there = 0; true; sched_yield()) {
      mpi_check(MPI_Iprobe(from, tag_of(leader), MPI_COMM_WORLD, &there, MPI_STATUS_IGNORE));
      std::int64_t number = 0;
      if (there) mpi_check(MPI_Recv(&number, 1, MPI_INT64_T, from, tag_of(leader), MPI_COMM_WORLD, MPI_STATUS_IGNORE));
      if (there || Clock::now() >= deadline) return number;
    }
  }

  void await(MPI_Request& request) {
    const auto deadline = Clock::now() + timeout_;
    for (std::uint32_t round = 1;; ++round) {
      int done = 0;
      mpi_check(MPI_Test(&request, &done, MPI_STATUS_IGNORE));
      if (done) return;
      if (round % 64 != 0) continue;
      if (aborted()) fail<CommError>("");  // QueuedEngine adds the reason
      hear();
      check<TimeoutError>(Clock::now() < deadline, "mpi: waited ", timeout_.count(), " ms for the other ranks");
      sched_yield();
    }
  }

  /// Throws if another rank has sent a message that it aborts.
  void hear() {
    int there = 0;
    MPI_Status status;
    mpi_check(MPI_Iprobe(MPI_ANY_SOURCE, 0, news_, &there, &status));
    if (!there) return;
    char why[reason_bytes] = {};
    mpi_check(MPI_Recv(why, reason_bytes - 1, MPI_CHAR, status.MPI_SOURCE, 0, news_, MPI_STATUS_IGNORE));
    fail<CommError>("rank ", status.MPI_SOURCE, " gave up: ", static_cast<const char*>(why));
  }

  /// Short messages are sent without waiting.
  void give_up(const std::string& why) noexcept override {
    const int length = static_cast<int>(std::min<std::size_t>(why.size(), reason_bytes - 1));
    for (int to = 0; to < size; ++to) {
      if (to == rank) continue;
      MPI_Request request = MPI_REQUEST_NULL;
      if (MPI_Isend(why.data(), length, MPI_CHAR, to, 0, news_, &request) != MPI_SUCCESS) continue;
      int done = 0;
      for (int i = 0; i < 1000 && !done; ++i) MPI_Test(&request, &done, MPI_STATUS_IGNORE);
    }
  }

  static constexpr std::size_t reason_bytes = 1024;

  const std::chrono::milliseconds timeout_;
  const bool compares_ = compares_calls();
  MPI_Comm comm_ = MPI_COMM_NULL, news_ = MPI_COMM_NULL, envelopes_ = MPI_COMM_NULL;
  Envelope theirs_;  ///< a member: MPI may still write it after a timeout
  std::vector<std::byte> scratch_;
};

inline std::shared_ptr<Engine> mpi_engine(const World& world) {
  const auto unused = Socket::adopt(world.listen_fd);
  return std::make_shared<MpiEngine>(world);
}

inline const bool mpi_registered = register_backend(Backend::mpi, mpi_engine);

}  // namespace detail

/// A Communicator over MPI.
class MpiCommunicator : public AnyCommunicator {
 public:
  /// This process's rank under mpirun. `timeout`: how long a call waits for the other ranks. Throws CommError.
  explicit MpiCommunicator(std::chrono::milliseconds timeout = std::chrono::milliseconds(60'000))
      : AnyCommunicator(detail::mpi_engine(place(timeout))) {}

 private:
  static World place(std::chrono::milliseconds timeout) {
    detail::MpiLibrary::instance(timeout);
    World world;
    MPI_Comm_rank(MPI_COMM_WORLD, &world.rank);
    MPI_Comm_size(MPI_COMM_WORLD, &world.size);
    world.timeout = timeout;
    return world;
  }
};

static_assert(Communicator<MpiCommunicator>);

}  // namespace chorus::comm
