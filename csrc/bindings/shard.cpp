// What Python sees of the sharded buffers.
#include <torch/csrc/utils/pybind.h>

#include "bindings/bindings.h"
#include "common/python_reference.h"
#include "shard/buffer_pool.h"
#include "shard/flat_layout.h"
#include "shard/graph_walk.h"
#include "shard/island.h"
#include "shard/materialize.h"
#include "shard/product_gradients.h"
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
      .def("trim", &BufferPool::trim, NoGil())
      .def("reset_peaks", &BufferPool::reset_peaks)
      .def("stats", [](const BufferPool& self) {
        const BufferPool::Stats stats = self.stats();
        return py::dict(py::arg("bytes_in_use") = stats.bytes_in_use,
                        py::arg("peak_bytes_in_use") = stats.peak_bytes_in_use,
                        py::arg("buffers_in_use") = stats.buffers_in_use,
                        py::arg("peak_buffers_in_use") = stats.peak_buffers_in_use,
                        py::arg("bytes_idle") = stats.bytes_idle, py::arg("allocations") = stats.allocations);
      });
}

std::shared_ptr<ShardedBuffer> make_group(
    std::string label, std::vector<at::Tensor> parameters, std::vector<std::string> names,
    std::vector<std::vector<std::int64_t>> shapes, std::shared_ptr<Communicator> gather_comm,
    std::shared_ptr<Communicator> reduce_comm, std::shared_ptr<BufferPool> pool, at::ScalarType dtype,
    const c10::Device& device, std::shared_ptr<Communicator> replica_comm,
    std::optional<at::ScalarType> compute_dtype, std::optional<at::ScalarType> reduce_dtype,
    std::optional<at::ScalarType> gather_dtype, ShardedBuffer::ReduceWay reduce_way,
    std::shared_ptr<Communicator> host_comm, std::shared_ptr<Communicator> hosts_comm) {
  const at::ScalarType gathered = compute_dtype.value_or(dtype);
  return std::make_shared<ShardedBuffer>(ShardedBuffer::Options{
      std::move(label), std::move(parameters), std::move(names), std::move(shapes), std::move(gather_comm),
      std::move(reduce_comm), std::move(replica_comm), reduce_way, std::move(host_comm),
      std::move(hosts_comm), std::move(pool), dtype, gather_dtype.value_or(gathered), gathered,
      reduce_dtype.value_or(dtype), device});
}

void bind_tree(py::module_& m) {
  py::class_<TreeSum, std::shared_ptr<TreeSum>>(m, "TreeSum")
      .def(py::init<>())
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
      .def(py::init([](const std::shared_ptr<OpenIslands>& open, std::string refusal) {
             return IslandShore(open, std::move(refusal));
           }),
           py::arg("open"), py::arg("refusal"))
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

void bind_group(py::module_& m) {
  py::class_<ShardedBuffer, std::shared_ptr<ShardedBuffer>> group(m, "ShardedBuffer");
  py::enum_<ShardedBuffer::State>(group, "State")
      .value("SHARDED", ShardedBuffer::State::kSharded)
      .value("GATHERING", ShardedBuffer::State::kGathering)
      .value("GATHERED", ShardedBuffer::State::kGathered);
  py::enum_<ShardedBuffer::ReduceWay>(group, "ReduceWay")
      .value("DIRECT", ShardedBuffer::ReduceWay::kDirect)
      .value("RING", ShardedBuffer::ReduceWay::kRing)
      .value("HOSTS", ShardedBuffer::ReduceWay::kHosts);
  group
      .def(py::init(&make_group), py::kw_only(), py::arg("label"), py::arg("parameters"), py::arg("names"),
           py::arg("shapes"), py::arg("gather_comm"), py::arg("reduce_comm"), py::arg("pool"),
           py::arg("dtype"), py::arg("device"), py::arg("replica_comm") = nullptr,
           py::arg("compute_dtype") = py::none(), py::arg("reduce_dtype") = py::none(),
           py::arg("gather_dtype") = py::none(), py::arg("reduce_way") = ShardedBuffer::ReduceWay::kDirect,
           py::arg("host_comm") = nullptr, py::arg("hosts_comm") = nullptr)
      // A copy: a reference would keep the group alive, which keeps the parameters, which keep their layout.
      .def_property_readonly("layout", [](const ShardedBuffer& self) { return FlatLayout(self.layout()); })
      .def_property_readonly("state", &ShardedBuffer::state)
      .def_property_readonly("is_bound", &ShardedBuffer::is_bound)
      .def_property_readonly("num_replicas", &ShardedBuffer::num_replicas)
      .def_property_readonly("gathered_bytes", &ShardedBuffer::gathered_bytes)
      .def_property_readonly("unreduced_bytes", &ShardedBuffer::unreduced_bytes)
      .def_property_readonly("parameters", &ShardedBuffer::parameters)
      .def_property_readonly("shard", &ShardedBuffer::shard)
      .def_property_readonly("gradient_shard",
                             [](const ShardedBuffer& self) -> py::object {
                               const at::Tensor gradient = self.gradient_shard();
                               return gradient.defined() ? py::cast(gradient) : py::none();
                             })
      .def("local_view", &ShardedBuffer::local_view, py::arg("index"))
      .def("num_references", &ShardedBuffer::num_references)
      .def("version", &ShardedBuffer::version)
      .def("requires_grad", &ShardedBuffer::requires_grad)
      .def("owns_storage", &ShardedBuffer::owns_storage, py::arg("tensor"))
      .def("attach", &ShardedBuffer::attach)
      .def("make_shard", &ShardedBuffer::make_shard, py::arg("index"))
      .def("adopt_data", &ShardedBuffer::adopt_data)
      .def(
          "set_hooks",
          [](ShardedBuffer& self, std::size_t index, const py::dict& hooks) {
            self.set_hooks(index, hooks.ptr());
          },
          py::arg("index"), py::arg("hooks"))
      .def("start_gather", &ShardedBuffer::start_gather, py::arg("in_place") = false, NoGil())
      .def("finish_gather", &ShardedBuffer::finish_gather, NoGil())
      .def("release", &ShardedBuffer::release, NoGil())
      .def("bind", &ShardedBuffer::bind)
      .def("unbind", &ShardedBuffer::unbind)
      .def("begin_backward", &ShardedBuffer::begin_backward, py::arg("trains"),
           py::arg("under_way") = std::vector<std::shared_ptr<ShardedBuffer>>{}, NoGil())
      .def("start_reduce", &ShardedBuffer::start_reduce, NoGil())
      .def("continue_reduce", &ShardedBuffer::continue_reduce, NoGil())
      .def("await_reduce", &ShardedBuffer::await_reduce, NoGil())
      .def("finish_reduce", &ShardedBuffer::finish_reduce, py::arg("tree") = nullptr, NoGil())
      .def("add_gradient", &ShardedBuffer::add_gradient, py::arg("sum"), NoGil())
      .def("join_backward", &ShardedBuffer::join_backward, py::arg("trains"), NoGil())
      .def("drop_gradients", &ShardedBuffer::drop_gradients, py::arg("which"), NoGil())
      .def("cancel_backward", &ShardedBuffer::cancel_backward, NoGil());
}

}  // namespace

void bind_shard(py::module_& m) {
  bind_layout(m);
  bind_pool(m);
  bind_tree(m);
  bind_group(m);
  bind_island(m);
  m.def("materialize", &materialize, py::arg("parameter"), py::arg("data"));
  m.def("next_node_number", &next_node_number);
  py::class_<GraphRoots>(m, "GraphRoots").def(py::init<const std::vector<at::Tensor>&>(), py::arg("outputs"));
  m.def("write_products_in_place", &write_products_in_place, py::arg("roots"), py::arg("packed"));
  m.def("find_older_node", &find_older_node, py::arg("outputs"), py::arg("first"));
}

}  // namespace bmtrain
