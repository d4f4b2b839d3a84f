// torch's operators on the simulated device: each becomes work of the current stream that computes on the
// host what the CUDA kernel would have, in memory of the device.
//
// [Note: An operator as work of a stream]
// What it returns has to exist before it is computed: shapes come from running it on tensors without data,
// and torch's own caching allocator gives the memory, so that memory is used again as on a device: as soon as
// the host has dropped a tensor, while the stream still has to use it. Work holds addresses, no tensors.
// Operators whose result the host has to know (an item, the number of nonzeros) wait for the stream, as on a
// device. Views, allocations and copies to and from the host are torch's own.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <ATen/ops/copy_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/mul.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>

#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace {

using c10::IValue;
using c10::OperatorHandle;
using torch::jit::Stack;

constexpr auto kCuda = c10::DispatchKey::CUDA;

/// The same value with each tensor, list of tensors and device in it replaced.
IValue replaced(const IValue& value, const std::function<at::Tensor(const at::Tensor&)>& replace,
                c10::Device device) {
  if (value.isTensor()) {
    const at::Tensor& tensor = value.toTensor();
    return tensor.defined() ? IValue(replace(tensor)) : value;
  }
  if (value.isTensorList()) {
    std::vector<at::Tensor> tensors;
    for (const at::Tensor& tensor : value.toTensorVector()) tensors.push_back(replace(tensor));
    return tensors;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> tensors;
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector()) {
      tensors.push_back(tensor && tensor->defined() ? std::optional(replace(*tensor)) : tensor);
    }
    return tensors;
  }
  if (value.isDevice() && value.toDevice().is_cuda()) return device;
  if (value.isGenerator()) return {};  // see generator_for
  return value;
}

at::Tensor keep_flags(const at::Tensor& of, at::Tensor in) {
  if (of.is_conj()) in._set_conj(true);
  if (of.is_neg()) in._set_neg(true);
  if (of.unsafeGetTensorImpl()->is_wrapped_number()) in.unsafeGetTensorImpl()->set_wrapped_number(true);
  return in;
}

/// The host's view of the memory of a tensor, which it does not keep alive. A number that is on the host
/// already is read now, as a launch does; and work that held Python's own tensor would need its lock to drop
/// it.
at::Tensor on_host(const at::Tensor& tensor) {
  if (!tensor.is_cuda()) return keep_flags(tensor, tensor.detach().clone());
  const auto options = at::TensorOptions(tensor.scalar_type()).device(at::kCPU);
  at::Tensor alias = at::from_blob(tensor.unsafeGetTensorImpl()->mutable_data(), tensor.sizes(),
                                   tensor.strides(), nullptr, options, at::kCPU);
  return keep_flags(tensor, alias);
}

at::Tensor without_data(const at::Tensor& tensor) {
  if (!tensor.is_cuda()) return tensor;
  at::Tensor meta = at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kMeta));
  return keep_flags(tensor, meta);
}

at::Tensor on_device(const at::Tensor& like) {
  return at::empty_strided(like.sizes(), like.strides(), like.options().device(at::kCUDA));
}

/// Random operators draw from the device's generator: its seed and offset seed one of the host's.
at::Generator generator_for(const OperatorHandle& op, const Stack& arguments) {
  if (!op.hasTag(at::Tag::nondeterministic_seeded)) return {};
  at::Generator given = at::cuda::detail::getDefaultCUDAGenerator();
  for (const IValue& argument : arguments) {
    if (argument.isGenerator()) given = argument.toGenerator();
  }
  TORCH_CHECK(given.device().type() == at::kCUDA, "expected a CUDA generator, got one of ", given.device());
  auto* const cuda = at::check_generator<at::CUDAGeneratorImpl>(given);
  const std::lock_guard lock(cuda->mutex_);
  const auto [seed, offset] = cuda->philox_engine_inputs(4);
  return at::detail::createCPUGenerator(seed * 0x9e3779b97f4a7c15u + offset);
}

void put_generator(const OperatorHandle& op, const at::Generator& generator, Stack& stack) {
  const auto& arguments = op.schema().arguments();
  for (std::size_t index = 0; generator.defined() && index < arguments.size(); ++index) {
    if (arguments[index].name() == "generator") stack[index] = generator;
  }
}

/// Dropout takes no generator.
void drop_out(const at::Generator& generator, Stack& stack) {
  const at::Tensor input = stack[0].toTensor();
  const double kept = stack[2].isNone() || stack[2].toBool() ? 1 - stack[1].toDouble() : 1;
  const at::Tensor mask =
      at::empty(input.sizes(), input.options().dtype(at::kBool)).bernoulli_(kept, generator);
  at::Tensor out = at::mul(input, mask);
  if (kept > 0) out.mul_(1 / kept);
  stack = {out, mask};
}

/// Means that CUDA kernels keep in fp32, and the host's in the dtype of the input.
void narrow_saved_means(const OperatorHandle& op, Stack& stack) {
  const std::string& name = op.operator_name().name;
  const std::size_t first = name == "aten::native_layer_norm_backward"   ? 3
                            : name == "aten::native_group_norm_backward" ? 2
                                                                         : 0;
  for (std::size_t index = first; first > 0 && index < first + 2; ++index) {
    stack[index] = stack[index].toTensor().to(stack[1].toTensor().scalar_type());
  }
}

void run_on_host(const OperatorHandle& op, Stack& stack, const at::Generator& generator = {}) {
  const c10::impl::ExcludeDispatchKeyGuard below_autograd(c10::autograd_dispatch_keyset);
  const c10::impl::ExcludeDispatchKeyGuard below_views(c10::DispatchKey::ADInplaceOrView);
  const c10::impl::ExcludeDispatchKeyGuard below_autocast(c10::autocast_dispatch_keyset);
  put_generator(op, generator, stack);
  if (generator.defined() && op.operator_name().name == "aten::native_dropout")
    return drop_out(generator, stack);
  op.callBoxed(&stack);
}

/// Gives `work` to the current stream.
void enqueue(std::function<void()> work) {
  auto* const owned = new std::function<void()>(std::move(work));
  C10_CUDA_CHECK(cudaLaunchHostFunc(
      c10::cuda::getCurrentCUDAStream(),
      [](void* argument) {
        const std::unique_ptr<std::function<void()>> mine(static_cast<std::function<void()>*>(argument));
        try {
          (*mine)();
        } catch (const std::exception& error) {  // a device would be lost too
          std::fprintf(stderr, "simulated CUDA: %.1000s\n", error.what());
          std::_Exit(70);
        }
      },
      owned));
}

bool is_written(const c10::Argument& argument) {
  return argument.alias_info() != nullptr && argument.alias_info()->isWrite();
}

/// The tensors among values, in order.
std::vector<at::Tensor> tensors_of(const Stack& values) {
  std::vector<at::Tensor> all;
  for (const IValue& value : values) {
    if (value.isTensor()) all.push_back(value.toTensor());
    if (value.isTensorList()) {
      for (const at::Tensor& tensor : value.toTensorVector()) all.push_back(tensor);
    }
  }
  return all;
}

/// What the operator returns: of what it writes to, the arguments themselves; otherwise what `make` gives for
/// the result of running it elsewhere.
Stack results_for(const c10::FunctionSchema& schema, const Stack& arguments, const Stack& elsewhere,
                  const std::function<at::Tensor(const at::Tensor&)>& make, c10::Device device) {
  Stack results;
  std::size_t next_written = 0;
  for (std::size_t index = 0; index < schema.returns().size(); ++index) {
    if (is_written(schema.returns()[index])) {
      while (!is_written(schema.arguments()[next_written])) ++next_written;
      results.push_back(arguments[next_written++]);
    } else {
      results.push_back(replaced(elsewhere[index], make, device));
    }
  }
  return results;
}

/// Sizes of outputs that the caller left to the operator (`out=` of no elements).
void resize_outputs(const c10::FunctionSchema& schema, const Stack& arguments, const Stack& meta_arguments) {
  for (std::size_t index = 0; index < arguments.size(); ++index) {
    if (!schema.arguments()[index].is_out() || !arguments[index].isTensor()) continue;
    const at::Tensor &given = arguments[index].toTensor(), &wanted = meta_arguments[index].toTensor();
    if (given.defined() && given.sizes() != wanted.sizes()) given.resize_(wanted.sizes());
  }
}

bool returns_tensors_only(const c10::FunctionSchema& schema) {
  for (const c10::Argument& result : schema.returns()) {
    const auto kind = result.type()->kind();
    const bool is_list =
        kind == c10::TypeKind::ListType &&
        result.type()->expectRef<c10::ListType>().getElementType()->kind() == c10::TypeKind::TensorType;
    if (kind != c10::TypeKind::TensorType && !is_list) return false;
  }
  return true;
}

Stack mapped(const Stack& values, at::Tensor (*map)(const at::Tensor&), c10::Device device) {
  Stack result;
  for (const IValue& value : values) result.push_back(replaced(value, map, device));
  return result;
}

/// Results and arguments as the operator leaves them on tensors without data; false if it needs the data.
bool find_shapes(const OperatorHandle& op, const Stack& arguments, Stack& meta_arguments, Stack& results) {
  if (!returns_tensors_only(op.schema())) return false;
  meta_arguments = mapped(arguments, without_data, at::kMeta);
  results = meta_arguments;
  try {
    run_on_host(op, results);
  } catch (const std::exception&) {
    return false;
  }
  return true;
}

void wait_and_run(const OperatorHandle& op, Stack* stack, const Stack& arguments) {
  const c10::FunctionSchema& schema = op.schema();
  const at::Generator generator = generator_for(op, arguments);
  Stack host = mapped(arguments, on_host, at::kCPU);
  // Through the stream, for device memory is open there; its other end is waited for.
  enqueue([&] { run_on_host(op, host, generator); });
  C10_CUDA_CHECK(cudaStreamSynchronize(c10::cuda::getCurrentCUDAStream()));
  const Stack results = results_for(
      schema, arguments, host, [](const at::Tensor& made) { return made.to(at::kCUDA); }, at::kCUDA);
  torch::jit::drop(*stack, schema.arguments().size());
  stack->insert(stack->end(), results.begin(), results.end());
}

void as_work(const OperatorHandle& op, c10::DispatchKeySet /*keys*/, Stack* stack) {
  const c10::FunctionSchema& schema = op.schema();
  const auto given = torch::jit::last(*stack, schema.arguments().size());
  const Stack arguments(given.begin(), given.end());
  c10::cuda::OptionalCUDAGuard guard;
  for (const at::Tensor& tensor : tensors_of(arguments)) {
    if (tensor.defined() && tensor.is_cuda()) {
      guard.set_index(tensor.get_device());
      break;
    }
  }
  Stack meta_arguments, meta_results;
  if (!find_shapes(op, arguments, meta_arguments, meta_results)) return wait_and_run(op, stack, arguments);
  resize_outputs(schema, arguments, meta_arguments);
  const Stack results = results_for(schema, arguments, meta_results, on_device, at::kCUDA);
  Stack host = mapped(arguments, on_host, at::kCPU), host_results = mapped(results, on_host, at::kCPU);
  enqueue([op, schema = &schema, host = std::move(host), host_results = std::move(host_results),
           generator = generator_for(op, arguments)]() mutable {
    narrow_saved_means(op, host);
    run_on_host(op, host, generator);
    for (std::size_t index = 0; index < host_results.size(); ++index) {
      if (is_written(schema->returns()[index])) continue;
      const auto to = tensors_of({host_results[index]}), from = tensors_of({host[index]});
      for (std::size_t t = 0; t < to.size(); ++t) {
        if (to[t].defined()) at::native::copy_(const_cast<at::Tensor&>(to[t]), from[t], false);
      }
    }
  });
  torch::jit::drop(*stack, schema.arguments().size());
  stack->insert(stack->end(), results.begin(), results.end());
}

/// Between two tensors of the device it is work; to and from the host it is torch's own.
at::Tensor& copy(at::Tensor& to, const at::Tensor& from, bool non_blocking) {
  if (!to.is_cuda() || !from.is_cuda() || to.unsafeGetTensorImpl() == from.unsafeGetTensorImpl()) {
    return at::native::copy_(to, from, non_blocking);
  }
  const c10::cuda::CUDAGuard guard(from.device());
  const bool is_one_device = to.device() == from.device();
  if (!is_one_device) c10::cuda::getCurrentCUDAStream(to.get_device()).synchronize();
  enqueue([to = on_host(to), from = on_host(from)]() mutable { at::native::copy_(to, from, false); });
  if (!is_one_device) c10::cuda::getCurrentCUDAStream(from.get_device()).synchronize();
  return to;
}

bool stays_native(const OperatorHandle& op) {
  static const std::set<std::string> names = {"aten::empty",          "aten::empty_strided",
                                              "aten::set_",           "aten::resize_",
                                              "aten::record_stream",  "aten::pin_memory",
                                              "aten::_pin_memory",    "aten::is_pinned",
                                              "aten::copy_",          "aten::_fused_sdp_choice",
                                              "aten::resize_as_",     "aten::_local_scalar_dense",
                                              "aten::is_set_to",      "aten::_nested_tensor_size",
                                              "aten::_reshape_alias", "aten::_efficientzerotensor",
                                              "aten::lift",           "aten::_resize_output_"};
  if (op.operator_name().name.rfind("aten::", 0) != 0 || names.count(op.operator_name().name) != 0)
    return true;
  if (!op.hasSchema()) return true;
  for (const c10::Argument& result : op.schema().returns()) {  // views
    if (result.alias_info() != nullptr && !result.alias_info()->isWrite()) return true;
  }
  return false;
}

struct Quiet final : c10::WarningHandler {
  void process(const c10::Warning& /*warning*/) override {}
};

bool replace_all() {
  Quiet quiet;
  const c10::WarningUtils::WarningHandlerGuard no_warnings(&quiet);
  auto& dispatcher = c10::Dispatcher::singleton();
  static auto* const registrations = new std::vector<c10::RegistrationHandleRAII>();
  for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
    const auto op = dispatcher.findOp(name);
    if (!op || !op->hasKernelForDispatchKey(kCuda) || stays_native(*op)) continue;
    registrations->push_back(dispatcher.registerImpl(name, kCuda,
                                                     c10::KernelFunction::makeFromBoxedFunction<&as_work>(),
                                                     std::nullopt, nullptr, "simulated"));
  }
  static auto* const library = new torch::Library(torch::Library::IMPL, "aten", kCuda, __FILE__, __LINE__);
  library->impl("copy_", &copy);
  // Kernels that the host has not.
  at::globalContext().setSDPUseFlash(false);
  at::globalContext().setSDPUseMemEfficient(false);
  at::globalContext().setSDPUseCuDNN(false);
  at::globalContext().setUserEnabledCuDNN(false);
  return true;
}

const bool is_replaced = replace_all();

}  // namespace
