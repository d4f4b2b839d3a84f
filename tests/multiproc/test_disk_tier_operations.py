"""Operations of torch on parameters and gradients on a drive: the values of memory, or an error."""

from __future__ import annotations

import copy
import io
import pickle
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import run_ranks
from harness.disk_tier import ALL, TIERS, small_chunks
from harness.offloaded import Model, values_of

import bmtrain as bmt
from bmtrain._engine.engine import current_engine
from bmtrain.global_var import context

Values = list[torch.Tensor]


def batch(step: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + bmt.rank())
    return torch.randn(3, 40, generator=generator).to(dtype)


def loss_of(model: Any, step: int) -> Any:
    return model(batch(step, model.first.dtype)).float().square().mean()


def steps(model: Any, optimizer: Any, numbers: range) -> Values:
    losses = []
    for step in numbers:
        optimizer.zero_grad()
        losses.append(loss_of(model, step))
        losses[-1].backward()
        optimizer.step()
    return [loss.detach() for loss in losses]


def adam(model: Any) -> Any:
    return bmt.optim.AdamOptimizer(model.parameters(), lr=0.01)


# ---- what an operation does: gets the model, its optimizer, and its parameters after two steps


def through_file(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def trained(model: Any) -> Values:
    optimizer = adam(model)
    return [*steps(model, optimizer, range(4, 6)), *values_of(model, [optimizer])]


def averaged(m: Any, o: Any, ps: Any) -> Values:
    average = torch.optim.swa_utils.AveragedModel(m)
    for step in range(3):
        steps(m, o, range(step, step + 1))
        average.update_parameters(m)
    with torch.no_grad():
        return [average(batch(9)), *average.parameters()]


def with_penalty(m: Any, o: Any, ps: Any) -> Values:
    for _ in range(2):  # the second adds
        (loss_of(m, 4) + sum(p.square().sum() for p in ps)).backward()
        sum(p.abs().sum() for p in ps[1:4]).backward()  # no block runs
    return [p.grad.clone() for p in ps]


def between_passes(m: Any, o: Any, ps: Any) -> Values:
    loss = loss_of(m, 4)
    with torch.no_grad():
        torch._foreach_mul_(ps[1:], 0.9)
    loss.backward()
    return [p.grad.clone() for p in ps]


def kept(m: Any, o: Any, ps: Any) -> Values:
    """Views that are made before passes and read after them."""
    views = [view for p in ps for view in (p.detach(), p.data, p.view(-1)[:7])]
    arrays = [p.detach().numpy() for p in ps]
    steps(m, o, range(4, 6))
    return [*(view.clone() for view in views), *(torch.from_numpy(array.copy()) for array in arrays)]


def kept_gradients(m: Any, o: Any, ps: Any) -> Values:
    loss_of(m, 4).backward()
    gradients = [p.grad for p in ps]
    loss_of(m, 5).backward()
    seen = [g.clone() for g in gradients]
    for g in gradients:
        g.mul_(0.5)
    o.step()
    o.zero_grad()
    loss_of(m, 5).backward()
    return [*seen, *(p.grad.clone() for p in ps)]


def written_views(m: Any, o: Any, ps: Any) -> Values:
    views = [p.detach() for p in ps]
    steps(m, o, range(4, 5))
    for view in views:
        view[::2].mul_(0.5)
    losses = steps(m, o, range(5, 6))
    for view in views:
        view.clamp_(-0.1, 0.1)
    return losses


def torch_optimizer(kind: Any, **options: Any) -> Callable[[Any, Any, Any], Values]:
    def run(m: Any, o: Any, ps: Any) -> Values:
        return steps(m, kind(ps, lr=0.01, **options), range(4, 7))

    return run


def converted(convert: Callable[[Any], Any]) -> Callable[[Any, Any, Any], Values]:
    def run(m: Any, o: Any, ps: Any) -> Values:
        convert(m)
        return [*trained(m), *(p.detach().clone() for p in m.parameters())]

    return run


def written(write: Callable[[Any], Any]) -> Callable[[Any, Any, Any], Values]:
    """Writes to each parameter, with autograd off."""

    def run(m: Any, o: Any, ps: Any) -> Values:
        with torch.no_grad():
            return [value for p in ps for value in [write(p)] if torch.is_tensor(value)]

    return run


def on_gradients(write: Callable[[Any, Any], Any]) -> Callable[[Any, Any, Any], Values]:
    def run(m: Any, o: Any, ps: Any) -> Values:
        loss_of(m, 4).backward()
        result = write(m, ps)
        o.step()
        return [result] if torch.is_tensor(result) else []

    return run


def in_inference_mode(m: Any, o: Any, ps: Any) -> Values:
    with torch.inference_mode():
        for p in ps:
            p.mul_(0.9)
        return [m(batch(4)).clone()]


def in_hooks(m: Any, o: Any, ps: Any) -> Values:
    """Reads the whole parameters, in a block's forward."""
    seen: Values = []

    def read(module: Any, *_: Any) -> None:
        seen.extend([module.weight.norm().detach(), module.weight.detach().clone()])

    handles = [layer.register_forward_hook(read) for layer in m.layers]
    losses = steps(m, o, range(4, 6))
    for handle in handles:
        handle.remove()
    return [*losses, *seen]


def skipped(m: Any, o: Any, ps: Any) -> Values:
    """Forwards without some of the blocks; these have zeros, or nothing, as gradients."""
    losses = []
    for step, (used, drops) in enumerate([([0, 1, 3], True), ([2], False), ([4, 2, 1], True), ([0], True)]):
        o.zero_grad(set_to_none=drops)
        x = batch(step) @ m.first
        for number in used:
            x = m.layers[number](x)
        losses.append(x.square().mean())
        losses[-1].backward()
        losses.append(bmt.optim.clip_grad.clip_gradients(ps, 0.1))
        o.step()
    return [loss.detach() for loss in losses]


def twice(m: Any, o: Any, ps: Any) -> Values:
    """Blocks that run twice in a forward, also one after the other."""
    losses = []
    for step in range(3):
        o.zero_grad()
        x = batch(step) @ m.first
        for number in (0, 1, 1, 2, 0, 3, 1):
            x = m.layers[number](x)
        losses.append(x.square().mean())
        losses[-1].backward()
        o.step()
    return [loss.detach() for loss in losses]


OPERATIONS: dict[str, Callable[[Any, Any, Any], Values]] = {
    "norm": lambda m, o, ps: [p.norm().detach() for p in ps],
    "arithmetic": lambda m, o, ps: [(p * 2 + p.sum() - torch.cat([p, p])[: p.numel()]).detach() for p in ps],
    "compare": lambda m, o, ps: [torch.tensor([torch.equal(p, p.clone()), bool((p == p).all())]) for p in ps],
    "list": lambda m, o, ps: [torch.tensor(p.tolist()) for p in ps],
    "text": lambda m, o, ps: [torch.tensor(list(repr(p).encode())) for p in ps],
    "numpy": lambda m, o, ps: [torch.from_numpy(p.detach().numpy().copy()) for p in ps],
    "foreach": lambda m, o, ps: torch._foreach_norm(list(ps)),
    "vector": lambda m, o, ps: [torch.nn.utils.parameters_to_vector(ps).detach()],
    "autograd": lambda m, o, ps: [torch.autograd.grad(p.square().sum(), p)[0] for p in ps],
    "file of a tensor": lambda m, o, ps: [through_file(p.detach()) for p in ps],
    "file of a parameter": lambda m, o, ps: [through_file(p).gather().detach() for p in ps],
    "pickle": lambda m, o, ps: [pickle.loads(pickle.dumps(p)).detach() for p in ps],
    "file of a model": lambda m, o, ps: trained(through_file(m)),
    "file of blocks": lambda m, o, ps: [p.detach() for p in through_file(m.layers).parameters()],
    "deepcopy": lambda m, o, ps: trained(copy.deepcopy(m)),
    "deepcopy with its optimizer": lambda m, o, ps: steps(*copy.deepcopy((m, o)), range(4, 6)),
    "deepcopy of a parameter": lambda m, o, ps: [copy.deepcopy(p).detach() for p in ps],
    "averaged model": averaged,
    "penalty": with_penalty,
    "between forward and backward": between_passes,
    "kept views": kept,
    "kept gradients": kept_gradients,
    "views that are written to": written_views,
    "torch's SGD": torch_optimizer(torch.optim.SGD, momentum=0.9),
    "torch's AdamW": torch_optimizer(torch.optim.AdamW, foreach=True),
    "to": converted(lambda m: m.to(torch.bfloat16)),
    "half": converted(lambda m: m.half()),
    "double": converted(lambda m: m.double()),
    "half and back": converted(lambda m: m.half().float()),
    "share_memory": converted(lambda m: m.share_memory()),
    "to itself": converted(lambda m: m.to("cpu").float().requires_grad_(True)),
    "mul_": written(lambda p: p.mul_(0.9)),
    "copy_": written(lambda p: p.copy_(torch.linspace(-1, 1, p.numel()))),
    "part": written(lambda p: [part.zero_() for part in p.chunk(3)[1:]] and p[:3].add_(1)),
    "detached": written(lambda p: p.detach().view(-1).add_(0.1)),
    "out": written(lambda p: torch.mul(p, 0.9, out=p)),
    "index": written(lambda p: p.index_fill_(0, torch.arange(min(5, p.numel())), 0.5)),
    "normal_": written(torch.nn.init.normal_),
    "uniform_": written(torch.nn.init.uniform_),
    "zeros_": written(torch.nn.init.zeros_),
    "xavier_normal_": written(torch.nn.init.xavier_normal_),
    "set_": written(lambda p: p.set_(torch.full_like(p, 0.1))),
    "set_ of data": written(lambda p: p.data.set_(torch.full_like(p, 0.1))),
    "data": written(lambda p: setattr(p, "data", torch.full_like(p, 0.1))),
    "numpy that is written to": written(lambda p: p.detach().numpy().fill(0.1)),
    "storage that is written to": written(lambda p: p.untyped_storage().fill_(0)),
    "in inference mode": in_inference_mode,
    "vector_to_parameters": lambda m, o, ps: (
        torch.nn.utils.vector_to_parameters(torch.nn.utils.parameters_to_vector(ps).detach() * 0.9, ps) or []
    ),
    "assigned": lambda m, o, ps: (
        m.load_state_dict({k: v + 1 for k, v in m.state_dict().items()}, assign=True) and []
    ),
    "hooks": in_hooks,
    "clip_grad_norm_": on_gradients(lambda m, ps: torch.nn.utils.clip_grad_norm_(ps, 0.01)),
    "clip_grad_value_": on_gradients(lambda m, ps: torch.nn.utils.clip_grad_value_(ps, 0.001)),
    "zero_grad": on_gradients(lambda m, ps: m.zero_grad(set_to_none=False)),
    "gradients": on_gradients(lambda m, ps: torch._foreach_mul_([p.grad for p in ps], 0.5)),
    "gradients' data": on_gradients(lambda m, ps: [p.grad.data.mul_(0.5) for p in ps]),
    "gradients' numpy": on_gradients(lambda m, ps: [p.grad.numpy().fill(0.1) for p in ps]),
    "some gradients": on_gradients(lambda m, ps: [setattr(p, "grad", None) for p in ps[::2]]),
    "state that starts anew": lambda m, o, ps: o.state.clear() or [],
    "state of some that starts anew": lambda m, o, ps: [o.state.pop(p) for p in ps[::2]] and [],
    "blocks that are skipped": skipped,
    "blocks that run twice": twice,
}

#: Those that a model does not go on after: they have one of their own.
ALONE = {
    *(
        "between forward and backward",
        "to",
        "half",
        "double",
        "half and back",
        "share_memory",
        "xavier_normal_",
    ),
    *("numpy that is written to", "storage that is written to"),
}
#: Where a drive and memory differ, what a drive says.
REFUSED = {
    "numpy that is written to": "their checksum differs",
    "storage that is written to": "their checksum differs",
    "share_memory": "no memory to share",
}


def outcome(names: list[str], places: dict[str, Any]) -> dict[str, Values | str]:
    """Returns what each operation returns and leaves, two steps later, or the error that ended the program.

    The forward of the second step raises what fails in the update of the first.
    """
    torch.manual_seed(3)
    with bmt.default_policy(bmt.BlockPolicy(**places)):
        model = Model()
    optimizer = adam(model)
    steps(model, optimizer, range(2))
    found: dict[str, Values | str] = {}
    for number, name in enumerate(names):
        torch.manual_seed(5 + bmt.rank())
        if name in REFUSED:
            _ = optimizer.state  # waits for updates, one of which would fail, on the slower rank alone
        try:
            seen = OPERATIONS[name](model, optimizer, list(model.parameters()))
            values = [
                *(value.detach().clone() for value in seen),
                *steps(model, optimizer, range(number, number + 2)),
            ]
            found[name] = [*values, *values_of(model, [optimizer])]
        except (RuntimeError, ValueError, TypeError, bmt.errors.DiskError) as error:
            found[name] = re.sub(r"#\d+", "", f"{type(error).__name__}: {error}")
            break
    if places:
        with suppress(bmt.errors.DiskError):  # of the updates after the first that failed
            optimizer._place.finish()
        current_engine(context()).drop_ahead()
        tier = current_engine(context()).tier
        tier.settle()
        tier.forget()
        tier.drives.failure = None
    return found


def compare() -> dict[str, str]:
    """Returns where a drive differs from memory."""
    small_chunks()
    found = {}
    together = [name for name in OPERATIONS if name not in ALONE]
    for names in (together, *([name] for name in OPERATIONS if name in ALONE)):
        expected, ours = outcome(names, {}), outcome(names, ALL)
        for name in names:
            a, b = expected.get(name, "did not run"), ours.get(name, "did not run")
            if isinstance(a, str) or isinstance(b, str):
                if a != b:
                    found[name] = b if isinstance(b, str) else f"no error, but in memory {a}"
            elif len(a) != len(b) or not all(map(torch.equal, a, b)):
                found[name] = (
                    f"values differ: {[n for n, pair in enumerate(zip(a, b, strict=False)) if not torch.equal(*pair)]}"
                )
                break
    return found


@pytest.mark.parametrize("world", [1, 2])
def test_same_values_as_in_memory(world: int, tmp_path: Path) -> None:
    environment = {"BMTRAIN_POISON_BUFFERS": "1"}
    init = {"tier_directories": [str(tmp_path)]}
    for found in run_ranks(world, compare, init=init, environment=environment):
        assert found.keys() == REFUSED.keys(), found
        for name, text in found.items():
            assert REFUSED[name] in text, name


# ---- parameters in whose places tensors are put after they have been read ahead


def put_tensors() -> list[torch.Tensor]:
    outputs = []
    for places in ({}, ALL):
        with bmt.default_policy(bmt.BlockPolicy(**places)):
            model = bmt.TransformerBlockList([bmt.Block(bmt.nn.Linear(64, 64)) for _ in range(5)])
        x = torch.ones(4, 64)
        for _ in range(3):
            model(x)
        with torch.no_grad():
            for p in model.parameters():
                p.set_(torch.full_like(p, 0.01))
        for _ in range(2):
            model(x).sum().backward()
        outputs.append(model(x).detach())
    return outputs


@pytest.mark.parametrize("world", [1, 2])
def test_tensors_put_in_place_after_a_read_ahead(world: int, tmp_path: Path) -> None:
    for plain, ours in run_ranks(world, put_tensors, init={"tier_directories": [str(tmp_path)]}):
        assert plain.isfinite().all()
        assert torch.equal(plain, ours)


# ---- gradients that a script keeps


def keep_and_zero_all(weight: Any, bias: Any, optimizer: Any) -> Any:
    kept = weight.grad
    optimizer.zero_grad(set_to_none=True)
    return kept


def keep_data_and_zero_all(weight: Any, bias: Any, optimizer: Any) -> Any:
    kept = weight.grad.data
    optimizer.zero_grad(set_to_none=True)
    return kept


def keep_one(weight: Any, bias: Any, optimizer: Any) -> Any:
    kept, bias.grad = bias.grad, None  # the weight's goes on
    return kept


def keep_one_and_zero_the_other(weight: Any, bias: Any, optimizer: Any) -> Any:
    kept = keep_one(weight, bias, optimizer)
    weight.grad.zero_()
    return kept


KEPT = [keep_and_zero_all, keep_data_and_zero_all, keep_one, keep_one_and_zero_the_other]


def keep_gradients() -> None:
    small_chunks()
    for keep in KEPT:
        results = []
        for places in (*TIERS[:3], ALL):
            torch.manual_seed(3)
            with bmt.default_policy(bmt.BlockPolicy(**places)):
                model = Model()
            optimizer = adam(model)
            layer = model.layers[1]
            kept = []
            for step in range(4):
                loss_of(model, step).backward()
                optimizer.step()
                kept.append(keep(layer.weight, layer.bias, optimizer))
            results.append([*kept, *values_of(model, [optimizer])])
        for result in results[1:]:
            assert len(result) == len(results[0])
            assert all(map(torch.equal, result, results[0])), keep.__name__


@pytest.mark.parametrize("world", [1, 2])
def test_kept_gradients_keep_their_values(world: int, tmp_path: Path) -> None:
    run_ranks(world, keep_gradients, init={"tier_directories": [str(tmp_path)]})


# ---- parameters that a forward without a backward has left gathered


def forward_before_step() -> None:
    small_chunks()
    for writes in (False, True):
        results = []
        for places in TIERS:
            torch.manual_seed(3)
            with bmt.default_policy(bmt.BlockPolicy(level=2, **places)):
                model = Model()
            optimizer = adam(model)
            losses = []
            for step in range(3):
                optimizer.zero_grad()
                loss_of(model, step).backward()
                losses.append(loss_of(model, step + 10))  # and keeps the parameters for its backward
                if writes:
                    model.layers[1].weight.data.mul_(0.9)
                optimizer.step()
            results.append([*(loss.detach() for loss in losses), *values_of(model, [optimizer])])
        for result in results[1:]:
            assert len(result) == len(results[0])
            assert all(map(torch.equal, result, results[0])), writes


@pytest.mark.parametrize("world", [1, 2])
def test_a_step_after_a_forward(world: int, tmp_path: Path) -> None:
    run_ranks(world, forward_before_step, init={"tier_directories": [str(tmp_path)]})
