"""What does not compile does not import torch's compiler, which takes 70 MiB of a process and seconds of its start."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from bmtrain._tools.started import run_forked

TRAINING = """
import sys, torch
import bmtrain as bmt

bmt.init_distributed(seed=0)

class Layer(bmt.DistributedModule):
    def __init__(self):
        super().__init__()
        self.weight = bmt.DistributedParameter(torch.randn(8, 8))

    def forward(self, x):
        return torch.tanh(x @ self.weight)

kinds = [bmt.optim.AdamOptimizer, bmt.optim.AdamOffloadOptimizer, bmt.optim.SGDOptimizer, bmt.optim.LionOptimizer]
for kind in kinds:
    policies = [bmt.BlockPolicy(recompute=how) for how in ("whole", "selective")]
    model = bmt.TransformerBlockList([bmt.Block(Layer(), policy=policy) for policy in policies])
    optimizer = kind(model[0].parameters(), lr=1e-3)
    optimizer.add_param_group({"params": list(model[1].parameters())})
    manager = bmt.optim.OptimManager()
    manager.add_optimizer(optimizer, bmt.lr_scheduler.Cosine(optimizer, 1e-3, 1, 10, 0))
    for _ in range(2):
        manager.zero_grad()
        manager.backward(model(torch.ones(2, 8)).sum())
        manager.clip_grad_norm(optimizer.param_groups, 1.0)
        manager.step()
    optimizer.zero_grad(set_to_none=True)
    optimizer.load_state_dict(optimizer.state_dict())
assert "torch._dynamo" not in sys.modules

import torch._dynamo  # as somebody does who compiles: everything goes on

optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(3))]})
optimizer.zero_grad()
assert len(optimizer.state_dict()["param_groups"]) == 3
"""


def test_training_does_not_import_the_compiler() -> None:
    command = [sys.executable, "-c", TRAINING]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


DIVIDED = """
import runpy, sys
import bmtrain as bmt

init = bmt.init_distributed
bmt.init_distributed = lambda **options: init(sp_size=2, **options)
runpy.run_path(sys.argv[1])
assert "torch._dynamo" not in sys.modules
"""


def test_sequences_of_forked_ranks_do_not_import_the_compiler(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(DIVIDED)
    train = Path(__file__).parents[1] / "scripts" / "parity_train.py"
    assert run_forked(2, [str(tmp_path / "script.py"), str(train)], {}) == 0
