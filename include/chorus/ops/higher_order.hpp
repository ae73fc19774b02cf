#pragma once
/// Gradients of gradients. If a computation starts with GraphVariables, all results are GraphVariables, and `grad` with
/// `create_graph` returns recorded gradients:
///
///   const ch::GraphVariable x(images, true);
///   const auto dx = ch::grad(sum(critic(x)), x, {.create_graph = true});
///   const auto norm = ch::sqrt(ch::sum(ch::square(ch::flatten(dx)), 1) + 1e-12);
///   ch::mean(ch::square(norm - 1)).backward();  // into the critic's parameters
///
/// Under a policy this code is in the model's `forward`, or around the policy's call, whose outputs are GraphVariables
/// if an input is one.
///
/// How it works: GraphVariable is a type of its own, so Variables have no extra cost. `record` is overloaded for it:
/// nodes keep the operation and its inputs, in addition to the backward function. `grad` walks the nodes and calls
/// `derivatives(operation, dy, y, inputs...)`, which is written once for each operation in terms of other operations.
/// These run on GraphVariables, so their results are on the tape. The gradient of an element-wise functor is a functor;
/// of one input, so are all its higher derivatives (autograd/jet.hpp).
///
/// Which operation has which order: see the table in ops/README.md. Elsewhere `grad` throws a UsageError with the
/// operation's name.

#include <chorus/ops/higher_order/convolution.hpp>
#include <chorus/ops/higher_order/graph_variable.hpp>
#include <chorus/ops/higher_order/normalization.hpp>
#include <chorus/ops/higher_order/picking.hpp>
#include <chorus/ops/higher_order/pointwise.hpp>
#include <chorus/ops/higher_order/reduction.hpp>
#include <chorus/ops/higher_order/special_functions.hpp>
#include <chorus/ops/higher_order/sync_batch_norm.hpp>
