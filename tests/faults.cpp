/// Trains small nets on ranks in virtual time while things go wrong: a plan of faults is drawn from each seed. After
/// each run every surviving rank has either the bits of the undisturbed run, step by step, or an error, in time, that
/// names a rank that has failed. Policies save_P also save a checkpoint after each step, on a disk that fails: the file
/// stays one of those that were saved, the last one that was completed or a later one, and loads on one device and on
/// other numbers of ranks.
///   faults [--policy P|all] [--ranks N] [--seeds FIRST:COUNT]     prints `N seeds, M violations` and each violation
///   faults --policy P --seed S [--plan TEXT] [--trace FILE]       one run, told and drawn; TEXT instead of S's plan

#include <fcntl.h>
#include <sched.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdarg>
#include <chorus/comm/any_communicator.hpp>
#include <chorus/core/trace.hpp>
#include <chorus/data/loader.hpp>
#include <chorus/io/checkpoint.hpp>
#include <chorus/nn/batch_norm.hpp>
#include <chorus/nn/activations.hpp>
#include <chorus/nn/chain.hpp>
#include <chorus/nn/linear.hpp>
#include <chorus/nn/transformer.hpp>
#include <chorus/ops/elementary.hpp>
#include <chorus/ops/losses.hpp>
#include <chorus/ops/shape.hpp>
#include <chorus/optim/adam.hpp>
#include <chorus/optim/sgd.hpp>
#include <chorus/parallel/distributed_data_parallel.hpp>
#include <chorus/parallel/elastic.hpp>
#include <chorus/parallel/expert.hpp>
#include <chorus/parallel/fully_sharded_data_parallel.hpp>
#include <chorus/parallel/hooks/compress.hpp>
#include <chorus/parallel/hooks/power_sgd.hpp>
#include <chorus/parallel/local_sgd.hpp>
#include <chorus/parallel/mesh.hpp>
#include <chorus/parallel/outer/quantised.hpp>
#include <chorus/parallel/outer/streaming.hpp>
#include <chorus/parallel/parameter_server.hpp>
#include <chorus/parallel/pipeline.hpp>
#include <chorus/parallel/sequence_parallel.hpp>
#include <chorus/parallel/single_device.hpp>
#include <chorus/parallel/tensor_parallel.hpp>
#include <chorus/same_bits.hpp>
#include <chorus/simulate/elastic_members.hpp>
#include <chorus/simulate/simulate.hpp>
#include <chorus/simulate/trace_file.hpp>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <regex>
#include <set>
#include <string>
#include <vector>

namespace ch = chorus;
namespace cs = ch::comm::simulated;

namespace {

constexpr int steps = 4;
constexpr double timeout = 30;

/// Where the ranks of a run save, and what they have done to their files.
struct Disk {
  std::string folder = made(), path = folder + "/run.safetensors";
  bool keeps = false;                     ///< all of the saved files
  bool restarts = false;                  ///< ranks load the file and save it again, instead of training
  int begun = -1, completed = -1;         ///< the newest saves
  std::map<int, std::uint64_t> files;     ///< operations, by rank
  std::map<int, std::string> saved;       ///< the file, by step
  std::set<ino_t> unsynced;               ///< files that a loss of power would take bytes from
  bool folder_unsynced = false;
  std::string wrong;

  Disk() = default;
  Disk(const Disk&) = delete;
  ~Disk() { std::filesystem::remove_all(folder); }

 private:
  static std::string made() {
    auto name = (std::filesystem::temp_directory_path() / "faults.XXXXXX").string();
    ch::check<ch::FileError>(::mkdtemp(name.data()) != nullptr, "faults: expected a folder for temporary files");
    return name;
  }
};
Disk* disk = nullptr;  // of the present run; null: nothing is saved

struct Saving;
thread_local Saving* saving = nullptr;
/// A save on this thread, which is a rank's.
struct Saving {
  explicit Saving(cs::SimulatedRank& of) : rank(of) { saving = this; }
  Saving(const Saving&) = delete;
  ~Saving() { saving = nullptr; }
  cs::SimulatedRank& rank;
  bool renamed = false;
};

std::string bytes_of(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

bool is_dead() { return saving != nullptr && saving->rank.has_died(saving->rank.rank()); }
/// The errno with which this thread's next operation on a file fails; 0: it does not. Of a write, `bytes` may become less.
int fault_of_file(std::size_t* bytes = nullptr) noexcept {
  if (saving == nullptr) return 0;
  ++disk->files[saving->rank.rank()];
  try {
    const auto wrong = saving->rank.touch_file();
    if (wrong == cs::Fault::Kind::full) return ENOSPC;
    if (wrong == cs::Fault::Kind::bad) return EIO;
    if (wrong && bytes != nullptr) *bytes = (*bytes + 1) / 2;
    return 0;
  } catch (const cs::Killed&) {  // functions of C don't throw: the rank's next call does
    return EIO;
  }
}
ino_t number_of(int file) {
  struct stat facts {};
  return ::fstat(file, &facts) == 0 ? facts.st_ino : 0;
}
template <class... Words>
long on_disk(int error, long call, const Words&... words) {
  if (error != 0) return errno = error, -1;
  return ::syscall(call, words...);
}
int opened(int folder, const char* path, int flags, mode_t mode) noexcept {
  const bool writes = (flags & O_ACCMODE) != O_RDONLY;
  return static_cast<int>(on_disk(writes ? fault_of_file() : 0, SYS_openat, folder, path, flags, mode));
}
long written(int file, long done) {
  if (saving != nullptr && done >= 0) disk->unsynced.insert(number_of(file));
  return done;
}

}  // namespace

// Instead of the C library's functions: a rank's operations on the file that it saves fail as its plan says.
extern "C" {
int open(const char* path, int flags, ...) {
  va_list more;
  va_start(more, flags);
  const auto mode = (flags & O_CREAT) != 0 ? va_arg(more, mode_t) : mode_t{};
  va_end(more);
  return opened(AT_FDCWD, path, flags, mode);
}
int openat(int folder, const char* path, int flags, ...) {
  va_list more;
  va_start(more, flags);
  const auto mode = (flags & O_CREAT) != 0 ? va_arg(more, mode_t) : mode_t{};
  va_end(more);
  return opened(folder, path, flags, mode);
}
ssize_t write(int file, const void* data, std::size_t count) {
  const int error = fault_of_file(&count);
  return written(file, on_disk(error, SYS_write, file, data, count));
}
ssize_t pwrite(int file, const void* data, std::size_t count, off_t offset) {
  const int error = fault_of_file(&count);
  return written(file, on_disk(error, SYS_pwrite64, file, data, count, offset));
}
ssize_t pread(int file, void* data, std::size_t count, off_t offset) {
  return on_disk(fault_of_file(), SYS_pread64, file, data, count, offset);
}
int ftruncate(int file, off_t length) noexcept {
  return static_cast<int>(written(file, on_disk(fault_of_file(), SYS_ftruncate, file, length)));
}
int fsync(int file) {
  if (saving == nullptr) return static_cast<int>(::syscall(SYS_fsync, file));
  if (const int error = fault_of_file()) return errno = error, -1;
  struct stat facts {};
  if (::fstat(file, &facts) == 0 && S_ISDIR(facts.st_mode)) disk->folder_unsynced = false;
  disk->unsynced.erase(facts.st_ino);
  return 0;
}
int renameat(int from_folder, const char* from, int to_folder, const char* to) noexcept {
  struct stat facts {};
  if (saving != nullptr && ::fstatat(from_folder, from, &facts, 0) == 0 && disk->unsynced.contains(facts.st_ino))
    disk->wrong = "a file takes the place of the old one before all of it is on the disk";
  const auto done = on_disk(fault_of_file(), SYS_renameat2, from_folder, from, to_folder, to, 0);
  if (saving != nullptr && done == 0) saving->renamed = disk->folder_unsynced = true;
  return static_cast<int>(done);
}
int unlinkat(int folder, const char* path, int flags) noexcept {  // the dead don't tidy up
  return is_dead() ? 0 : static_cast<int>(::syscall(SYS_unlinkat, folder, path, flags));
}
}

namespace {

/// Draws random numbers and has buffers.
struct Net : ch::nn::Module {
  ch::nn::Linear<ch::Cpu, double> fc1{5, 12}, fc2{12, 3};
  ch::nn::BatchNorm<ch::Cpu, double> norm{3};
  ch::nn::Dropout dropout{0.25};
  CHORUS_MODULE(Net, fc1, norm, dropout, fc2)
  auto forward(const auto& x) const {
    return fc2(dropout(ch::tanh(ch::flatten(norm(ch::reshape(fc1(x), ch::Shape<3>{-1, 3, 4}))))));
  }
};
struct Plain : ch::nn::Module {
  ch::nn::Linear<ch::Cpu, double> fc1{5, 12}, fc2{12, 3};
  CHORUS_MODULE(Plain, fc1, fc2)
  auto forward(const auto& x) const { return fc2(ch::tanh(fc1(x))); }
};
struct Divided : ch::nn::Module {
  ch::nn::Linear<ch::Cpu, double> fc1{5, 8}, fc2{8, 3};
  ch::nn::TransformerEncoderLayer<ch::Cpu, double> layer{8, {.heads = 4, .feed_forward = 12, .dropout = 0.2}};
  CHORUS_MODULE(Divided, fc1, layer, fc2)
  auto forward(const auto& x) const {
    return fc2(ch::reshape(layer(ch::reshape(fc1(x), ch::Shape<3>{-1, 1, 8})), ch::Shape<2>{-1, 8}));
  }
};

struct Experts : ch::nn::Module {
  ch::nn::Linear<ch::Cpu, double> fc1{5, 6}, fc2{6, 3};
  ch::nn::MixtureOfExperts<ch::Cpu, double> mixture{6, {.experts = 4, .hidden = 8, .capacity = 1}};
  CHORUS_MODULE(Experts, fc1, mixture, fc2)
  auto forward(const auto& x) const { return fc2(mixture(fc1(x)).y); }
};

struct Block : ch::nn::Module {
  ch::nn::Linear<ch::Cpu, double> fc{5, 5};
  ch::nn::Dropout dropout{0.3};
  CHORUS_MODULE(Block, fc, dropout)
  auto forward(const auto& x) const { return x + dropout(ch::tanh(fc(x))); }
};
struct Chain : ch::nn::Module {
  Block first, second, third;
  ch::nn::Linear<ch::Cpu, double> last{5, 3};
  CHORUS_MODULE(Chain, first, second, third, last)
  CHORUS_PIPELINE(first, second, third, last)
};

/// Its samples are sequences of five numbers, of which each rank has one or two.
struct Sequences : ch::nn::Module {
  ch::nn::Linear<ch::Cpu, double> fc1{1, 8}, fc2{8, 1};
  ch::nn::TransformerEncoderLayer<ch::Cpu, double> layer{8, {.heads = 4, .feed_forward = 12, .dropout = 0.2}};
  CHORUS_MODULE(Sequences, fc1, layer, fc2)
  auto forward(const auto& x) const {
    const auto y = layer(fc1(ch::reshape(x, ch::Shape<3>{x.size(0), x.size(1), 1})), /*causal=*/true);
    return ch::reshape(fc2(y), x.shape());
  }
};

ch::Tensor<double, 2> numbers(ch::Index rows, ch::Index columns, std::uint32_t key) {
  auto out = ch::Tensor<double, 2>::empty({rows, columns});
  for (ch::Index i = 0; i < out.numel(); ++i)
    out.data()[i] = 2.0 * ch::unit_float(ch::philox(7, {static_cast<std::uint32_t>(i), key, 0, 0})[0]) - 1;
  return out;
}

/// What one rank has after each step: a hash of the parameters that it holds.
using Steps = std::vector<std::uint64_t>;

std::uint64_t hash_of(const auto& parameters) {
  std::uint64_t hash = 1469598103934665603U;  // FNV-1a
  for (const auto& named : parameters) {
    const auto* bytes = static_cast<const unsigned char*>(named.parameter->value_data());
    const auto count = static_cast<std::size_t>(named.parameter->count()) * sizeof(double);
    for (std::size_t i = 0; i < count; ++i) hash = (hash ^ bytes[i]) * 1099511628211U;
  }
  return hash;
}

/// Which of the `count` parts of a batch this rank computes.
struct Parts {
  std::size_t count, begin, end;
};
Parts one_each(const cs::SimulatedRank& rank) {
  const auto r = static_cast<std::size_t>(rank.rank());
  return {static_cast<std::size_t>(rank.size()), r, r + 1};
}

/// A step for the picture, also one that a fault ends.
struct StepMark {
  cs::SimulatedRank& rank;
  int step;
  cs::Time begun;
  ~StepMark() { rank.mark("step", ch::cat("step ", step), begun, 0, step); }
};

template <class N, class Optimizer>
void save(N& net, Optimizer& optimizer, cs::SimulatedRank& rank, int step) {
  if (disk == nullptr) return;
  Saving own{rank};
  disk->begun = std::max(disk->begun, step);
  try {
    ch::io::save_checkpoint(net, optimizer, {.step = step}, disk->path);
  } catch (...) {
    if (is_dead()) throw cs::Killed{};
    throw;
  }
  if (!own.renamed) return;  // another rank has written
  disk->completed = std::max(disk->completed, step);
  if (disk->keeps) disk->saved[step] = bytes_of(disk->path);
  if (disk->folder_unsynced) disk->wrong = "a save has returned before the folder is on the disk";
}

/// The policies that save.
template <class N>
constexpr bool saves = false;
template <>
constexpr bool saves<ch::DistributedDataParallel<Net>> = true;
template <>
constexpr bool saves<ch::LocalSgd<Net, ch::Nesterov>> = true;
template <>
constexpr bool saves<ch::FullyShardedDataParallel<Net>> = true;
template <>
constexpr bool saves<ch::TensorParallel<Divided>> = true;
template <>
constexpr bool saves<ch::Pipeline<Chain>> = true;
template <>
constexpr bool saves<ch::Mesh<Divided, ch::mesh::Data<2>, ch::mesh::Tensor<2>>> = true;

/// Loads the file, and saves it again. Returns its step.
template <class N>
std::int64_t restart(N& net, const std::string& path) {
  ch::optim::Sgd optimizer{net.parameters(), {.lr = 0.1, .momentum = 0.9}};
  const auto position = ch::io::load_checkpoint(net, optimizer, path);
  ch::io::save_checkpoint(net, optimizer, position, path);
  return position.step;
}
template <class Model>
std::int64_t restart_alone(const std::string& path) {
  ch::SingleDevice<Model> net(Model{}, 3);
  return restart(net, path);
}

template <class N>
void train(N& net, cs::SimulatedRank& rank, Steps& done, const Parts& parts) {
  if constexpr (saves<N>)
    if (disk != nullptr && disk->restarts) return done.push_back(static_cast<std::uint64_t>(restart(net, disk->path)));
  ch::optim::Sgd optimizer{net.parameters(), {.lr = 0.1, .momentum = 0.9}};
  for (int step = 0; step < steps; ++step) {
    const auto key = static_cast<std::uint32_t>(step);
    const ch::Index samples = 2 * rank.size() + step % 3;  // some shares are larger
    const auto begin = ch::share_begin(samples, parts.count, parts.begin);
    const auto end = ch::share_begin(samples, parts.count, parts.end);
    const StepMark mark{rank, step, rank.clock()};
    rank.next_step();
    optimizer.zero_grad();
    const auto y = net(numbers(samples, 5, key).slice(0, begin, end));
    if constexpr (requires { net.stretch(numbers(1, 5, 0)); })
      ch::mse_loss(y, net.stretch(numbers(samples, 5, key + 100).slice(0, begin, end))).backward();
    else
      ch::mse_loss(y, numbers(samples, 3, key + 100).slice(0, begin, end)).backward();
    optimizer.step();
    rank.compute(1e-3);
    done.push_back(hash_of(net.parameters()));
    if constexpr (saves<N>) save(net, optimizer, rank, step);
  }
}

/// Samples by their index.
struct Samples {
  ch::Index size() const { return 60; }
  std::pair<std::array<double, 5>, std::array<double, 3>> get(ch::Index i) const {
    const auto x = numbers(1, 5, static_cast<std::uint32_t>(i)), y = numbers(1, 3, static_cast<std::uint32_t>(i) + 100);
    const auto *a = x.data(), *b = y.data();
    return {{a[0], a[1], a[2], a[3], a[4]}, {b[0], b[1], b[2]}};
  }
};
std::shared_ptr<cs::ElasticJob> elastic_job;  // of the present run; all ranks but the last one begin it

/// Steps that are made once, whoever is lost: by their number, 0 where another rank has made it.
void survive(cs::SimulatedRank& rank, Steps& done) {
  if (rank.rank() == rank.size() - 1) rank.pause(4e-3);
  ch::Elastic<ch::DistributedDataParallel<ch::SameBits<Net, 8>>> net{
      Net{}, std::make_unique<cs::ElasticMembers>(rank, elastic_job), {}, 3};
  const Samples data;
  ch::optim::Sgd optimizer{net.parameters(), {.lr = 0.1, .momentum = 0.9}};
  net.keep(optimizer);
  ch::data::DataLoader loader{data, net.sampler(data), {.batch = 16, .workers = 0}};
  for (int epoch = 0; epoch < 4; ++epoch) {
    loader.set_epoch(epoch);
    for (auto& [x, y] : loader) {
      const auto step = static_cast<std::size_t>(net.steps());
      const StepMark mark{rank, static_cast<int>(step), rank.clock()};
      rank.next_step();
      optimizer.zero_grad();
      ch::mse_loss(net(x), y).backward();
      optimizer.step();
      rank.compute(1e-3);
      if (net.is_void()) continue;
      done.resize(std::max(done.size(), step + 1));
      done[step] = hash_of(ch::nn::named_parameters<ch::Cpu>(net.module()));  // their order in memory changes
      save(net, optimizer, rank, static_cast<int>(step));
    }
  }
  done.resize(static_cast<std::size_t>(net.steps()));
  done.push_back(hash_of(ch::nn::named_parameters<ch::Cpu>(net.module())));
}

using Program = std::function<void(cs::SimulatedRank&, Steps&)>;

template <template <class...> class Policy, class Model = Net, class... More>
void run(cs::SimulatedRank& rank, Steps& done) {
  Policy<Model, More...> net(Model{}, rank.communicator(), {}, 3);
  train(net, rank, done, one_each(rank));
}
template <class Outer>
void run_local(cs::SimulatedRank& rank, Steps& done) {
  ch::LocalSgd<Net, Outer> net(Net{}, rank.communicator(), {.period = 2}, 3);
  train(net, rank, done, one_each(rank));
}
const std::map<std::string, Program>& policies() {
  static const std::map<std::string, Program> all = {
      {"ddp", run<ch::DistributedDataParallel>},
      {"ddp_small_buckets",
       [](cs::SimulatedRank& rank, Steps& done) {
         ch::DistributedDataParallel net(Net{}, rank.communicator(),
                                         {.first_bucket_cap_mb = 0, .bucket_cap_mb = 0, .find_unused_parameters = true}, 3);
         train(net, rank, done, one_each(rank));
       }},
      {"ddp_same_bits",
       [](cs::SimulatedRank& rank, Steps& done) {
         ch::DistributedDataParallel<ch::SameBits<Net, 8>> net(Net{}, rank.communicator(), {}, 3);
         const auto n = static_cast<std::size_t>(rank.size()), r = static_cast<std::size_t>(rank.rank());
         const auto begin = [&](std::size_t i) { return static_cast<std::size_t>(ch::share_begin(8, n, i)); };
         train(net, rank, done, {8, begin(r), begin(r + 1)});
       }},
      {"elastic", survive},
      {"ddp_compress", run<ch::DistributedDataParallel, Plain, ch::Compress<ch::bf16>>},
      {"ddp_power_sgd", run<ch::DistributedDataParallel, Plain, ch::PowerSgd>},
      {"local_sgd", run_local<ch::AverageParameters>},
      {"diloco", run_local<ch::Nesterov>},
      {"diloco_streaming", run_local<ch::Quantised<ch::Streaming<1>>>},
      {"parameter_server", run<ch::ParameterServer>},
      {"fsdp",
       [](cs::SimulatedRank& rank, Steps& done) {
         ch::FullyShardedDataParallel<Net> net(Net{}, rank.communicator(), rank.communicator(), {}, 3);
         train(net, rank, done, one_each(rank));
       }},
      {"fsdp_same_bits",
       [](cs::SimulatedRank& rank, Steps& done) {
         ch::FullyShardedDataParallel<ch::SameBits<Net, 8>> net(Net{}, rank.communicator(), rank.communicator(), {}, 3);
         const auto n = static_cast<std::size_t>(rank.size()), r = static_cast<std::size_t>(rank.rank());
         const auto begin = [&](std::size_t i) { return static_cast<std::size_t>(ch::share_begin(8, n, i)); };
         train(net, rank, done, {8, begin(r), begin(r + 1)});
       }},
      {"pipeline",
       [](cs::SimulatedRank& rank, Steps& done) {
         ch::Pipeline<Chain> net(Chain{}, rank.communicator(), rank.world(), {.micro_batches = 3}, 3);
         train(net, rank, done, {1, 0, 1});
       }},
      {"mesh_data_tensor",
       [](cs::SimulatedRank& rank, Steps& done) {
         ch::Mesh<Divided, ch::mesh::Data<2>, ch::mesh::Tensor<2>> net(Divided{}, rank.communicator(), rank.world(), {}, 3);
         const auto n = static_cast<std::size_t>(rank.size()) / 2, d = static_cast<std::size_t>(rank.rank()) / 2;
         train(net, rank, done, {n, d, d + 1});
       }},
      {"mesh_data_expert",
       [](cs::SimulatedRank& rank, Steps& done) {
         ch::Mesh<Experts, ch::mesh::Data<2>, ch::mesh::Expert<2>> net(Experts{}, rank.communicator(), rank.world(), {}, 3);
         train(net, rank, done, one_each(rank));
       }},
      {"mesh_pipe_data",
       [](cs::SimulatedRank& rank, Steps& done) {
         ch::Mesh<Chain, ch::mesh::Pipe<2>, ch::mesh::Data<2>> net(Chain{}, rank.communicator(), rank.world(), {}, 3);
         const auto n = static_cast<std::size_t>(rank.size()) / 2, d = static_cast<std::size_t>(rank.rank()) % n;
         train(net, rank, done, {n, d, d + 1});
       }},
      {"mesh_data_sequence",
       [](cs::SimulatedRank& rank, Steps& done) {
         ch::Mesh<Sequences, ch::mesh::Data<2>, ch::mesh::Sequence<2>> net(Sequences{}, rank.communicator(), rank.world(), {}, 3);
         const auto n = static_cast<std::size_t>(rank.size()) / 2, d = static_cast<std::size_t>(rank.rank()) / 2;
         train(net, rank, done, {n, d, d + 1});
       }},
      {"sequence",
       [](cs::SimulatedRank& rank, Steps& done) {
         ch::SequenceParallel<Sequences> net(Sequences{}, rank.communicator(), {}, 3);
         train(net, rank, done, {1, 0, 1});
       }},
      {"tp",
       [](cs::SimulatedRank& rank, Steps& done) {
         ch::TensorParallel<Divided> net(Divided{}, rank.communicator(), {}, 3);
         train(net, rank, done, {1, 0, 1});
       }},
  };
  return all;
}

/// How the file of a policy that saves is read again: on one device, and on that many ranks (0: not).
struct Reading {
  std::function<std::int64_t(const std::string&)> alone;
  int ranks;
};
const std::map<std::string, Reading>& readings() {
  static const std::map<std::string, Reading> all = {
      {"save_ddp", {restart_alone<Net>, 3}},
      {"save_diloco", {restart_alone<Net>, 3}},
      {"save_elastic", {restart_alone<ch::SameBits<Net, 8>>, 0}},
      {"save_fsdp", {restart_alone<Net>, 3}},
      {"save_mesh_data_tensor", {restart_alone<Divided>, 0}},
      {"save_pipeline", {restart_alone<Chain>, 3}},
      {"save_tp", {restart_alone<Divided>, 2}},
  };
  return all;
}
const Program& program_of(const std::string& policy) {
  return policies().at(readings().contains(policy) ? policy.substr(5) : policy);
}

struct Outcome {
  std::unique_ptr<Disk> disk;  ///< of a policy that saves
  cs::SimulatedTimes times;
  std::vector<Steps> done;
};
Outcome simulated(const std::string& policy, int ranks, const cs::FaultPlan& plan, bool keep_spans = false) {
  const auto& program = program_of(policy);
  Outcome out;
  if (readings().contains(policy)) out.disk = std::make_unique<Disk>(), out.disk->keeps = plan.faults.empty();
  disk = out.disk.get();
  out.done.resize(static_cast<std::size_t>(ranks));
  elastic_job = std::make_shared<cs::ElasticJob>(ranks - 1, ch::elastic::Options{.lost_after = std::chrono::seconds(60)});
  out.times = cs::simulate({.ranks = ranks, .keep_spans = keep_spans, .faults = plan}, [&](cs::SimulatedRank& rank) {
    ch::manual_seed(1);
    program(rank, out.done[static_cast<std::size_t>(rank.rank())]);
  });
  disk = nullptr;
  return out;
}

std::string message_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const ch::CommError& expected) {
    return expected.what();
  } catch (const ch::FileError& expected) {
    return expected.what();
  } catch (const std::exception& other) {
    return ch::cat("no CommError: ", other.what());
  }
}
/// The rank that an error names as the cause; -1: none.
int named_by(const std::string& error) {
  static const std::regex cause(
      "rank (\\d+) has died|waiting for rank (\\d+)|the connection to rank (\\d+) is lost|rank (\\d+) was silent|"
      "rank (\\d+): saving |rank (\\d+) failed: ");
  int named = -1;
  for (std::sregex_iterator match(error.begin(), error.end(), cause), end; match != end; ++match)
    for (std::size_t group = 1; group <= 6; ++group)
      if ((*match)[group].matched) named = std::stoi((*match)[group]);
  return named;
}

/// What a policy allows.
struct Allowed {
  /// How many deadlines may pass. A rank with several groups may begin to wait in one when others, in another one, have
  /// already given up; elastic ranks meet again and again.
  int waits = 1;
  bool alike = false;  ///< all ranks hold the same, and one may take another's state
};
Allowed allowed_by(const std::string& policy) {
  if (policy.ends_with("elastic")) return {.waits = 100, .alike = true};
  return {.waits = policy.find("mesh") != policy.npos ? 3 : policy.ends_with("pipeline") ? 2 : 1};
}

/// What is wrong with a run; empty: nothing.
std::string violation(const Outcome& run, const Outcome& undisturbed, const Allowed& how) {
  std::set<int> guilty;
  double first = 1e9, stops = 0;
  bool harmless = true;
  for (const auto& [fault, at] : run.times.faults) {
    using Kind = cs::Fault::Kind;
    if (fault.kind == Kind::stop) stops += fault.amount;
    if (fault.lasts()) continue;
    harmless = harmless && (fault.kind == Kind::stop || fault.kind == Kind::part);
    guilty.insert(fault.rank);
    if (fault.kind == Kind::cut) guilty.insert(fault.peer);
    first = std::min(first, cs::seconds(at));
  }
  harmless = harmless && stops < timeout;
  for (std::size_t r = 0; r < run.done.size(); ++r) {
    const auto& rank = run.times.ranks[r];
    const auto& right = undisturbed.done[how.alike ? 0 : r];
    if (rank.killed) {
      if (!guilty.contains(static_cast<int>(r))) return ch::cat("rank ", r, " was killed without a fault");
      continue;
    }
    for (std::size_t step = 0; step < run.done[r].size(); ++step)
      if (run.done[r][step] != 0 && run.done[r][step] != right[step]) return ch::cat("rank ", r, " has other bits after step ", step);
    if (!rank.error) {
      if (run.done[r].size() != right.size()) return ch::cat("rank ", r, " ended early, without an error");
      continue;
    }
    const auto said = message_of(rank.error);
    const double end = cs::seconds(rank.end);
    const bool of_file = said.find(": saving ") != said.npos || said.starts_with("saving ");
    if (of_file && (!run.disk || said.find(run.disk->path) == said.npos))
      return ch::cat("rank ", r, " names no file: ", said);
    if (said.starts_with("saving ") && guilty.contains(static_cast<int>(r))) continue;
    if (harmless) return ch::cat("rank ", r, " failed without a reason: ", said);
    // A newcomer that had no state yet when the others ended can only end, too.
    if (how.alike && r + 1 == run.done.size() && said.starts_with("Elastic: the ranks with the state")) continue;
    if (!guilty.contains(named_by(said))) return ch::cat("rank ", r, " names an innocent rank, or none: ", said);
    if (end > first + stops + how.waits * timeout + 1) return ch::cat("rank ", r, " failed late, at ", end, " s: ", said);
  }
  return {};
}

/// What is wrong with the file that a run has left; empty: nothing.
std::string file_violation(const Outcome& run, const Outcome& undisturbed, const std::string& policy, int ranks) {
  auto& own = *run.disk;
  if (!own.wrong.empty()) return own.wrong;
  if (!std::filesystem::exists(own.path)) return own.completed < 0 ? "" : "the checkpoint is lost";
  const auto& saved = undisturbed.disk->saved;
  const auto bytes = bytes_of(own.path);
  const auto found = std::find_if(saved.begin(), saved.end(), [&](const auto& save) { return save.second == bytes; });
  if (found == saved.end()) return ch::cat("a checkpoint of ", bytes.size(), " bytes that nobody has saved");
  const int step = found->first;
  if (step < own.completed || step > own.begun)
    return ch::cat("the checkpoint is of step ", step, ", expected one from ", own.completed, " to ", own.begun);
  const auto& reading = readings().at(policy);
  try {
    if (const int again = ranks == reading.ranks ? ranks - 1 : reading.ranks; again > 0) {
      disk = &own;
      own.restarts = true;
      std::vector<std::int64_t> begun(static_cast<std::size_t>(again), -1);
      cs::simulate({.ranks = again}, [&](cs::SimulatedRank& rank) {
        Steps at;
        program_of(policy)(rank, at);
        begun[static_cast<std::size_t>(rank.rank())] = static_cast<std::int64_t>(at.at(0));
      });
      disk = nullptr;
      for (const auto at : begun)
        if (at != step) return ch::cat("on ", again, " ranks it begins at step ", at, ", expected ", step);
    }
    const auto at = reading.alone(own.path);
    if (at != step) return ch::cat("on one device it begins at step ", at, ", expected ", step);
  } catch (const std::exception& error) {
    disk = nullptr;
    return ch::cat("the checkpoint can't be loaded: ", error.what());
  }
  for (const auto& file : std::filesystem::directory_iterator(own.folder))
    if (file.path() != own.path) return ch::cat("after the next save there is still ", file.path().filename().string());
  return {};
}

int threads_now() {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);)
    if (line.starts_with("Threads:")) return std::stoi(line.substr(8));
  return -1;
}
std::size_t bytes_now() {
  std::size_t all = 0;
  for (int device = 0; device < ch::trace::max_devices; ++device) all += ch::trace::memory(device).current;
  return all;
}

/// The place for faults in a run without any.
cs::FaultRoom room_of(const Outcome& run) {
  cs::FaultRoom room{.ranks = static_cast<int>(run.done.size())};
  std::uint64_t bytes = 0, links = 0;
  for (const auto& rank : run.times.ranks) {
    room.calls = std::max<std::uint64_t>(room.calls, rank.calls.size());
    std::map<int, std::size_t> sent;
    for (const auto& call : rank.calls)
      for (const auto& [to, more] : call.sent) sent[to] += more;
    for (const auto& [to, all] : sent) bytes += all, ++links;
  }
  room.bytes = bytes / std::max<std::uint64_t>(links, 1) + 1;
  // Elastic ranks meet in groups of their own, whose calls are not kept.
  if (bytes == 0) room.calls = 150, room.bytes = 20'000;
  if (run.disk)
    for (const auto& [rank, files] : run.disk->files) room.files = std::max(room.files, files);
  return room;
}

int check_seeds(const std::string& policy, int ranks, std::uint64_t first, std::uint64_t count) {
  const auto undisturbed = simulated(policy, ranks, {.timeout = timeout}, true);
  for (const auto& rank : undisturbed.times.ranks)
    if (rank.error) return std::printf("%s: %s\n", policy.c_str(), message_of(rank.error).c_str()), 1;
  const auto room = room_of(undisturbed);
  std::map<std::string, int> ends;  // how runs ended: that each way is met
  int violations = 0;
  for (auto seed = first; seed < first + count; ++seed) {
    const auto plan = cs::drawn_faults(seed, room, timeout);
    const int threads = threads_now();
    const auto bytes = bytes_now();
    const auto run = simulated(policy, ranks, plan);
    auto wrong = violation(run, undisturbed, allowed_by(policy));
    if (wrong.empty() && run.disk) wrong = file_violation(run, undisturbed, policy, ranks);
    if (wrong.empty() && threads_now() != threads) wrong = "a thread is left";
    if (wrong.empty() && bytes_now() != bytes) wrong = "memory is left";
    if (wrong.empty() && seed % 100 == 0) {
      const auto again = simulated(policy, ranks, plan);
      if (again.done != run.done || again.times.seconds() != run.times.seconds()) wrong = "a second run differs";
    }
    bool failed = false;
    for (const auto& rank : run.times.ranks) failed = failed || rank.error || rank.killed;
    ++ends[failed ? "failed" : run.times.faults.empty() ? "met no fault" : "went on"];
    if (wrong.empty()) continue;
    ++violations;
    std::printf("%s: seed %llu: %s: %s\n", policy.c_str(), static_cast<unsigned long long>(seed), plan.text().c_str(),
                wrong.c_str());
  }
  std::printf("%s: %llu seeds, %d violations (", policy.c_str(), static_cast<unsigned long long>(count), violations);
  const char* comma = "";
  for (const auto& [end, times] : ends) std::printf("%s%d %s", comma, times, end.c_str()), comma = ", ";
  std::printf(")\n");
  std::fflush(stdout);
  return violations > 0;
}

int replay(const std::string& policy, int ranks, std::uint64_t seed, const std::string& text, const std::string& trace) {
  const auto undisturbed = simulated(policy, ranks, {.timeout = timeout}, true);
  auto plan = cs::drawn_faults(seed, room_of(undisturbed), timeout);
  if (!text.empty()) {
    plan = cs::FaultPlan::read(text);
    plan.timeout = timeout;
    plan.seed = seed;
  }
  std::printf("plan: %s\n", plan.text().c_str());
  std::fflush(stdout);
  const auto run = simulated(policy, ranks, plan, true);
  for (const auto& [fault, at] : run.times.faults) std::printf("%.6f s: %s\n", cs::seconds(at), cs::text_of(fault).c_str());
  for (std::size_t r = 0; r < run.done.size(); ++r) {
    const auto& rank = run.times.ranks[r];
    std::printf("rank %zu: %zu steps, until %.6f s: %s\n", r, run.done[r].size(), cs::seconds(rank.end),
                rank.killed  ? "killed"
                : rank.error ? message_of(rank.error).c_str()
                             : "ended");
  }
  if (!trace.empty()) std::ofstream(trace) << cs::trace_text(run.times, ranks, policy, "");
  auto wrong = violation(run, undisturbed, allowed_by(policy));
  if (wrong.empty() && run.disk) wrong = file_violation(run, undisturbed, policy, ranks);
  std::printf("%s\n", wrong.empty() ? "no violation" : wrong.c_str());
  return !wrong.empty();
}

}  // namespace

int main(int argc, char** argv) {
  // Ranks compute in turn. On one processor none waits until the next one gets another's time from other programs.
  cpu_set_t one;
  CPU_ZERO(&one);
  CPU_SET(static_cast<std::size_t>(sched_getcpu()), &one);
  sched_setaffinity(0, sizeof one, &one);
  try {
    std::map<std::string, std::string> options = {{"--policy", "all"}, {"--ranks", "4"}, {"--seeds", "0:300"},
                                                  {"--seed", ""},      {"--plan", ""},   {"--trace", ""}};
    for (int i = 1; i < argc; i += 2) {
      ch::check<ch::UsageError>(i + 1 < argc && options.contains(argv[i]), "faults: option ", argv[i],
                                ": expected --policy P, --ranks N, --seeds FIRST:COUNT, --seed S, --plan TEXT, "
                                "--trace FILE, each with a value");
      options[argv[i]] = argv[i + 1];
    }
    const auto& policy = options["--policy"];
    std::string known = "all";
    std::vector<std::string> names;
    for (const auto& [name, program] : policies()) names.push_back(name);
    for (const auto& [name, reading] : readings()) names.push_back(name);
    for (const auto& name : names) known += ", " + name;
    ch::check<ch::UsageError>(policy == "all" || std::ranges::find(names, policy) != names.end(), "faults: policy '", policy,
                              "': expected one of ", known);
    const int ranks = std::stoi(options["--ranks"]);
    if (!options["--seed"].empty() || !options["--plan"].empty()) {
      ch::check<ch::UsageError>(policy != "all", "faults: expected --policy P with --seed or --plan");
      const auto seed = options["--seed"].empty() ? 0 : std::stoull(options["--seed"]);
      return replay(policy, ranks, seed, options["--plan"], options["--trace"]);
    }
    const auto& seeds = options["--seeds"];
    const auto colon = seeds.find(':');
    ch::check<ch::UsageError>(colon != std::string::npos, "faults: --seeds: expected FIRST:COUNT, got '", seeds, "'");
    int status = 0;
    for (const auto& name : names)
      if (policy == "all" || policy == name)
        status |= check_seeds(name, ranks, std::stoull(seeds.substr(0, colon)), std::stoull(seeds.substr(colon + 1)));
    return status;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 2;
  }
}
