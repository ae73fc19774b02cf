// One plain file, written by all ranks under FullyShardedDataParallel, and read under any policy.
#include <sys/resource.h>

#include <chorus/io/checkpoint.hpp>
#include <chorus/io/model_file.hpp>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <thread>
#include <chorus/optim/muon.hpp>
#include <unit/fsdp/fsdp.hpp>

namespace sharded_files_test {

using namespace test::names;
using test::EachLayer, test::FullySharded;
using AdamW = optim::AdamW<Cpu>;
using Muon = optim::Muon<Cpu>;
optim::AdamOptions options_of(const optim::AdamOptions&) { return {.lr = 0.02, .weight_decay = 0.01}; }
optim::MuonOptions options_of(const optim::MuonOptions&) { return {.lr = 0.05, .adam = {.lr = 0.02}}; }

/// With a buffer, and an empty part on some rank.
template <class D>
struct Counting : nn::Module {
  nn::Linear<D, double> fc1{5, 7}, fc2{7, 3};
  Buffer<double, 1, D> kept{Tensor<double, 1, D>::full({3}, 2.5)};
  nn::Dropout dropout{0.3};
  CHORUS_MODULE(Counting, fc1, fc2, kept, dropout)
  auto forward(const auto& x) const { return fc2(dropout(tanh(fc1(x)))); }
};
using Model = Counting<Cpu>;

std::string file_for(const char* name) {
  return std::filesystem::temp_directory_path() / cat("chorus_sharded_files_", getpid(), "_", name);
}
std::string bytes_of(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

/// Steps `from` to `to`, with files to load and save if they are named; returns the parameters at the end.
template <class Opt, class Net>
void run(Net& net, const World& world, std::uint32_t from, std::uint32_t to, const std::string& load,
         const std::string& save) {
  Opt optimizer{net.parameters(), options_of(typename Opt::options_type{})};
  if (!load.empty()) CHECK(io::load_checkpoint(net, optimizer, load).step == from);
  for (auto step = from; step < to; ++step) {
    optimizer.zero_grad();
    cross_entropy(net(test::share(numbers(7, 5, step), world)), test::share(labels(7, 3, step), world)).backward();
    optimizer.step();
  }
  if (!save.empty()) io::save_checkpoint(net, optimizer, {.step = to}, save);
}
template <class Opt = AdamW>
std::string sharded(int ranks, std::uint32_t from, std::uint32_t to, const std::string& load, const std::string& save) {
  return common_text(ranks, [=](const World& world) {
    FullySharded<Model, EachLayer> rank(world);
    run<Opt>(rank.net, world, from, to, load, save);
    const auto whole = rank.net.gathered();
    return test::text_of(test::values(rank.net.module()));
  });
}
template <class Opt = AdamW>
std::string distributed(int ranks, std::uint32_t from, std::uint32_t to, const std::string& load,
                        const std::string& save) {
  return common_text(ranks, [=](const World& world) {
    Distributed<Model> rank(world);
    run<Opt>(rank.net, world, from, to, load, save);
    return test::text_of(test::values(rank.net.module()));
  });
}
template <class Opt = AdamW>
std::string single(std::uint32_t from, std::uint32_t to, const std::string& load, const std::string& save) {
  SingleDevice<Model> net{make<Model>(), 3};
  run<Opt>(net, {}, from, to, load, save);
  return test::text_of(test::values(net.module()));
}

TEST_CASE("fsdp: rank0_offload_full_state_dict: a file of 3 ranks resumes under 2, 8, DDP and one device, and back") {
  const auto path = file_for("resume"), again = file_for("again");
  const auto undisturbed = sharded(3, 0, 8, "", "");
  CHECK(sharded(3, 0, 4, "", path) != undisturbed);
  CHECK(sharded(3, 4, 8, path, again) == undisturbed);  // to the bit
  for (const int ranks : {1, 2, 8}) CHECK(test::apart(sharded(ranks, 4, 8, path, ""), undisturbed) < 1e-9);
  CHECK(test::apart(distributed(2, 4, 8, path, ""), undisturbed) < 1e-9);
  CHECK(test::apart(single(4, 8, path, ""), undisturbed) < 1e-9);

  single(0, 4, "", path);
  CHECK(test::apart(sharded(2, 4, 8, path, ""), undisturbed) < 1e-9);
  distributed(2, 0, 4, "", path);
  CHECK(test::apart(sharded(3, 4, 8, path, ""), undisturbed) < 1e-9);
  std::filesystem::remove(path);
  std::filesystem::remove(again);
}

TEST_CASE("fsdp: Muon's file of 3 ranks resumes under 2, 8 and one device, and back") {
  const auto path = file_for("muon");
  const auto undisturbed = sharded<Muon>(3, 0, 6, "", "");
  CHECK(sharded<Muon>(3, 0, 3, "", path) != undisturbed);
  CHECK(sharded<Muon>(3, 3, 6, path, "") == undisturbed);  // to the bit
  for (const int ranks : {2, 8}) CHECK(test::apart(sharded<Muon>(ranks, 3, 6, path, ""), undisturbed) < 1e-9);
  CHECK(test::apart(single<Muon>(3, 6, path, ""), undisturbed) < 1e-9);
  single<Muon>(0, 3, "", path);
  CHECK(test::apart(sharded<Muon>(2, 3, 6, path, ""), undisturbed) < 1e-9);
  std::filesystem::remove(path);
}

TEST_CASE("fsdp: the file is the one that a single device writes, byte by byte, also through rank 0") {
  const auto plain = file_for("plain"), parts = file_for("parts"), through = file_for("through");
  Model model = make<Model>();
  const io::Metadata metadata{{"who", "a test"}};
  io::save(model, plain, metadata);
  common_text(3, [=](const World& world) {
    FullySharded<Model, EachLayer> rank(world);
    io::save(rank.net, parts, metadata);
    auto noted = metadata;
    io::detail::note_model(noted, rank.net.module());
    io::detail::write_in_parts(rank.net.communicator(), through, io::detail::places_in_parts<Cpu>(rank.net), noted,
                               true);
    return std::string("done");
  });
  CHECK(bytes_of(parts) == bytes_of(plain));
  CHECK(bytes_of(through) == bytes_of(plain));
  for (const auto& path : {plain, parts, through}) std::filesystem::remove(path);
}

TEST_CASE("fsdp: io::load fills a net from a file of weights, on all ranks") {
  const auto path = file_for("weights");
  auto other = test::make<Model>(7);
  io::save(other, path);
  const auto text = common_text(3, [=](const World& world) {
    FullySharded<Model, EachLayer> rank(world);
    io::load(rank.net, path);
    const auto hash = io::parameters_sha256(rank.net);
    const auto whole = rank.net.gathered();
    CHECK(io::parameters_sha256(rank.net.module()) == hash);
    return test::text_of(test::values(rank.net.module()));
  });
  CHECK(text == test::text_of(test::values(other)));
  std::filesystem::remove(path);
}

TEST_CASE("fsdp: what a rank can't write is told by all, in its words, once rank 0 has tidied up") {
  const auto path = file_for("half");
  std::ofstream(path) << "half";
  const auto told = common_text(3, [&](const World& world) {
    FullySharded<Model, EachLayer> rank(world);
    const auto step = [&] {
      if (world.rank > 0) fail<FileError>("no room for ", world.rank);
    };
    const auto undo = [&] {
      if (world.rank > 0) return;
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      std::filesystem::remove(path);
    };
    const auto text = message_of<FileError>([&] { io::detail::on_all_ranks(rank.net.communicator(), step, undo); });
    return cat(text, std::filesystem::exists(path) ? ", and half is left" : "");
  });
  CHECK(told == "rank 1: no room for 1");
}

TEST_CASE("fsdp: a file that becomes too long is an error on all ranks, and nothing is left") {
  const auto path = file_for("long");
  rlimit before{};
  getrlimit(RLIMIT_FSIZE, &before);
  const rlimit small{700, before.rlim_max};
  setrlimit(RLIMIT_FSIZE, &small);
  const auto told = common_text(2, [&](const World& world) {
    FullySharded<Model, EachLayer> rank(world);
    return message_of<FileError>([&] { io::save(rank.net, path); });
  });
  setrlimit(RLIMIT_FSIZE, &before);
  CHECK(told == cat("rank 0: saving ", path, ": extending the file failed: File too large"));
  for (const auto& entry : std::filesystem::directory_iterator(std::filesystem::temp_directory_path()))
    CHECK(entry.path().filename().string().find(cat(getpid(), "_long")) == std::string::npos);
}

TEST_CASE("fsdp: where a rank other than 0 can't write its part, the old file stays, and nothing else is left") {
  const auto path = file_for("old");
  std::ofstream(path) << "old";
  const auto told = common_text(2, [&](const World& world) {
    FullySharded<Model, EachLayer> rank(world);
    rlimit own{};
    getrlimit(RLIMIT_FSIZE, &own);
    if (world.rank == 1) own.rlim_cur = 100;
    setrlimit(RLIMIT_FSIZE, &own);
    return message_of<FileError>([&] { io::save(rank.net, path); });
  });
  CHECK(told == cat("rank 1: saving ", path, ": writing failed: File too large"));
  CHECK(bytes_of(path) == "old");
  std::filesystem::remove(path);
  for (const auto& entry : std::filesystem::directory_iterator(std::filesystem::temp_directory_path()))
    CHECK(entry.path().filename().string().find(cat(getpid(), "_old")) == std::string::npos);
}

TEST_CASE("fsdp: a file that can't be written, or doesn't fit, is an error on all ranks, and nothing is left") {
  const auto failed = common_text(3, [](const World& world) {
    FullySharded<Model, EachLayer> rank(world);
    const auto message = message_of<FileError>([&] { io::save(rank.net, "/nowhere/at/all.safetensors"); });
    return std::string(message.empty() ? "none" : "refused");
  });
  CHECK(failed == "refused");
  const auto path = file_for("other");
  test::Smooth<Cpu> other;
  io::save(other, path);
  const auto misfit = common_text(2, [=](const World& world) {
    FullySharded<Model, EachLayer> rank(world);
    AdamW optimizer{rank.net.parameters(), {.lr = 0.02, .weight_decay = 0.01}};
    return message_of<FileError>([&] { io::load_checkpoint(rank.net, optimizer, path); });
  });
  CHECK_THAT(misfit, Contains("it is not a checkpoint"));
  std::filesystem::remove(path);
}

}  // namespace sharded_files_test
