"""Fine-tune a causal language model of Hugging Face, sharded over the ranks, and save it for `from_pretrained`.

    torchrun --nproc-per-node 2 example/huggingface/fine_tune.py --model Llama-3.2-1B --data notes.txt --out tuned

`--model` is a folder with `config.json` and safetensors. Without it a small random LLaMA is made, so that the program
runs anywhere. `--lora R` trains and saves adapters of rank R alone (peft). Text is read as bytes if the folder has no
tokenizer.
"""

from __future__ import annotations

import argparse
import atexit
import shutil
import sys
import tempfile
from pathlib import Path

import torch
import transformers

import bmtrain as bmt


def main() -> None:
    options = parse()
    bmt.init_distributed(seed=options.seed)
    folder = options.model or small_model()
    config = transformers.AutoConfig.from_pretrained(folder)
    with torch.device("meta"):  # no rank ever holds the whole model
        model = transformers.AutoModelForCausalLM.from_config(config)
    model = bmt.BMTrainModelWrapper(model.train())
    bmt.weights.load(model, folder)
    if options.lora:
        model = with_adapters(model, options.lora)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = bmt.optim.AdamOptimizer(trained, lr=options.lr)
    manager = bmt.optim.OptimManager(loss_scale=2**16 if config.dtype == torch.float16 else None)
    manager.add_optimizer(optimizer)
    tokens = read_tokens(folder, options.data, config.vocab_size)
    generator = torch.Generator().manual_seed(options.seed + bmt.rank())
    for step in range(options.steps):
        ids = batch(tokens, options.batch_size, options.seq_len, generator).to(bmt.config["device"])
        manager.zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        manager.backward(loss)
        manager.clip_grad_norm(optimizer.param_groups, 1.0)
        manager.step()
        mean = bmt.distributed.all_reduce(loss.detach(), "avg").item()
        bmt.print_rank(f"step {step}: loss {mean:.4f}")
    if options.lora:
        bmt.weights.save(model, options.out / "adapter_model.safetensors", rename=name_in_adapter)
        config = model.peft_config["default"]
    else:
        bmt.weights.save(model, options.out)
    if bmt.rank() == 0:
        config.save_pretrained(options.out)
    bmt.print_rank(f"saved: {options.out}, for from_pretrained")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, help="folder with config.json and safetensors")
    parser.add_argument("--data", type=Path, help="a text file (default: this program)")
    parser.add_argument("--out", type=Path, default=Path("out/fine_tuned"), help="(default: %(default)s)")
    parser.add_argument("--lora", type=int, metavar="R", help="train adapters of this rank alone")
    parser.add_argument("--steps", type=int, default=20, help="(default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=4, help="of a rank (default: %(default)s)")
    parser.add_argument("--seq-len", type=int, default=64, help="(default: %(default)s)")
    parser.add_argument("--lr", type=float, default=1e-3, help="(default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="(default: %(default)s)")
    options = parser.parse_args()
    if options.model and not (options.model / "config.json").is_file():
        parser.error(f"--model: expected a folder with config.json, got {options.model}")
    if options.data and not options.data.is_file():
        parser.error(f"--data: expected a text file, got {options.data}")
    return options


def small_model() -> Path:
    """A folder with a random LLaMA of 0.3 M parameters, until the program ends; made by rank 0."""
    if bmt.rank() == 0:
        torch.manual_seed(0)
        folder = Path(tempfile.mkdtemp(prefix="small-llama-"))
        atexit.register(shutil.rmtree, folder)
        config = transformers.LlamaConfig(
            vocab_size=256,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=4,
            num_attention_heads=4,
        )
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return Path(bmt.store.broadcast_object(str(folder) if bmt.rank() == 0 else None))


def with_adapters(model: torch.nn.Module, rank: int) -> torch.nn.Module:
    """Low-rank adapters beside every linear layer of the blocks, trained alone."""
    import peft

    adapters = peft.LoraConfig(r=rank, target_modules="all-linear", lora_dropout=0.0)
    return bmt.BMTrainModelWrapper(peft.get_peft_model(model, adapters))


def name_in_adapter(name: str) -> str | None:
    """The name of an adapter's parameter in peft's files, which hold nothing else."""
    return name.replace(".default.", ".") if "lora_" in name else None


def read_tokens(folder: Path, data: Path | None, vocab_size: int) -> torch.Tensor:
    text = (data or Path(__file__)).read_bytes()
    if (folder / "tokenizer_config.json").exists():
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        return torch.tensor(tokenizer(text.decode()).input_ids)
    return torch.tensor(list(text)) % vocab_size


def batch(tokens: torch.Tensor, size: int, seq_len: int, generator: torch.Generator) -> torch.Tensor:
    """Random pieces of the text, ``(size, seq_len)``."""
    if len(tokens) < seq_len:
        sys.exit(f"--data: expected at least --seq-len {seq_len} tokens, got {len(tokens)}")
    begins = torch.randint(len(tokens) - seq_len + 1, (size,), generator=generator)
    return torch.stack([tokens[begin : begin + seq_len] for begin in begins.tolist()])


if __name__ == "__main__":
    main()
