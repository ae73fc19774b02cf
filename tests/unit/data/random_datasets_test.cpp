/// Reads image folders whose files have randomly changed bytes: the result is a valid dataset, or a FileError with the
/// path. CHORUS_RANDOM_SEEDS=FIRST-LAST tries other seeds.
#include <catch.hpp>
#include <chorus/data/open_images.hpp>

#include "../random_bytes.hpp"
#include "files.hpp"

namespace random_datasets_test {

using namespace chorus;
using Draw = test::DrawFrom<0x696d6773>;

/// Reads all images. Returns what is wrong with the dataset, or "".
std::string wrong(const data::ImageDataset& images) {
  const auto shape = images.image_shape();
  std::vector<float> image(static_cast<std::size_t>(shape[0] * shape[1] * shape[2]));
  if (images.size() == 0 || image.empty()) return "nothing in it";
  for (Index i = 0; i < images.size(); ++i) {
    const auto label = images.get(i, image);
    if (label < 0 || label >= images.classes()) return cat("label ", label);
    for (const float pixel : image)
      if (!(pixel >= 0 && pixel <= 1)) return cat("pixel ", pixel);
  }
  return "";
}

TEST_CASE("random changes to datasets: images or an error with the path") {
  int taken = 0, refused = 0;
  const auto text_of = [](const Bytes& bytes) { return std::string(bytes.begin(), bytes.end()); };
  const auto images = text_of(idx({3, 4, 5}, counting(60))), labels = text_of(idx({3}, counting(3)));
  const std::string records(3 * 3073, '\7');
  const auto try_one = [&](std::uint64_t seed) {
    Draw draw(seed);
    const TestFolder folder;
    const auto put = [&](std::string name, std::string text, std::uint32_t chance) {
      const bool change_packed = draw.chance(50);
      if (!change_packed && draw.chance(chance)) text = test::changed(std::move(text), draw);
      const auto bytes = [](const std::string& from) { return Bytes(from.begin(), from.end()); };
      auto content = bytes(text);
#if CHORUS_USE_ZLIB
      if (name.ends_with(".gz")) content = gzip(content);
#endif
      if (change_packed && draw.chance(chance)) {
        text = test::changed(std::string(content.begin(), content.end()), draw);
        content = bytes(text);
      }
      folder.write(name, content);
    };
    const char* ending = CHORUS_USE_ZLIB && draw.chance(40) ? ".gz" : "";
    const bool mnist = draw.chance(70);
    if (mnist) {
      put(cat("t10k-images-idx3-ubyte", ending), images, 70);
      put(cat("t10k-labels-idx1-ubyte", ending), labels, 30);
    } else {
      put("test_batch.bin", records, 90);
    }
    try {
      if (const auto what = wrong(data::open_images(folder.path(), data::Split::test)); !what.empty())
        FAIL_CHECK("seed " << seed << ": " << what);
      ++taken;
    } catch (const FileError& error) {
      ++refused;
      if (std::string_view(error.what()).find(folder.path()) == std::string::npos)
        FAIL_CHECK("seed " << seed << ": " << error.what());
    }
  };
  test::for_seeds(2000, try_one, [](std::uint64_t seed) { return cat("seed ", seed, "\n"); });
  if (std::getenv("CHORUS_RANDOM_SEEDS")) return;
  CHECK(taken > 100);
  CHECK(refused > 100);
}

}  // namespace random_datasets_test
