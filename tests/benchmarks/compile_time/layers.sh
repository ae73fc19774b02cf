#!/bin/sh
# Writes quickstart.cpp's program with a model of N layers, two convolutions for every three linear layers, to standard output.
#
#   tests/benchmarks/compile_time/layers.sh N
set -eu
awk -v n="$1" 'BEGIN {
  convolutions = int(n * 2 / 5)
  print "#include <chorus/chorus.hpp>\n\nnamespace ch = chorus;\n\ntemplate <class Device>\nstruct Deep : ch::nn::Module {"
  for (i = 1; i <= n; ++i) {
    if (i <= convolutions)
      printf "  ch::nn::Conv2d<Device> layer%d{%d, 6, {.kernel = 3, .padding = 1}};\n", i, i == 1 ? 3 : 6
    else
      printf "  ch::nn::Linear<Device> layer%d{%d, %d};\n", i, i == convolutions + 1 ? 6 * 16 * 16 : 64, i == n ? 10 : 64
    names = names ", layer" i
  }
  print "  CHORUS_MODULE(Deep" names ")\n\n  auto forward(const auto& images) const {"
  print "    auto x = ch::max_pool2d(ch::relu(layer1(images)), 2);"
  for (i = 2; i <= convolutions; ++i) printf "    x = ch::relu(layer%d(x));\n", i
  printf "    auto y = ch::relu(layer%d(ch::flatten(x)));\n", convolutions + 1
  for (i = convolutions + 2; i < n; ++i) printf "    y = ch::relu(layer%d(y));\n", i
  printf "    return layer%d(y);\n  }\n};\n\n", n
}'
sed -e 's/ToyModel/Deep/' -e '1,/^using Model/{/^using Model/!d}' "$(dirname "$0")/../../../examples/quickstart.cpp"
