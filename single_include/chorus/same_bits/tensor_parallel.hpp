#pragma once
#include <chorus/all.hpp>
