"""Sample text from a checkpoint of train.py, in a fresh process.

python example/generate.py --out out/gpt2 --prompt "def "
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from agree import UserError, exit_together
from checkpoint import read_run
from data import END_OF_FILE
from models import GPT
from options import DTYPES, Help

import bmtrain as bmt
from bmtrain.distributed import checkpoint


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Sample text from a checkpoint of train.py.", formatter_class=Help
    )
    parser.add_argument("--out", metavar="FOLDER", default="out/gpt2", help="folder that train.py wrote to")
    parser.add_argument("--checkpoint", metavar="FOLDER", help="a folder step-* of it; default: the last one")
    parser.add_argument(
        "--prompt", default="def main(", metavar="TEXT", help="text to continue (default: '%(default)s')"
    )
    parser.add_argument("--num-tokens", type=int, default=200, help="bytes to add")
    parser.add_argument("--temperature", type=float, default=0.8, help="0: always the most likely byte")
    parser.add_argument("--top-k", type=int, default=40, help="choose among the k most likely; 0: all")
    parser.add_argument("--seed", type=int, default=0, help="of the choices")
    options = parser.parse_args()

    bmt.init_distributed(seed=options.seed)
    try:
        model = load_model(options)
        tokens = list(options.prompt.encode()) or [END_OF_FILE]
        new = generate(model, tokens, options.num_tokens, options.temperature, options.top_k)
    except UserError as error:
        exit_together("generate.py", error)
    bmt.print_rank(f"--- a sample, which begins with the prompt\n{options.prompt}{text_of(new)}")


def load_model(options: argparse.Namespace) -> GPT:
    """The model of a checkpoint. Collective."""
    out = Path(options.out) / "checkpoints"
    folder = Path(options.checkpoint) if options.checkpoint else checkpoint.latest(out)
    if folder is None:
        raise UserError(f"--out: expected a checkpoint in {out}, found none; train.py writes one")
    config = read_run(folder, "--checkpoint")["model"]
    model = GPT(**{**config, "dtype": DTYPES[config["dtype"]]})
    checkpoint.load(folder, model, random=False)
    return model.eval()


@torch.no_grad()
def generate(model: GPT, tokens: list[int], num_tokens: int, temperature: float, top_k: int) -> list[int]:
    """Continue ``tokens``; every rank computes the same continuation. Collective.

    Returns:
        The new tokens, ``num_tokens`` of them or fewer, if the text ends.
    """
    device = bmt.config["device"]
    tokens, new = list(tokens), []
    for _ in range(num_tokens):
        context = torch.tensor([tokens[-model.max_distance :]], device=device)
        pos = torch.arange(context.size(1), device=device)[None]
        logits = model(context, pos, torch.ones_like(context, dtype=torch.bool))[0, -1, : END_OF_FILE + 1]
        token = pick(logits.float().cpu(), temperature, top_k)
        if token == END_OF_FILE:
            break
        tokens.append(token)
        new.append(token)
    return new


def pick(logits: torch.Tensor, temperature: float, top_k: int) -> int:
    """Draw a token from ``(vocab_size,)`` logits."""
    if temperature <= 0:
        return int(logits.argmax())
    if 0 < top_k < len(logits):
        logits = logits.masked_fill(logits < logits.topk(top_k).values[-1], float("-inf"))
    return int(torch.multinomial(torch.softmax(logits / temperature, dim=-1), 1))


def text_of(tokens: list[int]) -> str:
    return bytes(tokens).decode(errors="replace")


if __name__ == "__main__":
    main()
