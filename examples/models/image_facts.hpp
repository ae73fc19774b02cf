#pragma once
/// Facts about images that a model needs.

#include <chorus/core/dtype.hpp>

struct ImageFacts {
  chorus::Index channels, height, width, classes;
};
