"""The two buffers of gradients that a rank's peers read in place: how many there are, who waits for them, and what ends
such a wait."""

from __future__ import annotations

import functools
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import Status, rank_outcomes, run_ranks
from harness.large_blocks import DIM, Layer, Small, inputs, model_of

import bmtrain as bmt
from bmtrain._engine.engine import current_engine
from bmtrain.errors import CommunicationError
from bmtrain.global_var import context


def rank_that_is_late(options: dict[str, Any], late: int) -> tuple[int, list[int], list[float]]:
    """Bytes of a block's gradients, those in place when a rank is far behind in each backward, and sums."""
    model = model_of(delay=lambda call: 0.05 * (bmt.rank() == late) * (call % 2 == 0), **options)
    comm, sizes = context().world.reduce_comm, []
    for step in range(3):
        model(inputs(step)).sum().backward()
        sizes.append(comm.bytes_in_place)
    block = 4 * bmt.world_size() * model[0]._storages[0].shards.layout.partition
    return block, sizes, [p.grad.double().sum().item() for p in model.parameters()]


@functools.cache
def without_delays() -> list[tuple[int, list[int], list[float]]]:
    return run_ranks(2, rank_that_is_late, {"use_checkpoint": False}, -1, fresh=True)


@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.parametrize(
    ("options", "buffers"),
    [
        ({"use_checkpoint": False}, 2),
        ({"use_checkpoint": True}, 1),
        ({"policy": bmt.BlockPolicy(recompute="selective")}, 1),
    ],
)
def test_buffers_of_gradients_however_late_a_rank_is(
    options: dict[str, Any], buffers: int, late: int
) -> None:
    found = run_ranks(2, rank_that_is_late, options, late, fresh=True)
    for (block, sizes, sums), (*_, expected) in zip(found, without_delays(), strict=True):
        assert sizes == [buffers * block] * 3
        assert sums == expected


def gradients_of_a_model_that_is_gone() -> tuple[int, int, list[float]]:
    """Bytes in place for gradients after a model's backward, and after many of another one."""
    comm = context().world.reduce_comm
    model_of(3, use_checkpoint=False)(inputs()).sum().backward()
    before = comm.bytes_in_place
    other = bmt.Block(Small(), use_checkpoint=False)
    seen = []
    for step in range(4200):
        other.zero_grad(set_to_none=True)
        other(step % 8, trains=True).backward()
        if step % 600 == 599:
            seen.append(float(other.weight.grad.sum()))
    after = comm.bytes_in_place
    model_of(3)(inputs()).sum().backward()  # the memory is there anew
    return before, after, seen


def test_memory_for_gradients_of_a_model_that_is_gone_is_given_back() -> None:
    block, small = 4 * (DIM * DIM + DIM), 4 * 520 * 520
    for before, after, seen in run_ranks(2, gradients_of_a_model_that_is_gone, fresh=True):
        assert before >= 2 * block
        assert after <= 2 * small + 2 * 4096
        assert len(set(seen)) == 1


class Told(Layer):
    """Tells when its backward begins, with ``"begins"``, and when its input's gradient is there, with ``"ends"``."""

    def __init__(self, delay: Any = None) -> None:
        super().__init__(delay)
        self.told: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = super().forward(x)
        if self.told is not None:
            result.register_hook(lambda gradient: self.told("begins"))
            x.register_hook(lambda gradient: self.told("ends"))
        return result


def wait_for(file: Path) -> None:
    deadline = time.monotonic() + 40
    while not file.exists():
        assert time.monotonic() < deadline, f"rank 0 never wrote {file.name}"
        time.sleep(0.01)


def gradients(model: bmt.TransformerBlockList, set_to_none: bool = True) -> list[float]:
    model.zero_grad(set_to_none=set_to_none)
    model(inputs().requires_grad_()).square().sum().backward()
    return [p.grad.double().sum().item() for p in model.parameters()]


def goes_on_with_other_memory(folder: str) -> tuple[int, int]:
    """Rank 1 reads the first gradients only after rank 0 has had memory for the third: no program does that, and the
    ranks would wait for each other for ever."""
    comm: Any = context().world.reduce_comm.inner  # type: ignore[attr-defined]
    model, file = model_of(kind=Told, use_checkpoint=False), Path(folder) / "went on"
    expected = gradients(model)

    def told(number: int, what: str) -> None:
        if bmt.rank() == 1 and (number, what) == (3, "begins"):  # those of layer 4 were sent
            wait_for(file)
        if bmt.rank() == 0 and (number, what) == (2, "begins"):
            comm.longest_wait = 40  # and no second time
            file.touch()

    for number, block in enumerate(model):
        block._module.told = lambda what, number=number: told(number, what)
    comm.longest_wait = (
        0.05 if bmt.rank() == 0 else 40
    )  # rank 0 alone is to give up, however slow the machine is
    comm.reset_traffic()
    bmt.synchronize()
    assert gradients(model) == expected
    copied = comm.bytes_copied
    comm.reset_traffic()
    for block in model:
        block._module.told = None
    assert gradients(model) == expected
    assert comm.bytes_copied == 0  # again what peers read where it is
    return copied, 4 * model[0]._storages[0].shards.layout.partition


def test_after_its_longest_wait_a_rank_sends_gradients_in_other_memory(tmp_path: Path) -> None:
    for copied, partition in run_ranks(2, goes_on_with_other_memory, str(tmp_path), fresh=True):
        assert copied == partition  # of one block: what rank 0 sent and rank 1 received


def sums_what_has_come(folder: str, set_to_none: bool) -> int:
    """Rank 1 stays in a block until rank 0 has memory for its third gradients, which needs the first to be read."""
    comm: Any = context().world.reduce_comm.inner  # type: ignore[attr-defined]
    comm.longest_wait = 40
    model = model_of(kind=Told, use_checkpoint=False)
    sent, went_on = (Path(folder) / name for name in ("sent", "went on"))
    expected = gradients(model)

    def told(number: int, what: str) -> None:
        if bmt.rank() == 1 and (number, what) == (3, "begins"):
            wait_for(sent)
        if bmt.rank() == 1 and (number, what) == (3, "ends"):  # its own gradients have landed
            wait_for(went_on)
            # That the gradients of layer 4 were summed is not to be seen: it depends on the ranks' speed.
            assert not any(p.grad is not None and p.grad.any() for p in model[4].parameters())
        if bmt.rank() == 0 and (number, what) == (3, "begins"):
            sent.touch()
        if bmt.rank() == 0 and (number, what) == (2, "begins"):
            went_on.touch()

    for number, block in enumerate(model):
        block._module.told = lambda what, number=number: told(number, what)
    comm.reset_traffic()
    bmt.synchronize()
    assert gradients(model, set_to_none) == expected
    return comm.bytes_copied


@pytest.mark.parametrize("set_to_none", [True, False])
def test_what_has_come_is_summed_before_the_block_ends(tmp_path: Path, set_to_none: bool) -> None:
    assert run_ranks(2, sums_what_has_come, str(tmp_path), set_to_none, fresh=True) == [0, 0]


def dies_while_waited_for(folder: str) -> str:
    comm: Any = context().world.reduce_comm.inner  # type: ignore[attr-defined]
    comm.longest_wait = 1000  # longer than the test may last
    model, file = model_of(kind=Told, use_checkpoint=False), Path(folder) / "about to wait"

    def told(number: int, what: str) -> None:
        if bmt.rank() == 1 and (number, what) == (3, "begins"):
            wait_for(file)
            time.sleep(0.3)
            os.kill(os.getpid(), signal.SIGKILL)
        if bmt.rank() == 0 and (number, what) == (3, "ends"):
            file.touch()

    for number, block in enumerate(model):
        block._module.told = lambda what, number=number: told(number, what)
    with pytest.raises(CommunicationError) as error:
        gradients(model)
    return str(error.value)


def test_who_waits_for_a_buffer_learns_that_its_reader_died(tmp_path: Path) -> None:
    outcomes = rank_outcomes(
        2, dies_while_waited_for, str(tmp_path), fresh=True, init={"timeout": 600}, timeout=50
    )
    assert outcomes[1].status is Status.DIED
    assert outcomes[0].status is Status.RETURNED, outcomes[0]
    assert "rank 1 died" in outcomes[0].value


def longest_wait() -> None:
    comm: Any = context().world.reduce_comm.inner  # type: ignore[attr-defined]
    assert comm.longest_wait == 10
    for wrong in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="longest_wait: expected 0 to"):
            comm.longest_wait = wrong


def test_longest_wait_is_checked() -> None:
    run_ranks(2, longest_wait, fresh=True)


def gradients_between_steps() -> tuple[int, int, int, int]:
    """Bytes of gradient shards and in place for gradients, after a backward and after the next forward."""
    model = model_of(3)
    comm = context().world.reduce_comm
    first = gradients(model)
    shown = bmt.memory_report(model)  # from here on torch counts a reference more to each shard's memory
    kept = [p.grad for p in model.parameters()]
    before = comm.bytes_in_place
    comm.barrier("test")  # all ranks have read what they were sent
    for p in model.parameters():
        p.grad = None
    loss = model(inputs().requires_grad_()).square().sum()
    forward = bmt.memory_report(model).gradients, comm.bytes_in_place
    loss.backward()
    assert [p.grad.double().sum().item() for p in model.parameters()] == first
    assert all(
        now is not then and now.equal(then)
        for now, then in zip((p.grad for p in model.parameters()), kept, strict=True)
    )
    return shown.gradients, before, *forward


def test_gradients_make_room_for_activations() -> None:
    for shards, in_place, shards_in_forward, in_place_in_forward in run_ranks(
        2, gradients_between_steps, fresh=True
    ):
        assert shards > 0 and in_place > 0
        assert shards_in_forward == 0
        assert in_place_in_forward == 0


def large_gradients(dtype: torch.dtype, zero_size: int) -> None:
    model = model_of(policy=bmt.BlockPolicy(zero_size=zero_size)).to(dtype)
    leaves = [p.gather().detach().clone().requires_grad_() for p in model.parameters()]
    for _ in range(2):  # the second adds to what is there
        model(inputs().to(dtype)).square().sum().backward()
    x = torch.cat(bmt.store.allgather_objects(inputs())).to(dtype)
    for weight, bias in zip(leaves[::2], leaves[1::2], strict=True):
        x = x + torch.tanh(torch.nn.functional.linear(x, weight, bias))
    (2 * x.square().sum()).backward()
    rtol = 1e-12 if dtype == torch.float64 else 1e-4
    for p, leaf in zip(model.parameters(), leaves, strict=True):
        torch.testing.assert_close(
            p.gather_grad(), leaf.grad, rtol=rtol, atol=rtol * float(leaf.grad.abs().max())
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("world", "zero_size"), [(2, 2), (4, 2)])
def test_sums_of_large_blocks_keep_the_dtype_and_reach_replicas(
    dtype: torch.dtype, world: int, zero_size: int
) -> None:
    run_ranks(world, large_gradients, dtype, zero_size)


class Refusing:
    """Raises when the gradients of a block have come, the one time that is given."""

    def __init__(self, time: int) -> None:
        self.left = time

    def reduced(self, block: Any) -> None:
        self.left -= 1
        if self.left == 0:
            raise ValueError(f"no update of {block.label}")


def trains_after_an_error(time: int, policy: dict[str, Any]) -> None:
    model = model_of(3, policy=bmt.BlockPolicy(**policy))
    gradients(model)
    expected = gradients(model)
    refusing = Refusing(time)
    current_engine(context()).gradients.listeners.add(refusing)
    with pytest.raises(ValueError, match="no update of"):
        gradients(model)
    assert gradients(model) == expected
    assert refusing.left < 0


@pytest.mark.parametrize("time", [1, 2, 3])
@pytest.mark.parametrize(("world", "policy"), [(1, {}), (2, {"recompute": "off"}), (4, {"zero_size": 2})])
def test_a_backward_follows_one_whose_update_failed(world: int, policy: dict[str, Any], time: int) -> None:
    """As with step_in_backward: what other blocks had sent by then is dropped."""
    run_ranks(world, trains_after_an_error, time, policy)


def refuse(gradient: torch.Tensor) -> None:
    raise ValueError("no gradient")


def interrupt(engine: Any) -> None:
    """Ctrl-C after the next run of a block."""
    close = engine.close

    def interrupted(block: Any, *, keep: bool) -> None:
        engine.close = close
        raise KeyboardInterrupt

    engine.close = interrupted


def another_loss_after_an_error(kind: str, policy: dict[str, Any]) -> None:
    model, engine = model_of(4, policy=bmt.BlockPolicy(**policy)), current_engine(context())
    expected = gradients(model)
    failing, other = (model(inputs().requires_grad_()).square().sum() for _ in range(2))
    refusing, hook = Refusing(2), None
    if kind == "update":
        engine.gradients.listeners.add(refusing)
    elif kind == "hook":  # blocks behind it have sent theirs
        hook = next(model[1].parameters()).register_hook(refuse)
    else:
        interrupt(engine)
    with pytest.raises(KeyboardInterrupt if kind == "interrupt" else ValueError):
        failing.backward()
    if hook is not None:
        hook.remove()
    model.zero_grad()
    other.backward()
    assert [p.grad.double().sum().item() for p in model.parameters()] == expected
    assert gradients(model) == expected


@pytest.mark.parametrize("kind", ["update", "hook", "interrupt"])
@pytest.mark.parametrize(("world", "policy"), [(1, {}), (2, {"recompute": "off"}), (4, {"zero_size": 2})])
def test_the_backward_of_another_loss_follows_one_that_failed(
    world: int, policy: dict[str, Any], kind: str
) -> None:
    """What the failed one had sent does not come to the gradients, which were zeroed since."""
    run_ranks(world, another_loss_after_an_error, kind, policy)


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise ValueError("no gradient")


def hooks_after_an_error() -> None:
    layer, seen = bmt.nn.Linear(4, 4), []
    bmt.init_parameters(layer)
    weight = next(layer.parameters())
    weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad is None))
    x = torch.ones(2, 4, requires_grad=True)
    other = x.square().sum() + bmt.Block(Small(), use_checkpoint=False)(0, trains=True)
    with pytest.raises(ValueError, match="no gradient"):
        layer(Fails.apply(x)).sum().backward()
    layer.zero_grad()
    other.backward()
    assert seen == []
    layer(x).sum().backward()
    assert seen == [False]


@pytest.mark.parametrize("world", [1, 2])
def test_hooks_of_a_failed_backward_do_not_run_in_the_next(world: int) -> None:
    run_ranks(world, hooks_after_an_error)


def another_thread_in_a_backward() -> None:
    model = model_of(3)
    expected = gradients(model)

    def backward(gradient: torch.Tensor) -> None:
        thread = threading.Thread(target=torch.ones(1, requires_grad=True).sum().backward)
        thread.start()
        thread.join()

    next(model[0].parameters()).register_hook(backward)  # gradients of others are under way
    assert gradients(model) == expected


def test_the_backward_of_another_thread_drops_nothing() -> None:
    run_ranks(2, another_thread_in_a_backward)
