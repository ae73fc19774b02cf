#pragma once
/// Lines of a tensor along one axis, and reductions, with several threads of a block per line. The order of sums
/// depends only on sizes, so that repeated runs give the same bits.

#include <chorus/kernels/axis_shape.hpp>
#include <chorus/kernels/cuda/launch.hpp>
#include <cstdint>

namespace chorus::kernels::cuda {

/// Combines `value` over the lanes of each line. All threads of the block must call it; all get the result.
template <class A, class Combine>
__device__ A combine_lanes(const LinePlan& plan, int lane, int line, A value, const Combine& combine) {
  __shared__ A all[block_threads];
  __syncthreads();  // an earlier result may still be read
  all[lane * plan.lines + line] = value;
  for (int half = plan.lanes / 2; half > 0; half /= 2) {
    __syncthreads();
    if (lane < half) {
      A& mine = all[lane * plan.lines + line];
      mine = combine(mine, all[(lane + half) * plan.lines + line]);
    }
  }
  __syncthreads();
  return all[line];
}

struct Plus {
  template <class A>
  __device__ A operator()(A a, A b) const {
    return a + b;
  }
};
/// The maximum; NaN propagates.
struct Larger {
  template <class A>
  __device__ A operator()(A a, A b) const {
    return a > b || a != a ? a : b;
  }
};
struct Smaller {
  template <class A>
  __device__ A operator()(A a, A b) const {
    return a < b || a != a ? a : b;
  }
};

/// One thread's elements of a line. Threads of a line that does not exist only take part in `reduce`.
struct Line {
  LinePlan plan;
  int lane, line;
  bool exists;
  Index at;      ///< index of the first element in [outer, axis, inner]
  Index result;  ///< index of the line in [outer, inner]
  Index length, stride;

  /// Calls `f(offset)` for this thread's elements.
  template <class F>
  __device__ void each(const F& f) const {
    for (Index i = lane; i < length; i += plan.lanes) f(at + i * stride);
  }
  /// Reduces `value(offset)` over the whole line with `combine`; all threads of the block must call it.
  template <class A, class Combine, class Value>
  __device__ A reduce(A neutral, const Combine& combine, const Value& value) const {
    A mine = neutral;
    each([&](Index i) { mine = combine(mine, static_cast<A>(value(i))); });
    return combine_lanes(plan, lane, line, mine, combine);
  }
  template <class Value>
  __device__ double sum(const Value& value) const {
    return reduce(0.0, Plus{}, value);
  }
  /// True in the thread that writes the line's results.
  __device__ bool first() const { return exists && lane == 0; }
};

namespace detail {
template <class Body>
__global__ void lines(AxisShape shape, LinePlan plan, const __grid_constant__ Body body) {
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = plan.along ? thread % plan.lanes : thread / plan.lines;
  const int line = plan.along ? thread / plan.lanes : thread % plan.lines;
  const Index count = shape.outer * shape.inner;
  for (Index first = Index{blockIdx.x} * plan.lines; first < count; first += Index{gridDim.x} * plan.lines) {
    const Index result = first + line;
    const bool exists = result < count;
    const Index o = result / shape.inner, i = result - o * shape.inner;
    body(
        Line{plan, lane, line, exists, o * shape.axis * shape.inner + i, result, exists ? shape.axis : 0, shape.inner});
  }
}
}  // namespace detail

/// Calls `body(line)` for all lines along the axis, on the device.
template <class Body>
void for_lines(Cuda device, const char* name, AxisShape shape, const Body& body, const LinePlan& plan) {
  static_assert(std::is_trivially_copyable_v<Body>);
  const Index count = shape.outer * shape.inner;
  if (count == 0) return;
  launch(device, name, blocks_for(count, plan.lines), detail::lines<Body>, shape, plan, body);
}
template <class Body>
void for_lines(Cuda device, const char* name, AxisShape shape, const Body& body) {
  for_lines(device, name, shape, body, plan_lines(shape.axis, shape.inner));
}

/// Calls `f(i, n)` for this thread's vectors of a contiguous line of `x`: the `n` numbers at indices i to i + n - 1.
/// With `vector`, whole ones begin where a 16-byte access may; the first and the last of a line may be short.
template <class T, class F>
__device__ void each_place(const Line& line, const T* x, bool vector, const F& f) {
  constexpr int width = Vector<T>::width;
  const auto address = reinterpret_cast<std::uintptr_t>(x + line.at);
  const Index skipped = vector ? static_cast<Index>(address % access_bytes / sizeof(T)) : 0;
  for (Index i = Index{width} * line.lane - skipped; i < line.length; i += Index{width} * line.plan.lanes) {
    const Index begin = i < 0 ? 0 : i, end = i + width < line.length ? i + width : line.length;
    if (begin < end) f(begin, static_cast<int>(end - begin));
  }
}
/// Calls `f(i, n, numbers)` likewise.
template <class T, class F>
__device__ void each_vector(const Line& line, const T* x, bool vector, const F& f) {
  each_place(line, x, vector, [&](Index i, int n) { f(i, n, load_vector(x + line.at + i, n, vector)); });
}

namespace detail {
template <class A, class Job>
__global__ void reduce(const __grid_constant__ ReducePlan plan, const __grid_constant__ Job job, A* partial) {
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = plan.lines.along ? thread % plan.lines.lanes : thread / plan.lines.lines;
  const int line = plan.lines.along ? thread / plan.lines.lanes : thread % plan.lines.lines;
  const Index begin = Index{blockIdx.y} * plan.split_length;
  const Index end = begin + plan.split_length < plan.length ? begin + plan.split_length : plan.length;
  for (Index first = Index{blockIdx.x} * plan.lines.lines; first < plan.outputs;
       first += Index{gridDim.x} * plan.lines.lines) {
    const Index output = first + line;
    A sum = {};
    if (output < plan.outputs) {
      const Index start = job.start(output);
      for (Index i = begin + lane; i < end; i += plan.lines.lanes) sum = sum + job.value(start, i, output);
    }
    sum = combine_lanes(plan.lines, lane, line, sum, Plus{});
    if (lane != 0 || output >= plan.outputs) continue;
    if (plan.splits == 1)
      job.finish(output, sum);
    else
      partial[blockIdx.y * plan.outputs + output] = sum;
  }
}

template <class A, class Job>
struct FinishSplits {
  ReducePlan plan;
  Job job;
  const A* partial;
  __device__ void operator()(Index output) const {
    A sum = {};
    for (Index split = 0; split < plan.splits; ++split) sum = sum + partial[split * plan.outputs + output];
    job.finish(output, sum);
  }
};
}  // namespace detail

/// For each output: `job.finish(output, sum)` with the sum, in A, of `job.value(job.start(output), i, output)` over i
/// below `length`.
template <class A, class Job>
void reduce(Cuda device, const char* name, Index outputs, Index length, bool neighbours, const Job& job) {
  static_assert(std::is_trivially_copyable_v<Job>);
  if (outputs == 0) return;
  const ReducePlan plan = plan_reduce(outputs, length, neighbours);
  const dim3 blocks(blocks_for(outputs, plan.lines.lines), static_cast<unsigned>(plan.splits));
  if (plan.splits == 1) {
    launch(device, name, blocks, detail::reduce<A, Job>, plan, job, static_cast<A*>(nullptr));
    return;
  }
  const Scratch<A> partial(device, plan.splits * outputs);
  launch(device, name, blocks, detail::reduce<A, Job>, plan, job, partial.data());
  for_each(device, name, outputs, detail::FinishSplits<A, Job>{plan, job, partial.data()});
}

/// Two sums. No initialiser, since shared memory does not allow one.
struct Pair {
  double a, b;
  friend __device__ Pair operator+(const Pair& x, const Pair& y) { return {x.a + y.a, x.b + y.b}; }
};

}  // namespace chorus::kernels::cuda
