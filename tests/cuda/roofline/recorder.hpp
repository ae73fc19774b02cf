#pragma once
/// Notes the kernels that a program would launch, with the bytes that each has to move, in place of running them: the
/// emulated runtime, without emulated numbers. To be included before all of chorus.

#include <cublasLt.h>
#include <cxxabi.h>
#include <sys/mman.h>

#include <algorithm>
#include <chorus/tensor/size_class.hpp>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <map>
#include <string>
#include <tuple>
#include <type_traits>
#include <typeinfo>
#include <vector>

namespace chorus::roofline {

/// A kernel's name and functor, and what all of its launches did.
struct Total {
  std::size_t launches = 0;
  double bytes = 0;             ///< to and from memory
  double cached = 0;            ///< to and from attention's scores where only as many are in memory as the cache holds
  double operations = 0;        ///< of products and convolutions, on tensor cores
  double plain_operations = 0;  ///< of attention's blockwise kernels, in float
  std::size_t unknown = 0;      ///< pointers into an array whose part was not to be told: they count for nothing
};

struct Recorder {
  std::map<std::string, Total> totals;
  std::map<std::uintptr_t, std::size_t> arrays;  ///< bytes of each array, by its address
  std::size_t requested = 0;
};
inline Recorder& recorder() {
  static Recorder all;
  return all;
}

// Every request gets memory of its own, of just its size: blocks that are to be returned have this bit in theirs, and
// another list than those that are asked for.
inline constexpr std::size_t never_again = std::size_t{1} << 45;
template <std::size_t Smallest>
SizeClass exact_size(std::size_t bytes) {
  if (bytes & never_again) return {1, bytes};
  recorder().requested = bytes;
  return {0, ((bytes + Smallest) / Smallest * Smallest) | never_again};
}

/// Notes a part of an array as one of its own.
inline void part(const void* data, std::size_t bytes) {
  if (data != nullptr) recorder().arrays[reinterpret_cast<std::uintptr_t>(data)] = bytes;
}

// Addresses without memory behind them until somebody writes there.
inline cudaError_t reserve(void** data, std::size_t bytes) {
  constexpr int untouched = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  *data = mmap(nullptr, bytes & ~never_again, PROT_READ | PROT_WRITE, untouched, -1, 0);
  if (*data == MAP_FAILED) return cudaErrorMemoryAllocation;
  recorder().arrays[reinterpret_cast<std::uintptr_t>(*data)] = recorder().requested;
  return cudaSuccess;
}

inline std::string name_of(const char* mangled) {
  int status = 0;
  char* const text = abi::__cxa_demangle(mangled, nullptr, nullptr, &status);
  std::string name(status == 0 ? text : mangled);
  std::free(text);
  for (const char* space : {"chorus::kernels::cuda::", "chorus::kernels::", "chorus::functors::", "chorus::"})
    for (std::size_t at; (at = name.find(space)) != std::string::npos;) name.erase(at, std::strlen(space));
  return name.substr(0, name.find('<'));
}

/// Bytes of the arrays that an argument names, as a whole each.
template <class Argument>
void scan(const Argument& argument, Total& total) {
  const auto& arrays = recorder().arrays;
  for (std::size_t at = 0; at + 8 <= sizeof argument; at += 8) {
    std::uintptr_t word = 0;
    std::memcpy(&word, reinterpret_cast<const char*>(&argument) + at, 8);
    auto next = arrays.upper_bound(word);
    if (next == arrays.begin()) continue;
    --next;
    if (word == next->first)
      total.bytes += static_cast<double>(next->second);
    else if (word < next->first + next->second)
      ++total.unknown;
  }
}

template <class T>
double bytes_of(const T*, double count) {
  return count * sizeof(T);
}

/// Where a functor's sizes are known, of those.
template <class F>
void count(double n, const F& f, Total& total) {
  if constexpr (requires { f.stack, f.ldc, f.k; }) {
    const auto of = static_cast<double>(f.stack.count), k = static_cast<double>(f.k);
    const auto m = static_cast<double>(f.m), columns = static_cast<double>(f.n);
    total.bytes += bytes_of(f.c, of * (m * k + k * columns + (f.accumulate ? 2 : 1) * m * columns));
    total.operations += 2 * of * m * columns * k;
  } else if constexpr (requires { f.z.s.weight_count(); }) {
    const auto& s = f.z.s;
    double numbers = static_cast<double>(s.x_count() + s.weight_count() + s.y_count());
    if constexpr (requires { f.dx; }) {
      numbers += f.accumulate ? static_cast<double>(s.x_count()) : 0;
      total.bytes += bytes_of(f.dx, numbers);
    } else {
      total.bytes += bytes_of(f.x, numbers);
    }
    total.operations += 2 * static_cast<double>(s.y_count()) * static_cast<double>(s.weight_count() / s.out_channels);
  } else if constexpr (requires { f.take, f.to; }) {
    total.bytes += bytes_of(f.to, (f.accumulate ? 3 : 2) * n);
  } else if constexpr (requires { f.block, f.row; }) {
    const auto steps = n / static_cast<double>(f.whole.axis * f.whole.inner);
    total.bytes += bytes_of(f.to, n + steps * static_cast<double>(f.row));
  } else if constexpr (requires { f.plan, f.job, f.partial; }) {
    scan(f.partial, total);
  } else if constexpr (requires { f.map, f.dst; }) {
    total.bytes += bytes_of(f.dst, 2 * n);
  } else if constexpr (requires { f.sums, f.dweight, f.dbias; }) {  // its padding may look like a pointer
    total.bytes += bytes_of(f.sums, 2 * n) + bytes_of(f.dweight, 3 * n);
  } else if constexpr (requires { f.x, f.y; } && sizeof(F) == 2 * sizeof(void*)) {  // Convert
    total.bytes += bytes_of(f.x, n) + bytes_of(f.y, n);
  } else {
    scan(f, total);
  }
}

/// Attention: its products move scores within the cache, the largest of their operands.
template <class Gemm>
void count_attention(const Gemm& f, Total& total) {
  count(0, f, total);
  const auto m = f.m, n = f.n, k = f.k;
  const double scores =
      bytes_of(f.c, static_cast<double>(f.stack.count) * static_cast<double>(std::max({m * n, m * k, k * n})));
  total.bytes -= scores;
  total.cached += scores;
}
/// Operations of a blockwise kernel, which computes the scores again for each of its tiles of columns.
template <class Shape>
double attention_operations(const std::string& name, const Shape& s) {
  const auto tiles = [](auto columns) { return static_cast<double>((columns + 63) / 64); };
  const auto features = static_cast<double>(s.features), values = static_cast<double>(s.values);
  double each = features * tiles(s.values) + values;
  if (name == "attention gradient by queries") each = (features + values) * tiles(s.features) + features;
  if (name == "attention gradients by keys and values")
    each = (features + values) * (tiles(std::max(s.features, s.values)) + 1);
  const double scores = static_cast<double>(s.batch()) * static_cast<double>(s.queries) * static_cast<double>(s.keys);
  return 2 * scores * each * (s.causal ? 0.5 : 1);
}

struct None {};
/// A member of a tuple, or None behind its end.
template <std::size_t I, class... Members>
const auto& nth(const std::tuple<Members...>& all) {
  static constexpr None none;
  if constexpr (I < sizeof...(Members))
    return std::get<I>(all);
  else
    return none;
}

inline void add(const std::string& label, const Total& now) {
  auto& total = recorder().totals[label];
  total.launches += now.launches;
  total.bytes += now.bytes;
  total.cached += now.cached;
  total.operations += now.operations;
  total.plain_operations += now.plain_operations;
  total.unknown += now.unknown;
}

template <class... Parameters, class... Arguments>
void record(const char* name, dim3, void (*)(Parameters...), const Arguments&... arguments) {
  const auto args = std::tie(arguments...);
  const auto& first = nth<0>(args);
  using First = std::remove_cvref_t<decltype(first)>;
  std::string label = name;
  Total now;
  now.launches = 1;
  if constexpr (sizeof...(Arguments) == 2 && std::is_integral_v<First>) {  // for_each
    label += ": " + name_of(typeid(nth<1>(args)).name());
    if constexpr (requires { nth<1>(args).stack, nth<1>(args).ldc; })
      if (label.starts_with("attention")) {
        count_attention(nth<1>(args), now);
        return add(label, now);
      }
    count(static_cast<double>(first), nth<1>(args), now);
  } else if constexpr (requires { nth<2>(args).stack, nth<2>(args).scores; }) {
    const auto& weights = nth<2>(args);
    constexpr bool gradients = requires { weights.gradients; };
    now.cached += bytes_of(weights.scores, (gradients ? 4 : 2) * static_cast<double>(first.numel()));
    now.bytes += bytes_of(weights.log_sums, static_cast<double>(first.outer));
  } else if constexpr (requires { nth<2>(args).p, nth<1>(args).skip; }) {
    const auto& rule = nth<2>(args);  // gradients are read, all else is read and written
    std::uintptr_t words[sizeof rule / sizeof(std::uintptr_t)];
    std::memcpy(words, &rule, sizeof words);
    const auto absent = std::count(std::begin(words), std::end(words), std::uintptr_t{0});
    const auto arrays = static_cast<double>(std::size(words)) - static_cast<double>(absent);
    now.bytes += bytes_of(rule.p, static_cast<double>(first) * (2 * arrays - 1));
  } else if constexpr (requires { nth<2>(args).at; }) {  // the element-wise ones
    label += ": " + name_of(typeid(first).name());
    double arrays = 1;
    for (const auto* in : nth<2>(args).at) arrays += in != nullptr;
    if constexpr (requires { nth<5>(args).at; }) {
      for (const auto* out : nth<4>(args).at) arrays += out != nullptr;
      for (const bool adds : nth<5>(args).at) arrays += adds;
    }
    now.bytes += bytes_of(nth<2>(args).at[0], arrays * static_cast<double>(nth<1>(args)));
  } else if constexpr (requires { nth<1>(args).z.s.weight_count(); }) {  // a convolution's gradient by the weight
    count(0, nth<1>(args), now);
  } else if constexpr (requires { first.inner, nth<2>(args)[0], nth<4>(args)[0]; } && sizeof...(Arguments) == 5) {
    now.bytes += bytes_of(nth<4>(args), 3.0 * static_cast<double>(nth<1>(args) * first.inner));
  } else {
    if constexpr (requires { first.features, nth<1>(args).row_tiles; })
      now.plain_operations += attention_operations(name, first);
    (scan(arguments, now), ...);
  }
  add(label, now);
}

/// Products that the stand-in for cuBLASLt takes itself: those of 2 bytes with a float result.
inline cublasStatus_t matmul(cublasLtHandle_t, cublasLtMatmulDesc_t desc, const void*, const void*,
                             cublasLtMatrixLayout_t a, const void*, cublasLtMatrixLayout_t b, const void* beta,
                             const void*, cublasLtMatrixLayout_t, void*, cublasLtMatrixLayout_t c, const void*, void*,
                             std::size_t, cudaStream_t) {
  const auto bytes = [](cublasLtMatrixLayout_t x) {
    const double width = x->type == CUDA_R_64F ? 8 : x->type == CUDA_R_32F ? 4 : 2;
    return width * static_cast<double>(x->rows * x->columns) * x->count;
  };
  float adds = 0;
  std::memcpy(&adds, beta, sizeof adds);
  Total now;
  now.launches = 1;
  now.bytes = bytes(a) + bytes(b) + (adds != 0 ? 2 : 1) * bytes(c);
  const auto depth = static_cast<double>(desc->operation_a == CUBLAS_OP_T ? a->rows : a->columns);
  now.operations = 2 * depth * static_cast<double>(c->rows * c->columns) * c->count;
  add("matrix product: with a float result", now);
  return CUBLAS_STATUS_SUCCESS;
}

inline cudaError_t copy(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind, cudaStream_t stream) {
  if (kind != cudaMemcpyDeviceToDevice) return cudaMemcpyAsync(to, from, bytes, kind, stream);
  auto& total = recorder().totals["copy"];
  ++total.launches;
  total.bytes += 2 * static_cast<double>(bytes);
  return cudaSuccess;
}
inline cudaError_t set(void*, int, std::size_t bytes, cudaStream_t) {
  auto& total = recorder().totals["zero"];
  ++total.launches;
  total.bytes += static_cast<double>(bytes);
  return cudaSuccess;
}

}  // namespace chorus::roofline

#undef CHORUS_LAUNCH_KERNEL
#define CHORUS_LAUNCH_KERNEL(KERNEL, BLOCKS, THREADS, STREAM, ...) \
  ::chorus::roofline::record(name, BLOCKS, KERNEL, __VA_ARGS__)
#define size_class ::chorus::roofline::exact_size
#define cudaMalloc ::chorus::roofline::reserve
#define aligned_alloc(ALIGNMENT, BYTES) aligned_alloc(ALIGNMENT, (BYTES) & ~::chorus::roofline::never_again)
#define cudaMemcpyAsync ::chorus::roofline::copy
#define cudaMemsetAsync ::chorus::roofline::set
#define cublasLtMatmul ::chorus::roofline::matmul
