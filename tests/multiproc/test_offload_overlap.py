"""AdamOffloadOptimizer's updates that go on after the step: nobody sees an unfinished one, and no bit differs."""

from __future__ import annotations

import copy
import gc
import io
import os
import pickle
import sys
import tempfile
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import run_process, run_ranks

import bmtrain as bmt
from bmtrain import _C
from bmtrain._engine.engine import current_engine
from bmtrain.optim import AdamOffloadOptimizer, AdamOptimizer
from bmtrain.parameter import full_value

DTYPES = (torch.float32, torch.bfloat16)
WIDTH = 6_000  # two chunks of work for each block


class Inner(torch.nn.Module):
    def __init__(self, dtype: torch.dtype, width: int) -> None:
        super().__init__()
        self.weight = bmt.DistributedParameter(torch.linspace(-1, 1, width * 8).reshape(width, 8).to(dtype))
        self.bias = bmt.DistributedParameter(torch.linspace(1, 2, 8).to(dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.weight).tanh() @ self.weight.t() + self.bias.sum()


class Model(bmt.DistributedModule):
    """Two blocks, and parameters outside of them."""

    def __init__(self, dtype: torch.dtype, width: int = WIDTH) -> None:
        super().__init__()
        self.first = bmt.DistributedParameter(torch.ones(width, dtype=dtype))
        self.layers = bmt.TransformerBlockList([bmt.Block(Inner(dtype, width)) for _ in range(2)])
        self.last = bmt.DistributedParameter(torch.ones(width, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.layers(x * self.first) * self.last).float().square().mean()


def build(dtype: torch.dtype, overlap: bool, **options: Any) -> tuple[Model, Any, torch.Tensor]:
    model = Model(dtype)
    optimizer = AdamOffloadOptimizer(
        model.parameters(), lr=1e-2, weight_decay=0.1, overlap=overlap, **options
    )
    return model, optimizer, torch.linspace(-1, 1, WIDTH).to(dtype)[None]


def backward(model: Model, x: torch.Tensor) -> None:
    model(x).backward()


def is_pending(model: Model) -> list[bool]:
    """Of those parameters of which this rank holds elements; there is nothing to update in others."""
    with torch._C.DisableTorchFunctionSubclass():  # the question must not wait
        return ["_pending" in p.__dict__ for p in model.parameters() if p.numel()]


def watched(overlap: bool, dtype: torch.dtype, watch: Callable[[Model, Any, torch.Tensor], Any]) -> Any:
    """Two steps with slow updates, and what ``watch`` sees right after the second."""
    model, optimizer, x = build(dtype, overlap)
    backward(model, x)
    optimizer.step()
    optimizer.zero_grad()
    backward(model, x)
    before = watch.before(model, optimizer) if hasattr(watch, "before") else None
    _C.disturb_updates(300)
    optimizer.step()
    pending = is_pending(model)
    assert all(pending) if overlap and before is None else not any(pending), pending
    result = watch(model, optimizer, x) if before is None else watch(before)
    _C.disturb_updates(0)
    return result, [full_value(p).clone() for p in model.parameters()]


def compare(dtype: torch.dtype, kind: str) -> bool:
    watch = globals()[f"by_{kind}"]
    return same(watched(True, dtype, watch), watched(False, dtype, watch))


def same(a: Any, b: Any) -> bool:
    """Whether every bit of two results, however nested, is the same."""
    if torch.is_tensor(a):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def tensors(values: Any) -> list[Any]:
    return [v.detach().clone() for v in values]


def by_data(model: Model, *_: Any) -> Any:
    return tensors(p.data for p in model.parameters())


def by_detach(model: Model, *_: Any) -> Any:
    return tensors(p.detach() for p in model.parameters())


def by_arithmetic(model: Model, *_: Any) -> Any:
    return tensors(2 * p + 1 for p in model.parameters())


def by_function_of_a_list(model: Model, *_: Any) -> Any:
    with torch.no_grad():
        return tensors(torch._foreach_mul(list(model.parameters()), 3.0))


def by_in_place(model: Model, *_: Any) -> Any:
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.5)


def by_assignment_of_data(model: Model, *_: Any) -> Any:
    for p in model.parameters():
        p.data = torch.full_like(p.data, 3.0)


def by_deepcopy(model: Model, *_: Any) -> Any:
    return tensors(copy.deepcopy(p) for p in model.parameters())


def by_deepcopy_of_the_model(model: Model, *_: Any) -> Any:
    return tensors(full_value(p) for p in copy.deepcopy(model).parameters())


def by_pickle(model: Model, *_: Any) -> Any:
    return tensors(pickle.loads(pickle.dumps(p)) for p in model.parameters())


def by_numpy(model: Model, *_: Any) -> Any:
    return [p.detach().float().numpy().tolist() for p in model.parameters()]


def by_storage(model: Model, *_: Any) -> Any:
    return [torch.empty(0, dtype=torch.uint8).set_(p.untyped_storage()).clone() for p in model.parameters()]


def by_gradient(model: Model, *_: Any) -> Any:
    for p in model.parameters():
        p.grad.fill_(7.0)
    return tensors(p.data for p in model.parameters())


def by_another_optimizer(model: Model, *_: Any) -> Any:
    torch.optim.SGD(model.parameters(), lr=0.1).step()


def by_another_of_ours(model: Model, *_: Any) -> Any:
    AdamOptimizer(model.parameters(), lr=0.1).step()


def by_state(model: Model, optimizer: Any, *_: Any) -> Any:
    return [tensors(v for v in optimizer.state[p].values() if torch.is_tensor(v)) for p in model.parameters()]


def by_state_dict(model: Model, optimizer: Any, *_: Any) -> Any:
    return copy.deepcopy((model.state_dict(), optimizer.state_dict(), optimizer.state_dict(gather=True)))


def by_load_state_dict(model: Model, optimizer: Any, *_: Any) -> Any:
    model.load_state_dict({name: torch.ones_like(p) for name, p in model.state_dict().items()})


def by_load_of_its_own_state(model: Model, optimizer: Any, *_: Any) -> Any:
    fresh = AdamOffloadOptimizer(model.parameters(), overlap=False)
    backward(model, torch.ones(1, WIDTH).to(model.first.dtype))
    fresh.step()
    optimizer.load_state_dict(fresh.state_dict())


def by_save(model: Model, *_: Any) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.pt"
        bmt.save(model, path)
        return tensors(torch.load(path).values()) if bmt.rank() == 0 else None


def by_inspect(model: Model, *_: Any) -> Any:
    return bmt.inspect.inspect_model(model, "*")


def by_flat_parameter_of_a_block(model: Model, *_: Any) -> Any:
    return [tensors(block._storage_params.values()) for block in model.layers]


def by_pickled_optimizer(model: Model, optimizer: Any, *_: Any) -> Any:
    other = pickle.loads(pickle.dumps(optimizer))
    return tensors(p.data for p in other.param_groups[0]["params"])


def by_zero_grad(model: Model, optimizer: Any, *_: Any) -> Any:
    optimizer.zero_grad()
    return tensors(p.grad for p in model.parameters())


def by_zero_grad_to_none(model: Model, optimizer: Any, *_: Any) -> Any:
    optimizer.zero_grad(set_to_none=True)
    return [p.grad is None for p in model.parameters()]


def by_zero_grad_of_the_model(model: Model, *_: Any) -> Any:
    model.zero_grad()


def by_forward_and_backward(model: Model, optimizer: Any, x: torch.Tensor) -> Any:
    optimizer.zero_grad()
    backward(model, x)
    return tensors(p.grad for p in model.parameters())


def by_evaluation(model: Model, optimizer: Any, x: torch.Tensor) -> Any:
    with torch.no_grad():
        return model(x)


def by_change_of_options(model: Model, optimizer: Any, *_: Any) -> Any:
    optimizer.param_groups[0]["lr"] = 5.0
    optimizer.param_groups[0]["weight_decay"] = 0.5


def by_weights_only_file(model: Model, optimizer: Any, *_: Any) -> Any:
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=True)


KINDS = sorted(name.removeprefix("by_") for name in globals() if name.startswith("by_"))


def differing(dtype: torch.dtype) -> list[str]:
    return [kind for kind in KINDS if not compare(dtype, kind)]


def graph_from_before_a_call() -> list[bool]:
    """Whether a graph of a Block's parameters is known before a call of the Block, and after it."""
    model, _, x = build(torch.float32, overlap=True)
    params = list(model.layers[0].parameters())
    penalty: Any = sum(p.square().sum() for p in params)
    found = [_C.lead_graphs_to([p]) for p in params]
    model(x)
    found += [_C.lead_graphs_to([p]) for p in params]
    penalty.backward()
    return found


def test_graphs_that_lead_to_parameters_are_known_after_a_call() -> None:
    """Their backward waits for a pending update, whose gradients it would change."""
    assert run_ranks(2, graph_from_before_a_call) == [[True] * 4] * 2


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_access_sees_an_unfinished_update(dtype: torch.dtype) -> None:
    """One function by_... above for each kind."""
    assert run_ranks(2, differing, dtype, timeout=300) == [[]] * 2


class Held:
    """Tensors that somebody made before the step, and looks at after it."""

    def __init__(self, make: Callable[[Any, Any], Any]) -> None:
        self.before = make

    def __call__(self, before: Any) -> Any:
        return tensors(before)


def _states(optimizer: Any, name: str) -> list[Any]:
    return [state[name] for state in optimizer.state.values()]


HELD = {
    "data": lambda model, optimizer: [p.data for p in model.parameters()],
    "detached": lambda model, optimizer: [p.detach()[:3] for p in model.parameters()],
    "gradients": lambda model, optimizer: [p.grad for p in model.parameters()],
    "views of gradients": lambda model, optimizer: [p.grad[1:] for p in model.parameters()],
    "moments": lambda model, optimizer: _states(optimizer, "exp_avg"),
    "views of moments": lambda model, optimizer: [m[2:] for m in _states(optimizer, "exp_avg_sq")],
}


def compare_held(dtype: torch.dtype, kind: str) -> bool:
    watch: Any = Held(HELD[kind])
    return same(watched(True, dtype, watch), watched(False, dtype, watch))


def differing_held(dtype: torch.dtype) -> list[str]:
    return [kind for kind in HELD if not compare_held(dtype, kind)]


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_was_held_before_the_step_is_up_to_date_after_it(dtype: torch.dtype) -> None:
    assert run_ranks(2, differing_held, dtype, timeout=300) == [[]] * 2


def left_alone(dtype: torch.dtype) -> int:
    """Nobody asks for anything after a step until the workers have computed all of it."""
    model, optimizer, x = build(dtype, True)
    num_updates = 0
    for _ in range(2):  # the second time the workers are there already, and asleep
        backward(model, x)
        optimizer.step()
        updates = {vars(p)["_pending"].update for p in model.parameters() if "_pending" in vars(p)}
        num_updates += len(updates)
        deadline = time.monotonic() + 60
        while any(update.state != _C.OffloadUpdate.State.DONE for update in updates):
            assert time.monotonic() < deadline, [update.state for update in updates]
            time.sleep(0.001)
    return num_updates


@pytest.mark.parametrize("dtype", DTYPES)
def test_updates_start_by_themselves(dtype: torch.dtype) -> None:
    assert all(run_ranks(2, left_alone, dtype))


def fail_in_the_worker() -> str:
    """The next call that needs the block says what failed, and training can go on after it."""
    model, optimizer, x = build(torch.float32, True)
    backward(model, x)
    optimizer.step()
    assert optimizer.state  # the first step has ended
    label = model.layers[1]._label
    _C.disturb_updates(0, label)
    optimizer.zero_grad()
    backward(model, x)
    optimizer.step()
    try:
        model(x)
    except RuntimeError as error:
        message = str(error)
    _C.disturb_updates(0)
    assert message == f"{label}: the update of its parameters failed: failed on request", message
    backward(model, x)
    optimizer.step()
    optimizer.state_dict()
    return message


def test_an_error_in_a_worker_is_raised_where_the_block_is_needed() -> None:
    run_ranks(1, fail_in_the_worker)


def left_after_a_step(dtype: torch.dtype) -> int:
    """How many parameters there still are when model and optimizer were dropped while updates were under way.

    They may go at any time; their memory goes after the workers are done with it.
    """
    model, optimizer, x = build(dtype, True)
    backward(model, x)
    _C.disturb_updates(2000)
    optimizer.step()
    assert all(is_pending(model))
    parameters = list(map(weakref.ref, model.parameters()))
    del model, optimizer
    gc.collect()
    _C.disturb_updates(0)
    return sum(reference() is not None for reference in parameters)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("world", [1, 2])
def test_a_model_that_is_dropped_after_a_step_is_freed(world: int, dtype: torch.dtype) -> None:
    assert run_ranks(world, left_after_a_step, dtype) == [0] * world


def backward_through_an_older_graph(overlap: bool) -> list[torch.Tensor]:
    """Gradients that arrive after the step wait for the update that reads them."""
    model, optimizer, x = build(torch.float32, overlap)
    backward(model, x)
    optimizer.step()
    backward(model, x)
    late = (model.first * x).sum() + model.layers[0].weight.sum()
    _C.disturb_updates(300)
    optimizer.step()
    late.backward()
    _C.disturb_updates(0)
    return tensors([p.grad for p in model.parameters()] + list(model.parameters()))


def compare_older_graphs() -> bool:
    return same(backward_through_an_older_graph(True), backward_through_an_older_graph(False))


def test_a_backward_through_an_older_graph_waits() -> None:
    assert all(run_ranks(2, compare_older_graphs))


def fork_in_flight() -> int:
    """A child, which has no workers, finds every update done."""
    model, optimizer, x = build(torch.float32, True)
    backward(model, x)
    _C.disturb_updates(2000)
    optimizer.step()
    child = os.fork()
    if child == 0:
        os._exit(any(is_pending(model)) or not torch.isfinite(model.layers[1].weight).all().item())
    _C.disturb_updates(0)
    return os.waitpid(child, 0)[1]


def test_a_fork_in_mid_flight() -> None:
    assert run_ranks(1, fork_in_flight) == [0]


EXIT = """
import torch, bmtrain as bmt
bmt.init_distributed()
p = bmt.DistributedParameter(torch.ones(1 << 20))
p.grad = torch.ones(1 << 20)
optimizer = bmt.optim.AdamOffloadOptimizer([p])
bmt._C.disturb_updates(2000)
optimizer.step()
assert "_pending" in p.__dict__
print("end")
"""


def test_exit_in_mid_flight() -> None:
    assert run_process([sys.executable, "-c", EXIT]).stdout.split() == ["end"]


def unsent_after_zero_grad() -> None:
    """A backward that is not sent, through one block only, so that the update of the others stays pending."""
    model, optimizer, x = build(torch.float32, True)
    backward(model, x)
    optimizer.step()
    with bmt.no_sync():
        model.layers[0](x).float().sum().backward()
    assert any(is_pending(model))
    optimizer.zero_grad()
    gradients = current_engine(bmt.global_var.context()).gradients
    assert not gradients.unsent.has_any_of(model.parameters())


@pytest.mark.parametrize("world", [1, 2])
def test_zero_grad_drops_unsent_gradients_while_updates_are_pending(world: int) -> None:
    run_ranks(world, unsent_after_zero_grad)
