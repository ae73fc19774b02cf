#pragma once
/// The step of Sgd.

#include <chorus/kernels/optimizer.hpp>
#include <chorus/optim/sgd.hpp>

namespace chorus::optim {

template <Device D>
void Sgd<D>::step() {
  this->for_each_range([&]<class T>(T, const typename Optimizer<D>::Range& range) {
    kernels::sgd_step(this->device(), range.count, static_cast<T*>(range.value), static_cast<const T*>(range.grad),
                      static_cast<T*>(range.state[0]),
                      this->scalars(kernels::SgdScalars{.lr = this->lr_of(range),
                                                        .momentum = options_.momentum,
                                                        .dampening = options_.dampening,
                                                        .weight_decay = range.weight_decay(options_.weight_decay),
                                                        .nesterov = options_.nesterov,
                                                        .first_step = range.steps == 0},
                                    range));
  });
}

}  // namespace chorus::optim
