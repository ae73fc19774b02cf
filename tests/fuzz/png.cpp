// PNG files: what is not refused is a picture.
#include "images.hpp"

FUZZ_TARGET(png) { fuzz_images::decode(input); }
