/// Lab 4: a solution, in the place of the student's file.

#include "device_0.hpp"

using namespace device_0_lab;

Loss forward(const Layer& fc, const Inputs& inputs, const Labels& labels) {
  return ch::cross_entropy(fc(inputs), labels);
}

int main(int argc, char** argv) {
  return lab::run(argc, argv, title, check, {.forward = forward});
}
