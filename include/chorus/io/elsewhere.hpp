#pragma once
/// What <chorus/chorus.hpp> declares, but whose header it leaves out: a program that forgets it is told which it is.

#include <string>

namespace chorus::io {

struct LoadReport;  // io::load needs #include <chorus/io/load_model.hpp>

/// `load` with its usual options: see load_model.hpp.
template <class Model>
LoadReport load(Model& model, const std::string& path);

}  // namespace chorus::io
