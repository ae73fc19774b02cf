#pragma once
#include <chorus/chorus.hpp>
