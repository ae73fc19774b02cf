#pragma once
/// All of the library chorus::compiled in one file of a program; included by <chorus/chorus.hpp> where
/// CHORUS_IMPLEMENTATION is defined. All files of the program are compiled with -DCHORUS_COMPILED=1.

#include <chorus/compiled/communication.cpp>
#include <chorus/compiled/files.cpp>
#include <chorus/compiled/integers.cpp>
#include <chorus/compiled/kernels.cpp>
#include <chorus/compiled/model.cpp>
#include <chorus/compiled/pointwise.cpp>
#include <chorus/compiled/same_bits.cpp>
#include <chorus/compiled/training.cpp>
