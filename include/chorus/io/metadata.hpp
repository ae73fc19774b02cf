#pragma once
/// The notes that a file carries beside its tensors.

#include <map>
#include <string>

#include <chorus/core/config.hpp>

namespace chorus::io {

/// Text by text.
using Metadata = std::map<std::string, std::string>;

}  // namespace chorus::io
