#include <catch.hpp>
#include <chorus/data/cifar10.hpp>
#include <chorus/data/datasets.hpp>
#include <chorus/data/image_folder.hpp>
#include <chorus/data/loader.hpp>
#include <chorus/io/safetensors_reader.hpp>
#include <cmath>
#include <filesystem>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "files.hpp"

#ifndef CHORUS_GOLDEN_IMAGES
#define CHORUS_GOLDEN_IMAGES "tests/golden_images/images.safetensors"
#endif

namespace image_folder_test {

namespace data = chorus::data;
using chorus::FileError;
using chorus::Index;
using chorus::Tensor;
using data::Frame;
using data::Picture;
using data::RandomStream;

/// What golden_images/generate.py wrote: bytes, or floats.
struct Golden {
  std::vector<Index> shape;
  Bytes bytes;

  std::span<const float> floats() const { return {reinterpret_cast<const float*>(bytes.data()), bytes.size() / 4}; }
};
const std::map<std::string, Golden>& golden() {
  static const auto all = [] {
    const chorus::io::SafetensorsReader file(CHORUS_GOLDEN_IMAGES);
    std::map<std::string, Golden> out;
    for (const auto& entry : file.entries()) {
      Golden one{entry.shape, Bytes(entry.bytes)};
      file.read(entry, std::as_writable_bytes(std::span(one.bytes)));
      out.emplace(entry.name, std::move(one));
    }
    return out;
  }();
  return all;
}
const Bytes& file_of(const std::string& name) { return golden().at(name + ".file").bytes; }

Picture source() {
  const auto& from = golden().at("source");
  Picture out(from.shape[0], from.shape[1]);
  std::ranges::copy(from.bytes, out.pixels().begin());
  return out;
}
RandomStream stream(Index sample) { return {1, data::Purpose::augment, sample, 0}; }

bool decodes(const std::string& name) { return name.starts_with("png") ? CHORUS_USE_PNG == 1 : CHORUS_USE_JPEG == 1; }

TEST_CASE("files have the pixels that torchvision and Pillow read") {
  int files = 0;
  for (const auto& [name, pixels] : golden()) {
    if (!name.ends_with(".pixels")) continue;
    const auto of = name.substr(0, name.rfind('.'));
    if (!decodes(of)) continue;
    const Picture picture = data::decode_image(file_of(of), of);
    INFO(of);
    CHECK(std::vector<Index>{picture.height(), picture.width(), 3} == pixels.shape);
    CHECK(std::ranges::equal(picture.pixels(), pixels.bytes));
    ++files;
  }
  CHECK(files == 11 * CHORUS_USE_PNG + 9 * CHORUS_USE_JPEG);
}

TEST_CASE("a file that is cut short or damaged is refused; nothing else happens") {
  for (const auto& entry : golden()) {
    const auto of = entry.first.substr(0, entry.first.rfind('.'));
    if (!entry.first.ends_with(".file") || !decodes(of)) continue;
    const Bytes& whole = entry.second.bytes;
    for (std::size_t size = 8; size < whole.size(); ++size) {
      const auto message = message_of<FileError>([&] { data::decode_image(std::span(whole).first(size), "FILE"); });
      const char* kind = of.starts_with("png") ? "PNG" : "JPEG";
      INFO(of << ' ' << size << ' ' << message);
      REQUIRE(message.starts_with(std::string("FILE: reading the ") + kind + " file failed: "));
    }
    auto random = stream(0);
    for (int i = 0; i < 300; ++i) {  // other pixels, or an error
      Bytes changed = whole;
      changed[static_cast<std::size_t>(random.below(static_cast<Index>(changed.size())))] ^=
          static_cast<std::uint8_t>(1 << random.below(8));
      message_of<FileError>([&] { data::decode_image(changed); });
    }
  }
}

std::string refusal(const Bytes& bytes) {
  return message_of<FileError>([&] { data::decode_image(bytes, "FILE"); });
}

TEST_CASE("what is no image, and sizes that would fill the memory") {
  CHECK(refusal({'G', 'I', 'F', '8', '9', 'a', 0, 1, 2}) ==
        "FILE: expected a PNG or JPEG file, got 9 bytes that begin with 'GIF89a\\x00\\x01'");
  CHECK(refusal({}) == "FILE: expected a PNG or JPEG file, got 0 bytes that begin with ''");
#if CHORUS_USE_JPEG
  Bytes jpeg = file_of("jpeg_progressive");
  std::size_t frame = 0;  // the segment that has the size
  while (jpeg[frame] != 0xff || jpeg[frame + 1] != 0xc2) ++frame;
  jpeg[frame + 5] = jpeg[frame + 7] = 0xff;
  CHECK(refusal(jpeg) == "FILE: reading the JPEG file failed: the file is too short for its size in pixels");
  Bytes scans = file_of("jpeg_progressive");
  const auto find = [&](std::uint8_t from, std::uint8_t to, std::size_t at) {  // the next marker in [from, to]
    while (scans[at] != 0xff || scans[at + 1] < from || scans[at + 1] > to) ++at;
    return at;
  };
  const std::size_t begin = find(0xda, 0xda, 0), end = find(0xc4, 0xda, begin + 2);
  const Bytes scan(scans.begin() + static_cast<std::ptrdiff_t>(begin),
                   scans.begin() + static_cast<std::ptrdiff_t>(end));
  for (int i = 0; i < 200; ++i)
    scans.insert(scans.begin() + static_cast<std::ptrdiff_t>(end), scan.begin(), scan.end());
  CHECK(refusal(scans) == "FILE: reading the JPEG file failed: it has more than 100 scans");
  Bytes arithmetic = file_of("jpeg_gray");
  for (std::size_t i = 0; i + 1 < arithmetic.size(); ++i)
    if (arithmetic[i] == 0xff && arithmetic[i + 1] == 0xc0) arithmetic[i + 1] = 0xc9;
  CHECK(refusal(arithmetic).ends_with("arithmetic coding is not supported"));
#else
  CHECK(refusal(file_of("jpeg_gray")) ==
        "FILE: reading the JPEG file failed: this program was built without libjpeg: link the CMake target "
        "chorus::images, or compile with -DCHORUS_USE_JPEG=1 -ljpeg");
#endif
#if !CHORUS_USE_PNG
  CHECK(refusal(file_of("png_gray")) ==
        "FILE: reading the PNG file failed: this program was built without libpng: link the CMake target "
        "chorus::images, or compile with -DCHORUS_USE_PNG=1 -lpng");
#endif
}

TEST_CASE("pictures are scaled as PyTorch scales floats, and as Pillow does, up to its rounding") {
  const Picture picture = source();
  for (const auto& [name, expected] : golden()) {
    if (!name.starts_with("resize.")) continue;
    INFO(name);
    const Index height = expected.shape[1], width = expected.shape[2];
    auto random = stream(0);
    const auto out = data::framed(picture, data::Resize{height, width}(picture.height(), picture.width(), random));
    REQUIRE(out.shape() == chorus::Shape<3>{3, height, width});
    const auto& pillow = golden().at("pillow." + name.substr(7)).bytes;
    for (Index c = 0; c < 3; ++c)
      for (Index i = 0; i < height * width; ++i) {
        const float pixel = out.data()[c * height * width + i];
        REQUIRE(std::abs(pixel - expected.floats()[static_cast<std::size_t>(c * height * width + i)]) < 2e-6f);
        REQUIRE(std::abs(pixel * 255 - pillow[static_cast<std::size_t>(i * 3 + c)]) <= 1.01f);
      }
  }
}

TEST_CASE("a window of a scaled picture is that part of the whole") {
  const Picture picture = source();
  auto random = stream(0);
  const auto whole = data::framed(picture, {2, 3, 11, 14, 8, 30, 0, 0, 8, 30});
  const auto part = data::framed(picture, {2, 3, 11, 14, 8, 30, 1, 5, 6, 9});
  for (Index c = 0; c < 3; ++c)
    for (Index y = 0; y < 6; ++y)
      for (Index x = 0; x < 9; ++x) REQUIRE(part(c, y, x) == whole(c, y + 1, x + 5));
  // A picture as it is: exact bytes.
  const auto same = data::framed(picture, data::detail::whole_picture(15, 21));
  for (Index x = 0; x < 21; ++x) CHECK(same(1, 4, x) == static_cast<float>(picture.row(4)[x * 3 + 1]) / 255.0f);
  CHECK(message_of<chorus::ShapeError>([&] {
          data::framed(picture, {10, 0, 6, 21, 6, 21, 0, 0, 6, 21});
        }) == "framed: the part of 6 x 21 at 10, 0 is not inside the picture of 15 x 21");
  CHECK(message_of<chorus::ShapeError>([&] {
          data::framed(picture, {0, 0, 15, 21, 8, 8, 0, 1, 8, 8});
        }) == "framed: the window of 8 x 8 at 0, 1 is not inside the scaled picture of 8 x 8");
  const auto huge = data::Resize{1 << 20}(15, 21, random);
  CHECK(message_of<chorus::ShapeError>([&] {
          data::framed(picture, huge);
        }).starts_with("framed: expected at most 178956970 pixels, got 1048576 x 1468006"));
}

TEST_CASE("frames have torchvision's sizes and places") {
  auto random = stream(0);
  const auto resized = [&](Index height, Index width) {
    const Frame f = data::Resize{256}(height, width, random);
    return std::vector<Index>{f.scaled_height, f.scaled_width};
  };
  CHECK(resized(375, 500) == std::vector<Index>{256, 341});
  CHECK(resized(500, 375) == std::vector<Index>{341, 256});
  CHECK(resized(100, 100) == std::vector<Index>{256, 256});
  const auto centered = [&](Index size, Index height, Index width) {
    const Frame f = data::CenterCrop{size, size + 5}(height, width, random);
    return std::vector<Index>{f.window_top, f.window_left};
  };
  CHECK(centered(10, 15, 18) == std::vector<Index>{2, 4});  // 2.5 and 4: half to even
  CHECK(centered(10, 19, 15) == std::vector<Index>{4, 2});  // 4.5
  CHECK(centered(10, 22, 15) == std::vector<Index>{6, 2});
  CHECK(message_of<chorus::UsageError>([&] {
          data::CenterCrop{224, 200}(300, 300, random);
        }) == "CenterCrop: expected a resize of at least 224, got 200");
  CHECK_THROWS_AS((data::Resize{0}(3, 3, random)), chorus::UsageError);

  // No draw fits: the middle, with the nearest ratio.
  const Frame narrow = data::RandomResizedCrop{8}(1000, 9, random), flat = data::RandomResizedCrop{8}(6, 999, random);
  CHECK((narrow.left == 0 && narrow.width == 9 && narrow.height == 12 && narrow.top == 494));
  CHECK((flat.top == 0 && flat.height == 6 && flat.width == 8 && flat.left == 495));
  double area = 0, ratio = 0, top = 0;
  constexpr int draws = 4000;
  for (Index i = 0; i < draws; ++i) {
    auto own = stream(i);
    const Frame f = data::RandomResizedCrop{8}(1000, 1000, own);
    REQUIRE((f.top >= 0 && f.left >= 0 && f.top + f.height <= 1000 && f.left + f.width <= 1000));
    const auto h = static_cast<double>(f.height), w = static_cast<double>(f.width);
    REQUIRE((h * w > 78'000 && h * w <= 1e6 && w / h > 0.745 && w / h < 1.34));
    area += h * w / draws / 1e6;
    ratio += std::log(w / h) / draws;
    top += (static_cast<double>(f.top) + h / 2) / draws;
  }
  CHECK(std::abs(area - 0.478) < 0.012);  // less than 0.54, since of large ones fewer fit
  CHECK(std::abs(ratio) < 0.015);
  CHECK(std::abs(top - 500) < 10);
  CHECK_THROWS_AS((data::RandomResizedCrop{8, 0.5f, 0.4f}(9, 9, random)), chorus::UsageError);
}

TEST_CASE("colours change as torchvision changes them") {
  const auto changed = [](const std::string& name, auto change) {
    const auto image = data::framed(source(), data::detail::whole_picture(15, 21));
    change(data::Image{{image.data(), static_cast<std::size_t>(image.numel())}, {3, 15, 21}});
    const auto& expected = golden().at("color." + name);
    float worst = 0;
    for (std::size_t i = 0; i < expected.floats().size(); ++i)
      worst = std::max(worst, std::abs(image.data()[i] - expected.floats()[i]));
    return worst;
  };
  CHECK(changed("brightness", [](const auto& image) { data::adjust_brightness(image, 1.4f); }) < 1e-6f);
  CHECK(changed("contrast", [](const auto& image) { data::adjust_contrast(image, 0.6f); }) < 1e-6f);
  CHECK(changed("saturation", [](const auto& image) { data::adjust_saturation(image, 1.7f); }) < 1e-6f);
  CHECK(changed("hue", [](const auto& image) { data::adjust_hue(image, 0.3f); }) < 5e-6f);
  CHECK(changed("hue_back", [](const auto& image) { data::adjust_hue(image, -0.45f); }) < 5e-6f);
}

TEST_CASE("jitter and flips: drawn for each sample, and refused where they don't fit") {
  std::vector<float> pixels(27), mono(9);
  const auto image = data::Image{pixels, {3, 3, 3}};
  const auto jittered = [&](Index sample, const data::ColorJitter& jitter) {
    for (std::size_t i = 0; i < 27; ++i) pixels[i] = static_cast<float>(i) / 40;
    auto random = stream(sample);
    jitter(image, random);
    return pixels;
  };
  const data::ColorJitter all{.brightness = 0.4f, .contrast = 0.4f, .saturation = 0.4f, .hue = 0.1f};
  CHECK(jittered(1, all) == jittered(1, all));
  CHECK(jittered(1, all) != jittered(2, all));
  const auto plain = jittered(1, {});
  CHECK(plain[26] == 26.0f / 40);
  for (Index i = 0; i < 50; ++i) {
    const float factor = jittered(i, {.brightness = 0.4f})[1] * 40;
    CHECK((factor > 0.599f && factor < 1.401f));
  }
  auto random = stream(0);
  CHECK(message_of<chorus::UsageError>([&] { data::ColorJitter{.hue = 0.6f}(image, random); }) ==
        "ColorJitter: expected a hue of at most 0.5, got 0.6");
  CHECK(message_of<chorus::ShapeError>([&] {
          data::ColorJitter{.contrast = 1}(data::Image{mono, {1, 3, 3}}, random);
        }) == "adjust_contrast: expected 3 channels, got shape [1, 3, 3]");
  jittered(0, {});
  data::RandomVerticalFlip{1}(image, random);
  CHECK((pixels[0] == 6.0f / 40 && pixels[4] == 4.0f / 40 && pixels[26] == 20.0f / 40));
}

#if CHORUS_USE_PNG && CHORUS_USE_JPEG
void write_classes(const TestFolder& folder) {
  folder.write("dog/b.png", file_of("png_rgb"));
  folder.write("dog/a.JPG", file_of("jpeg_444"));
  folder.write("cat/z.jpeg", file_of("jpeg_422"));
  folder.write("cat/x/a.png", file_of("png_rgb"));
  folder.write("cat/x-y/a.png", file_of("png_rgb"));
  folder.write("cat/notes.txt", counting(3));
  folder.write("README", counting(3));
}

TEST_CASE("folders are classes, and files come in torchvision's order") {
  const TestFolder folder;
  write_classes(folder);
  const data::ImageFolder images(folder.path());
  CHECK(images.classes() == std::vector<std::string>{"cat", "dog"});
  const std::vector<std::string> names = {"cat/z.jpeg", "cat/x/a.png", "cat/x-y/a.png", "dog/a.JPG", "dog/b.png"};
  REQUIRE(images.size() == 5);
  for (std::size_t i = 0; i < 5; ++i) {
    CHECK(images.samples()[i].first == folder.path() + "/" + names[i]);
    CHECK(images.samples()[i].second == (i < 3 ? 0 : 1));
  }
  auto random = stream(0);
  const auto [image, label] = images.get(4, random);
  CHECK(label == 1);
  CHECK(image(2, 3, 5) == static_cast<float>(golden().at("png_rgb.pixels").bytes[(3 * 19 + 5) * 3 + 2]) / 255.0f);
  CHECK(message_of<chorus::UsageError>([&] { images.get(5, random); }) == "ImageFolder: sample 5 is not in [0, 5)");
}

TEST_CASE("shares and workers change no pixel") {
  const TestFolder folder;
  write_classes(folder);
  const data::ImageFolder images(
      folder.path(), {.frame = data::RandomResizedCrop{6},
                      .transforms = {data::RandomHorizontalFlip{}, data::ColorJitter{0.3f, 0.3f, 0.3f, 0.1f},
                                     data::Normalize{{0.5f, 0.5f, 0.5f}, {0.2f, 0.2f, 0.2f}}}});
  const auto epoch = [&](const auto& dataset, int rank, int ranks, int workers) {
    data::DataLoader loader{dataset,
                            data::Sampler{dataset.size(), {.rank = rank, .world_size = ranks, .seed = 3}},
                            {.batch = 5, .workers = workers}};
    loader.set_epoch(2);
    auto& [x, y] = *loader.begin();
    return std::pair(x.to_vector(), y.to_vector());
  };
  const auto check = [&](const auto& dataset) {
    const auto whole = epoch(dataset, 0, 1, 0);
    auto shares = epoch(dataset, 0, 2, 2);
    const auto second = epoch(dataset, 1, 2, 1);
    shares.first.insert(shares.first.end(), second.first.begin(), second.first.end());
    shares.second.insert(shares.second.end(), second.second.begin(), second.second.end());
    CHECK(shares == whole);
    CHECK(whole.first.size() == 5 * 3 * 6 * 6);
  };
  check(images);
  check(data::MixUp{images, 2});
  check(data::CutMix{images, 2});
}

TEST_CASE("mixed classes have the shares of the mixed images") {
  // Images of one value each, which is also the class.
  std::vector<std::pair<Tensor<float, 3>, std::int64_t>> of;
  for (int k = 0; k < 4; ++k) of.emplace_back(Tensor<float, 3>::full({1, 8, 12}, static_cast<float>(k)), k);
  const data::VectorDataset dataset(of);
  double mean = 0, plain = 0;
  for (Index i = 0; i < 400; ++i) {
    const auto check = [&](const auto& mixed) {
      auto random = stream(i);
      const auto [image, target] = mixed.get(i % 4, random);
      double sum = 0, expected = 0, ones = 0;
      for (Index k = 0; k < image.numel(); ++k) sum += image.data()[k];
      for (Index k = 0; k < 4; ++k) {
        ones += target(k);
        expected += target(k) * static_cast<float>(k);
      }
      REQUIRE(std::abs(ones - 1) < 1e-6);
      REQUIRE(std::abs(sum / 96 - expected) < 1e-5);
      return target(i % 4);
    };
    mean += check(data::MixUp{dataset, 4, {.alpha = 0.4f}}) / 400;
    check(data::CutMix{dataset, 4});
    plain += check(data::CutMix{dataset, 4, {.probability = 0.25f}}) == 1;
  }
  CHECK(of[2].first(0, 0, 0) == 2);      // the dataset's own image
  CHECK(std::abs(mean - 0.625) < 0.06);  // 1/2, and half of the quarter whose partner has the same class
  CHECK((plain > 280 && plain < 370));
  CHECK(message_of<chorus::UsageError>([&] {
          auto random = stream(0);
          data::MixUp{dataset, 3}.get(3, random);
        }) == "MixUp: expected classes 0 to 2, got 3 of sample 3");
  CHECK(message_of<chorus::UsageError>([&] { data::CutMix(dataset, 4, {.alpha = 0}); }) ==
        "CutMix: expected an alpha above 0, got 0");
  CHECK(message_of<chorus::UsageError>([&] {
          data::MixUp(dataset, 4, {.transforms = {data::RandomHorizontalFlip{}}});
        }).starts_with("MixUp: transforms are for datasets such as Cifar10"));
  of[1].first = Tensor<float, 3>::zeros({1, 8, 11});
  const data::VectorDataset sizes(of);
  CHECK(message_of<chorus::ShapeError>([&] {
          for (Index i = 0; i < 20; ++i) {
            auto random = stream(i);
            data::MixUp{sizes, 4}.get(0, random);
          }
        }) == "MixUp: expected images of one shape, got [1, 8, 12] of sample 0 and [1, 8, 11] of sample 1");
  // A dataset in memory, with transforms.
  const data::ImageDataset bytes({3, 2, 2}, Bytes(36, 255), {0, 1, 2}, 3, {});
  auto random = stream(0);
  const auto [image, target] =
      data::MixUp{bytes, 3, {.transforms = {data::Normalize{{1, 1, 1}, {1, 1, 1}}}}}.get(0, random);
  CHECK(image(0, 0, 0) == 0);
}

TEST_CASE("shares are from the beta distribution") {
  for (const double alpha : {0.2, 1.0, 3.0}) {
    double mean = 0, square = 0;
    constexpr int draws = 5000;
    for (Index i = 0; i < draws; ++i) {
      auto random = stream(i);
      const double x = data::detail::beta_draw(alpha, random);
      REQUIRE((x >= 0 && x <= 1));
      mean += x / draws;
      square += x * x / draws;
    }
    CHECK(std::abs(mean - 0.5) < 0.025);
    CHECK(std::abs(square - mean * mean - 1 / (8 * alpha + 4)) < 0.006);
  }
}

TEST_CASE("wrong folders are refused by name") {
  const TestFolder folder;
  const auto open = [&](const std::string& path) {
    return message_of<FileError>([&] { data::ImageFolder images(path); });
  };
  const std::string place = folder.path();
  errno = 0;
  CHECK(open(place + "/none") == "ImageFolder: folder " + place + "/none: No such file or directory");
  folder.write("a.png", file_of("png_rgb"));
  CHECK(open(place) == "ImageFolder: expected a folder for each class in " + place + ", got none; it holds a.png");
  folder.write("cat/a.png", file_of("png_rgb"));
  std::filesystem::create_directory(place + "/dog");
  CHECK(open(place) ==
        "ImageFolder: expected .jpg, .jpeg or .png files in each class's folder, got none in " + place + "/dog");
  folder.write("dog/x.webp", counting(5));
  CHECK(open(place) ==
        "ImageFolder: " + place + "/dog/x.webp: expected .jpg, .jpeg or .png files; convert or remove it");
  std::filesystem::rename(place + "/dog/x.webp", place + "/dog/x.png");
  std::filesystem::create_directory_symlink("..", place + "/dog/up");
  CHECK(open(place) == "ImageFolder: " + place + "/dog/up is a link to a folder around it");
  std::filesystem::remove(place + "/dog/up");

  // A broken file: the loader's error names it.
  const data::ImageFolder images(place, {.frame = data::CenterCrop{4}});
  data::DataLoader loader{images, data::Sampler{2, {.shuffle = false}}, {.batch = 2, .workers = 2}};
  CHECK(message_of<FileError>([&] { loader.begin(); }) ==
        place + "/dog/x.png: expected a PNG or JPEG file, got 5 bytes that begin with '\\x00\\x01\\x02\\x03\\x04'");
}
#endif

}  // namespace image_folder_test
