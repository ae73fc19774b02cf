#pragma once
/// Whole models with the parameter names of Hugging Face and torchvision: GPT, BERT, ResNet.

#include <chorus/nn/models/bert.hpp>
#include <chorus/nn/models/gpt.hpp>
#include <chorus/nn/models/resnet.hpp>
