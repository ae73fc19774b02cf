#pragma once
/// Declarations of <chorus/chorus.hpp> without their headers: if a program forgets one, the error names it.

#include <string>

namespace chorus::io {

struct LoadReport;  // io::load needs #include <chorus/io/load_model.hpp>

/// `load` with its usual options: see load_model.hpp.
template <class Model>
LoadReport load(Model& model, const std::string& path);

}  // namespace chorus::io
