/// In place of examples/train_classifier_qat.cpp, which takes minutes to compile header-only, where a test needs a
/// train_classifier without --qat.
#include <cstdio>

struct Options;

int train_quantized(int, char**, const Options&) {
  std::fputs("train_classifier: --qat: this program was built without it\n", stderr);
  return 2;
}
