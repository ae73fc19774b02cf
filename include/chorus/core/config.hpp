#pragma once
/// Version, optional parts, and the macros that every other header may rely on.
#include <chorus/core/requirements.hpp>

#define CHORUS_VERSION_MAJOR 0
#define CHORUS_VERSION_MINOR 1
#define CHORUS_VERSION_PATCH 0

// Optional parts: always defined, 0 or 1. CMake sets them for the parts that it finds.
#ifndef CHORUS_USE_CUDA
#define CHORUS_USE_CUDA 0
#endif
#ifndef CHORUS_USE_CUDNN
#define CHORUS_USE_CUDNN 0
#endif
#ifndef CHORUS_USE_NCCL
#define CHORUS_USE_NCCL 0
#endif
#ifndef CHORUS_USE_ZLIB
#define CHORUS_USE_ZLIB 0
#endif
#ifndef CHORUS_USE_OPENSSL
#define CHORUS_USE_OPENSSL 0
#endif

// Header-only, or with the larger functions in a library (include/chorus/compiled/, target chorus::compiled). With
// CHORUS_COMPILED=1 headers only declare the functions that don't depend on a user's types. CHORUS_INLINE marks their
// definitions. The library's own sources set CHORUS_BUILDS_LIBRARY, so that these are emitted there. In a program that
// is built by hand, with -DCHORUS_COMPILED=1 for all files, one file that defines CHORUS_IMPLEMENTATION before it
// includes <chorus/chorus.hpp> takes the library's place.
#ifdef CHORUS_IMPLEMENTATION
#define CHORUS_BUILDS_LIBRARY
#undef CHORUS_COMPILED
#endif
#ifndef CHORUS_COMPILED
#define CHORUS_COMPILED 0
#endif
#if defined(CHORUS_BUILDS_LIBRARY) && defined(__clang__)
#define CHORUS_INLINE [[gnu::used, gnu::weak]] inline  // of inline constructors it would emit but one of two symbols
#elif defined(CHORUS_BUILDS_LIBRARY)
#define CHORUS_INLINE [[gnu::used]] inline
#else
#define CHORUS_INLINE inline
#endif
// The library holds the code of models on the CPU. Models on GPUs instantiate theirs where nvcc compiles them.
#if !CHORUS_COMPILED || defined(__CUDACC__)
#define CHORUS_DEFINES_DEVICE_TEMPLATES 1
#else
#define CHORUS_DEFINES_DEVICE_TEMPLATES 0
#endif
// Likewise for AnyCommunicator; programs with GPUs, MPI or gloo may have others.
#if CHORUS_DEFINES_DEVICE_TEMPLATES || CHORUS_USE_MPI || CHORUS_USE_GLOO
#define CHORUS_DEFINES_COMMUNICATOR_TEMPLATES 1
#else
#define CHORUS_DEFINES_COMMUNICATOR_TEMPLATES 0
#endif

// Marks functions that also run in a CUDA kernel.
#if defined(__CUDACC__)
#define CHORUS_HD __host__ __device__
#else
#define CHORUS_HD
#endif

// Eigen disables its vectorisation, on the host too, when it sees nvcc; we never use it inside a kernel.
#ifndef EIGEN_NO_CUDA
#define EIGEN_NO_CUDA
#endif

#include <chorus/core/one_version.hpp>
#include <chorus/core/unoptimized.hpp>
