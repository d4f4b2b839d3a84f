"""Raw data and gradients, bytes of host tensors, tied tensors, references to memory, views, walks over graphs."""

from __future__ import annotations

import ctypes
import sys
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any, NoReturn

import torch
from torch.autograd import forward_ad

# torch's raw ``.data`` and ``.grad``, which DistributedParameter overrides, without change tracking: for reading alone.
TORCH_DATA: Any = torch.Tensor.data
TORCH_GRAD: Any = torch.Tensor.grad

#: ``param.data``, without a notification to optimizers that values may change through it.
data_of: Callable[[torch.Tensor], torch.Tensor] = TORCH_DATA.__get__
#: ``param.grad``, without invalidation of a copy in flight.
gradient_of: Callable[[torch.Tensor], torch.Tensor | None] = TORCH_GRAD.__get__


def in_host_memory(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor whose bytes are the values: contiguous, on the host, a conjugate or a negative carried out."""
    return tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a tensor as :func:`in_host_memory` gives it, to read and to write; valid as long as the tensor."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        raise ValueError(f"expected a contiguous tensor on the host, got one on {tensor.device}")
    size = tensor.numel() * tensor.element_size()
    return memoryview((ctypes.c_char * size).from_address(tensor.data_ptr() or 1)).cast("B")


def place_of(tensor: torch.Tensor) -> Hashable:
    """A key, equal for dense tensors with the same elements and strides (tied weights) while one of them lives."""
    storage = tensor.untyped_storage()._cdata
    layout = tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype
    return storage, layout, tensor.is_conj(), tensor.is_neg()


def version_of(tensor: torch.Tensor) -> int:
    """The number of writes to a tensor; 0 for one made in inference mode, which has no counter."""
    return 0 if tensor.is_inference() else tensor._version


def storage_references(tensor: torch.Tensor) -> int:
    """The number of references to the storage of a tensor, this function's own among them: to be compared."""
    storage = tensor.untyped_storage()  # a Python object counts too; so there always is one
    return int(torch._C._storage_Use_Count(storage._cdata)) + sys.getrefcount(storage)


def edge_of(tensor: Any) -> tuple[Any, int]:
    """Returns node and number of a tensor or GradientEdge in the graph of autograd; of a leaf no node."""
    if isinstance(tensor, torch.Tensor):
        return tensor.grad_fn, tensor.output_nr
    return tensor.node, tensor.output_nr


def nodes_of(tensors: Iterable[Any]) -> Iterator[Any]:
    """Yields each node of autograd that made ``tensors``, or that leads to them, once."""
    waiting, seen = [edge_of(tensor)[0] for tensor in tensors], set()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            waiting += [following for following, _ in node.next_functions]


def refuse_tangents(what: str, tensors: Iterable[torch.Tensor]) -> None:
    """Raises RuntimeError if a tensor has a tangent of forward-mode differentiation, which ``what`` would drop."""
    if any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors):
        raise RuntimeError(
            f"{what}: got an argument with a tangent (of dual_level()), which parameters that are gathered over the "
            "ranks do not carry on; use backward()"
        )


def gathering_error(what: str, is_traced: bool) -> RuntimeError:
    """Returns the error of ``what``, which gathers parameters, in a traced graph or a transform of torch.func."""
    if is_traced:
        return RuntimeError(
            f"{what} inside a trace of torch.jit, torch.fx or torch.export: parameters that are gathered over the "
            "ranks cannot be traced; load the full tensors of model.state_dict() into a model without Blocks and "
            "wrapper"
        )
    return RuntimeError(
        f"{what} inside a transform of torch.func (grad, vmap, jvp, jacrev, ...): parameters that are gathered "
        "over the ranks cannot be transformed; use backward(), or torch.func.functional_call with the full "
        "tensors of model.state_dict() on a model without Blocks"
    )


def refuse_scripting(module: torch.nn.Module) -> NoReturn:
    """Raises RuntimeError: the method of distributed modules and Blocks that ``torch.jit.script`` calls first."""
    raise gathering_error(module.__class__.__name__, is_traced=True)


def _is_comparable(value: Any) -> bool:
    dtypes = torch.float64, torch.float32, torch.bfloat16, torch.float16
    is_plain = isinstance(value, torch.Tensor) and value.layout == torch.strided and not value.is_nested
    return is_plain and value.dtype in dtypes and value.numel() > 0


def refuse_other_results(label: str, first: list[Any], again: list[Any], inputs: list[torch.Tensor]) -> None:
    """Raises RuntimeError if a forward that was run again has other results, by more than rounding.

    Not compared are results that were written to in between, nested ones, and edges of the graph in their places.
    A result that is no larger than the rounding of 1 or of ``inputs`` may be a difference of equal values.
    """
    if len(again) != len(first):
        raise RuntimeError(
            f"{label}: the forward took another path when it was run again: {len(again)} results require grad, "
            f"{len(first)} did at first"
        )
    scale = max([1.0, *(float(t.detach().abs().max()) for t in inputs if _is_comparable(t))])
    for old, new in zip(first, again, strict=True):
        if not (_is_comparable(old) and _is_comparable(new)):
            continue
        old, new = old.detach(), new.detach()
        is_other = (old.shape, old.dtype) != (new.shape, new.dtype)
        if not is_other and old._version == new._version:
            size, rounding = old.abs().max(), 2 * torch.finfo(old.dtype).eps * scale
            is_other = bool(
                (old - new).abs().max() > 0.1 * size and torch.maximum(size, new.abs().max()) > rounding
            )
        if is_other:
            raise RuntimeError(
                f"{label}: the forward took another path when it was run again, with another result of shape "
                f"{tuple(new.shape)}: a function or an attribute that it uses was exchanged in between (by a patch, "
                "say); exchange it until backward() has returned, or give the block use_checkpoint=False"
            )


def with_shared_bases(tensors: list[torch.Tensor], leaves: list[torch.Tensor]) -> list[torch.Tensor]:
    """Returns the tensors, and then the bases of several of them, other than ``leaves``."""
    bases: list[Any] = [t._base for t in tensors if t._is_view() and t.grad_fn is not None]
    if len(bases) < 2:
        return tensors
    known = {*map(id, tensors), *map(id, leaves)}
    shared = {id(b): b for b, count in Counter(bases).items() if count > 1 and b.requires_grad}
    return [*tensors, *(base for key, base in shared.items() if key not in known)]


def take_views_again(tensors: list[Any], outer: list[Any], bases: dict[int, torch.Tensor]) -> None:
    """Makes ``outer``, aliases of ``tensors``, views of ``bases``, by identity, where these are views, or leaves there.

    Autograd needs the views, to know of writes to one of several tensors that share memory.
    """
    for index, tensor in enumerate(tensors):
        if tensor.is_leaf and bases.get(id(tensor), outer[index]) is not outer[index]:
            outer[index] = bases[id(tensor)].view_as(tensor)
        elif tensor._is_view() and tensor.grad_fn is not None and id(tensor._base) in bases:
            outer[index] = tensor._view_func(bases[id(tensor._base)])
