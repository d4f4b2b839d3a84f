"""One call of a block: a single node of the outer autograd graph.

[Note: A block call is an island]
The inner forward runs on detached inputs, so it records a graph of its own that begins and ends at the block's
border. Outside, the call is one node (island.h). When backward reaches that node it gathers the block, (runs the
forward again,) runs autograd inside the island, sends the gradients off and returns those of the inputs. So it is known
exactly when a block's backward starts and ends, without hooks on inner tensors, and whatever is legal inside plain
autograd is legal inside the island.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import torch
from torch.autograd import Variable
from torch.autograd.graph import get_gradient_edge

from .._base.precision import computing_in
from .._base.tree import distinct, has_containers, replace_arguments, replace_tensors, tensors_of
from .._C import GraphRoots, attach_island, find_older_node, next_node_number, write_products_in_place
from .._shards.foreign import require_gathering
from .hooked import HookedResults, without_history
from .host_activations import HostActivations, Mover, entrance
from .modes import NoAutocastCache
from .recompute import ModuleState
from .recording import Recordings
from .replay import Replay
from .running import Phase
from .runtime import BlockRuntime
from .unchanged import Unchanged

__all__ = ["BlockCall", "run_block"]


def run_block(
    runtime: BlockRuntime, forward: Callable[..., Any], modules: ModuleState, args: Any, kwargs: Any
) -> Any:
    """Runs ``forward(*args, **kwargs)`` with the block's parameters gathered.

    Args:
        runtime: the block's buffers.
        forward: the inner forward, as it is now.
        modules: the modules that take part.

    Returns:
        The result of ``forward``, a list as a tuple, attached to the caller's graph.

    Raises:
        RuntimeError: the block's parameters are on another stage of a pipeline.
    """
    require_gathering("a Block")
    if runtime.other_stage is not None:
        raise RuntimeError(
            f"{runtime.label} runs on stage {runtime.other_stage} of the pipeline, which alone has its parameters: "
            "call the PipelineTransformerBlockList, on all ranks, and not its blocks one by one"
        )
    if runtime.policy.compute_dtype is not None:
        forward = computing_in(runtime.policy.compute_dtype, forward)
    if torch.is_grad_enabled():
        return BlockCall(runtime, forward, modules).run(args, kwargs)
    return _as_tuple(_evaluated(runtime, forward, modules, args, kwargs))


def _evaluated(
    runtime: BlockRuntime, forward: Callable[..., Any], modules: ModuleState, args: Any, kwargs: Any
) -> Any:
    try:
        runtime.open(Phase.EVALUATE)
        with NoAutocastCache(), runtime.engine.reads.scope(modules.root):
            result = _kept_alive(runtime, forward(*args, **kwargs))
    except BaseException:
        runtime.abandon()
        raise
    runtime.close(keep=False)
    return result


class BlockCall:
    """One forward of a block, with the state that its backward needs."""

    def __init__(self, runtime: BlockRuntime, forward: Callable[..., Any], modules: ModuleState) -> None:
        self.runtime = runtime
        self.forward = forward
        self.modules = modules
        self.inputs: list[torch.Tensor] = []  # outer tensors that require grad, each once
        self.leaves: list[torch.Tensor] = []  # the same, detached: where the island begins
        self.inner = self.leaves  # the tensors used in place of the inputs in the forward
        self.outputs: list[Any] = []  # inner results that require grad, each once: where the island ends
        self._roots: GraphRoots | None = None  # the roots, if some outputs leave their graph
        self.trains: list[list[bool]] = []  # per group: which parameters required grad
        self.recordings = Recordings()
        self._unchanged = Unchanged(runtime.label)  # arguments that must not change until backward
        self.is_spent = False
        self.replay: Replay | None = None  # state to recompute the forward
        self.host: HostActivations | None = None  # offloaded activations
        self._hooked = HookedResults(runtime) if modules.has_own_forward_hooks() else None

    # ---- forward

    def run(self, args: Any, kwargs: Any) -> Any:
        """[Note: Containers among the arguments]

        Lists, dicts and cache objects are passed to the inner forward themselves, with detached tensors in place of
        tensors that require grad; afterwards the caller's tensors are put back. A tensor that the forward has put into
        them is a result: it leaves the island as an output, and the container then holds the attached tensor.
        """
        first_node = next_node_number()
        has_state = has_containers(args) or any(map(has_containers, kwargs.values()))
        outer: dict[int, torch.Tensor] = {}  # outer tensors by the identity of the island's tensors
        runtime = self.runtime
        mover = runtime.engine.mover if runtime.policy.offload_activations else None
        if mover is not None:
            self._use_host(mover, args, kwargs)
        try:
            inner_args, inner_kwargs = replace_arguments(args, kwargs, self._detach)
            result = self._gathered_first_run(inner_args, inner_kwargs, has_state)
            if self.outputs:
                self._refuse_foreign_history(first_node)
                outer.update(zip(map(id, self.outputs), self._attach(), strict=True))
                result = replace_tensors(result, lambda tensor: outer.get(id(tensor), tensor))
            self._deliver_recordings(outer)
        finally:
            if has_state:
                outer.update(zip(map(id, self.inner), self.inputs, strict=True))
                replace_tensors((args, list(kwargs.values())), lambda tensor: outer.get(id(tensor), tensor))
        if self.host is not None and self.outputs:
            self._put_away(self.host)
        return _as_tuple(result)

    def _detach(self, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.requires_grad:
            return tensor
        for known, inner in zip(self.inputs, self.inner, strict=True):
            if known is tensor or inner is tensor:
                return inner
        self.inputs.append(tensor)
        if self.host is None:
            self.leaves.append(tensor.detach().requires_grad_())
        else:
            leaf, inner = entrance(tensor)
            self.leaves.append(leaf)
            self.inner.append(inner)
            self._unchanged.note(leaf)
        self.runtime.shore.guard(self.leaves[-1])
        return self.inner[-1]

    def _use_host(self, mover: Mover, args: Any, kwargs: Any) -> None:
        """Offloads the activations, see [Note: Activations on the host]."""
        runtime = self.runtime
        others = (tensor for tensor in tensors_of((args, kwargs)) if not tensor.requires_grad)
        self.host = HostActivations(
            runtime.label, mover, runtime.owns_storage, chain(others, self.modules.buffers())
        )
        self.inner = []

    def _put_away(self, host: HostActivations) -> None:
        """Drops references to device memory that backward will restore from the host."""
        self._unchanged.check()  # the forward itself may have written to them
        if self.replay is not None:
            self.replay.put_away(host, self.inner, self.leaves)
        self.outputs = _edges(self.outputs)
        self.inputs, self.inner = [], []
        self.runtime.engine.host_stack.push(host)

    def _gathered_first_run(self, args: Any, kwargs: dict[str, Any], has_state: bool) -> Any:
        runtime = self.runtime
        try:
            runtime.open(Phase.FORWARD)
            self.trains = [group.requires_grad() for group in runtime.groups]
            self._parameter_version = runtime.version()
            result = self._first_run(args, kwargs, has_state)
            self._has_state = has_state
            wanted = self.recordings.tensors + (self._hooked.kept() if self._hooked else [])
            self.outputs = self._outputs_among(result, args, kwargs, self.inner, wanted)
        except BaseException:
            runtime.abandon()
            raise
        runtime.close(keep=bool(self.outputs) and runtime.keeps_for_backward())
        return result

    def _first_run(self, args: Any, kwargs: dict[str, Any], has_state: bool) -> Any:
        runtime = self.runtime
        with NoAutocastCache():
            if runtime.policy.recomputes:
                for tensor in tensors_of((args, kwargs)):
                    if self.host is None or not tensor.requires_grad:
                        self._unchanged.note(tensor)
                self.replay = Replay(runtime, self.modules, args, kwargs, has_state)
                result = self.replay.first_run(self._run_inner, args, kwargs)
            elif self.host is not None or self._hooked is not None:
                with self._saving():
                    result = self._run_inner(args, kwargs)
            else:
                result = self._run_inner(args, kwargs)
            return _kept_alive(runtime, result)

    def _saving(self) -> Any:
        return self.host.saving() if self.host is not None else without_history(self.runtime.label)

    def _run_inner(self, args: Any, kwargs: dict[str, Any]) -> Any:
        engine = self.runtime.engine
        forward = self._hooked.watched(self.forward) if self._hooked else self.forward
        engine.calls.append(self)
        try:
            with engine.reads.scope(self.modules.root):
                return forward(*args, **kwargs)
        finally:
            engine.calls.pop()

    def _outputs_among(
        self,
        result: Any,
        args: Any,
        kwargs: Any,
        leaves: list[torch.Tensor],
        recorded: list[torch.Tensor],
    ) -> list[torch.Tensor]:
        outputs = distinct(tensor for tensor in tensors_of(result) if tensor.requires_grad)
        if recorded:
            known = {id(tensor) for tensor in (*outputs, *leaves)}
            outputs += distinct(tensor for tensor in recorded if id(tensor) not in known)
        if self._has_state:
            known = {id(tensor) for tensor in (*outputs, *leaves)}
            outputs += distinct(
                tensor
                for tensor in tensors_of((args, kwargs))
                if tensor.requires_grad and id(tensor) not in known
            )
        return outputs

    def _refuse_foreign_history(self, first_node: int) -> None:
        node = find_older_node(self.outputs, first_node)
        if node:
            raise RuntimeError(
                f"{self.runtime.label}: a tensor with gradient history ({node}) reached the block's forward "
                "other than as an argument (through an attribute or a closure); pass it as an argument, so that its "
                "gradient can flow"
            )

    def _deliver_recordings(self, outputs: dict[int, torch.Tensor]) -> None:
        if self.recordings.tensors:
            inputs = dict(zip(map(id, self.inner), self.inputs, strict=True))
            self.recordings.deliver(outputs, inputs)

    def _attach(self) -> list[torch.Tensor]:
        # Without inputs that require grad, an extra leaf makes the node require grad: on the run device, since at the
        # end of a backward autograd waits for the streams of the leaves that it has reached.
        inputs = self.inputs or [torch.empty(0, requires_grad=True, device=self.runtime.engine.device)]
        self.runtime.open_calls.add(self)
        if self._hooked:
            outputs, self.outputs = self.outputs, _edges(self.outputs)
            self._roots = GraphRoots(outputs)
            attached = self._hooked.taken_out(outputs, [*self.inner, *self.recordings.tensors])
        else:
            attached = [output.detach() for output in self.outputs]
        attach_island(attached, inputs, self.backward)
        return attached

    # ---- backward

    def backward(self, gradients: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
        runtime = self.runtime
        self._refuse_what_cannot_be_right()
        keep_graph = torch._C._autograd._get_current_graph_task_keep_graph()
        trains = {
            group: flags for group, flags in zip(runtime.groups, self.trains, strict=True) if True in flags
        }
        training = tuple(trains)
        roots = [number for number, gradient in enumerate(gradients) if gradient is not None]
        leaves = self.leaves
        if self.host is not None:
            runtime.engine.host_stack.bring_back(self.host)
        try:
            runtime.open(Phase.BACKWARD)
            outputs = self.outputs
            if self.replay is not None and roots:
                outputs, leaves = self._second_run(self.replay)
            runtime.begin_backward(trains)
            if roots:
                self._differentiate(
                    tuple(map(outputs.__getitem__, roots)),
                    tuple(map(gradients.__getitem__, roots)),
                    keep_graph,
                )
            input_gradients = [leaf.grad for leaf in leaves]
            self.recordings.hand_over_gradients(second=leaves is not self.leaves)
        except BaseException:
            runtime.cancel_backward(training)
            runtime.abandon()
            raise
        finally:
            for leaf in leaves:
                leaf.grad = None
            if self.replay is not None:
                self.replay.drop(for_good=not keep_graph)
            if self.host is not None:
                self.host.drop(for_good=not keep_graph)
        runtime.close(keep=runtime.engine.schedule.expects_backward_of(runtime))
        runtime.start_reduce(training)
        if not keep_graph:
            self._spend()
        return input_gradients

    def _differentiate(
        self, outputs: tuple[Any, ...], gradients: tuple[torch.Tensor | None, ...], keep_graph: bool
    ) -> None:
        """Runs autograd in the island, without the checks of torch.autograd.backward() on the given gradients."""
        islands = self.runtime.engine.islands
        islands.enter()
        try:
            with NoAutocastCache():
                if self.host is None:
                    roots = None if isinstance(outputs[0], torch.Tensor) else self._roots
                    write_products_in_place(
                        roots or GraphRoots(outputs),
                        packed=self.replay is not None or self._hooked is not None,
                    )
                Variable._execution_engine.run_backward(
                    outputs, gradients, keep_graph, False, (), allow_unreachable=True, accumulate_grad=True
                )
        finally:
            islands.leave()

    def _refuse_what_cannot_be_right(self) -> None:
        label = self.runtime.label
        if self.is_spent:
            raise RuntimeError(
                f"{label}: trying to backward through the block a second time, but what it saved has been freed; "
                "specify retain_graph=True in the first backward()"
            )
        if not Variable._execution_engine.is_checkpoint_valid():
            raise RuntimeError(
                f"{label}: torch.autograd.grad() and backward(inputs=...) cannot be used through a Block, because "
                "the gradients of its parameters are reduced over the ranks on the way; use backward(), which "
                "leaves an input's gradient in its .grad"
            )
        if torch.is_grad_enabled():
            raise RuntimeError(f"{label}: a Block cannot be differentiated twice (create_graph=True)")
        if self._parameter_version != self.runtime.version():
            raise RuntimeError(
                f"{label}: a parameter was modified in place between forward and backward (by an optimizer step, "
                "a load?)"
            )
        if self.replay is not None:
            self._unchanged.check()

    def _second_run(self, replay: Replay) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        leaves = replay.leaves_of_second_run(self.leaves, self.host)
        fresh = dict(zip(map(id, self.leaves), leaves, strict=True))
        args, kwargs, result = replay.second_run(self._run_inner, self.trains, fresh)
        if replay.is_complete:
            return self.outputs, self.leaves
        wanted = self.recordings.again + (self._hooked.kept_again() if self._hooked else [])
        outputs = self._outputs_among(result, args, kwargs, leaves, wanted)
        if len(outputs) != len(self.outputs):
            raise RuntimeError(
                f"{self.runtime.label}: the forward took another path when it was run again: {len(outputs)} results "
                f"require grad, {len(self.outputs)} did at first"
            )
        return outputs, leaves

    def kept_for_backward(self) -> Iterator[torch.Tensor] | None:
        """Returns the tensors that this call keeps; None if it keeps all activations, which autograd holds."""
        if self.replay is None:
            return None
        kept = self.replay.kept()
        if self.host is None:
            return kept
        return (tensor for tensor in kept if all(tensor is not leaf for leaf in self.leaves))

    def _spend(self) -> None:
        self.is_spent = True
        self.runtime.open_calls.discard(self)
        self.outputs, self.inputs, self.leaves, self.inner = [], [], [], []
        self._roots = None
        self.recordings = Recordings()
        self.replay = None
        self._unchanged.drop()
        if self.host is not None:
            self.runtime.engine.host_stack.pop(self.host)


def _edges(outputs: list[Any]) -> list[Any]:
    return [get_gradient_edge(x) if isinstance(x, torch.Tensor) else x for x in outputs]


def _as_tuple(result: Any) -> Any:
    return tuple(result) if type(result) is list else result


def _kept_alive(runtime: BlockRuntime, result: Any) -> Any:
    """Copies the parts of a result in the gathered buffer (parameters or their views), which is released next."""

    def copied_out(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone() if runtime.owns_storage(tensor) else tensor

    return replace_tensors(result, copied_out)
