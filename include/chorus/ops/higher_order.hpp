#pragma once
/// Gradients of gradients. Where a computation begins with GraphVariables, every result is one, and `grad` with
/// `create_graph` gives gradients that are recorded in turn:
///
///   const ch::GraphVariable x(images, true);
///   const auto dx = ch::grad(sum(critic(x)), x, {.create_graph = true});
///   const auto norm = ch::sqrt(ch::sum(ch::square(ch::flatten(dx)), 1) + 1e-12);
///   ch::mean(ch::square(norm - 1)).backward();  // into the critic's parameters
///
/// Under a policy this stands in the model's `forward`, or around the call of the policy, whose outputs are
/// GraphVariables where an input is one.
///
/// How it works: GraphVariable is a type of its own, so that Variables pay nothing. `record` is overloaded for it and
/// makes nodes that, beside their backward function, keep the operation and its inputs. `grad` walks them and calls
/// `derivatives(operation, dy, y, inputs...)`, which stands here for each operation, once, in terms of other
/// operations. Those run on GraphVariables, so their results are on the tape. An element-wise functor's gradient is a
/// functor itself; its own gradient comes from Dual numbers of Dual numbers.
///
/// Derivatives of the second order exist for element-wise functions, matrix products, convolutions, pooling,
/// normalisation, reductions, softmax, cross entropy, dropout, and what changes shapes or picks elements; higher orders
/// where only products, sums and exp are met. Else `grad` throws a UsageError that names the operation.

#include <chorus/ops/higher_order/convolution.hpp>
#include <chorus/ops/higher_order/graph_variable.hpp>
#include <chorus/ops/higher_order/normalization.hpp>
#include <chorus/ops/higher_order/picking.hpp>
#include <chorus/ops/higher_order/pointwise.hpp>
#include <chorus/ops/higher_order/reduction.hpp>
#include <chorus/ops/higher_order/sync_batch_norm.hpp>
