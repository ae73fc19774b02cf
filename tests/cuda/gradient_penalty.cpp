#include "gradient_penalty.hpp"

std::vector<float> chorus_test::penalty_gradients_on_cpu() { return penalty_gradients<Cpu>(); }
