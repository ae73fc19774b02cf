// Each system call of a save and of a load fails once, transfers fewer bytes than requested, or kills the process. The
// file is the old one or the new one, the error names path and reason, and no files or descriptors leak.
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <catch.hpp>
#include <cerrno>
#include <chorus/data/idx.hpp>
#include <chorus/io/checkpoint.hpp>
#include <chorus/io/model_file.hpp>
#include <chorus/io/npz.hpp>
#include <chorus/io/parameters_hash.hpp>
#include <chorus/io/tensor_file.hpp>
#include <chorus/nn/linear.hpp>
#include <chorus/optim/adam.hpp>
#include <chorus/parallel/single_device.hpp>
#include <chorus/train/metrics.hpp>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "child_process.hpp"
#include "files.hpp"

#if CHORUS_USE_ZLIB
#include <zlib.h>
#endif

namespace file_faults_test {
/// The most bytes that one call transfers; 0: no limit.
std::size_t most = 0;
std::size_t limited(std::size_t count) { return most == 0 ? count : std::min(count, most); }
}  // namespace file_faults_test

// Overrides the C library's functions in this program.
extern "C" ssize_t write(int file, const void* data, std::size_t count) {
  return syscall(SYS_write, file, data, file_faults_test::limited(count));
}
extern "C" ssize_t read(int file, void* data, std::size_t count) {
  return syscall(SYS_read, file, data, file_faults_test::limited(count));
}
extern "C" ssize_t pread(int file, void* data, std::size_t count, off_t offset) {
  return syscall(SYS_pread64, file, data, file_faults_test::limited(count), offset);
}

namespace file_faults_test {

using namespace chorus;
using namespace chorus_test;

using Names = std::vector<std::string>;

struct Model : nn::Module {
  nn::Linear<Cpu> fc{3, 5};
  CHORUS_MODULE(Model, fc)
  int forward() const { return 0; }
};

/// A run in which all numbers are `value`, those of the optimizer's state too.
struct Run {
  SingleDevice<Model> net{Model(), 3};
  optim::Adam<Cpu> optimizer{net.parameters(), {.lr = 0.1}};

  explicit Run(float value) {
    for (const auto& tensor : optimizer.state())
      if (tensor.dtype == DType::f32) fill(tensor, value);
    for (auto& place : io::detail::model_places<Cpu>(net.module()))
      std::fill_n(static_cast<float*>(place.data), static_cast<std::size_t>(numel(place.shape)), value);
  }
  static void fill(const optim::StateTensor& tensor, float value) {
    std::fill_n(static_cast<float*>(tensor.data), static_cast<std::size_t>(numel(tensor.shape)), value);
  }
  std::string numbers() {
    auto text = io::parameters_sha256(net.module());
    for (const auto& tensor : optimizer.state())
      if (tensor.dtype == DType::f32)
        text.append(static_cast<const char*>(tensor.data), static_cast<std::size_t>(numel(tensor.shape)) * 4);
    return text;
  }
};

Tensor<float, 2> numbers(float value) { return Tensor<float, 2>::full({5, 7}, value); }

void require(bool right) {
  if (!right) throw std::logic_error("wrong numbers were read");
}

/// One kind of file: how to save it, and how to load and check it with the expected value.
struct Kind {
  const char* name;
  std::function<void(const std::string& path, float value)> save;
  std::function<void(const std::string& path, float value)> load;
};

const std::vector<Kind> kinds{
    {"safetensors",
     [](const std::string& path, float value) {
       const auto tensor = numbers(value);
       const std::vector<io::TensorView> tensors{io::view_of("x", tensor)};
       io::write_safetensors(path, tensors, {{"key", "value"}});
     },
     [](const std::string& path, float value) {
       const auto tensor = io::read_tensor<float, 2>(io::SafetensorsReader(path), "x");
       require(tensor.to_vector() == numbers(value).to_vector());
     }},
    {"model", [](const std::string& path, float value) { io::save(Run(value).net.module(), path); },
     [](const std::string& path, float value) {
       Run run(-1);
       const auto before = run.numbers();
       try {
         io::load(run.net.module(), path);
       } catch (...) {
         require(run.numbers() == before);
         throw;
       }
       require(io::parameters_sha256(run.net.module()) == io::parameters_sha256(Run(value).net.module()));
     }},
    {"checkpoint",
     [](const std::string& path, float value) {
       Run run(value);
       io::save_checkpoint(run.net, run.optimizer, {1, 2, 3}, path);
     },
     [](const std::string& path, float value) {
       Run run(-1);
       const auto before = run.numbers();
       try {
         require(io::load_checkpoint(run.net, run.optimizer, path).step == 3);
       } catch (...) {
         require(run.numbers() == before);
         throw;
       }
       require(run.numbers() == Run(value).numbers());
     }},
    {"npy", [](const std::string& path, float value) { io::save_npy(path, numbers(value)); },
     [](const std::string& path, float value) {
       require(io::load_npy<float, 2>(path).to_vector() == numbers(value).to_vector());
     }},
    {"npz",
     [](const std::string& path, float value) {
       io::NpzWriter writer;
       writer.add("a", numbers(value));
       writer.add("b", numbers(2 * value));
       writer.save(path);
     },
     [](const std::string& path, float value) {
       require(io::NpzReader(path).read<float, 2>("b").to_vector() == numbers(2 * value).to_vector());
     }}};

constexpr float old_value = 1, new_value = 2;

std::size_t open_descriptors() {
  std::size_t count = 0;
  for (int file = 0; file < 256; ++file) count += fcntl(file, F_GETFD) >= 0;
  return count;
}

constexpr const char* leak = " and a descriptor has leaked";

/// Runs `body` with a fault; a descriptor that it leaves open is an error.
ChildResult with_fault(const Fault& fault, const std::function<void()>& body) {
  auto result = in_child(
      [&] {
        const auto before = open_descriptors();
        const auto leaked = [&] { return open_descriptors() != before ? leak : ""; };
        std::string message;
        try {
          body();
        } catch (const Error& error) {
          throw std::runtime_error(std::string(error.what()) + leaked());
        }
        if (*leaked() != '\0') throw std::runtime_error(leaked());
      },
      &fault);
  // A close that the fault prevented leaves its descriptor open.
  if (result.hit == SYS_close && result.message.ends_with(leak))
    result.message.resize(result.message.size() - std::strlen(leak));
  return result;
}

/// Calls `with(fault)` for the first system call, the second one, and so on, until there are no more. Returns false if
/// this machine does not let a process intercept another's system calls.
bool for_each_call(int error, const std::function<ChildResult(const Fault& fault)>& with) {
  for (std::size_t call = 1; call < 500; ++call) {
    const auto result = with({call, error});
    if (!result.supervised) {
      WARN("not checked: this machine does not let a process supervise the system calls of another");
      return false;
    }
    if (result.hit == -1) {
      CHECK(result.message == "");
      CHECK(call > 3);
      return true;
    }
  }
  FAIL("there is no end of system calls");
  return false;
}

constexpr int errors[] = {EIO, ENOSPC, EINTR, EMFILE};

TEST_CASE("any system call of a save that fails leaves the old file, or the new one, and an error that says so") {
  for (const auto& kind : kinds) {
    CAPTURE(kind.name);
    const TemporaryFolder folder;
    const auto path = folder / "file";
    kind.save(path, new_value);
    const auto new_file = get(path);
    kind.save(path, old_value);
    const auto old_file = get(path);
    REQUIRE(old_file != new_file);
    for (const int error : errors) {
      const auto with = [&](const Fault& fault) {
        const auto result = with_fault(fault, [&] { kind.save(path, new_value); });
        CAPTURE(fault.call, result.hit, result.message, std::strerror(error));
        REQUIRE_FALSE(result.killed);
        const bool in_place =
            result.message.empty() || result.message.find(": the file is in place, ") != std::string::npos;
        REQUIRE(get(path) == (in_place ? new_file : old_file));
        REQUIRE(folder.names() == Names{"file"});
        if (!result.message.empty()) {
          REQUIRE(result.message.starts_with("saving " + path + ": "));
          REQUIRE(result.message.ends_with(cat(" failed: ", std::strerror(error))));
        }
        put(path, old_file);
        return result;
      };
      if (!for_each_call(error, with)) return;
    }
  }
}

TEST_CASE("any system call of a load that fails gives an error with path and reason, and changes nothing") {
  for (const auto& kind : kinds) {
    CAPTURE(kind.name);
    const TemporaryFolder folder;
    const auto path = folder / "file";
    kind.save(path, old_value);
    kind.load(path, old_value);  // opens what libraries open once and keep
    for (const int error : errors) {
      const auto with = [&](const Fault& fault) {
        const auto result = with_fault(fault, [&] { kind.load(path, old_value); });
        CAPTURE(fault.call, result.hit, result.message, std::strerror(error));
        REQUIRE_FALSE(result.killed);
        if (!result.message.empty()) {
          REQUIRE(result.message.find(path + ": ") != std::string::npos);
          REQUIRE(result.message.ends_with(std::strerror(error)));
        } else {
          REQUIRE((result.hit == -1 || result.hit == SYS_close || error == EINTR));
        }
        return result;
      };
      if (!for_each_call(error, with)) return;
    }
  }
}

TEST_CASE("any system call of a dataset's file that fails gives an error with path and reason") {
  const TemporaryFolder folder;
  const auto plain = folder / "labels", zipped = folder / "labels.gz";
  put(plain, std::string("\0\0\x8\1\0\0\0\3abc", 11));
  Names paths{plain};
#if CHORUS_USE_ZLIB
  const auto file = gzopen(zipped.c_str(), "wb");
  gzwrite(file, get(plain).data(), 11);
  gzclose(file);
  paths.push_back(zipped);
#endif
  for (const auto& path : paths)
    for (const int error : errors) {
      const auto with = [&](const Fault& fault) {
        const auto result = with_fault(fault, [&] { require(data::read_idx(path, 1).values.size() == 3); });
        CAPTURE(fault.call, result.hit, result.message, std::strerror(error));
        REQUIRE_FALSE(result.killed);
        if (!result.message.empty()) {
          REQUIRE(result.message.starts_with(path + ": "));
          REQUIRE(result.message.ends_with(std::strerror(error)));
        } else {
          // stdio calls fstat to choose a buffer size, and does without if that fails.
          REQUIRE((result.hit == -1 || result.hit == SYS_close || result.hit == SYS_newfstatat));
        }
        return result;
      };
      if (!for_each_call(error, with)) return;
    }
}

TEST_CASE(
    "any system call of a metrics log that fails gives an error with path and reason, and no half line before it") {
  const TemporaryFolder folder;
  const auto path = folder / "log";
  const auto log = [&] {
    MetricsLog metrics(path);
    metrics.epoch(1, 0.5, 0.25, 1);
    metrics.epoch(2, 0.5, 0.25, 1);
  };
  log();
  const auto whole = get(path);
  for (const int error : errors) {
    const auto with = [&](const Fault& fault) {
      const auto result = with_fault(fault, log);
      CAPTURE(fault.call, result.hit, result.message, std::strerror(error));
      REQUIRE_FALSE(result.killed);
      const auto found = get(path);
      REQUIRE(whole.starts_with(found));
      REQUIRE((found.empty() || found.ends_with('\n')));
      if (result.message.empty())
        REQUIRE(found == whole);
      else
        REQUIRE(result.message.ends_with(cat("'", path, "': ", std::strerror(error))));
      return result;
    };
    if (!for_each_call(error, with)) return;
  }
}

TEST_CASE("writes and reads that move less than they are asked to are gone on with") {
  const TemporaryFolder folder;
  for (const auto& kind : kinds)
    for (const std::size_t bytes : {1u, 3u, 100u}) {
      CAPTURE(kind.name, bytes);
      const auto whole = folder / "whole", path = folder / "file";
      kind.save(whole, new_value);
      most = bytes;
      std::string message;
      try {
        kind.save(path, new_value);
        kind.load(path, new_value);
      } catch (const std::exception& error) {
        message = error.what();
      }
      most = 0;
      CHECK(message == "");
      CHECK(get(path) == get(whole));
    }
}

TEST_CASE("a process killed at any system call of a save leaves the old file or the new one") {
  int kills = 0;
  for (const auto& kind : kinds) {
    CAPTURE(kind.name);
    const TemporaryFolder folder;
    const auto path = folder / "file";
    kind.save(path, new_value);
    const auto new_file = get(path);
    kind.save(path, old_value);
    const auto old_file = get(path);
    const auto with = [&](const Fault& fault) {
      const auto result = with_fault(fault, [&] { kind.save(path, new_value); });
      CAPTURE(fault.call, result.hit);
      kills += result.killed;
      const auto found = get(path);
      REQUIRE((found == old_file || found == new_file));
      kind.save(path, old_value);  // removes leftovers
      REQUIRE(get(path) == old_file);
      REQUIRE(folder.names() == Names{"file"});
      return result;
    };
    if (!for_each_call(0, with)) return;
  }
  CHECK(kills > 100);
}

TEST_CASE("a process killed at any moment of its saves leaves the old file or the new one") {
  const TemporaryFolder folder;
  const auto& kind = kinds[2];
  const auto path = folder / "file";
  kind.save(path, new_value);
  const auto new_file = get(path);
  kind.save(path, old_value);
  const auto old_file = get(path);
  for (int i = 0; i < 100; ++i) {
    const auto child = fork();
    REQUIRE(child >= 0);
    if (child == 0)
      for (float value = new_value;; value = old_value + new_value - value) kind.save(path, value);
    usleep(static_cast<unsigned>(2000 + 137 * i % 6000));
    kill(child, SIGKILL);
    waitpid(child, nullptr, 0);
    const auto found = get(path);
    REQUIRE((found == old_file || found == new_file));
    kind.load(path, found == old_file ? old_value : new_value);
  }
  kind.save(path, old_value);
  CHECK(folder.names() == Names{"file"});
}

}  // namespace file_faults_test
