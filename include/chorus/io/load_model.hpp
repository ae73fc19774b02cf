#pragma once
/// Reading a model's numbers from a safetensors file.

#include <algorithm>
#include <chorus/io/converted_numbers.hpp>
#include <chorus/io/data_hash.hpp>
#include <chorus/io/elsewhere.hpp>
#include <chorus/io/file_names.hpp>
#include <chorus/io/load_options.hpp>
#include <chorus/io/model_file.hpp>
#include <chorus/io/safetensors_files.hpp>
#include <chorus/io/tensor_place.hpp>
#include <chorus/io/write_in_parts_impl.hpp>
#include <cstddef>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

namespace chorus::io {

namespace detail {

/// A tensor of a model: all its names there, and the required dtype and shape.
struct Destination {
  std::vector<std::string> names;
  DType dtype{};
  std::vector<Index> shape;
  bool transposed = false;  ///< in the file

  std::vector<Index> shape_in_file() const { return transposed ? std::vector<Index>{shape[1], shape[0]} : shape; }
};

/// The file's tensors for each tensor of a model, and those that don't fit.
struct LoadPlan {
  std::vector<std::vector<const TensorEntry*>> sources;  ///< of each destination; all of its sources must be equal
  LoadReport report;
};

/// PyTorch also accepts one number for a scalar.
inline bool same_shape(std::span<const Index> file, std::span<const Index> model) {
  return std::ranges::equal(file, model) || (model.empty() && file.size() == 1 && file[0] == 1);
}

/// Advice if names or shapes don't fit.
[[gnu::cold]] inline std::string hints_for(const std::string& path, const LoadReport& report,
                                           const FileTensors& tensors) {
  std::string hints;
  NameSet missing(report.missing.begin(), report.missing.end());
  const auto count = [&](const auto& is_found) {
    return std::ranges::count_if(tensors.unexpected(), [&](const auto& tensor) { return is_found(tensor.name); });
  };
  const auto hint = [&](const std::string& what, std::ptrdiff_t fitting) {
    hints += cat("; {.rename = io::", what, "} makes ", fitting, fitting == 1 ? " name fit" : " names fit");
  };
  for (const auto& [name, in_file] : tensors.unexpected()) {
    // Whether one is "model.fc.weight" and the other "fc.weight".
    if (const auto dot = name.find('.'); dot != name.npos)
      for (auto end = dot + 1; end != 0 && end < name.size(); end = name.find('.', end) + 1)
        if (missing.contains(name.substr(end))) {
          const auto prefix = name.substr(0, end);
          hint(cat("without_prefix(", Quoted{prefix}, ")"), count([&](const std::string& other) {
                 return other.starts_with(prefix) && missing.contains(other.substr(end));
               }));
          break;
        }
    for (const auto& wanted : missing)
      if (hints.empty() && wanted.ends_with("." + name)) {
        const auto prefix = wanted.substr(0, wanted.size() - name.size());
        hint(cat("with_prefix(", Quoted{prefix}, ")"),
             count([&](const std::string& other) { return missing.contains(prefix + other); }));
      }
    if (!hints.empty()) break;
  }
  if (hints.empty() && !report.missing.empty() && !report.unexpected.empty())
    hints = "; a function as {.rename = ...} turns names of the file into the model's";
  for (const auto& x : report.mismatched) {
    if (!convertible(x.got, x.expected) && same_shape(x.got_shape, x.expected_shape))
      hints += cat("; ", x.got, " is not converted to ", x.expected, " (floating-point numbers are to each other, ",
                   "integers to each other): convert ", x.name, " in Python if that is correct");
    else if (x.got_shape.size() == 2 && x.expected_shape.size() == 2 && x.got_shape[0] == x.expected_shape[1] &&
             x.got_shape[1] == x.expected_shape[0])
      hints +=
          cat("; ", x.name, " is transposed in the file: Keras, Flax and GPT-2's Conv1D keep [inputs, outputs], ",
              "PyTorch and chorus [outputs, inputs]: {.transposed = ...} names those (also square ones, which fit)");
    else
      continue;
    break;
  }
  if (const auto of = path.rfind("-of-"); !report.missing.empty() && of != std::string::npos)
    hints += cat("; the name ", Quoted{path.substr(path.rfind('/') + 1)},
                 " says that the model is in several files: load their index, whose name ends in .index.json");
  return hints;
}

/// Finds the file's tensors for each destination.
LoadPlan plan_load(const auto& file, const std::vector<Destination>& model, const LoadOptions& options) {
  LoadPlan plan;
  NameSet names;
  for (const auto& to : model) names.insert(to.names.begin(), to.names.end());
  const FileTensors tensors(file, names, options.rename);
  bool any = false;
  for (const auto& to : model) {
    auto& sources = plan.sources.emplace_back();
    for (const auto& name : to.names)
      if (const TensorEntry* entry = tensors.find(name)) sources.push_back(entry);
    const auto& name = to.names.front();
    const auto misfit = std::ranges::find_if(sources, [&](const TensorEntry* entry) {
      return !convertible(entry->dtype, to.dtype) || !same_shape(entry->shape, to.shape_in_file());
    });
    // Batch norm of PyTorch before 0.4.1 had no batch counter. As in PyTorch, the layer keeps its own count.
    constexpr std::string_view counted = "num_batches_tracked";
    const bool may_lack = name.ends_with(counted) && to.dtype == DType::i64 && to.shape.empty() &&
                          tensors.find(name.substr(0, name.size() - counted.size()) + "running_mean") != nullptr;
    if (sources.empty()) {
      if (!may_lack) plan.report.missing.push_back(name);
    } else if (misfit != sources.end()) {
      plan.report.mismatched.push_back({name, to.dtype, to.shape_in_file(), (*misfit)->dtype, (*misfit)->shape});
      sources.clear();
    } else {
      any = true;
    }
  }
  for (const auto& tensor : tensors.unexpected()) plan.report.unexpected.push_back(tensor.in_file);
  if (plan.report.complete()) return plan;
  const auto hints = hints_for(file.path(), plan.report, tensors);
  check<FileError>(any || model.empty(), "loading ", file.path(),
                   ": the file doesn't fit the model: ", "none of its tensors does; ", plan.report, hints);
  check<FileError>(!options.strict, "loading ", file.path(), ": the file doesn't fit the model; ", plan.report, hints,
                   "; with {.strict = false} io::load fills what fits and returns the rest in a report");
  return plan;
}

/// The numbers of the transposed matrix.
inline std::vector<std::byte> transposed(const std::vector<std::byte>& numbers, const std::vector<Index>& shape,
                                         std::size_t size) {
  const auto rows = static_cast<std::size_t>(shape[0]), columns = static_cast<std::size_t>(shape[1]);
  std::vector<std::byte> out(numbers.size());
  if (!out.empty())
    for (std::size_t row = 0; row < rows; ++row)
      for (std::size_t column = 0; column < columns; ++column)
        std::memcpy(out.data() + (column * rows + row) * size, numbers.data() + (row * columns + column) * size, size);
  return out;
}

/// Marks the matrices that the file keeps transposed.
inline void mark_transposed(std::vector<Destination>& model, const Transposed& transposed) {
  for (auto& to : model) to.transposed = transposed && to.shape.size() == 2 && transposed(to.names.front());
}

/// The file's numbers for a destination. Throws FileError if a number has no value in its type, and if the file's
/// sources of a tied tensor differ.
std::vector<std::byte> numbers_for(const auto& file, const Destination& to,
                                   const std::vector<const TensorEntry*>& sources) {
  std::vector<std::byte> first;
  for (const TensorEntry* entry : sources) {
    std::vector<std::byte> numbers(entry->bytes);
    file.read(*entry, numbers);
    check_bools(file, *entry, numbers);
    const auto who = cat("loading ", file.path(), ": tensor ", Quoted{entry->name});
    numbers = converted(std::move(numbers), *dtype_of_tensors(entry->dtype), to.dtype, who);
    if (entry == sources.front())
      first = std::move(numbers);
    else
      check<FileError>(numbers == first, who, " has other values than ", Quoted{sources.front()->name},
                       ", and the model's ", to.names[0],
                       " is tied to both; a LoadOptions::rename that returns \"\" for one of them leaves it out");
  }
  return to.transposed ? transposed(first, to.shape_in_file(), size_of(to.dtype)) : first;
}

/// The tensors at `places` with all of their names.
template <Device D>
std::vector<Destination> destinations(nn::Module& model, const std::vector<TensorPlace<D>>& places) {
  const auto names = all_names(model);
  std::vector<Destination> out;
  for (const auto& place : places) out.push_back({names.at(place.name), place.dtype, place.shape});
  return out;
}

/// All tensors of a model, whole even if this rank has only a part.
template <Device D>
std::vector<Destination> whole_destinations(nn::Module& model) {
  const auto names = all_names(model);
  std::vector<Destination> out;
  const auto add = [&](const std::string& name, const auto& tensor) {
    const auto extents = tensor.extents();
    out.push_back({names.at(name), tensor.dtype(), {extents.begin(), extents.end()}});
  };
  for (const auto& named : nn::named_parameters<D>(model)) add(named.name, *named.parameter);
  for (const auto& named : nn::named_buffers<D>(model)) add(named.name, *named.buffer);
  return out;
}

template <Device D>
LoadReport load_model(nn::Module& model, const auto& open, const LoadOptions& options) {
  const auto file = open();
  const auto places = model_places<D>(model);
  for (const auto& place : places) check_whole(place);
  auto wanted = destinations(model, places);
  mark_transposed(wanted, options.transposed);
  auto plan = plan_load(file, wanted, options);
  std::vector<std::vector<std::byte>> numbers;  // all are read before one is stored
  for (std::size_t i = 0; i < wanted.size(); ++i) numbers.push_back(numbers_for(file, wanted[i], plan.sources[i]));
  for (std::size_t i = 0; i < wanted.size(); ++i)
    if (!plan.sources[i].empty()) places[i].fill(numbers[i].data());
  say_changed<D>(model);
  return std::move(plan.report);
}

/// Under a policy whose ranks have parts of the model: each takes its own. All ranks call it.
template <class Net>
LoadReport load_parts(Net& net, const auto& open, const LoadOptions& options) {
  using D = typename Net::device_type;
  const auto places = places_in_parts<D>(net);
  auto wanted = whole_destinations<D>(net.module());
  mark_transposed(wanted, options.transposed);
  const auto place_of = [&](const Destination& tensor) {
    return std::find_if(places.begin(), places.end(),
                        [&](const auto& place) { return place.name == tensor.names.front(); });
  };
  std::vector<std::vector<std::byte>> numbers(wanted.size());
  LoadReport report;
  const auto read = [&] {
    const auto file = open();
    auto plan = plan_load(file, wanted, options);
    for (std::size_t i = 0; i < wanted.size(); ++i)
      if (const auto place = place_of(wanted[i]); place != places.end() && !plan.sources[i].empty())
        numbers[i] = place->own_of(numbers_for(file, wanted[i], plan.sources[i]));
    report = std::move(plan.report);
  };
  on_all_ranks(net.communicator(), read, [] {});
  for (std::size_t i = 0; i < wanted.size(); ++i)
    if (!numbers[i].empty()) place_of(wanted[i])->fill(numbers[i].data());
  say_changed<D>(net.module());
  return report;
}

/// Fills a model, or a policy's net, from the file that `open()` opens.
template <class Model>
LoadReport load_from(Model& model, const auto& open, const LoadOptions& options) {
  if constexpr (std::is_base_of_v<nn::Module, Model>) {
    return load_model<typename Model::device_type>(model, open, options);
  } else {
    static_assert(IsNet<Model>, "io::load: expected a model or a policy's net");
    if constexpr (keeps_parts<Model>)
      return load_parts(model, open, options);
    else
      return load_from(model.module(), open, options);
  }
}

}  // namespace detail

/// Fills all parameters and buffers of `model` from a safetensors file, or from several by their index (see
/// SafetensorsFiles). Numbers are converted to the model's type: floating-point
/// numbers of any type to each other, integers and bools to each other. A PyTorch file fits as it does there, even
/// without batch norm's batch counter (the layer keeps its own count). Tied tensors may have one name, as safetensors'
/// `save_model` writes them, or all. Prefixes of PyTorch's wrappers are removed, unless the model has them, too:
/// `module.` (DataParallel, DistributedDataParallel) if all names have it, and anywhere `_orig_mod.` (torch.compile),
/// `_fsdp_wrapped_module.`, `_checkpoint_wrapped_module.` and `_forward_module.`.
///
/// Returns the differences: none, unless `options.strict` is false. Throws FileError, and changes nothing, if the file
/// is damaged or of another format; if names, shapes or kinds of numbers differ from the model's (one message lists
/// them all) or, without `strict`, if no tensor fits; if a number is out of the range of the model's type; and if the
/// file's sources of a tied tensor differ.
///
/// Copies on other devices and in 16 bits are updated. Under every policy it takes the net, and all ranks call it: each
/// reads the file, or only its parts if ranks have parts of the model. If one rank fails, all throw FileError.
template <class Model>
LoadReport load(Model& model, const std::string& path, const LoadOptions& options) {
  return detail::load_from(
      model, [&] { return SafetensorsFiles(path); }, options);
}
template <class Model>
LoadReport load(Model& model, const std::string& path) {
  return load(model, path, LoadOptions{});
}

}  // namespace chorus::io
