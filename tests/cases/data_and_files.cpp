// Loaders that are read twice, samples that are seen twice, and files as PyTorch's users have them.
#include "policies.hpp"

#include <cstring>
#include <deque>
#include <filesystem>
#include <fstream>
#include <unistd.h>

namespace cases {
namespace {

namespace fs = std::filesystem;

struct Folder {
  fs::path path = fs::temp_directory_path() / ("chorus-cases-" + std::to_string(getpid()));
  Folder() { fs::create_directories(path); }
  ~Folder() { fs::remove_all(path); }
};

// petastorm#544, pytorch-lr-finder#60: a second loop over a loader within the first.
const Add nested("nested_loops", R"(
workers 0: outer 5, inner 5; with a look at a batch 5
workers 2: outer 5, inner 5; with a look at a batch 5
)",
                 [](std::ostream& out) {
  const ch::data::SyntheticImages data{40, 1};
  for (const int workers : {0, 2}) {
    ch::data::DataLoader loader{data, ch::data::Sampler(data.size(), {.shuffle = false}),
                                {.batch = 8, .workers = workers}};
    int outer = 0, inner = 0, looked = 0;
    for ([[maybe_unused]] const auto& batch : loader)
      if (++outer == 2)
        for ([[maybe_unused]] const auto& other : loader) ++inner;
    for ([[maybe_unused]] const auto& batch : loader)
      if (++looked == 3) (void)(*loader.begin()).index;
    out << "workers " << workers << ": outer " << outer << ", inner " << inner << "; with a look at a batch " << looked
        << "\n";
  }
});

// pytorch#5059, SimCLR: two views of each sample.
const Add two_views("two_views", "2 views of 8 samples, the same pixels: 0", [](std::ostream& out) {
  const ch::data::SyntheticImages data{8, 1};
  ch::data::DataLoader loader{data, ch::data::Sampler(data.size()),
                              {.batch = 8, .transforms = {ch::data::RandomCrop{4}}, .views = 2}};
  for (const auto& batch : loader) {
    int same = 0;
    for (ch::Index i = 0; i < batch.views.size(1); ++i)
      same += ch::contiguous(batch.views[0][i]).to_vector() == ch::contiguous(batch.views[1][i]).to_vector();
    out << batch.views.size(0) << " views of " << batch.views.size(1) << " samples, the same pixels: " << same << "\n";
  }
});

// cudnn-training#13, python-mnist#19: MNIST's files under other names.
const Add mnist("mnist_names", R"(
train-images.idx3-ubyte: 4 images
raw/train-images-idx3-ubyte: 4 images
train-images-idx3-ubyte/train-images-idx3-ubyte: 4 images
nothing: refused, with what is there
)",
                [](std::ostream& out) {
  const auto write = [](const fs::path& path, std::initializer_list<unsigned char> sizes) {
    fs::create_directories(path.parent_path());
    std::ofstream file(path, std::ios::binary);
    file.put(0).put(0).put(8).put(static_cast<char>(sizes.size()));
    std::size_t count = 1;
    for (const unsigned char size : sizes) {
      file.put(0).put(0).put(0).put(static_cast<char>(size));
      count *= size;
    }
    for (std::size_t i = 0; i < count; ++i) file.put(static_cast<char>(i % 10));
  };
  for (const std::string images : {"train-images.idx3-ubyte", "raw/train-images-idx3-ubyte",
                                   "train-images-idx3-ubyte/train-images-idx3-ubyte"}) {
    const Folder folder;
    auto labels = images;
    for (std::size_t at = 0; (at = labels.find("images", at)) != labels.npos;) labels.replace(at, 6, "labels");
    for (std::size_t at = 0; (at = labels.find("idx3", at)) != labels.npos;) labels.replace(at, 4, "idx1");
    write(folder.path / images, {4, 28, 28});
    write(folder.path / labels, {4});
    out << images << ": " << ch::data::Mnist(folder.path).size() << " images\n";
  }
  const Folder folder;
  std::ofstream(folder.path / "notes.txt") << "x";
  const auto text = refusal([&] { ch::data::Mnist{folder.path}; });
  out << "nothing: " << (text.find("notes.txt") != text.npos ? "refused, with what is there" : text) << "\n";
});

template <class D>
struct Loaded : ch::nn::Module {
  ch::nn::Linear<D> fc{3, 4};
  ch::nn::BatchNorm1d<D> norm{4};
  CHORUS_MODULE(Loaded, fc, norm)
  auto forward(const auto& x) const { return norm(fc(x)); }
};

// accelerate#2807, pytorch#8481, nanoGPT#325: files of models that were wrapped, are older, or have more.
const Add wild("safetensors_in_the_wild", R"(
as it is: loaded
without num_batches_tracked: loaded
module._orig_mod.: loaded
bf16: loaded
one more: refused; with strict = false: unexpected: head.weight
)",
               [](std::ostream& out) {
  const Folder folder;
  Loaded<ch::Cpu> model;
  const auto write = [&](const std::string& prefix, bool counts, bool narrow, bool more) {
    std::vector<ch::io::TensorView> views;
    std::deque<std::vector<ch::Index>> shapes;
    static const std::vector<float> ones(64, 1);
    static const std::vector<ch::bf16> narrow_ones(64, ch::bf16(1.0f));
    static const std::int64_t count = 7;
    const auto add = [&](const std::string& name, std::vector<ch::Index> shape) {
      ch::Index size = 1;
      for (const auto extent : shape) size *= extent;
      const auto bytes = narrow ? std::as_bytes(std::span(narrow_ones)).first(static_cast<std::size_t>(size) * 2)
                                : std::as_bytes(std::span(ones)).first(static_cast<std::size_t>(size) * 4);
      shapes.push_back(std::move(shape));
      views.push_back({prefix + name, narrow ? ch::io::FileDType::bf16 : ch::io::FileDType::f32, shapes.back(), bytes});
    };
    add("fc.weight", {4, 3});
    for (const char* name : {"fc.bias", "norm.weight", "norm.bias", "norm.running_mean", "norm.running_var"})
      add(name, {4});
    if (counts)
      views.push_back({prefix + "norm.num_batches_tracked", ch::io::FileDType::i64, {},
                       std::as_bytes(std::span(&count, 1))});
    if (more) add("head.weight", {2, 4});
    ch::io::write_safetensors((folder.path / "m.safetensors").string(), views, {});
  };
  const auto load = [&](const ch::io::LoadOptions& options = {}) {
    for (const auto& named : ch::nn::named_parameters<ch::Cpu>(model))
      std::memset(named.parameter->value_data(), 0, named.parameter->size_bytes());
    std::string text;
    const auto refused = refusal(
        [&] { text = ch::cat(ch::io::load(model, (folder.path / "m.safetensors").string(), options)); });
    if (refused != "no error") return std::string("refused");
    return model.fc.weight.value()(3, 2) == 1 && model.norm.running_var.value()(3) == 1 ? "loaded" + text
                                                                                        : std::string("other numbers");
  };
  write("", true, false, false);
  out << "as it is: " << load() << "\n";
  write("", false, false, false);
  out << "without num_batches_tracked: " << load() << "\n";
  write("module._orig_mod.", true, false, false);
  out << "module._orig_mod.: " << load() << "\n";
  write("", true, true, false);
  out << "bf16: " << load() << "\n";
  write("", true, false, true);
  out << "one more: " << load();
  const auto relaxed = load({.strict = false});
  out << "; with strict = false: " << relaxed.substr(relaxed.find("unexpected")) << "\n";
});

}  // namespace
}  // namespace cases
