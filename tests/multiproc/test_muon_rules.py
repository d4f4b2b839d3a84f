"""Rules and splits of MuonOptimizer by name: the choice, and parts as separate matrices, bit for bit."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from harness import run_ranks

import bmtrain as bmt
from bmtrain.optim import MuonOptimizer

LR, DECAY, EXPERTS = 0.02, 0.1, 3


class Conv1D(torch.nn.Module):
    """A matrix stored as ``(in, out)``, as transformers have it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(8, 24))


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = torch.nn.Linear(8, 24)
        self.grouped_qkv = torch.nn.Linear(8, 16, bias=False)
        self.c_attn = Conv1D()
        self.out = torch.nn.Linear(8, 8, bias=False)
        self.experts = torch.nn.Parameter(torch.randn(EXPERTS, 10, 8))
        self.relative = torch.nn.Embedding(4, 8)
        self.pos = torch.nn.Parameter(torch.randn(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = (x + self.relative.weight[1] + self.out(x)) @ self.pos
        x = x + sum(self.qkv(x).chunk(3, -1)) + self.grouped_qkv(x)[..., :8] + self.grouped_qkv(x)[..., 8:]
        x = x + sum((x @ self.c_attn.weight).chunk(3, -1))
        return (x @ self.experts.transpose(1, 2)).sum(0)[..., :8].tanh()


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embedding = torch.nn.Embedding(6, 8)
        self.layers = torch.nn.ModuleList([Layer(), Layer()])
        self.head = torch.nn.Linear(8, 6, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


RULES = {"*.pos": "adam", "head": "muon"}
SPLITS: dict[str, int | list[int]] = {
    "*.qkv": 3,
    "*.grouped_qkv": [8, 4, 4],
    "*.c_attn": 3,
    "layers.*.experts": EXPERTS,
}


def make(model: torch.nn.Module, **options: Any) -> MuonOptimizer:
    return MuonOptimizer(
        model.named_parameters(), lr=LR, weight_decay=DECAY, adjust_lr_fn="match_rms_adamw", **options
    )


def chosen(optimizer: MuonOptimizer) -> dict[str, Any]:
    """Rule and split by name."""
    return {name: (g["rule"], g.get("split")) for g in optimizer.param_groups for name in g["param_names"]}


def parts_of(name: str, matrix: torch.Tensor) -> Sequence[torch.Tensor]:
    """The separate matrices."""
    if "c_attn" in name:
        return matrix.chunk(3, 1)
    if "experts" in name:
        return matrix.unbind(0)
    sizes = {"qkv": [8, 8, 8], "grouped_qkv": [8, 4, 4]}
    return matrix.split(sizes.get(name.split(".")[-2], [len(matrix)]))


def parity() -> None:
    model = bmt.BMTrainModelWrapper(Net())
    optimizer = make(model, rules=RULES, splits=SPLITS)
    named = dict(model.named_parameters())
    by_muon = [name for name, (rule, _) in chosen(optimizer).items() if rule == "muon"]
    assert len(by_muon) == 2 * 5 + 1
    separate = {
        name: [torch.nn.Parameter(part.clone()) for part in parts_of(name, named[name].gather().detach())]
        for name in by_muon
    }
    reference = torch.optim.Muon(
        [p for parts in separate.values() for p in parts],
        lr=LR,
        weight_decay=DECAY,
        adjust_lr_fn="match_rms_adamw",
    )
    for step in range(3):
        optimizer.zero_grad()
        model(torch.tensor([step, 2, 5 - bmt.rank() % 3])).square().mean().backward()
        for name, parts in separate.items():
            gradient = named[name].gather_grad()
            assert gradient is not None
            for part, g in zip(parts, parts_of(name, gradient), strict=True):
                part.grad = g.clone()
        reference.step()
        optimizer.step()
        if step == 0:  # splits travel with pickles and state dicts
            optimizer = _again(optimizer, model)
        for name, parts in separate.items():
            for part, value in zip(parts, parts_of(name, named[name].gather().detach()), strict=True):
                assert torch.equal(part.detach(), value), name


def _again(optimizer: MuonOptimizer, model: torch.nn.Module) -> MuonOptimizer:
    copy = pickle.loads(pickle.dumps(optimizer))
    assert chosen(copy) == chosen(optimizer)
    new = make(model, rules=RULES, splits=SPLITS)
    new.load_state_dict(optimizer.state_dict(gather=True))
    return new


@pytest.mark.parametrize("world", [1, 2, 3])
def test_parts_are_separate_matrices(world: int) -> None:
    run_ranks(world, parity)


def structure() -> None:
    model = bmt.BMTrainModelWrapper(Net())
    with pytest.warns(
        UserWarning, match=r"layers\.\*\.qkv\.weight, layers\.\*\.grouped_qkv\.weight, layers"
    ) as seen:
        optimizer = make(model)
    (text,) = [str(w.message) for w in seen if "MuonOptimizer" in str(w.message)]
    assert "c_attn" in text and "experts" in text and "out" not in text.split(":")[1]
    by_default = chosen(optimizer)
    assert {n for n, (rule, _) in by_default.items() if rule == "muon"} == {
        f"layers.{k}.{name}" for k in (0, 1)
        for name in ("qkv.weight", "grouped_qkv.weight", "c_attn.weight", "out.weight", "pos")
    }  # fmt: skip
    ruled = make(model, rules={"layers.0.*": "adam", **RULES}, splits={"layers.1.qkv.*": 3})
    assert chosen(ruled)["layers.0.out.weight"][0] == "adam" and chosen(ruled)["layers.1.pos"][0] == "adam"
    assert chosen(ruled)["head.weight"] == ("muon", None) and chosen(ruled)["layers.1.qkv.weight"] == (
        "muon",
        3,
    )
    lines = str(ruled).splitlines()
    assert lines[0] == "MuonOptimizer" and lines[1].split() == [
        "rule",
        "split",
        "tensors",
        "elements",
        "names",
    ]
    assert any(line.split()[:4] == ["muon", "3", "1", "192"] for line in lines)
    assert any("layers.*.relative.weight" in line and line.startswith("adam") for line in lines)
    named = dict(model.named_parameters())
    group = {"params": [named["layers.0.qkv.weight"]], "split": 3}
    assert MuonOptimizer([group]).param_groups[0]["split"] == 3
    later = MuonOptimizer([("head.weight", named["head.weight"])])
    with pytest.warns(UserWarning, match=r"MuonOptimizer: layers\.\*\.qkv\.weight: several matrices in one"):
        later.add_param_group({"params": [("layers.1.qkv.weight", named["layers.1.qkv.weight"])]})


def test_rules_come_from_the_structure_and_from_names() -> None:
    run_ranks(1, structure)


def wrong() -> None:
    model = bmt.BMTrainModelWrapper(Net())
    for options, message in (
        ({"rules": {"*.pos": "sgd"}}, "rules: expected 'muon' or 'adam', got 'sgd'"),
        ({"rules": {"*.position": "adam"}}, r"no parameter has a name that matches '\*.position'"),
        ({"rules": {"layers.0.experts": "muon"}}, r"layers.0.experts: expected parameters of two dimensions"),
        ({"splits": {"*.qkv.weight": 5}}, r"layers.0.qkv.weight: expected parts of 24 rows together, got 5"),
        ({"splits": {"*.qkv.weight": [8, 8]}}, r"expected parts of 24 rows together, got \[8, 8\]"),
        ({"splits": {"*.c_attn": [8, 16]}}, "expected a number of parts for the columns of Conv1D"),
        ({"splits": {"*.qkv": 0}}, "splits: expected a number of parts or a list of their rows, got 0"),
    ):
        with pytest.raises(ValueError, match=message):
            make(model, **options)  # type: ignore[arg-type]
    for name in ("rules", "splits"):
        with pytest.raises(
            TypeError, match=f"{name}: expected a dict by pattern, or None, got {{3: 'adam'}}"
        ):
            make(model, **{name: {3: "adam"}})
    with pytest.raises(
        ValueError, match=r"expected parameters with names, such as model.named_parameters\(\)"
    ):
        MuonOptimizer(model.parameters(), rules=RULES)


def test_wrong_rules_are_named() -> None:
    run_ranks(1, wrong)
