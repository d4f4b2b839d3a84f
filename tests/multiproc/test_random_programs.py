"""Programs drawn at random train as plain torch does, and as themselves under other policies, bit for bit.

``BMTRAIN_RANDOM_PROGRAMS=400`` runs that many of each kind in place of a few; ``-o faulthandler_timeout=0`` gives
each test more than five minutes.
"""

from __future__ import annotations

import copy
import os
import random
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from harness import run_ranks
from harness.random_program import (
    Program,
    RandomModel,
    Step,
    batch,
    draw,
    draw_policy,
    forward,
    hidden_of,
    reset,
)
from harness.twins import distribute, full_gradient

import bmtrain as bmt
from bmtrain.parameter import full_value

COUNT = int(os.environ.get("BMTRAIN_RANDOM_PROGRAMS", "16"))
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
ADAM = {"lr": 1e-2, "eps": 1e-2, "betas": (0.8, 0.9)}
SGD = {"lr": 5e-2, "momentum": 0.7}
OPTIMIZERS = {  # ours, torch's, and their arguments
    "adam": (bmt.optim.AdamOptimizer, torch.optim.Adam, ADAM),
    "adam_offload": (bmt.optim.AdamOffloadOptimizer, torch.optim.Adam, ADAM),
    "adam_offload_synchronous": (bmt.optim.AdamOffloadOptimizer, torch.optim.Adam, ADAM),
    "sgd": (bmt.optim.SGDOptimizer, torch.optim.SGD, SGD),
    "sgd_offload": (bmt.optim.SGDOffloadOptimizer, torch.optim.SGD, SGD),
    "torch_sgd": (torch.optim.SGD, torch.optim.SGD, SGD),
    "torch_adamw": (torch.optim.AdamW, torch.optim.AdamW, ADAM),
}


def groups(model: torch.nn.Module, program: Program) -> list:
    params = list(model.parameters())
    if not program.two_groups:
        return params
    return [{"params": params[::2], "lr": 0.02, "weight_decay": 0.01}, {"params": params[1::2]}]


def our_optimizer(model: torch.nn.Module, program: Program) -> torch.optim.Optimizer:
    ours, _, arguments = OPTIMIZERS[program.optimizer]
    if program.optimizer.endswith("synchronous"):
        arguments = {**arguments, "overlap": False}
    return ours(groups(model, program), **arguments)


def close(
    got: torch.Tensor, want: torch.Tensor, what: str, *, tolerance: float = 5e-5, floor: float = 0.1
) -> None:
    """``got`` is ``want`` to ``tolerance`` of its maximum, which counts as ``floor`` where it is less."""
    got, want = got.detach(), want.detach()
    assert got.shape == want.shape, what
    if want.numel():
        difference = (got - want).abs().max().item()
        limit = tolerance * max(want.abs().max().item(), floor)
        assert difference <= limit, f"{what}: differs by {difference}, allowed {limit}"


class AgainstTorch:
    """A program, and the same one in plain torch, which sees the batches of all ranks."""

    def __init__(self, program: Program, folder: str) -> None:
        self.program, self.folder = program, folder
        torch.manual_seed(program.seed)
        self.plain = RandomModel(program)
        self.model = distribute(copy.deepcopy(self.plain))
        self.model.layers = torch.nn.ModuleList(
            [
                bmt.Block(layer, policy=policy)
                for layer, policy in zip(self.model.layers, program.policies, strict=True)
            ]
        )
        self.ours = our_optimizer(self.model, program)
        _, theirs, arguments = OPTIMIZERS[program.optimizer]
        self.theirs = theirs(groups(self.plain, program), **arguments)
        self.manager = bmt.optim.OptimManager(loss_scale=program.loss_scale)
        self.manager.add_optimizer(self.ours)

    def run(self) -> None:
        for number, step in enumerate(self.program.steps):
            self.theirs.zero_grad(set_to_none=self.program.set_to_none)
            if self.program.set_to_none:
                self.ours.zero_grad(set_to_none=True)
            else:
                self.manager.zero_grad()
            for index in range(len(step.micros)):
                self.micro(number, index)
            self.check_gradients(number)
            if self.program.clip:
                norm = self.manager.clip_grad_norm(self.ours.param_groups, self.program.clip)
                want = torch.nn.utils.clip_grad_norm_(self.plain.parameters(), self.program.clip)
                close(torch.as_tensor(norm), want, f"norm of step {number}")
            self.manager.step()
            self.step_plain()
            getattr(self, f"after_{step.after}", lambda step: None)(step)
            self.check_values(number)

    def micro(self, number: int, index: int) -> None:
        micro = self.program.steps[number].micros[index]
        for rank in range(bmt.world_size()):
            ids, extra = batch(self.program, number, index, rank)
            loss = forward(self.plain, micro, ids, extra)
            for _ in range(1 + micro.retain):
                (loss / bmt.world_size()).backward(retain_graph=micro.retain)
            if rank == bmt.rank():
                want, extra_wanted = loss, extra

        ids, extra = batch(self.program, number, index, bmt.rank())
        evaluation = replace(micro, hook=False)
        if micro.evaluate_before:
            with torch.no_grad():
                close(forward(self.model, evaluation, ids, extra), want, f"evaluation {number}.{index}")
        with nullcontext() if micro.sync else bmt.no_sync():
            loss = forward(self.model, micro, ids, extra)
            if micro.evaluate_between:
                with torch.no_grad():
                    forward(self.model, evaluation, ids, extra)
            if micro.retain:
                self.manager.scale_loss(loss).backward(retain_graph=True)
            self.manager.backward(loss)
        close(loss, want, f"loss {number}.{index}")
        if extra is not None and extra.grad is not None:
            close(extra.grad / self.manager.loss_scale, extra_wanted.grad, f"argument {number}.{index}")

    def pairs(self) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        named = zip(self.model.named_parameters(), self.plain.named_parameters(), strict=True)
        for (name, param), (plain_name, plain) in named:
            assert name == plain_name
            yield name, param, plain

    def check_gradients(self, number: int) -> None:
        for name, param, plain in self.pairs():
            got, want = full_gradient(param), plain.grad
            if got is None or want is None:  # what no micro-batch used
                assert all(gradient is None or not gradient.any() for gradient in (got, want)), name
            else:
                close(got / self.manager.loss_scale, want, f"gradient of {name} in step {number}")

    def step_plain(self) -> None:
        """Torch's optimizers go on with frozen parameters that have a gradient; ours do not."""
        frozen = [(plain, plain.grad) for plain in self.plain.parameters() if not plain.requires_grad]
        for plain, _ in frozen:
            plain.grad = None
        self.theirs.step()
        for plain, gradient in frozen:
            plain.grad = gradient

    def check_values(self, number: int) -> None:
        """And both go on from the same values, so that rounding does not add up."""
        for name, param, plain in self.pairs():
            value = full_value(param)
            close(value, plain, f"{name} after step {number}", tolerance=2e-4)
            plain.data.copy_(value)

    def after_state_dict(self, step: Step) -> None:
        state = self.model.state_dict()
        with torch.no_grad():
            for param in self.model.parameters():
                param.zero_()
        whole = state if bmt.rank() == 0 else {}
        self.model.load_state_dict(bmt.store.DistributedStateDictWrapper(whole))

    def after_save(self, step: Step) -> None:
        path = os.path.join(self.folder, "model.pt")
        bmt.save(self.model, path)
        for param in self.model.parameters():
            param.data.add_(1)
        bmt.load(self.model, path)

    def after_scale(self, step: Step) -> None:
        with torch.no_grad():
            for _, param, plain in self.pairs():
                param.mul_(0.9)
                plain.mul_(0.9)

    def after_freeze(self, step: Step) -> None:
        if self.program.optimizer.startswith("torch"):
            return  # they step frozen parameters too
        self.ours.zero_grad(set_to_none=True)
        self.theirs.zero_grad(set_to_none=True)
        pairs = list(self.pairs())
        _, param, plain = pairs[step.which % len(pairs)]
        for either in (param, plain):
            either.requires_grad_(not either.requires_grad)

    def after_optimizer_state(self, step: Step) -> None:
        self.ours.load_state_dict(copy.deepcopy(self.ours.state_dict()))

    def after_deepcopy(self, step: Step) -> None:
        twin = copy.deepcopy(self.model)
        hidden = torch.randn(2, 3, self.program.dim, generator=torch.Generator().manual_seed(1))
        with torch.no_grad():
            got, want = (hidden_of(model.layers[0](hidden)) for model in (twin, self.model))
        assert torch.equal(got, want)
        reset(self.model)

    def after_forward_only(self, step: Step) -> None:
        hidden = torch.randn(2, 3, self.program.dim, generator=torch.Generator().manual_seed(1))
        self.model.layers[0](hidden.requires_grad_())
        reset(self.model)


def against_torch(folder: str) -> None:
    for seed in range(COUNT):
        program = draw(seed, bmt.world_size())
        try:
            AgainstTorch(program, folder).run()
        except Exception as error:
            raise AssertionError(f"{program}") from error


@pytest.mark.parametrize("world", [2, 3, 4])
def test_a_random_program_trains_as_plain_torch(world, tmp_path):
    run_ranks(world, against_torch, str(tmp_path), timeout=60 + 5 * COUNT)


class Cast(torch.nn.Module):
    """A block whose parameters and arguments have another dtype than the model around it."""

    def __init__(self, block: bmt.Block, dtype: torch.dtype) -> None:
        super().__init__()
        self.block, self.dtype = block, dtype

    def __getattr__(self, name):
        own = self._modules
        return own[name] if name in own else getattr(own["block"], name)

    def forward(self, x, extra=None, causal=True):
        output = self.block(x.to(self.dtype), None if extra is None else extra.to(self.dtype), causal=causal)
        if isinstance(output, dict):
            return {"hidden": output["hidden"].float(), "others": [output["others"][0].float()]}
        return output.float()


def trace(program: Program, policies: list, dtypes: list, overlap: bool) -> list:
    """Everything that a program computes, by name."""
    torch.manual_seed(program.seed)
    model = RandomModel(program)
    for layer, dtype in zip(model.layers, dtypes, strict=True):
        layer.to(dtype)
    distribute(model)
    model.layers = torch.nn.ModuleList(
        [
            Cast(bmt.Block(layer, policy=policy), dtype)
            for layer, policy, dtype in zip(model.layers, policies, dtypes, strict=True)
        ]
    )
    optimizer = our_optimizer(model, program)
    if "offload" in program.optimizer:
        optimizer = type(optimizer)(optimizer.param_groups, overlap=overlap)
    manager = bmt.optim.OptimManager(loss_scale=program.loss_scale)
    manager.add_optimizer(optimizer)
    seen = []
    for number, step in enumerate(program.steps):
        optimizer.zero_grad(set_to_none=program.set_to_none)
        for index, micro in enumerate(step.micros):
            ids, extra = batch(program, number, index, bmt.rank())
            with nullcontext() if micro.sync else bmt.no_sync():
                loss = forward(model, micro, ids, extra)
                manager.backward(loss)
            seen.append((f"loss {number}.{index}", loss.detach()))
        for name, param in model.named_parameters():
            gradient = full_gradient(param)
            if gradient is not None:
                seen.append((f"gradient of {name} in step {number}", gradient))
        manager.step()
        seen += [
            (f"{name} after step {number}", full_value(param)) for name, param in model.named_parameters()
        ]
    return seen


def same_bits(seed: int) -> None:
    """Which gradients wait in `no_sync` and how ranks add them up is a matter of rounding; nothing else is."""
    r = random.Random(seed)
    program = replace(
        draw(seed, bmt.world_size()), optimizer=r.choice(["adam", "adam_offload", "sgd", "sgd_offload"])
    )
    dtypes = [r.choice(DTYPES) for _ in program.layers]
    plain = [bmt.BlockPolicy(recompute="off", keep_gradients=p.keep_gradients) for p in program.policies]
    wanted = trace(program, plain, dtypes, overlap=False)
    for _ in range(2):
        # At level 0 a gradient of 16 bits that several backwards add to is rounded once more.
        drawn = [
            draw_policy(r, 1, levels=(0, 1, 2, 3) if dtype == torch.float32 else (1, 2, 3))
            for dtype in dtypes
        ]
        policies = [
            replace(policy, keep_gradients=p.keep_gradients)
            for policy, p in zip(drawn, program.policies, strict=True)
        ]
        got = trace(program, policies, dtypes, overlap=True)
        assert [name for name, _ in got] == [name for name, _ in wanted]
        for (name, value), (_, want) in zip(got, wanted, strict=True):
            assert torch.equal(value.nan_to_num(7.0), want.nan_to_num(7.0)), f"{name}: {program} {policies}"


def against_other_policies() -> None:
    for seed in range(COUNT // 2):
        same_bits(seed)


@pytest.mark.parametrize("world", [2, 4])
def test_a_policy_changes_no_bit_of_a_random_program(world):
    run_ranks(world, against_other_policies, timeout=60 + 5 * COUNT)
