#pragma once
/// Ranks in virtual time: whole programs with true numbers, and steps of the policies on thousands of ranks. Contents:
/// simulate/README.md.

#include <chorus/simulate/meshed.hpp>
#include <chorus/simulate/pipelined.hpp>
#include <chorus/simulate/recorded.hpp>
#include <chorus/simulate/simulate.hpp>
#include <chorus/simulate/trace_file.hpp>
#include <chorus/simulate/training.hpp>
