#include "shard/materialize.h"

#include <torch/csrc/autograd/variable.h>

#include "common/check.h"
#include "shard/gradient_sink.h"

namespace bmtrain {

void materialize(const at::Tensor& parameter, const at::Tensor& data) {
  BMT_CHECK(StateError, parameter.is_meta(), "expected a parameter on the meta device, got one on ",
            parameter.device());
  BMT_CHECK(TypeError, parameter.scalar_type() == data.scalar_type(), "data: expected ",
            parameter.scalar_type(), ", got ", data.scalar_type());
  parameter.unsafeGetTensorImpl()->shallow_copy_from(data.getIntrusivePtr());
  // As set_data() does where the device changes: an accumulator expects gradients like the old data.
  torch::autograd::impl::set_grad_accumulator(parameter, NodeTraits<NodePtr>::Weak(NodePtr()));
}

}  // namespace bmtrain
