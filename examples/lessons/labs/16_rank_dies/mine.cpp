/// Lab 16: a rank dies. See README.md.

#include "rank_dies.hpp"

using namespace rank_dies_lab;

int hear([[maybe_unused]] Rank& me, [[maybe_unused]] int from, [[maybe_unused]] double& number) { lab::hole("hear"); }

void train([[maybe_unused]] Training& run) { lab::hole("train"); }

int main(int argc, char** argv) { return lab::run(argc, argv, title, check, {hear, train}); }
