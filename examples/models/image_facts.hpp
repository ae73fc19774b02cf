#pragma once
/// What a model has to know about its images.

#include <chorus/core/dtype.hpp>

struct ImageFacts {
  chorus::Index channels, height, width, classes;
};
