// What Python sees of the sharded buffers.
#include <ATen/ops/from_blob.h>
#include <sys/mman.h>
#include <torch/csrc/utils/pybind.h>

#include "bindings/bindings.h"
#include "common/python_reference.h"
#include "shard/buffer_pool.h"
#include "shard/graph.h"
#include "shard/products.h"
#include "shard/sharded_buffer.h"
#include "shard/tree_sum.h"

namespace bmtrain {
namespace py = pybind11;

namespace {

using NoGil = py::call_guard<py::gil_scoped_release>;

void bind_layout(py::module_& m) {
  py::class_<FlatLayout>(m, "FlatLayout")
      .def(py::init<std::vector<std::int64_t>, std::int64_t, std::int64_t, std::int64_t,
                    std::optional<std::int64_t>>(),
           py::arg("numels"), py::arg("element_size"), py::arg("num_ranks"),
           py::arg("alignment_bytes") = FlatLayout::kAlignmentBytes, py::arg("partition") = py::none())
      .def_readonly_static("SLICE_BYTES", &FlatLayout::kSliceBytes)
      .def_property_readonly("total", &FlatLayout::total)
      .def_property_readonly("partition", &FlatLayout::partition)
      .def_property_readonly("num_ranks", &FlatLayout::num_ranks)
      .def("__len__", &FlatLayout::size)
      .def(
          "offset", [](const FlatLayout& self, std::size_t index) { return self.span(index).offset; },
          py::arg("index"))
      .def(
          "numel", [](const FlatLayout& self, std::size_t index) { return self.span(index).numel; },
          py::arg("index"))
      .def(
          "local_part",
          [](const FlatLayout& self, std::size_t index, std::int64_t rank) {
            const LocalPart part = self.local_part(index, rank);
            return py::make_tuple(part.param_begin, part.numel, part.shard_offset);
          },
          py::arg("index"), py::arg("rank"),
          "(first element of the parameter, count, first element of the "
          "shard)");
}

void bind_pool(py::module_& m) {
  py::class_<BufferPool, std::shared_ptr<BufferPool>>(m, "BufferPool")
      .def(py::init<std::int64_t, bool>(), py::arg("idle_per_class"), py::arg("poison"))
      .def(
          "acquire",
          [](BufferPool& self, std::int64_t nbytes) {
            auto owner = std::make_shared<c10::DataPtr>(self.acquire(nbytes, c10::kCPU));
            // A drive may write to it while a forked child shares its pages.
            ::madvise(owner->get(), static_cast<std::size_t>(nbytes), MADV_DONTFORK);
            void* const data = owner->get();
            return at::from_blob(data, {nbytes}, [owner](void*) {}, at::TensorOptions().dtype(at::kByte));
          },
          py::arg("nbytes"), "Host memory for transfers; of whole pages if it is 1 MiB or more.")
      .def("trim", &BufferPool::trim, NoGil())
      .def("reset_peaks", &BufferPool::reset_peaks)
      .def("stats", [](const BufferPool& self) {
        const BufferPool::Stats stats = self.stats();
        return py::dict(py::arg("bytes_in_use") = stats.bytes_in_use,
                        py::arg("peak_bytes_in_use") = stats.peak_bytes_in_use,
                        py::arg("buffers_in_use") = stats.buffers_in_use,
                        py::arg("peak_buffers_in_use") = stats.peak_buffers_in_use,
                        py::arg("bytes_idle") = stats.bytes_idle);
      });
}

std::shared_ptr<ShardedBuffer> make_buffer(
    std::string label, std::vector<at::Tensor> parameters, std::vector<std::string> names,
    std::vector<std::vector<std::int64_t>> shapes, std::shared_ptr<Communicator> gather_comm,
    std::shared_ptr<Communicator> reduce_comm, std::shared_ptr<BufferPool> pool, at::ScalarType dtype,
    const c10::Device& device, std::shared_ptr<Communicator> replica_comm,
    std::optional<at::ScalarType> compute_dtype, std::optional<at::ScalarType> reduce_dtype,
    std::optional<at::ScalarType> gather_dtype, ReduceWay reduce_way, std::shared_ptr<Communicator> host_comm,
    std::shared_ptr<Communicator> hosts_comm, std::shared_ptr<HostLane> host_lane) {
  const at::ScalarType gathered = compute_dtype.value_or(dtype);
  return std::make_shared<ShardedBuffer>(BufferOptions{
      std::move(label), std::move(parameters), std::move(names), std::move(shapes), std::move(gather_comm),
      std::move(reduce_comm), std::move(replica_comm), reduce_way, std::move(host_comm),
      std::move(hosts_comm), std::move(pool), dtype, gather_dtype.value_or(gathered), gathered,
      reduce_dtype.value_or(dtype), device, std::move(host_lane)});
}

/// Python functions in a dict, each given the gradient that the one before returned (or left as it was).
class PythonHooks final : public torch::autograd::FunctionPreHook {
 public:
  explicit PythonHooks(const py::dict& hooks) : hooks_(hooks.ptr()) {}

  torch::autograd::variable_list operator()(const torch::autograd::variable_list& gradients) override {
    const py::gil_scoped_acquire gil;
    torch::autograd::variable_list results = gradients;
    const auto hooks = py::reinterpret_borrow<py::dict>(hooks_.get());
    for (const py::handle hook : py::list(hooks.attr("values")())) {
      if (!results.at(0).defined()) {
        break;
      }
      const py::object changed = hook(results[0]);
      if (!changed.is_none()) {
        results[0] = changed.cast<at::Tensor>();
      }
    }
    return results;
  }

 private:
  PythonReference hooks_;
};

void bind_tree(py::module_& m) {
  py::class_<TreeSum, std::shared_ptr<TreeSum>>(m, "TreeSum")
      .def(py::init([](std::optional<std::int64_t> capacity) {
             return capacity ? std::make_shared<TreeSum>(*capacity) : std::make_shared<TreeSum>();
           }),
           py::arg("capacity") = py::none())
      .def("push", &TreeSum::push, py::arg("leaf"), NoGil())
      .def_property_readonly("num_leaves", &TreeSum::num_leaves)
      .def("total", &TreeSum::total, NoGil());
}

Gradients call_backward(const PythonReference& backward, const Gradients& gradients) {
  const py::gil_scoped_acquire gil;
  Gradients results;
  for (const py::handle result : py::list(backward.get()(gradients))) {
    results.push_back(result.is_none() ? at::Tensor() : result.cast<at::Tensor>());
  }
  return results;
}

void bind_island(py::module_& m) {
  py::class_<OpenIslands, std::shared_ptr<OpenIslands>>(m, "OpenIslands")
      .def(py::init<>())
      .def_property_readonly("count", &OpenIslands::count)
      .def("enter", &OpenIslands::enter)
      .def("leave", &OpenIslands::leave);
  py::class_<IslandShore>(m, "IslandShore")
      .def(py::init<std::shared_ptr<OpenIslands>, std::string>(), py::arg("open"), py::arg("refusal"))
      .def("guard", &IslandShore::guard, py::arg("leaf"));
  m.def(
      "attach_island",
      [](const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& inputs,
         const py::object& backward) {
        const auto kept = std::make_shared<PythonReference>(backward.ptr());
        attach_island(outputs, inputs,
                      [kept](const Gradients& gradients) { return call_backward(*kept, gradients); });
      },
      py::arg("outputs"), py::arg("inputs"), py::arg("backward"));
}

// Methods of a buffer's parts as methods of the buffer.
template <typename Part, typename Owner, typename Result, typename... Arguments>
auto of(Part (ShardedBuffer::*part)(), Result (Owner::*method)(Arguments...)) {
  return [=](ShardedBuffer& self, Arguments... arguments) -> Result {
    return ((self.*part)().*method)(std::forward<Arguments>(arguments)...);
  };
}
template <typename Part, typename Owner, typename Result, typename... Arguments>
auto of(Part (ShardedBuffer::*part)(), Result (Owner::*method)(Arguments...) const) {
  return [=](ShardedBuffer& self, Arguments... arguments) -> Result {
    return ((self.*part)().*method)(std::forward<Arguments>(arguments)...);
  };
}
template <typename Result, typename... Arguments>
auto of_reduction(Result (Reduction::*method)(Arguments...)) {
  return [=](ShardedBuffer& self, Arguments... arguments) -> Result {
    return (*self.reduction().*method)(std::forward<Arguments>(arguments)...);
  };
}

void bind_state(py::class_<ShardedBuffer, std::shared_ptr<ShardedBuffer>>& buffer) {
  using Self = const ShardedBuffer&;
  buffer
      // A copy: a reference would keep the buffer alive, which keeps the parameters, which keep their layout.
      .def_property_readonly("layout", [](Self self) { return FlatLayout(self.spec().layout); })
      .def_property_readonly("state", of(&ShardedBuffer::gathered, &GatheredBuffer::state))
      .def_property_readonly("num_replicas", [](Self self) { return self.spec().num_replicas(); })
      .def_property_readonly("gathered_bytes", of(&ShardedBuffer::gathered, &GatheredBuffer::num_bytes))
      .def_property_readonly("unreduced_bytes", [](Self self) { return self.reduction()->num_bytes(); })
      .def_property_readonly("parameters", [](Self self) { return self.spec().parameters; })
      .def_property_readonly("shard", [](ShardedBuffer& self) { return self.shard().flat(); })
      .def_property_readonly("gradient_shard",
                             [](Self self) -> py::object {
                               const at::Tensor& gradient = self.gradient_shard().flat();
                               return gradient.defined() ? py::cast(gradient) : py::none();
                             })
      .def("num_references", &ShardedBuffer::num_references)
      .def("version", &ShardedBuffer::version)
      .def("requires_grad", &ShardedBuffer::requires_grad)
      .def("owns_storage", of(&ShardedBuffer::gathered, &GatheredBuffer::owns), py::arg("tensor"));
}

void bind_buffer(py::module_& m) {
  py::class_<HostLane, std::shared_ptr<HostLane>>(m, "HostLane")
      .def(py::init<const c10::Device&>(), py::arg("device"));
  py::class_<ShardedBuffer, std::shared_ptr<ShardedBuffer>> buffer(m, "ShardedBuffer");
  py::enum_<GatheredBuffer::State>(buffer, "State")
      .value("SHARDED", GatheredBuffer::State::kSharded)
      .value("GATHERING", GatheredBuffer::State::kGathering)
      .value("GATHERED", GatheredBuffer::State::kGathered);
  py::enum_<ReduceWay>(buffer, "ReduceWay")
      .value("DIRECT", ReduceWay::kDirect)
      .value("RING", ReduceWay::kRing)
      .value("HOSTS", ReduceWay::kHosts);
  buffer.def(py::init(&make_buffer), py::kw_only(), py::arg("label"), py::arg("parameters"), py::arg("names"),
             py::arg("shapes"), py::arg("gather_comm"), py::arg("reduce_comm"), py::arg("pool"),
             py::arg("dtype"), py::arg("device"), py::arg("replica_comm") = nullptr,
             py::arg("compute_dtype") = py::none(), py::arg("reduce_dtype") = py::none(),
             py::arg("gather_dtype") = py::none(), py::arg("reduce_way") = ReduceWay::kDirect,
             py::arg("host_comm") = nullptr, py::arg("hosts_comm") = nullptr, py::arg("host_lane") = nullptr);
  bind_state(buffer);
  buffer.def("local_view", of(&ShardedBuffer::shard, &ShardMemory::local_view), py::arg("index"))
      .def("attach", of(&ShardedBuffer::shard, &ShardMemory::attach))
      .def("make_shard", of(&ShardedBuffer::shard, &ShardMemory::make), py::arg("index"))
      .def(
          "use_gradient_memory",
          [](ShardedBuffer& self, const at::Tensor& memory) { self.gradient_shard().use_memory(memory); },
          py::arg("memory"), "Makes the next gradient shard of it.")
      .def("keep_gradient_memory", [](ShardedBuffer& self) { self.gradient_shard().keep_memory(); })
      .def("adopt_data", &ShardedBuffer::adopt_data)
      .def(
          "set_hooks",
          [](ShardedBuffer& self, std::size_t index, const py::dict& hooks) {
            self.set_hook(index, std::make_unique<PythonHooks>(hooks));
          },
          py::arg("index"), py::arg("hooks"))
      .def("start_gather", of(&ShardedBuffer::gathered, &GatheredBuffer::start), py::arg("in_place") = false,
           NoGil())
      .def("finish_gather", of(&ShardedBuffer::gathered, &GatheredBuffer::finish), NoGil())
      .def("release", of(&ShardedBuffer::gathered, &GatheredBuffer::release), NoGil())
      .def("bind", &ShardedBuffer::bind)
      .def("unbind",
           [](ShardedBuffer& self) {
             self.gathered().unbind();
             if (self.spec().host_lane) {
               const py::gil_scoped_release no_gil;
               self.gathered().await_copy();
             }
           })
      .def("begin_backward", &ShardedBuffer::begin_backward, py::arg("trains"),
           py::arg("under_way") = std::vector<std::shared_ptr<ShardedBuffer>>{}, py::arg("in_turn") = false,
           NoGil())
      .def("sum_if_arrived", of_reduction(&Reduction::sum_if_arrived), NoGil())
      .def("join_backward", of_reduction(&Reduction::join), py::arg("trains"), NoGil())
      .def("drop_gradients", of_reduction(&Reduction::drop), py::arg("which"), NoGil())
      .def("send_pieces", of_reduction(&Reduction::send_pieces), py::arg("all_comm"))
      .def("start_reduce", of_reduction(&Reduction::start), NoGil())
      .def("continue_reduce", of_reduction(&Reduction::continue_sum), NoGil())
      .def("await_reduce", of_reduction(&Reduction::await), NoGil())
      .def("finish_reduce", of_reduction(&Reduction::finish), py::arg("tree") = nullptr, NoGil())
      .def("add_gradient", of_reduction(&Reduction::add), py::arg("sum"), NoGil())
      .def("cancel_backward", of_reduction(&Reduction::cancel), NoGil());
}

}  // namespace

void bind_shard(py::module_& m) {
  bind_layout(m);
  bind_pool(m);
  bind_tree(m);
  bind_buffer(m);
  bind_island(m);
  m.def("materialize", &materialize, py::arg("parameter"), py::arg("data"));
  m.def("lend", &lend, py::arg("flat"), py::arg("memory"));
  m.def("next_node_number", &next_node_number);
  py::class_<GraphRoots>(m, "GraphRoots").def(py::init<const std::vector<at::Tensor>&>(), py::arg("outputs"));
  py::class_<DeferredProducts, std::shared_ptr<DeferredProducts>>(m, "DeferredProducts")
      .def(py::init<>())
      .def("run", &DeferredProducts::run, py::call_guard<py::gil_scoped_release>());
  m.def("write_products_in_place", &write_products_in_place, py::arg("roots"), py::arg("packed"),
        py::arg("later") = nullptr);
  m.def("find_older_node", &find_older_node, py::arg("outputs"), py::arg("first"));
}

}  // namespace bmtrain
