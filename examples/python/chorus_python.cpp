/// A Python module that trains a chorus model on NumPy's or PyTorch's arrays, by nanobind. No array is copied, in
/// neither direction.

#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <chorus/chorus.hpp>
#include <chorus/io/dlpack.hpp>
#include <cstdint>
#include <utility>
#include <vector>

namespace nb = nanobind;
namespace ch = chorus;

/// The memory of any array that has __dlpack__. `read_only`: whether nobody may write to it.
template <class T, int Rank>
ch::Tensor<T, Rank> tensor_of(const nb::object& array, bool* read_only = nullptr) {
  const nb::object capsule = array.attr("__dlpack__")(nb::arg("max_version") = nb::make_tuple(1, 0));
  const auto take = [&](const char* name, const char* used) {
    void* const managed = PyCapsule_GetPointer(capsule.ptr(), name);
    if (managed == nullptr || PyCapsule_SetName(capsule.ptr(), used) != 0) throw nb::python_error();
    return managed;  // the capsule no longer frees it
  };
  if (PyCapsule_IsValid(capsule.ptr(), "dltensor"))
    return ch::from_dlpack<T, Rank>(static_cast<ch::dlpack::Managed*>(take("dltensor", "used_dltensor")));
  auto* const managed =
      static_cast<ch::dlpack::ManagedVersioned*>(take("dltensor_versioned", "used_dltensor_versioned"));
  if (read_only != nullptr) *read_only = (managed->flags & ch::dlpack::read_only) != 0;
  return ch::from_dlpack<T, Rank>(managed, {.read_only = true});  // nothing here writes to it
}

/// A tensor that NumPy and PyTorch read: numpy.from_dlpack(array).
struct Array {
  ch::Tensor<float, 2> numbers;
  bool read_only = false;

  template <class Managed>
  static nb::object capsule(Managed* managed, const char* name) {
    const auto free_unused = [](PyObject* self) {  // a consumer renames the capsule
      const char* const its_name = PyCapsule_GetName(self);
      if (*its_name == 'u') return;
      auto* const mine = static_cast<Managed*>(PyCapsule_GetPointer(self, its_name));
      mine->deleter(mine);
    };
    return nb::steal(PyCapsule_New(managed, name, free_unused));
  }
  nb::object dlpack(const nb::kwargs& asked) const {
    const bool versioned = asked.contains("max_version") && !asked["max_version"].is_none();
    ch::ToDlpackOptions options;
    if (read_only) options.writable = false;
    return versioned ? capsule(ch::to_dlpack(numbers, options), "dltensor_versioned")
                     : capsule(ch::to_dlpack_unversioned(numbers, options), "dltensor");
  }
};

template <class Device>
struct Classifier : ch::nn::Module {
  Classifier(ch::Index inputs, ch::Index classes) : hidden(inputs, 32), last(32, classes) {}
  ch::nn::Linear<Device> hidden, last;
  CHORUS_MODULE(Classifier, hidden, last)
  auto forward(const auto& x) const { return last(ch::relu(hidden(x))); }
};
using Net = ch::SingleDevice<Classifier<ch::Cpu>>;

/// The losses of `steps` steps, each on all samples: x [samples, inputs], y [samples].
std::vector<float> fit(Net& net, const nb::object& x, const nb::object& y, int steps, double lr) {
  const auto inputs = tensor_of<float, 2>(x);
  const auto labels = tensor_of<std::int64_t, 1>(y);
  const nb::gil_scoped_release other_threads_run;
  ch::optim::Adam optimizer{net.parameters(), {.lr = lr}};
  std::vector<float> losses;
  for (int i = 0; i < steps; ++i) {
    optimizer.zero_grad();
    const auto loss = ch::cross_entropy(net(inputs), labels);
    loss.backward();
    optimizer.step();
    losses.push_back(loss.item());
  }
  return losses;
}

NB_MODULE(chorus_python, module) {
  using namespace nb::literals;
  nb::class_<Array>(module, "Array")
      .def("__init__",
           [](Array* self, const nb::object& x) {
             bool read_only = false;
             auto numbers = tensor_of<float, 2>(x, &read_only);
             new (self) Array{std::move(numbers), read_only};
           })
      .def("__dlpack__", &Array::dlpack)
      .def("__dlpack_device__", [](const Array&) { return std::pair(1, 0); });
  nb::class_<Net>(module, "Classifier")
      .def("__init__",
           [](Net* self, ch::Index inputs, ch::Index classes) {
             new (self) Net({inputs, classes});
           })
      .def("fit", &fit, "x"_a, "y"_a, "steps"_a, "lr"_a = 0.01)
      .def("logits", [](Net& net, const nb::object& x) { return Array{net(tensor_of<float, 2>(x)).value()}; })
      .def("weight", [](Net& net) { return Array{net.module().hidden.weight.value()}; });
}
