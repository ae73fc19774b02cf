#pragma once
/// Traces: a few steps of a run as a picture. A program that includes this header has `--trace FILE`; one that links
/// chorus::compiled has it anyway. Contents of a trace, and how to read it: trace/README.md.

#include <chorus/trace/at_launch.hpp>
#include <chorus/trace/trace_recorder.hpp>
