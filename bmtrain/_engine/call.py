"""One call of a block: a single node of the outer autograd graph.

[Note: A block call is an island]
The inner forward runs on detached inputs, so it records a graph of its own that begins and ends at the block's
border. Outside, the call is one node (graph.h). When backward reaches that node, it gathers the block, (runs the
forward again,) runs autograd inside the island, sends the parameters' gradients and returns the inputs' gradients. The
start and the end of a block's backward are thus known exactly, without hooks on inner tensors, and everything that
plain autograd allows is allowed inside the island.

[Note: Parts of a call]
This file is the plain call, which keeps all activations. Every feature is a :class:`Part` that sees the same few
moments of a call: recomputation (`recompute.py`), activations on the host (`offload.py`), results that hooks keep
(`hooked.py`), recorded tensors (`recording.py`). `run_block.py` gives a call the parts that it needs.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch.nn.utils import parametrize

from .._base.opaque import opaque
from .._base.tensors import take_views_again, with_shared_bases
from .._base.tree import detached, distinct, has_containers, replace_arguments, replace_tensors, tensors_of
from .._C import GraphRoots, attach_island, find_older_node, next_node_number, write_products_in_place
from .._ranks.context import current
from .block_state import BlockState
from .engine import Engine, current_engine
from .hidden_inputs import CALL, refuse_hidden
from .host_activations import HostActivations
from .phase import Phase
from .run_state import ModuleState

Run = Callable[[Any, dict[str, Any]], Any]
Graph = tuple[list[Any], list[torch.Tensor]]


class Part:
    """A feature of a block call; it sees these moments, in this order. This base class does nothing in them."""

    #: Whether it packs the tensors that autograd saves in the first run.
    packs_saved = False

    def first_run(self, call: BlockCall, run: Run, args: Any, kwargs: dict[str, Any]) -> Any:
        """Returns ``run(args, kwargs)``, the first run of the forward; the block is gathered."""
        return run(args, kwargs)

    def results(self, again: bool) -> Sequence[torch.Tensor]:
        """Returns tensors that leave the block without being results of the first (or second) run."""
        return ()

    def after_forward(self, call: BlockCall, outer: dict[int, torch.Tensor]) -> None:
        """The call is a node of the caller's graph; ``outer``: outer tensors, by identity of the inner tensor."""

    def kept(self) -> Iterator[torch.Tensor] | None:
        """Returns all tensors that the call keeps for its backward; None if autograd holds further ones."""
        return None

    def before_backward(self, call: BlockCall) -> None:
        """The block is not gathered yet."""

    def graph(self, call: BlockCall, outputs: list[Any], leaves: list[torch.Tensor]) -> Graph:
        """Returns the ends of the graph to differentiate, in place of these; the block is gathered."""
        return outputs, leaves

    def after_backward(self, *, again: bool) -> None:
        """The leaves have their gradients; ``again``: in a graph of the second run."""

    def drop(self, *, for_good: bool) -> None:
        """Frees the memory of a backward; ``for_good`` (no further backward) also the memory that the forward kept."""


class BlockCall:
    """One forward of a block, with the state that its backward needs.

    Attributes:
        inputs: outer tensors that require grad, each once, during the forward.
        leaves: the same, detached: where the island begins.
        inner: the tensors that the forward gets in their places: the leaves, if no part changes `enter`.
        outputs: inner results that require grad (or their edges), once; behind ``num_visible`` common bases of them.
        roots: the roots of the graph, if outputs have left it.
        trains: for each buffer, which parameters required grad.
        has_state: whether the arguments hold objects that can be written to.
        writes_in_place: whether a backward has led products of the graph to the flat gradients.
        parts: the features of this call. They do not refer to it, so that it is freed with the caller's graph.
        host: offloaded activations.
        of_several: gives a further part of a call with several outer results, in the order of the outputs.
        enter: gives the leaf and the inner tensor of an input.
        take_out: gives the outer tensors, without history, of the outputs.
    """

    def __init__(self, block: BlockState, forward: Callable[..., Any], modules: ModuleState) -> None:
        self.block = block
        self.engine: Engine = block.engine
        self.forward = forward
        self.modules = modules
        self.inputs: list[torch.Tensor] = []
        self.leaves: list[torch.Tensor] = []
        self.inner: list[torch.Tensor] = []
        self.outputs: list[Any] = []
        self.roots: GraphRoots | None = None
        self.trains: list[list[bool]] = []
        self.has_state = False
        self.is_spent = self.writes_in_place = False
        self.parts: list[Part] = []
        self.host: HostActivations | None = None
        self.of_several: Callable[[list[torch.Tensor]], Part]
        self.enter: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]] = _leaf_of
        self.take_out: Callable[[BlockCall], list[torch.Tensor]] = _detached_outputs

    # ---- forward

    def run(self, args: Any, kwargs: Any) -> Any:
        """[Note: Containers among the arguments]

        Lists, dicts and cache objects are passed to the inner forward themselves, with detached tensors in place of
        tensors that require grad; afterwards the caller's tensors are put back. A tensor that the forward has put into
        them is a result: it leaves the island as an output, and the container then holds the attached tensor.
        """
        first_node = next_node_number()
        self.has_state = has_containers(args) or any(map(has_containers, kwargs.values()))
        outer: dict[int, torch.Tensor] = {}  # outer tensors by the identity of the island's tensors
        try:
            inner_args, inner_kwargs = replace_arguments(args, kwargs, self._detach)
            result = self._gathered_run(inner_args, inner_kwargs)
            if self.outputs:
                self._refuse_foreign_history(first_node)
                outer.update(zip(map(id, self.outputs), self._attach(), strict=True))
                result = replace_tensors(result, lambda tensor: outer.get(id(tensor), tensor))
        finally:
            if self.has_state:
                known = {**outer, **dict(zip(map(id, self.inner), self.inputs, strict=True))}
                replace_tensors((args, list(kwargs.values())), lambda tensor: known.get(id(tensor), tensor))
        for part in reversed(self.parts):
            part.after_forward(self, outer)
        if self.num_visible > 1:
            self.parts.append(self.of_several([*outer.values()][: self.num_visible]))
        self.inputs = []  # a write of a result to one of them would make a cycle with the caller's graph
        return result

    def _detach(self, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.requires_grad:
            return tensor
        for known, inner in zip(self.inputs, self.inner, strict=True):
            if known is tensor or inner is tensor:
                return inner
        leaf, inner = self.enter(tensor)
        self.inputs.append(tensor)
        self.leaves.append(leaf)
        self.inner.append(inner)
        self.block.shore.guard(leaf)
        return inner

    def _gathered_run(self, args: Any, kwargs: dict[str, Any]) -> Any:
        block, engine = self.block, self.engine
        try:
            engine.open(block, Phase.FORWARD)
            self.trains = [buffer.requires_grad() for buffer in block.buffers]
            self._parameter_version = block.version()
            run = self.run_forward
            for part in reversed(self.parts):
                run = partial(part.first_run, self, run)
            with OwnCaches():
                given = set(map(id, tensors_of((args, kwargs)))) if self.has_state else ()
                result = kept_alive(block, run(args, kwargs))
                if self.has_state:
                    kept_alive(block, (args, kwargs), given)
            self.outputs = self.outputs_among(result, args, kwargs, self.inner)
        except BaseException:
            engine.abandon(block)
            raise
        engine.close(block, keep=bool(self.outputs) and engine.keeps_for_backward(block))
        return result

    def run_forward(self, args: Any, kwargs: dict[str, Any]) -> Any:
        """Runs the inner forward, for the first or the second time."""
        engine = self.engine
        engine.calls.append(self)
        try:
            with engine.reads.scope(self.modules.root):
                return self.forward(*args, **kwargs)
        finally:
            engine.calls.pop()

    def outputs_among(
        self, result: Any, args: Any, kwargs: Any, leaves: list[torch.Tensor], *, again: bool = False
    ) -> list[torch.Tensor]:
        """Returns the tensors at which the graph of the first run ends, or with ``again`` of the second."""
        outputs = distinct(tensor for tensor in tensors_of(result) if tensor.requires_grad)
        further = [tensor for part in self.parts for tensor in part.results(again)]
        if self.has_state:
            further += [tensor for tensor in tensors_of((args, kwargs)) if tensor.requires_grad]
        if further:
            known = {id(tensor) for tensor in (*outputs, *leaves)}
            outputs += distinct(tensor for tensor in further if id(tensor) not in known)
        self.num_visible = len(outputs)
        return with_shared_bases(outputs, leaves) if len(outputs) > 1 else outputs

    def _refuse_foreign_history(self, first_node: int) -> None:
        if node := find_older_node(self.outputs, first_node):
            raise RuntimeError(
                f"{self.block.label}: a tensor with gradient history ({node}) reached the block's forward "
                "other than as an argument (through an attribute or a closure); pass it as an argument, so that its "
                "gradient can flow"
            )

    def _attach(self) -> list[torch.Tensor]:
        # Without inputs that require grad, an extra leaf makes the node require grad: on the run device, since at the
        # end of a backward autograd waits for the streams of the leaves that it has reached.
        inputs = self.inputs or [torch.empty(0, requires_grad=True, device=self.engine.device)]
        self.block.open_calls.add(self)
        inner, ids, attached = self.outputs, list(map(id, self.outputs)), self.take_out(self)
        given = dict(zip(map(id, self.inner), self.inputs, strict=True))
        if has_views := any(map(torch.Tensor._is_view, inner)) or not given.keys().isdisjoint(ids):
            given |= dict(list(zip(ids, attached, strict=True))[self.num_visible :])
            take_views_again(inner, attached, given)
        attach_island(attached, inputs, self.backward)
        node: Any = attached[0].grad_fn  # a view's leads to that of the call
        (node.next_functions[0][0] if attached[0]._is_view() else node).metadata[CALL] = weakref.ref(self)
        if has_views:  # hooks of a visible base see what comes to its views
            take_views_again(inner, attached, dict(zip(ids[: self.num_visible], attached, strict=False)))
        return attached

    # ---- backward

    def backward(self, gradients: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Returns the gradients of the inputs; called by the node in the outer graph."""
        block, engine = self.block, self.engine
        for_inputs = not torch.autograd.Variable._execution_engine.is_checkpoint_valid()  # grad(), inputs=
        self._refuse_what_cannot_be_right(for_inputs)
        keep_graph = torch._C._autograd._get_current_graph_task_keep_graph()
        known = zip(block.buffers, self.trains, strict=True)
        trains = {} if for_inputs else dict(filter(engine.gradients.destination.takes, known))
        roots = [number for number, gradient in enumerate(gradients) if gradient is not None]
        training, outputs, leaves = tuple(trains), self.outputs, self.leaves
        for part in self.parts:
            part.before_backward(self)
        try:
            engine.open(block, Phase.BACKWARD)
            with OwnCaches():
                if roots:
                    for part in self.parts:
                        outputs, leaves = part.graph(self, outputs, leaves)
                engine.gradients.begin(block, trains)
                if roots:
                    self._differentiate(
                        tuple(map(outputs.__getitem__, roots)),
                        tuple(map(gradients.__getitem__, roots)),
                        keep_graph,
                        tuple(leaves) if for_inputs else (),
                    )
            input_gradients = [leaf.grad for leaf in leaves]
            for part in self.parts:
                part.after_backward(again=leaves is not self.leaves)
            engine.close(block, keep=engine.schedule.expects_backward_of(block))
        except BaseException:
            block.cancel_backward(training)
            engine.abandon(block)
            raise
        finally:
            for leaf in leaves:
                leaf.grad = None
            for part in self.parts:
                part.drop(for_good=not keep_graph)
        if not for_inputs:
            engine.gradients.send(block, training)
        if not keep_graph:
            self._spend()
        return input_gradients

    def _differentiate(self, outputs: tuple[Any, ...], gradients: Any, keep_graph: bool, leaves: Any) -> None:
        """Runs autograd in the island, to ``leaves`` alone if given, without the checks of torch.autograd."""
        islands = self.engine.islands
        islands.enter()
        try:
            if self.host is None and not leaves and (self.engine.later or self.engine.device.type == "cpu"):
                roots = None if isinstance(outputs[0], torch.Tensor) else self.roots
                ends, packed = roots or GraphRoots(outputs), any(part.packs_saved for part in self.parts)
                found = write_products_in_place(ends, packed=packed, later=self.engine.later)
                self.writes_in_place |= found > 0
            torch.autograd.Variable._execution_engine.run_backward(
                outputs, gradients, keep_graph, False, leaves, allow_unreachable=True, accumulate_grad=True
            )
        finally:
            islands.leave()

    def _refuse_what_cannot_be_right(self, for_inputs: bool) -> None:
        label = self.block.label
        if self.is_spent:
            raise RuntimeError(
                f"{label}: trying to backward through the block a second time, but its saved tensors have been freed; "
                + (
                    "call backward() once, on the sum of the losses of vertical()"
                    if self.engine.gradients.turn is not None
                    else "specify retain_graph=True in the first backward()"
                )
            )
        if for_inputs and self.writes_in_place:
            raise RuntimeError(
                f"{label}: torch.autograd.grad() and backward(inputs=...) cannot follow backward(retain_graph=True), "
                "which has changed the graph; call them before it"
            )
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"{label}: a Block cannot be differentiated twice; for create_graph, grad() in the forward of a "
                "use_checkpoint=False Block"
            )
        if self._parameter_version != self.block.version():
            raise RuntimeError(
                f"{label}: a parameter was modified in place between forward and backward (by an optimizer step, "
                "a load, or the forward itself?); change parameters after backward()"
            )

    def kept_for_backward(self) -> Iterator[torch.Tensor] | None:
        """Returns the tensors that this call keeps; None if it keeps all activations, which autograd holds."""
        for part in self.parts:
            if (kept := part.kept()) is not None:
                leaves = [] if self.host is None else self.leaves  # which have no memory
                return (tensor for tensor in kept if all(tensor is not leaf for leaf in leaves))
        return None

    def _spend(self) -> None:
        self.is_spent = True
        self.block.open_calls.discard(self)
        self.outputs, self.leaves, self.inner, self.parts, self.roots = [], [], [], [], None


class OwnCaches:
    """Disables autocast's cache and empties the parametrizations' one: with tensors of an earlier gather or call."""

    def __enter__(self) -> None:
        self._before = torch.is_autocast_cache_enabled(), parametrize._cache_enabled, parametrize._cache
        torch.set_autocast_cache_enabled(False)
        parametrize._cache = {}

    def __exit__(self, *_: object) -> None:
        of_autocast, parametrize._cache_enabled, parametrize._cache = self._before
        torch.set_autocast_cache_enabled(of_autocast)


def _leaf_of(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    leaf = detached(tensor).requires_grad_()
    return leaf, leaf


def _detached_outputs(call: BlockCall) -> list[torch.Tensor]:
    return list(map(detached, call.outputs))


def kept_alive(block: BlockState, result: Any, given: Collection[int] = ()) -> Any:
    """Copies tensors of a result in the gathered buffer (parameters or views), which is released next; none given."""

    def copied_out(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone() if block.owns_storage(tensor) and id(tensor) not in given else tensor

    return replace_tensors(result, copied_out)


@cache
def watch_backwards() -> None:
    """Makes a backward of torch drop what a failed one left, and refuse inputs of which it would miss a part."""
    autograd: Any = torch.autograd
    plain = autograd._engine_run_backward  # of backward() and grad(), by whatever names they were imported

    @opaque
    def run(outputs: Any, grads: Any, keep: Any, create: Any, inputs: Any, *args: Any, **options: Any) -> Any:
        if (context := current()) is not None:
            current_engine(context).gradients.drop_stale(in_forward=False)
        if inputs:
            refuse_hidden(outputs, inputs)
        return plain(outputs, grads, keep, create, inputs, *args, **options)

    autograd._engine_run_backward = autograd.graph._engine_run_backward = run
