// JPEG files: what is not refused is a picture.
#include "images.hpp"

FUZZ_TARGET(jpeg) { fuzz_images::decode(input); }
