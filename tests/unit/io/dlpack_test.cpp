#include <catch.hpp>
#include <chorus/chorus.hpp>
#include <chorus/io/dlpack.hpp>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "files.hpp"

namespace dlpack_test {

namespace ch = chorus;
namespace dl = ch::dlpack;
using ch::Index;
using ch::Tensor;
using chorus_test::message_of;

/// An array of another library, which counts what is freed.
struct Foreign {
  std::vector<float> numbers = std::vector<float>(64);
  std::vector<std::int64_t> shape{2, 3}, strides{3, 1};
  int freed = 0;
  dl::ManagedVersioned managed{1,    0,
                               this, [](dl::ManagedVersioned* m) { ++static_cast<Foreign*>(m->context)->freed; },
                               0,    {numbers.data(), {1, 0}, 2, {2, 32, 1}, shape.data(), strides.data(), 0}};

  Foreign() {
    for (std::size_t i = 0; i < 64; ++i) numbers[i] = static_cast<float>(i);
  }
  Tensor<float, 2> take(const ch::FromDlpackOptions& options = {}) {
    return ch::from_dlpack<float, 2>(&managed, options);
  }
  /// The message, after which the array is freed.
  template <class Error, class Change>
  std::string refusal(Change change) {
    change(managed);
    freed = 0;
    const auto message = message_of<Error>([&] { take(); });
    CHECK(freed == 1);
    return message;
  }
};

TEST_CASE("memory of another library: no copy, and freed with the last handle") {
  Foreign from;
  {
    auto x = from.take();
    CHECK(x.data() == from.numbers.data());
    CHECK(x.to_vector() == std::vector<float>{0, 1, 2, 3, 4, 5});
    x(1, 2) = 50;
    CHECK(from.numbers[5] == 50);
    const auto row = x[1];
    x = Tensor<float, 2>();
    CHECK(from.freed == 0);
    CHECK(row(0) == 3);
  }
  CHECK(from.freed == 1);
  std::thread([x = from.take()]() mutable { x = {}; }).join();
  CHECK(from.freed == 2);

  // Strides, an offset that no vector is aligned to, and kernels on it.
  from.strides = {1, 8};
  from.managed.array.byte_offset = 12;
  const auto x = from.take();
  CHECK(x(1, 2) == from.numbers[3 + 1 + 16]);
  CHECK(ch::sum(x * 2.0f).item() == 2 * (3 + 4 + 11 + 12 + 19 + 20));
  const auto product = ch::matmul(x, Tensor<float, 2>::ones({3, 2}));
  CHECK(product(1, 1) == 4 + 12 + 20);
  from.managed.array.strides = nullptr;
  CHECK(from.take()(1, 0) == from.numbers[6]);
  // An axis of size 1 may have any stride, and the array is still contiguous.
  from.shape = {2, 1}, from.strides = {1, 7};
  from.managed.array.strides = from.strides.data();
  CHECK(from.take().strides() == ch::Shape<2>{1, 1});
  from.shape = {2, 3};
  from.managed.array.strides = nullptr;
  from.managed.deleter = nullptr;
  CHECK(from.take()(0, 0) == 3);
}

TEST_CASE("what can't be taken is refused by name, and given back") {
  Foreign from;
  using Managed = dl::ManagedVersioned;
  CHECK(from.refusal<ch::UsageError>([](Managed& m) { m.major = 2; }) ==
        "from_dlpack: expected DLPack 1, got version 2.0");
  CHECK(from.refusal<ch::UsageError>([](Managed& m) {
    m.major = 1;
    m.flags = dl::read_only;
  }) == "from_dlpack: the memory is read-only; copy it, or pass {.read_only = true} if nothing writes to it");
  CHECK(from.take({.read_only = true})(0, 1) == 1);
  from.managed.flags = 0;
  CHECK(from.refusal<ch::UsageError>([](Managed& m) { m.array.dtype.bits = 64; }) ==
        "from_dlpack: expected F32, got F64");
  CHECK(from.refusal<ch::UsageError>([](Managed& m) {
    m.array.dtype = {2, 32, 4};
  }) == "from_dlpack: expected F32, got F32 x 4 lanes");
  CHECK(from.refusal<ch::UsageError>([](Managed& m) {
    m.array.dtype = {4, 16, 1};
  }) == "from_dlpack: expected F32, got BF16");
  from.managed.array.dtype = {2, 32, 1};
  CHECK(from.refusal<ch::ShapeError>([](Managed& m) { m.array.rank = 3; }) == "from_dlpack: expected 2 axes, got 3");
  from.managed.array.rank = 2;
  CHECK(from.refusal<ch::DeviceError>([](Managed& m) {
    m.array.device = {2, 1};
  }) == "from_dlpack: expected cpu memory (DLPack's device type 1), got device type 2, number 1");
  from.managed.array.device = {1, 0};
  CHECK(from.refusal<ch::ShapeError>([&](Managed&) {
    from.strides = {-3, 1};
  }) == "from_dlpack: expected strides of at least 0, got [-3, 1]; copy the array first (numpy.ascontiguousarray)");
  CHECK(from.refusal<ch::ShapeError>([&](Managed&) {
              from.strides = {Index{1} << 60, 1};
            })
            .starts_with("from_dlpack: strides [1152921504606846976, 1] are too large"));
  from.strides = {3, 1};
  CHECK(from.refusal<ch::ShapeError>([&](Managed&) {
    from.shape = {2, -3};
  }) == "from_dlpack: shape [2, -3] has a negative size");
  CHECK(from.refusal<ch::ShapeError>([&](Managed&) {
              from.shape = {Index{1} << 40, Index{1} << 40};
            })
            .ends_with("has too many elements"));
  from.shape = {2, 3};
  CHECK(from.refusal<ch::UsageError>([](Managed& m) { m.array.byte_offset = 2; })
            .starts_with("from_dlpack: expected memory aligned to 4 bytes"));
  CHECK(from.refusal<ch::UsageError>([](Managed& m) { m.array.data = nullptr; })
            .starts_with("from_dlpack: expected memory of 6 elements"));
  // Nothing to point to: a tensor of its own, and the array is given back at once.
  from.shape = {0, 3};
  from.freed = 0;
  const auto none = from.take();
  CHECK((from.freed == 1 && none.defined() && none.shape() == ch::Shape<2>{0, 3}));
  CHECK_THROWS_AS((ch::from_dlpack<float, 2>(static_cast<dl::Managed*>(nullptr))), ch::UsageError);
}

TEST_CASE("lent memory lives until the consumer gives it back") {
  auto x = Tensor<std::int32_t, 2>::from({1, 2, 3, 4, 5, 6}, {2, 3});
  dl::ManagedVersioned* const lent = ch::to_dlpack(x.transpose(0, 1));
  const auto& array = lent->array;
  CHECK((lent->major == 1 && lent->flags == 0 && array.data == x.data() && array.rank == 2 && array.byte_offset == 0));
  CHECK((array.dtype.code == 0 && array.dtype.bits == 32 && array.dtype.lanes == 1 && array.device.type == 1));
  CHECK((array.shape[0] == 3 && array.shape[1] == 2 && array.strides[0] == 1 && array.strides[1] == 3));
  CHECK(x.storage().owners() == 2);
  lent->deleter(lent);
  CHECK(x.storage().owners() == 1);
  // There and back, by both structs.
  {
    const auto again = ch::from_dlpack<std::int32_t, 2>(ch::to_dlpack_unversioned(x));
    CHECK(again.data() == x.data());
    CHECK(x.storage().owners() == 2);
  }
  CHECK(x.storage().owners() == 1);
  const auto dtypes = [](auto value) { return ch::to_dlpack(Tensor<decltype(value), 0>::full({}, value)); };
  const auto code = [](dl::ManagedVersioned* m) {
    const int out = m->array.dtype.code * 100 + m->array.dtype.bits;
    m->deleter(m);
    return out;
  };
  CHECK(code(dtypes(true)) == 608);
  CHECK(code(dtypes(std::uint8_t{1})) == 108);
  CHECK(code(dtypes(ch::bf16(1.0f))) == 416);
  CHECK(code(dtypes(ch::half(1.0f))) == 216);
  CHECK(code(dtypes(1.0)) == 264);
  CHECK(message_of<ch::UsageError>([] { ch::to_dlpack(Tensor<float, 1>()); }) == "to_dlpack: the tensor is undefined");
}

TEST_CASE("parameters are lent read-only, unless asked; writes are noticed, and the memory stays") {
  auto layer = std::make_unique<ch::nn::Linear<ch::Cpu>>(3, 2);
  const auto weight = layer->weight;
  auto* const lent = ch::to_dlpack(weight.value());
  CHECK(lent->flags == dl::read_only);
  CHECK(message_of<ch::UsageError>([&] { ch::to_dlpack_unversioned(weight.value()); }) ==
        "to_dlpack_unversioned: the memory is read-only, which needs a consumer of DLPack 1.0");
  auto* const written = ch::to_dlpack(weight.value(), {.writable = true});
  CHECK(written->flags == 0);
  const auto before = weight.value().storage().version();
  static_cast<float*>(written->array.data)[1] = 7;
  CHECK(weight.value()(0, 1) == 7);
  CHECK(weight.value().storage().version() > before);
  written->deleter(written);
  // A policy moves the values into a buffer of its own; those that were lent stay.
  ch::SingleDevice<ch::nn::Linear<ch::Cpu>> net{std::move(*layer)};
  layer.reset();
  CHECK(weight.value().data() != lent->array.data);
  CHECK(static_cast<float*>(lent->array.data)[1] == 7);
  lent->deleter(lent);
}

}  // namespace dlpack_test
