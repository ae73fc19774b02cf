/// Whatever happens during a save, the old file or the new one is there, and no other files.

#include <catch.hpp>

#include <fcntl.h>

#include <atomic>
#include <csignal>
#include <string>
#include <thread>
#include <vector>

#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <chorus/core/atomic_file.hpp>
#include <chorus/io/safetensors_reader.hpp>
#include <chorus/io/safetensors_writer.hpp>

#include "child_process.hpp"
#include "files.hpp"

namespace atomic_file_test {

using namespace chorus;
using namespace chorus_test;
using io::AtomicFile;

using Names = std::vector<std::string>;

void save(const std::string& path, std::string_view content) {
  AtomicFile file(path);
  file.write(content);
  file.commit();
}

std::string refusal(const std::string& path) {
  return message_of<FileError>([&] { save(path, "new"); });
}

bool contains(std::string_view text, std::string_view part) { return text.find(part) != text.npos; }

/// A model of two tensors with the same value in every element, so that mixed contents would show.
void save_model(const std::string& path, char value) {
  const std::string weights(3000, value), bias(40, value);
  const std::vector<Index> shape{3000}, shape2{40};
  const io::TensorView tensors[] = {{"weight", io::FileDType::u8, shape, bytes_of(weights)},
                                    {"bias", io::FileDType::u8, shape2, bytes_of(bias)}};
  io::write_safetensors(path, tensors, {{"value", std::string(1, value)}});
}

/// The value of the model in the file; throws, or returns '?', if there is no single value.
char load_model(const std::string& path) {
  const io::SafetensorsReader file(path);
  const char value = file.metadata().at("value").at(0);
  for (const io::TensorEntry& entry : file.entries()) {
    std::string data(entry.bytes, '\0');
    file.read(entry, std::as_writable_bytes(std::span(data)));
    if (data != std::string(entry.bytes, value)) return '?';
  }
  return file.entries().size() == 2 ? value : '?';
}

/// A temporary file that a killed process leaves.
constexpr const char* leftover = ".model.0123456789abcdef.tmp";

TEST_CASE("a file appears when it is committed") {
  const TemporaryFolder folder;
  {
    AtomicFile file(folder / "x");
    file.write("new");
    CHECK(folder.names().size() == 1);
    CHECK(folder.names()[0].starts_with(".x."));
    file.commit();
    CHECK(folder.names() == Names{"x"});
    CHECK_THROWS_WITH(file.commit(), "saving " + (folder / "x") + ": commit of a file that is committed or has failed");
    CHECK_THROWS_WITH(file.write("more"),
                      "saving " + (folder / "x") + ": write to a file that is committed or has failed");
  }
  CHECK(get(folder / "x") == "new");
  {
    AtomicFile file(folder / "x");
    file.write("never committed");
  }
  CHECK(get(folder / "x") == "new");
  CHECK(folder.names() == Names{"x"});
}

TEST_CASE("a new file has the permissions that the umask leaves") {
  const TemporaryFolder folder;
  const mode_t before = ::umask(027);
  save(folder / "x", "new");
  ::umask(before);
  CHECK(std::filesystem::status(folder / "x").permissions() == std::filesystem::perms(0640));
}

TEST_CASE("paths without a folder, and long names, can be saved") {
  const TemporaryFolder folder;
  const auto before = std::filesystem::current_path();
  std::filesystem::current_path(folder.path());
  save("x", "new");
  std::filesystem::current_path(before);
  CHECK(get(folder / "x") == "new");
  const std::string long_name(255, 'n');
  save(folder / long_name, "new");
  CHECK(get(folder / long_name) == "new");
}

TEST_CASE("a place where no file can be is refused, with path, step and reason") {
  const TemporaryFolder folder;
  put(folder / "file", "old");
  std::filesystem::create_directory(folder / "folder");
  const auto starts = [](const std::string& path, const std::string& rest) {
    CHECK(refusal(path) == "saving " + path + rest);
  };
  starts(folder / "none/x", ": opening the folder " + (folder / "none/") + " failed: No such file or directory");
  starts(folder / "file/x", ": opening the folder " + (folder / "file/") + " failed: Not a directory");
  starts(folder / "folder", ": it exists and is not a regular file");
  starts(folder / "folder/", ": the path has no file name");
  CHECK(refusal("") == "saving \"\": the path has no file name");
  REQUIRE(::mkfifo((folder / "pipe").c_str(), 0600) == 0);
  starts(folder / "pipe", ": it exists and is not a regular file");
  starts(folder / std::string(256, 'n'), ": looking at the old file failed: File name too long");
  std::filesystem::create_symlink("around", folder / "around");
  starts(folder / "around", ": following the symbolic link failed: Too many levels of symbolic links");
  CHECK(folder.names() == Names{"around", "file", "folder", "pipe"});
  CHECK(get(folder / "file") == "old");
}

TEST_CASE("a symbolic link is followed and stays") {
  const TemporaryFolder folder;
  std::filesystem::create_directory(folder / "real");
  put(folder / "real/x", "old");
  std::filesystem::create_symlink("real/x", folder / "latest");
  save(folder / "latest", "new");
  CHECK(std::filesystem::is_symlink(folder / "latest"));
  CHECK(get(folder / "real/x") == "new");
  CHECK(folder.names() == Names{"latest", "real"});
}

TEST_CASE("a symbolic link to nothing yet leads to where the file is to be") {
  const TemporaryFolder folder;
  std::filesystem::create_directory(folder / "real");
  std::filesystem::create_symlink("real/x", folder / "next");
  std::filesystem::create_symlink(folder / "next", folder / "latest");
  save(folder / "latest", "new");
  CHECK(get(folder / "real/x") == "new");
  CHECK(folder.names() == Names{"latest", "next", "real"});
}

TEST_CASE("write_file replaces a file, and writes to a pipe or a device without replacing it") {
  const TemporaryFolder folder;
  put(folder / "file", "old");
  io::write_file("test", folder / "file", "new");
  CHECK(get(folder / "file") == "new");
  io::write_file("test", "/dev/null", "new");
  CHECK(std::filesystem::is_character_file("/dev/null"));
  REQUIRE(::mkfifo((folder / "pipe").c_str(), 0600) == 0);
  const int reader = ::open((folder / "pipe").c_str(), O_RDONLY | O_NONBLOCK);
  io::write_file("test", folder / "pipe", "new");
  char read[8] = {};
  CHECK(::read(reader, read, sizeof read) == 3);
  CHECK(std::string(read) == "new");
  ::close(reader);
  CHECK(std::filesystem::is_fifo(folder / "pipe"));
  const auto message = [](const std::string& path) {
    return message_of<FileError>([&] { io::write_file("test", path, "new"); });
  };
  CHECK(message("/dev/full") == "test: cannot write '/dev/full': No space left on device");
  CHECK(message(folder.path()) == "test: cannot write '" + folder.path() + "': Is a directory");
  CHECK(folder.names() == Names{"file", "pipe"});
}

TEST_CASE("what is write-protected is not replaced") {
  const TemporaryFolder folder;
  REQUIRE(::chmod(folder.path().c_str(), 0777) == 0);
  std::filesystem::create_directory(folder / "closed");
  put(folder / "protected", "old");
  REQUIRE(::chmod((folder / "protected").c_str(), 0444) == 0);
  REQUIRE(::chmod((folder / "closed").c_str(), 0555) == 0);
  const auto as_user = [](const std::string& path) {
    return in_child([&] {
             constexpr uid_t nobody = 65534;
             if (::geteuid() == 0 && ::setuid(nobody) != 0) throw std::runtime_error("setuid");
             save(path, "new");
           })
        .message;
  };
  CHECK(as_user(folder / "protected") ==
        "saving " + (folder / "protected") + ": replacing the old file failed: Permission denied");
  CHECK(as_user(folder / "closed/x") ==
        "saving " + (folder / "closed/x") + ": creating a temporary file in its folder failed: Permission denied");
  CHECK(get(folder / "protected") == "old");
}

TEST_CASE("what killed writers left is removed by the next one, and nothing else") {
  const TemporaryFolder folder;
  for (const char* name : {leftover, ".model.fedcba9876543210.tmp"}) put(folder / name, "partial");
  const Names others = {".model.0123456789abcde.tmp", ".model.0123456789abcdef.tmpx", ".other.0123456789abcdef.tmp",
                        "model.0123456789abcdef.tmp"};
  for (const std::string& name : others) put(folder / name, "precious");
  save_model(folder / "model", 'n');
  Names expected = others;
  expected.push_back("model");
  std::sort(expected.begin(), expected.end());
  CHECK(folder.names() == expected);
}

TEST_CASE("a file that is being written is not taken for a leftover") {
  const TemporaryFolder folder;
  AtomicFile first(folder / "model");
  first.write("first");
  save(folder / "model", "second");
  CHECK(get(folder / "model") == "second");
  first.commit();
  CHECK(get(folder / "model") == "first");
  CHECK(folder.names() == Names{"model"});
}

TEST_CASE("writers of one file in several threads all succeed, and one wins") {
  const TemporaryFolder folder;
  std::atomic<int> errors = 0;
  std::vector<std::thread> threads;
  for (const char value : {'a', 'b', 'c', 'd'}) {
    threads.emplace_back([&, value] {
      for (int i = 0; i < 25; ++i) {
        try {
          save_model(folder / "model", value);
          if (load_model(folder / "model") == '?') ++errors;
        } catch (const std::exception&) {
          ++errors;
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(errors == 0);
  CHECK(folder.names() == Names{"model"});
}

TEST_CASE("a disk that is full after any number of bytes leaves the old file, and no other") {
  const TemporaryFolder folder;
  save_model(folder / "model", 'n');
  const std::size_t size = get(folder / "model").size();
  save_model(folder / "model", 'o');
  const auto save_with_limit = [&](rlim_t limit, bool ignored) {
    return in_child([&] {
      // A write of the test's own output past the limit would end the process.
      std::signal(SIGXFSZ, ignored ? SIG_IGN : SIG_DFL);
      const rlimit limits{limit, limit}, no_core{0, 0};
      ::setrlimit(RLIMIT_CORE, &no_core);
      ::setrlimit(RLIMIT_FSIZE, &limits);
      save_model(folder / "model", 'n');
    });
  };
  for (std::size_t limit = 0; limit < size; limit += limit < 300 ? 13 : 331) {
    CAPTURE(limit);
    for (const bool ignored : {false, true}) {
      const ChildResult full = save_with_limit(limit, ignored);
      CHECK(full.message == "saving " + (folder / "model") + ": writing failed: File too large");
      CHECK(load_model(folder / "model") == 'o');
      CHECK(folder.names() == Names{"model"});
    }
  }
  CHECK(save_with_limit(size, false).message == "");
  CHECK(load_model(folder / "model") == 'n');
}

TEST_CASE("a file is synced before it is renamed, and its folder after") {
  const TemporaryFolder folder;
  const Fault none;
  const ChildResult result = in_child([&] { save_model(folder / "model", 'n'); }, &none);
  if (!result.supervised) {
    WARN("not checked: this machine does not let a process supervise the system calls of another");
    return;
  }
  REQUIRE(load_model(folder / "model") == 'n');
  std::vector<long> steps;
  for (const long call : result.calls) {
    const bool is_step = call == SYS_write || call == SYS_fsync || call == SYS_renameat || call == SYS_flock;
    if (is_step) steps.push_back(call);
  }
  CHECK(steps == std::vector<long>{SYS_flock, SYS_write, SYS_write, SYS_write, SYS_fsync, SYS_renameat, SYS_fsync});
}

TEST_CASE("a file whose writing failed can't be committed") {
  const TemporaryFolder folder;
  put(folder / "x", "old");
  const ChildResult result = in_child([&] {
    std::signal(SIGXFSZ, SIG_IGN);
    const rlimit limits{3, 3};
    ::setrlimit(RLIMIT_FSIZE, &limits);
    AtomicFile file(folder / "x");
    try {
      file.write("longer");
    } catch (const FileError&) {
    }
    file.commit();
  });
  CHECK(result.message == "saving " + (folder / "x") + ": commit of a file that is committed or has failed");
  CHECK(get(folder / "x") == "old");
  CHECK(folder.names() == Names{"x"});
}

TEST_CASE("a process killed at any system call leaves the old file or the new one") {
  const TemporaryFolder folder;
  bool killed = true;
  int old_files = 0, new_files = 0;
  for (std::size_t call = 1; killed && call < 200; ++call) {
    save_model(folder / "model", 'o');
    put(folder / leftover, "partial");
    const Fault fault{call, 0};
    const ChildResult result = in_child([&] { save_model(folder / "model", 'n'); }, &fault);
    if (!result.supervised) {
      WARN("not checked: this machine does not let a process supervise the system calls of another");
      return;
    }
    CAPTURE(call, result.hit);
    killed = result.killed;
    const char found = load_model(folder / "model");
    REQUIRE((found == 'o' || found == 'n'));
    ++(found == 'o' ? old_files : new_files);
    save_model(folder / "model", 'N');
    REQUIRE(load_model(folder / "model") == 'N');
    REQUIRE(folder.names() == Names{"model"});
  }
  CHECK_FALSE(killed);
  CHECK(old_files > 15);
  CHECK(new_files > 2);
}

TEST_CASE("any system call that fails once leaves the old file, or the new one, and an error that says so") {
  const TemporaryFolder folder;
  for (const int error : {EIO, ENOSPC, EINTR, EMFILE, EDQUOT}) {
    bool hit = true;
    int failed = 0;
    for (std::size_t call = 1; hit && call < 200; ++call) {
      save_model(folder / "model", 'o');
      put(folder / leftover, "partial");
      const Fault fault{call, error};
      const ChildResult result = in_child([&] { save_model(folder / "model", 'n'); }, &fault);
      if (!result.supervised) {
        WARN("not checked: this machine does not let a process supervise the system calls of another");
        return;
      }
      CAPTURE(call, result.hit, result.message, std::strerror(error));
      hit = result.hit != -1;
      REQUIRE_FALSE(result.killed);
      const bool in_place = result.message.empty() || contains(result.message, ": the file is in place, ");
      REQUIRE(load_model(folder / "model") == (in_place ? 'n' : 'o'));
      if (!result.message.empty()) {
        ++failed;
        REQUIRE(result.message.starts_with("saving " + (folder / "model") + ": "));
        REQUIRE(result.message.ends_with(cat(" failed: ", std::strerror(error))));
      }
      const bool interrupted = error == EINTR && (result.hit == SYS_write || result.hit == SYS_fsync);
      if (interrupted) REQUIRE(result.message == "");
      // A failed save leaves no temporary file.
      for (const std::string& name : folder.names()) REQUIRE((name == "model" || name == leftover));
      save_model(folder / "model", 'N');
      REQUIRE(folder.names() == Names{"model"});
    }
    CHECK_FALSE(hit);
    CHECK(failed > 5);
  }
}

}  // namespace atomic_file_test
