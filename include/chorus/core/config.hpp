#pragma once
/// Version, optional parts, and macros for all other headers.
#include <chorus/core/requirements.hpp>

#define CHORUS_VERSION_MAJOR 0
#define CHORUS_VERSION_MINOR 1
#define CHORUS_VERSION_PATCH 0

// Optional parts, always defined as 0 or 1. CMake sets them for the parts that it finds.
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

// Header-only, or with larger functions in a library (include/chorus/compiled/, target chorus::compiled). With
// CHORUS_COMPILED=1 headers only declare functions that don't depend on a user's types; CHORUS_INLINE marks their
// definitions. The library's sources set CHORUS_BUILDS_LIBRARY to emit them. Programs built by hand do the same with
// -DCHORUS_SEPARATE for all files; one file defines CHORUS_IMPLEMENTATION before it includes <chorus/chorus.hpp>,
// instead of the library.
#ifdef CHORUS_IMPLEMENTATION
#define CHORUS_BUILDS_LIBRARY
#undef CHORUS_COMPILED
#endif
#ifndef CHORUS_COMPILED
#define CHORUS_COMPILED 0
#endif
#if defined(CHORUS_BUILDS_LIBRARY) && defined(__clang__)
#define CHORUS_INLINE [[gnu::used, gnu::weak]] inline  // clang emits only one of an inline constructor's two symbols
#elif defined(CHORUS_BUILDS_LIBRARY)
#define CHORUS_INLINE [[gnu::used]] inline
#else
#define CHORUS_INLINE inline
#endif
// The library has the code of models on the CPU. Models on GPUs instantiate theirs where nvcc compiles them.
#if !CHORUS_COMPILED || defined(__CUDACC__)
#define CHORUS_DEFINES_DEVICE_TEMPLATES 1
#else
#define CHORUS_DEFINES_DEVICE_TEMPLATES 0
#endif
// The same for AnyCommunicator; programs with GPUs, MPI or gloo may have other instances.
#if CHORUS_DEFINES_DEVICE_TEMPLATES || CHORUS_USE_MPI || CHORUS_USE_GLOO
#define CHORUS_DEFINES_COMMUNICATOR_TEMPLATES 1
#else
#define CHORUS_DEFINES_COMMUNICATOR_TEMPLATES 0
#endif

// Marks functions that also run in CUDA kernels.
#if defined(__CUDACC__)
#define CHORUS_HD __host__ __device__
#else
#define CHORUS_HD
#endif

// Eigen disables its vectorisation, even on the host, under nvcc. Kernels here never use Eigen.
#ifndef EIGEN_NO_CUDA
#define EIGEN_NO_CUDA
#endif

#include <chorus/core/one_version.hpp>
#include <chorus/core/unoptimized.hpp>
