#pragma once
// NCCL among the GPUs of the emulation, as the table of calls that NcclDeviceGroup takes. A call is under way when all
// ranks have made it, and moves numbers when a stream comes to it that somebody waits for; sums are made from the last
// rank to the first. It keeps a record, and fails on request.

#include <algorithm>
#include <chorus/comm/nccl/nccl_device_group.hpp>
#include <chorus/core/cuda/stream.hpp>
#include <cstring>
#include <map>
#include <set>

namespace test {

namespace ch = chorus;

/// What all groups of a test share.
struct StandInNcclNet {
  /// What the next call of a name by a rank returns.
  std::map<std::pair<int, std::string>, int> refusals;
  /// Collectives never end, until they are aborted.
  bool stuck = false;

  std::vector<std::string> record(int rank) {
    const std::lock_guard lock(mutex);
    return records[rank];
  }
  int count(int rank, std::string_view start) {
    const auto lines = record(rank);
    return static_cast<int>(
        std::count_if(lines.begin(), lines.end(), [&](const auto& line) { return line.starts_with(start); }));
  }
  void clear_records() {
    const std::lock_guard lock(mutex);
    records.clear();
  }

  std::mutex mutex;
  std::map<int, std::vector<std::string>> records;
  std::set<cudaStream_t> streams;
  std::map<cudaEvent_t, ch::comm::Clock::time_point> recorded;
  int groups = 0;

  // Under the lock.
  int note(int rank, const std::string& line) {
    records[rank].push_back(line);
    const auto refusal = refusals.find({rank, line.substr(0, line.find(' '))});
    if (refusal == refusals.end()) return 0;
    const int code = refusal->second;
    refusals.erase(refusal);
    return code;
  }
};
inline StandInNcclNet& nccl_net() {
  static StandInNcclNet net;
  return net;
}

struct EmulatedNccl {
  struct Piece {
    bool reduces;
    void* data;
    std::size_t bytes;
    ch::DType dtype;
  };
  /// The launches of a kind of all ranks: what they name, and where in their streams they are.
  struct Launch {
    std::map<int, std::pair<cudaStream_t, std::vector<Piece>>> ranks;
    std::map<int, std::size_t> places;
    std::set<int> come;
    bool done = false;
  };
  struct Group {
    std::string id;
    int size = 0, joined = 0, finalized = 0;
    std::vector<std::shared_ptr<Launch>> launches;
  };
  struct Member {
    std::shared_ptr<Group> group;
    int rank = 0;
    std::size_t launches = 0;
    bool leaves = false, aborted = false;
  };
  using Comm = Member*;
  using Stream = cudaStream_t;
  using Event = cudaEvent_t;
  struct UniqueId {
    char text[32];
  };
  using RedOp = int;
  static constexpr int success = 0, in_progress = 7, not_ready = cudaErrorNotReady;

  static int unique_id(UniqueId& id) {
    const std::lock_guard lock(nccl_net().mutex);
    std::snprintf(id.text, sizeof id.text, "group %d", nccl_net().groups++);
    return 0;
  }
  static int init(Comm& comm, int size, const UniqueId& id, int rank) {
    const std::lock_guard lock(nccl_net().mutex);
    static std::map<std::string, std::shared_ptr<Group>> groups;
    static std::vector<std::unique_ptr<Member>> members;
    auto& group = groups[id.text];
    if (!group) group = std::make_shared<Group>();
    group->size = size;
    members.push_back(std::make_unique<Member>(Member{group, rank}));
    comm = members.back().get();
    if (const int code = nccl_net().note(rank, ch::cat("init rank ", rank, " of ", size)); code != 0) return code;
    ++group->joined;
    return in_progress;
  }
  static int async_error(Comm comm, int& state) {
    const std::lock_guard lock(nccl_net().mutex);
    const Group& group = *comm->group;
    const auto size = static_cast<std::size_t>(group.size);
    const bool pending = group.joined < group.size || (comm->leaves && group.finalized < group.size) ||
                         (comm->launches > 0 && group.launches[comm->launches - 1]->ranks.size() < size);
    state = pending ? in_progress : success;
    return 0;
  }
  static int finalize(Comm comm) {
    const std::lock_guard lock(nccl_net().mutex);
    comm->leaves = true;
    ++comm->group->finalized;
    return nccl_net().note(comm->rank, "finalize"), in_progress;
  }
  static void destroy(Comm comm) { note(comm->rank, "destroy"); }
  static void abort(Comm comm) {
    comm->aborted = true;
    note(comm->rank, "abort");
  }
  static std::string nccl_error(int code, Comm) { return ch::cat("error ", code); }

  static RedOp reduce_op(ch::comm::ReduceOp op) { return static_cast<int>(op); }
  static void destroy_operator(RedOp, Comm) {}
  static int reduce(const void* in, void*, std::size_t n, ch::DType dtype, RedOp op, int root, Comm comm,
                    Stream stream) {
    if (op != static_cast<int>(ch::comm::ReduceOp::sum)) return 4;
    return add({true, const_cast<void*>(in), n * size_of(dtype), dtype}, comm, stream,
               ch::cat("reduce ", n, ' ', dtype, " to ", root));
  }
  static int broadcast(const void*, void* out, std::size_t bytes, int root, Comm comm, Stream stream) {
    return add({false, out, bytes, ch::DType::u8}, comm, stream, ch::cat("broadcast ", bytes, " from ", root));
  }
  static int group_start() { return batch() = {}, success; }
  static int group_end() {
    const std::lock_guard lock(nccl_net().mutex);
    const auto [comm, stream, pieces] = std::exchange(batch(), {});
    if (comm == nullptr) return success;  // a call of it was refused
    Group& group = *comm->group;
    if (group.launches.size() == comm->launches) group.launches.push_back(std::make_shared<Launch>());
    const auto launch = group.launches[comm->launches++];
    launch->ranks[comm->rank] = {stream, pieces};
    if (launch->ranks.size() < static_cast<std::size_t>(group.size)) return in_progress;
    for (const auto& [rank, part] : launch->ranks) {
      part.first->run([launch, rank = rank] { come_to(*launch, rank); });
      launch->places[rank] = part.first->given;
    }
    return in_progress;
  }

  static int use_device(int device) { return cudaSetDevice(device); }
  static int create_stream(Stream& stream) {
    const int code = cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
    const std::lock_guard lock(nccl_net().mutex);
    nccl_net().streams.insert(stream);
    return code;
  }
  static void destroy_stream(Stream stream) { static_cast<void>(cudaStreamDestroy(stream)); }
  static Stream compute_stream(int device) { return ch::cuda::current_stream(ch::Cuda{device}); }
  static bool capturing(Stream stream) { return ch::cuda::is_capturing(stream); }
  static int create_event(Event& event) { return cudaEventCreateWithFlags(&event, cudaEventDisableTiming); }
  static void destroy_event(Event event) { static_cast<void>(cudaEventDestroy(event)); }
  static int record(Event event, Stream stream) {
    const std::lock_guard lock(nccl_net().mutex);
    nccl_net().recorded[event] = ch::comm::Clock::now();
    return cudaEventRecord(event, stream);
  }
  static int wait(Stream stream, Event event) { return cudaStreamWaitEvent(stream, event, 0); }
  // Who asks does not get the stream to work at once: only who waits for it, in the order of streams, may rely on it.
  static int query(Event event) {
    {
      const std::lock_guard lock(nccl_net().mutex);
      if (nccl_net().stuck && nccl_net().streams.contains(event->stream)) return not_ready;
      const bool fresh = ch::comm::Clock::now() - nccl_net().recorded[event] < std::chrono::milliseconds(50);
      const std::lock_guard runtime(emulation::runtime());
      if (fresh && event->stream->done < event->place) return not_ready;
    }
    return cudaEventQuery(event);
  }
  static std::string cuda_error(int code) { return ch::cat("CUDA error ", code); }

 private:
  struct Batch {
    Comm comm = nullptr;
    Stream stream = nullptr;
    std::vector<Piece> pieces;
  };
  static Batch& batch() {
    thread_local Batch own;
    return own;
  }
  static void note(int rank, const std::string& line) {
    const std::lock_guard lock(nccl_net().mutex);
    nccl_net().note(rank, line);
  }
  static int add(const Piece& piece, Comm comm, Stream stream, const std::string& line) {
    const std::lock_guard lock(nccl_net().mutex);
    if (const int code = nccl_net().note(comm->rank, line); code != 0) return batch() = {}, code;
    batch().comm = comm;
    batch().stream = stream;
    batch().pieces.push_back(piece);
    return success;
  }

  // A stream has come to its part: the others have to come, too, and then all of it is done.
  static void come_to(Launch& launch, int rank) {
    launch.come.insert(rank);
    for (const auto& [other, part] : launch.ranks)
      if (!launch.come.contains(other)) part.first->finish(launch.places.at(other));
    if (std::exchange(launch.done, true)) return;
    const auto& root = launch.ranks.at(0).second;
    for (std::size_t i = 0; i < root.size(); ++i) {
      for (const auto& [other, part] : launch.ranks)
        if (part.second.at(i).bytes != root[i].bytes) std::abort();
      if (!root[i].reduces)
        for (const auto& [other, part] : launch.ranks) std::memmove(part.second[i].data, root[i].data, root[i].bytes);
      else if (root[i].dtype == ch::DType::f32)
        sum<float>(launch, i);
      else
        sum<double>(launch, i);
    }
  }
  template <class T>
  static void sum(const Launch& launch, std::size_t i) {
    const auto& root = launch.ranks.at(0).second[i];
    for (std::size_t at = 0; at < root.bytes / sizeof(T); ++at) {
      T total = 0;
      for (auto part = launch.ranks.rbegin(); part != launch.ranks.rend(); ++part)
        total += static_cast<const T*>(part->second.second[i].data)[at];
      static_cast<T*>(root.data)[at] = total;
    }
  }
};

/// While it lives, DataParallel's groups are made of EmulatedNccl.
class StandInNccl {
 public:
  StandInNccl() : before_(ch::comm::device_group_maker()) {
    auto& net = nccl_net();
    net.refusals.clear();
    net.stuck = false;
    net.clear_records();
    ch::comm::device_group_maker() = [](std::span<const int> devices, std::chrono::milliseconds timeout) {
      return std::unique_ptr<ch::comm::DeviceGroup>(
          std::make_unique<ch::comm::NcclDeviceGroup<EmulatedNccl>>(devices, timeout));
    };
  }
  ~StandInNccl() { ch::comm::device_group_maker() = before_; }
  StandInNccl(const StandInNccl&) = delete;
  StandInNccl& operator=(const StandInNccl&) = delete;

 private:
  ch::comm::DeviceGroupMaker before_;
};

}  // namespace test
