#pragma once
/// Placement types: models of one's own under TensorParallel whose missing and double sums don't compile. See
/// placement/placed.hpp for the kinds, placement/collectives.hpp for the calls, placement/rules.hpp for the rules.

#include <chorus/ops/placement/collectives.hpp>
#include <chorus/ops/placement/operators.hpp>
#include <chorus/ops/placement/placed.hpp>
#include <chorus/ops/placement/rules.hpp>
