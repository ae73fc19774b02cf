#pragma once
/// AnyFunction: a function without its type, so that what calls it is compiled once and not for each lambda.

namespace test {

/// Refers to a function, which has to stay. (std::function takes the compiler ten times as long for each type.)
template <class Signature>
class AnyFunction;
template <class Result, class... Xs>
class AnyFunction<Result(Xs...)> {
 public:
  template <class F>
  AnyFunction(const F& f)  // NOLINT: converts as std::function does
      : f_(&f), call_([](const void* g, Xs... xs) -> Result { return (*static_cast<const F*>(g))(xs...); }) {}
  Result operator()(Xs... xs) const { return call_(f_, xs...); }

 private:
  const void* f_;
  Result (*call_)(const void*, Xs...);
};

}  // namespace test
