// What Python sees of the disk tier: files, their mappings, and queues of transfers, with memory as tensors.
#include <ATen/ops/from_blob.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "bindings/bindings.h"
#include "common/check.h"
#include "disk/disk_file.h"
#include "disk/disk_queue.h"

namespace bmtrain {
namespace {

using NoGil = py::call_guard<py::gil_scoped_release>;

// Bytes that `owner` holds, for as long as the tensor lives.
at::Tensor bytes_of(std::shared_ptr<void> owner, char* data, std::int64_t nbytes) {
  return at::from_blob(
      data, {nbytes}, [owner = std::move(owner)](void*) {}, at::TensorOptions().dtype(at::kByte));
}

using Move = void (DiskQueue::*)(int, std::shared_ptr<DiskFile>, std::int64_t, std::int64_t,
                                 std::shared_ptr<char>);

template <Move move>
void start(DiskQueue& self, int buffer, std::shared_ptr<DiskFile> file, std::int64_t offset,
           std::int64_t nbytes, const std::optional<at::Tensor>& memory) {
  std::shared_ptr<char> lent;
  if (memory) {
    BMT_CHECK(ValueError, memory->is_cpu() && memory->is_contiguous(),
              "memory: expected a contiguous CPU tensor");
    BMT_CHECK(ValueError, static_cast<std::int64_t>(memory->nbytes()) >= nbytes, "memory: expected ", nbytes,
              " bytes, got ", memory->nbytes());
    lent = {static_cast<char*>(memory->data_ptr()), [held = *memory](char*) {}};
  }
  (self.*move)(buffer, std::move(file), offset, nbytes, std::move(lent));
}

}  // namespace

void bind_disk(py::module_& module) {
  module.attr("SEAL_BYTES") = kSealBytes;
  py::class_<DiskMapping, std::shared_ptr<DiskMapping>>(module, "DiskMapping")
      .def(
          "tensor",
          [](const std::shared_ptr<DiskMapping>& self, std::int64_t begin, std::int64_t nbytes) {
            BMT_CHECK(ValueError, begin >= 0 && nbytes >= 0 && begin + nbytes <= self->nbytes(),
                      "DiskMapping.tensor: expected a range of ", self->nbytes(), " bytes, got ", nbytes,
                      " at ", begin);
            return bytes_of(self, self->data() + begin, nbytes);
          },
          py::arg("begin"), py::arg("nbytes"), "Bytes of the mapping, with a storage of their own.");
  py::class_<DiskFile, std::shared_ptr<DiskFile>>(
      module, "DiskFile", "Reserved space on a drive, in a file without a name, which ends with the process.")
      .def(py::init<std::string>(), py::arg("directory"), NoGil())
      .def("reserve", &DiskFile::reserve, py::arg("nbytes"), NoGil())
      .def("map", &DiskFile::map, py::arg("offset"), py::arg("nbytes"), NoGil())
      .def("zero", &DiskFile::zero, py::arg("offset"), py::arg("nbytes"), NoGil())
      .def("unseal", &DiskFile::unseal, py::arg("offset"), py::arg("nbytes"))
      .def("seals", &DiskFile::seals, py::arg("offset"), py::arg("nbytes"))
      .def("fileno", &DiskFile::descriptor)
      .def_property_readonly("name", &DiskFile::name)
      .def_property_readonly("nbytes", &DiskFile::size)
      .def_property_readonly("is_direct", &DiskFile::is_direct);
  py::class_<DiskQueue, std::shared_ptr<DiskQueue>>(
      module, "DiskQueue",
      "Buffers, and transfers between them and files that continue behind the caller's back.")
      .def(py::init(&DiskQueue::make), py::arg("back_end"), py::arg("num_buffers"), py::arg("buffer_bytes"))
      .def(
          "buffer",
          [](const std::shared_ptr<DiskQueue>& self, int number) {
            BMT_CHECK(ValueError, number >= 0 && number < self->num_buffers(), "expected a buffer from 0 to ",
                      self->num_buffers() - 1, ", got ", number);
            return bytes_of(self, self->buffer(number), self->buffer_bytes());
          },
          py::arg("number"))
      .def("read", &start<&DiskQueue::read>, py::arg("buffer"), py::arg("file"), py::arg("offset"),
           py::arg("nbytes"), py::arg("memory") = py::none(), NoGil())
      .def("write", &start<&DiskQueue::write>, py::arg("buffer"), py::arg("file"), py::arg("offset"),
           py::arg("nbytes"), py::arg("memory") = py::none(), NoGil())
      .def("wait", &DiskQueue::wait, py::arg("buffer"), NoGil())
      .def_property_readonly("bytes_read", &DiskQueue::bytes_read)
      .def_property_readonly("bytes_written", &DiskQueue::bytes_written)
      .def_property_readonly("num_calls", &DiskQueue::num_calls)
      .def_property_readonly("back_end", &DiskQueue::back_end)
      .def_property_readonly("reason", &DiskQueue::reason);
}

}  // namespace bmtrain
