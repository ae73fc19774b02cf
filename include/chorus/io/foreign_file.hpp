#pragma once
/// Recognises other file formats by the first bytes, and tells how to convert them. No other byte of such a file is
/// interpreted: a pickle could make a program run code.

#include <algorithm>
#include <chorus/core/config.hpp>
#include <cstddef>
#include <span>
#include <string>
#include <string_view>

namespace chorus::io::detail {

/// Enough first bytes to recognise all formats.
inline constexpr std::size_t foreign_bytes = 4096;

/// "it is ...: ...", or "" if the format is unknown. `begin`: the first bytes, up to `foreign_bytes`.
[[gnu::cold]] inline std::string identify_file(std::span<const std::byte> begin, std::string_view path) {
  constexpr std::string_view from_numpy =
      "to read a model from it, convert it once in Python: import numpy; from safetensors.numpy import save_file; ";
  using namespace std::string_view_literals;
  const std::string_view text(reinterpret_cast<const char*>(begin.data()), std::min(begin.size(), foreign_bytes));
  const auto has = [&](std::string_view part) { return text.find(part) != text.npos; };
  const auto starts = [&](auto... marks) { return (text.starts_with(marks) || ...); };
  const auto is = [](auto... parts) { return (std::string("it is ") + ... + std::string(parts)); };
  const auto packed = [&](std::string_view kind, std::string_view command) {
    return is("compressed with ", kind, ": unpack it first (", command, ")");
  };

  if (text.empty()) return is("empty: check that it was downloaded or written completely");
  if (std::ranges::all_of(text, [](char c) { return c == '\0'; }))
    return is("zeros from its first byte on: check that it was downloaded or written completely");
  if (starts("version https://git-lfs"sv))
    return is("a git-lfs pointer in place of the file: fetch the file itself with git lfs pull");
  if (starts("PK\3\4"sv, "PK\5\6"sv)) {
    if (has("data.pkl") || has("/constants.pkl") || has("/code/"))
      return is("a file of PyTorch's torch.save, whose tensors io::load_pt (io/pt.hpp) reads without running its code");
    if (has(".npy"))
      return is("a NumPy archive (.npz), which io::NpzReader reads; ", from_numpy,
                "save_file(dict(numpy.load(\"FILE\")), \"FILE.safetensors\")");
    if (has("model.weights.h5") || has("config.json"))
      return is(
          "a model of Keras (a zip archive with an HDF5 file): convert it once in Python with keras and "
          "safetensors.numpy.save_file; Keras keeps weights as [inputs, outputs], so transpose them");
    return is("a zip archive: unpack it first (unzip FILE)");
  }
  if (text.size() > 1 && text[0] == '\x80' && text[1] >= 2 && text[1] <= 5)
    return is(
        "a Python pickle, as PyTorch's torch.save before 1.6 wrote it. chorus does not read it, because a pickle can "
        "run code. Write it again in Python: torch.save(torch.load(\"FILE\", map_location=\"cpu\", weights_only=True), "
        "\"FILE.pt\"), which io::load_pt reads");
  if (starts("\x89HDF\r\n"sv))
    return is(
        "an HDF5 file, as Keras and h5py write it: convert it once in Python: import h5py; from safetensors.numpy "
        "import save_file; t = {}; h5py.File(\"FILE\").visititems(lambda k, v: t.update({k.replace(\"/\", \".\"): "
        "v[()]}) if hasattr(v, \"dtype\") else None); save_file(t, \"FILE.safetensors\") (Keras keeps weights as "
        "[inputs, outputs]: transpose them)");
  if (starts("GGUF"sv, "lmgg"sv, "tjgg"sv, "fmgg"sv))
    return is(
        "a model of llama.cpp (GGUF): convert it once in Python: from gguf import GGUFReader, dequantize; from "
        "safetensors.numpy import save_file; save_file({t.name: dequantize(t.data, t.tensor_type) for t in "
        "GGUFReader(\"FILE\").tensors}, \"FILE.safetensors\")");
  if (starts("\x93NUMPY"sv))
    return is("a NumPy array (.npy), which io::load_npy reads; ", from_numpy,
              "save_file({\"NAME\": numpy.load(\"FILE\")}, \"FILE.safetensors\")");
  if (starts("\x1f\x8b"sv)) return packed("gzip", "gunzip FILE, or tar xzf FILE where it is a .tar.gz");
  if (starts("BZh"sv)) return packed("bzip2", "bunzip2 FILE");
  if (starts("\xFD\x37zXZ"sv)) return packed("xz", "unxz FILE");
  if (starts("\x28\xB5\x2F\xFD"sv)) return packed("zstd", "unzstd FILE");
  if (starts("7z\xBC\xAF"sv)) return packed("7-Zip", "7z x FILE");
  if (text.size() > 262 && text.substr(257, 5) == "ustar") return is("a tar archive: unpack it first (tar xf FILE)");

  const auto blanks = text.find_first_not_of(" \t\r\n\xEF\xBB\xBF");
  const auto word = text.substr(std::min(blanks, text.size()));
  if (word.starts_with('<'))
    return is("an HTML or XML page, perhaps a server's error or login page: download the file itself, and check it");
  if (word.starts_with('{') && (has("\"weight_map\"") || path.ends_with(".index.json")))
    return is("the index of a model in several files, which io::load reads if its name ends in .index.json");
  if (word.starts_with('{') || word.starts_with('['))
    return is("JSON (perhaps a configuration): the numbers are in another file next to it");

  // Protocol buffers have no signature. ONNX begins with its version, then the producer's name or the graph.
  const bool onnx =
      text.size() > 4 && text[0] == '\x08' && text[1] > 0 && text[1] < 32 && (text[2] == '\x12' || text[2] == '\x3A');
  if (path.ends_with(".onnx") || onnx)
    return is(
        "an ONNX model: convert it once in Python: import onnx; from safetensors.numpy import save_file; "
        "save_file({t.name: onnx.numpy_helper.to_array(t) for t in onnx.load(\"FILE\").graph.initializer}, "
        "\"FILE.safetensors\")");
  if (text.size() > 8 && text.substr(4, 4) == "TFL3")
    return is("a TensorFlow Lite model: read its tensors in Python, and write them with safetensors.numpy.save_file");
  for (const std::string_view end : {".msgpack", ".ckpt", ".pb", ".pt", ".pth", ".bin"})
    if (path.ends_with(end))
      return is("not a file of a known format, though its name ends in ", end,
                ": load it with the library that wrote it, and write it with safetensors.numpy.save_file in Python");
  return "";
}

/// The end of a message about a refused file, for readers of NumPy files.
[[gnu::cold]] inline std::string numpy_hint(std::span<const std::byte> begin, std::string_view path) {
  // The header's size in 8 bytes, mostly zeros, then the header.
  if (begin.size() > 8 && begin[8] == std::byte{'{'} && begin[5] == std::byte{} && begin[7] == std::byte{})
    return "; it is a safetensors file: io::load fills a model from it, io::SafetensorsReader reads its tensors";
  const auto what = identify_file(begin, path);
  return what.empty() ? "" : "; " + what;
}

}  // namespace chorus::io::detail
