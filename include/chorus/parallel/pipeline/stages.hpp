#pragma once
/// The state of a pipeline's rank: its stages' parameters, the links to its neighbours, and shared settings.

#include <algorithm>
#include <chorus/comm/objects.hpp>
#include <chorus/parallel/ddp/same_model.hpp>
#include <chorus/parallel/dp/input_roles.hpp>
#include <chorus/parallel/model_handles.hpp>
#include <chorus/parallel/model_ranks.hpp>
#include <chorus/parallel/parameter_slice.hpp>
#include <chorus/parallel/pipeline/cut.hpp>
#include <chorus/parallel/pipeline/elsewhere.hpp>
#include <chorus/parallel/pipeline/loss_weights.hpp>
#include <chorus/parallel/pipeline/pass.hpp>
#include <chorus/parallel/policy.hpp>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <map>
#include <new>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>
#include <variant>
#include <vector>

namespace chorus {

struct PipelineOptions {
  /// The number of micro-batches per batch, at most one per sample. Their sizes differ by at most one.
  int micro_batches = 8;
  /// Where the model is cut: EqualBytes{}, At{3, 7}, or ByTime{layer_times(model, x)}.
  PipelineCut cut = EqualBytes{};
};

namespace pipeline {

template <class Model, class Order, class Communicator>
class Stages {
 public:
  using D = typename nn::detail::DeviceOfModel<Model>::type;
  static_assert(std::is_same_v<D, Cpu>, "Pipeline: expected a model on the CPU");
  static_assert(
      requires { Model::pipeline_names; },
      "Pipeline: the model needs CHORUS_PIPELINE(...) with its links in their order; for SameBits include "
      "<chorus/same_bits/pipeline.hpp>");

  /// All ranks take rank 0's parameters. A collective.
  Stages(Model model, Communicator& communicator, const comm::World& world, const PipelineOptions& options)
      : model_(std::move(model)), communicator_(communicator), options_(options) {
    if (!world.members.empty()) rank_in_job_ = world.members[static_cast<std::size_t>(communicator.rank())];
    check<UsageError>(options.micro_batches >= 1, "Pipeline: expected micro_batches >= 1, got ", options.micro_batches);
    stage_count_ = static_cast<std::size_t>(Order::of(communicator.size(), 1).stages);
    take_first_state();
    cut();
    keep_own(world);
  }
  Stages(const Stages&) = delete;
  Stages& operator=(const Stages&) = delete;

  Model& model() { return model_; }
  /// This rank's layers, under their names in the model. A parameter that another stage shares has that stage's name.
  /// Layers of other stages are visited without their members, since a mode holds for the whole model.
  void visit(nn::Visitor& visitor) {
    struct Foreign final : nn::detail::Walker {
      nn::Visitor& visitor;
      explicit Foreign(nn::Visitor& of) : visitor(of) {}
      void enter(nn::Module& layer) override { visitor.inner(layer); }
    } foreign(visitor);
    foreign.walk(*foreign_);
    for (auto& [name, handle] : named_elsewhere_) visitor.parameter(name, handle);
    own_->visit(visitor);
  }
  /// `own`, this rank's parameters, and those of other stages, which are empty here: programs that choose parameters by
  /// name or shape work as on one device.
  std::vector<nn::NamedParameter<D>> with_elsewhere(std::vector<nn::NamedParameter<D>> own) const {
    own.insert(own.end(), elsewhere_.begin(), elsewhere_.end());
    return own;
  }
  /// Makes `ranks` decide together about the model's parameters, wherever these are; a parameter that several stages
  /// share counts once.
  template <class Ranks>
  void decide_together(Ranks& ranks, const std::weak_ptr<void>& net) {
    const auto counts = [this](const auto& named) { return this->counts(named); };
    detail::decide_together(with_elsewhere(nn::named_parameters<D>(model_)), ranks, net, counts);
  }
  Communicator& communicator() const { return communicator_; }
  const PipelineOptions& options() const { return options_; }
  const std::vector<std::size_t>& stage_begins() const { return begins_; }

  /// Calls `f(model)` on every rank with all parameters and buffers present, in memory for the whole model, such as for
  /// `io::save` by rank 0. Writes of `f` persist, as in `io::load`; all ranks must write the same. All ranks call it.
  template <class F>
  void gathered(const F& f) {
    or_all_end([&] {
      std::vector<const detail::AtHome<D>*> foreign;
      std::vector<std::string> why;
      for (const Numbers& each : numbers_) {
        if (!each.why.empty()) {
          fetch_back(*each.numbers, D{});
          foreign.push_back(each.numbers);
          why.push_back(each.why);
        }
        broadcast(each.numbers->memory(), each.numbers->size_bytes(), each.owner, trace::Traffic::parameters);
        each.numbers->touch();
      }
      try {
        f(model_);
      } catch (...) {
        try {
          send_away<D>(foreign, why);
        } catch (const std::exception&) {  // such as no memory: the error of `f` comes first
        }
        throw;
      }
      send_away<D>(foreign, why);
    });
  }

  /// Whether this rank shares a parameter with other ranks' stages.
  bool ties_stages() const { return tied_->any(); }
  /// Whether a parameter's numbers count on this rank, if those that several stages share must count once.
  bool counts(const nn::NamedParameter<D>& named) const {
    return tied_->counts_here(*named.handle.shared(), communicator_.rank());
  }

  /// How the batch is cut, into at most `most` micro-batches. Throws ShapeError if it is unknown whether a target has
  /// samples.
  template <class First, class... Rest>
  dp::Split split(int most, const First& first, const Rest&... rest) {
    static_assert(AnyTensor<First> && First::rank >= 1 && detail::batch_axis_of<First>(0) == 0,
                  "Pipeline: expected an input Tensor with the samples along axis 0");
    [[maybe_unused]] constexpr auto takes_gradient = []<class X>(std::type_identity<X>) { return AnyVariable<X>; };
    static_assert(!(detail::holds<Rest>(takes_gradient) || ...),
                  "Pipeline: expected targets that are Tensors, without gradients");
    return roles_.split("Pipeline", most, 0, batch_axis<0>(first), rest...);
  }

  const Schedule& schedule_for(int m) {
    const auto known = schedules_.find(m);
    if (known != schedules_.end()) return known->second;
    auto schedule = Order::of(communicator_.size(), m);
    check<UsageError>(schedule.size() == communicator_.size() &&
                          static_cast<std::size_t>(schedule.stages) == stage_count_ && schedule.micro_batches == m,
                      "Pipeline: the schedule for ", communicator_.size(), " ranks and ", m, " micro-batches has ",
                      schedule.size(), " and ", schedule.micro_batches, ", and ", schedule.stages, " stages for ",
                      stage_count_);
    check_schedule(schedule);
    if constexpr (requires { cat(Order::name); })
      if (auto* const trace = trace::step_counter(); trace != nullptr) [[unlikely]]
        trace->note("schedule", cat('"', Order::name, '"'));
    return schedules_.emplace(m, std::move(schedule)).first->second;
  }
  const std::vector<Schedule::Action>& own_actions(const Schedule& schedule) const {
    return schedule.ranks[static_cast<std::size_t>(communicator_.rank())];
  }

  auto facts(const Schedule& schedule, const RandomContext& random, dp::Split split) {
    using Facts = PassFacts<Model>;
    return Facts{model_, stages_, schedule, *wires_, parameters_, random, std::move(split), D{}};
  }
  /// For results on the tape, which may live longer.
  std::weak_ptr<void> alive() const { return alive_; }
  TiedParameters<D>& tied() { return *tied_; }
  /// Parameters that several stages have, each with these stages, on all ranks in the same order.
  const std::vector<std::pair<Ref<Node>, std::vector<int>>>& in_several_stages() const { return in_several_; }
  void flush() { wires_->flush(); }
  /// The current stage, for messages.
  void at_stage(int stage) { stage_now_ = stage; }

  /// A pass's results, shared by all ranks.
  template <class Value>
  struct Shared {
    Value value;
    double correction = 1;  ///< of gradients: see LossWeights
    LossWeights::Description loss;
    bool wants_grad = false, drew = false;
  };

  /// Sends the last stage's result to all ranks.
  template <class Pass>
  auto share_result(const Schedule& schedule, Pass& pass) {
    using Value = tensor_of<typename Pass::Result>;
    flush();
    const int root = schedule.rank_of(schedule.stages - 1);
    Shared<Value> shared;
    Header header;
    if (communicator_.rank() == root) {
      shared.value = whole_result(schedule, pass);
      std::copy(shared.value.shape().begin(), shared.value.shape().end(), header.extents.begin());
      header.wants_grad = result_wants_grad_;
      header.drew = pass.drew();
    }
    broadcast(&header, sizeof header, root, trace::Traffic::control);
    if (communicator_.rank() != root) {
      Shape<Value::rank> shape{};
      std::copy_n(header.extents.begin(), Value::rank, shape.begin());
      shared.value = Value::empty(shape, D{});
    }
    broadcast(shared.value.data(), shared.value.bytes(), root, trace::Traffic::outputs);
    if constexpr (Pass::gives_loss) {
      struct {
        double correction;
        LossWeights::Description loss;
      } of_loss{pass.sums().weights().correction(), pass.sums().weights().description()};
      broadcast(&of_loss, sizeof of_loss, root, trace::Traffic::control);
      shared.correction = of_loss.correction;
      shared.loss = of_loss.loss;
    }
    shared.wants_grad = header.wants_grad != 0;
    shared.drew = header.drew != 0;
    return shared;
  }

  /// Runs a part of a step. Any exception aborts all ranks, so that none waits for messages that will not come.
  template <class Part>
  auto or_all_end(const Part& part) {
    try {
      return part();
    } catch (const CommError& error) {
      abort(error.what());
      throw;
    } catch (const std::bad_alloc&) {  // no memory for a longer text either
      abort("out of memory");
      throw;
    } catch (const std::exception& error) {
      abort(cat("Pipeline: stage ", stage_now_, ", on rank ", rank_in_job_, ", threw: ", error.what()));
      throw;
    } catch (...) {
      abort(cat("Pipeline: stage ", stage_now_, ", on rank ", rank_in_job_, ", threw an exception of unknown type"));
      throw;
    }
  }

 private:
  void broadcast(void* data, std::size_t bytes, int root, trace::Traffic traffic) {
    if (bytes > 0 && communicator_.size() > 1)
      communicator_.broadcast(std::span(static_cast<std::uint8_t*>(data), bytes), root, {.traffic = traffic});
  }

  // For a loss the weighted mean, for outputs all rows.
  template <class Pass>
  auto whole_result(const Schedule& schedule, Pass& pass) {
    using Value = tensor_of<typename Pass::Result>;
    using T = typename Value::value_type;
    if constexpr (Pass::gives_loss) {
      result_wants_grad_ = pass.loss_wants_grad();
      auto& weights = pass.sums().weights();
      if (pass.recorded()) weights.finish();
      return Value::full({}, static_cast<T>(weights.loss()), D{});
    } else {
      auto& parts = pass.results();
      auto shape = value_of(*parts[0]).shape();
      shape[0] = 0;
      result_wants_grad_ = false;
      for (int i = 0; i < schedule.micro_batches; ++i) {
        const auto& part = value_of(*parts[static_cast<std::size_t>(i)]);
        check<UsageError>(pass.size(i) == 0 || part.size(0) % pass.size(i) == 0, "Pipeline: the model's output for ",
                          pass.size(i), " samples has shape ", part.shape(),
                          ": expected one row, or an equal number, for each sample along axis 0");
        shape[0] += part.size(0);
        result_wants_grad_ = result_wants_grad_ || static_cast<bool>(node_of(*parts[static_cast<std::size_t>(i)]));
      }
      auto whole = Value::empty(shape, D{});
      T* to = whole.data();
      for (const auto& part : parts) {
        const auto dense = contiguous(value_of(*part));
        copy_bytes(D{}, to, D{}, dense.data(), dense.bytes());
        to += dense.numel();
      }
      return whole;
    }
  }

  void abort(std::string_view why) noexcept {
    if (communicator_.size() == 1) return;
    wires_->abort(why);
    tied_->abort(why);
    communicator_.abort(why);
  }

  // All ranks take rank 0's parameters, then keep their part.
  [[gnu::cold]] void take_first_state() {
    const auto all = [](const auto&) { return true; };
    std::string cut = cat(options_.cut.index());
    if (const auto* const at = std::get_if<At>(&options_.cut)) cut += cat(std::span(at->layers));
    detail::check_same_description(communicator_, "Pipeline",
                                   cat("micro_batches ", options_.micro_batches, ", cut ", cut, ", stages ",
                                       stage_count_, "\n", detail::model_description<D>(model_, all)));
    detail::take_rank_0s<D>(model_, communicator_);
  }

  // Assigns layers to stages.
  [[gnu::cold]] void cut() {
    std::vector<double> bytes;
    for (const auto& layer : layers()) {
      double sum = 0;
      for (const auto& named : layer.parameters) sum += static_cast<double>(named.parameter->size_bytes());
      bytes.push_back(sum);
    }
    if (auto* const time = std::get_if<ByTime>(&options_.cut)) {
      check<UsageError>(time->seconds.size() == bytes.size(), "Pipeline: ByTime has ", time->seconds.size(),
                        " times for ", bytes.size(), " layers: expected the result of layer_times(model, x)");
      broadcast(time->seconds.data(), time->seconds.size() * sizeof(double), 0, trace::Traffic::control);
    }
    begins_ = pipeline::stage_begins(options_.cut, bytes, stage_count_);
    const auto places = places_of(model_);
    for (std::size_t s = 0; s < stage_count_; ++s) stages_.push_back({places[begins_[s]], begins_[s + 1] - begins_[s]});
  }

  struct Layer {
    std::vector<nn::NamedParameter<D>> parameters;
    std::vector<nn::NamedBuffer<D>> buffers;
  };
  [[gnu::cold]] std::vector<Layer> layers() {
    std::vector<Layer> out;
    const std::size_t count = places_of(model_).size();
    for (std::size_t i = 0; i < count; ++i) {
      std::vector<bool> one(count);
      one[i] = true;
      SomeLayers<Model> layer(model_, std::move(one));
      out.push_back({nn::named_parameters<D>(layer), nn::named_buffers<D>(layer)});
    }
    return out;
  }
  int stage_of_layer(std::size_t layer) const {
    return static_cast<int>(std::upper_bound(begins_.begin(), begins_.end(), layer) - begins_.begin() - 1);
  }
  int rank_of_layer(std::size_t layer) const { return stage_of_layer(layer) % communicator_.size(); }

  // Frees the memory of other stages.
  [[gnu::cold]] void keep_own(const comm::World& world) {
    const auto all = layers();
    std::unordered_map<const Node*, std::vector<int>> owners, stages_of;
    std::vector<bool> own(all.size());
    for (std::size_t i = 0; i < all.size(); ++i) {
      const int rank = rank_of_layer(i);
      own[i] = rank == communicator_.rank();
      const auto note = [&](const Node* node) {
        auto& ranks = owners[node];
        if (std::find(ranks.begin(), ranks.end(), rank) == ranks.end()) ranks.push_back(rank);
      };
      for (const auto& named : all[i].parameters) {
        note(named.handle.shared().get());
        auto& stages = stages_of[named.handle.shared().get()];
        if (stages.empty() || stages.back() != stage_of_layer(i)) stages.push_back(stage_of_layer(i));
      }
      for (const auto& named : all[i].buffers) note(named.handle.shared().get());
    }
    std::vector<const detail::AtHome<D>*> foreign;
    std::vector<std::string> why;
    std::vector<Node*> parameters;
    std::vector<std::vector<int>> ranks_of;
    const auto sort = [&](const auto& named, const detail::AtHome<D>& numbers) {
      const Node* const node = named.handle.shared().get();
      check<UsageError>(owners.contains(node), "Pipeline: the model's '", named.name,
                        "' is in none of the layers that CHORUS_PIPELINE lists");
      const auto& ranks = owners[node];
      if constexpr (requires { named.parameter; })
        if (ranks.front() != communicator_.rank() && ranks.size() > 1 &&
            std::find(ranks.begin(), ranks.end(), communicator_.rank()) != ranks.end())
          named_elsewhere_.emplace_back(named.name, named.handle);
      numbers_.push_back({&numbers, named.handle.shared(), ranks.front(), {}});
      if (std::find(ranks.begin(), ranks.end(), communicator_.rank()) != ranks.end()) return;
      foreign.push_back(&numbers);
      why.push_back(numbers_.back().why =
                        cat("Pipeline: '", named.name, "' is in a stage of rank ", ranks.front(), ", and this is rank ",
                            communicator_.rank(), ", which does not store it"));
    };
    for (const auto& named : nn::named_parameters<D>(model_)) {
      sort(named, *named.parameter);
      parameters.push_back(named.handle.shared().get());
      if (auto& stages = stages_of[parameters.back()]; stages.size() > 1)
        in_several_.emplace_back(named.handle.shared(), std::move(stages));
      ranks_of.push_back(owners[named.handle.shared().get()]);
    }
    for (const auto& named : nn::named_buffers<D>(model_)) {
      sort(named, *named.buffer);
      check<UsageError>(owners[named.handle.shared().get()].size() == 1, "Pipeline: the buffer '", named.name,
                        "' is in several stages, which would give it different values");
    }
    std::vector<bool> has_parameters(static_cast<std::size_t>(communicator_.size()));
    for (const auto& ranks : ranks_of)
      for (const int rank : ranks) has_parameters[static_cast<std::size_t>(rank)] = true;
    for (int rank = 0; rank < communicator_.size(); ++rank)
      check<UsageError>(has_parameters[static_cast<std::size_t>(rank)], "Pipeline: rank ", rank,
                        " has no parameters: cut the model in other places, or into fewer stages");
    own_.emplace(model_, own);
    own.flip();
    foreign_.emplace(model_, std::move(own));
    struct Own final : nn::Module {
      Stages& stages;
      explicit Own(Stages& of) : stages(of) {}
      void visit(nn::Visitor& visitor) override { stages.visit(visitor); }
    } own_model(*this);
    parameters_ = nn::named_parameters<D>(own_model);
    for (const auto& named : nn::named_parameters<D>(model_))
      if (const auto& ranks = owners[named.handle.shared().get()];
          std::find(ranks.begin(), ranks.end(), communicator_.rank()) == ranks.end()) {
        named.parameter->drop_grad_of(*named.handle.shared());
        nothing_of_.push_back(std::make_unique<detail::ParameterElsewhere<D>>(*named.parameter));
        elsewhere_.push_back({named.name, named.handle, nothing_of_.back().get()});
      }
    send_away(foreign, why);
    wires_.emplace(communicator_, world, stage_count_ > static_cast<std::size_t>(communicator_.size()));
    tied_.emplace(communicator_, world, parameters, ranks_of);
  }

  /// A parameter or a buffer of the whole model.
  struct Numbers {
    const detail::AtHome<D>* numbers;
    Ref<Node> kept;
    int owner;
    std::string why;  // it is not here; empty if it is
  };

  Model model_;
  Communicator& communicator_;
  PipelineOptions options_;
  std::size_t stage_count_ = 0;
  std::vector<std::size_t> begins_;
  std::vector<Stage> stages_;
  std::optional<SomeLayers<Model>> own_, foreign_;
  std::vector<std::pair<std::string, AnyParameter>> named_elsewhere_;  // aliases in own_
  std::vector<nn::NamedParameter<D>> parameters_;                      // this rank's
  std::vector<nn::NamedParameter<D>> elsewhere_;                       // those of other stages
  std::vector<std::unique_ptr<ParameterOn<D>>> nothing_of_;            // their empty stand-ins
  std::vector<Numbers> numbers_;
  std::vector<std::pair<Ref<Node>, std::vector<int>>> in_several_;
  dp::InputRoles roles_;
  std::map<int, Schedule> schedules_;  // by the number of micro-batches
  std::optional<Wires<D>> wires_;
  std::optional<TiedParameters<D>> tied_;
  bool result_wants_grad_ = false;
  int stage_now_ = communicator_.rank(), rank_in_job_ = communicator_.rank();
  std::shared_ptr<void> alive_ = std::make_shared<int>();
};

}  // namespace pipeline

}  // namespace chorus
