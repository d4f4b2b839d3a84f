"""Check that a model treats every token by itself outside of attention.

[Note: Models that may be divided]
Attention is the only place where divided tokens meet. A convolution, a recurrence, a pooling, an attention of the
model's own or positions that it counts itself would compute over this rank's tokens as if there were no others, and
nothing would fail. No list of layers finds all of these. So the first forward of a model is preceded by three small
ones in which attention is replaced by a function of each token alone: then the result for some tokens together must be
the results for their first and for their second half. So is the first call of each module with distributed parameters
in a model that is not wrapped, such as its Blocks, of which less is known: it may have no attention, or return a loss.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, MutableMapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from .._base.generators import kept_generators
from .._engine.engine import current_engine
from .._engine.selective import uncompiled
from .._ranks.agree import largest
from ..global_var import context
from ._intercept import replaced_by, replacement
from ._sequences import Sequences, current_sequences

_NUM_TOKENS = 32  # of one sequence, at most
#: Values in their place. Labels of `shard_sequence` are shifted: a loss must be one of ``shift_labels`` alone.
_LABELS: dict[str, Any] = {"labels": -100, "shift_labels": 0, "num_items_in_batch": 5}
_NO_SUM = (
    "not the sum of the losses of 'shift_labels' divided by 'num_items_in_batch', so that its mean over ranks is not "
    "the mean over tokens; expected a model without labels, whose loss is bmtrain.nn.sequence.token_mean of the "
    "losses of tokens ('shift_labels' in the batch given to shard_sequence() are labels as they are, 'labels' the "
    "tokens themselves)"
)
_MIXED = (
    "other for some tokens together than for the first and the second half of them, even without attention: the model "
    "mixes tokens (a convolution, a recurrence, a pooling, an attention that is not torch's "
    "scaled_dot_product_attention or bmtrain.nn.functional.attention), or counts positions instead of taking "
    "position_ids; its sequences cannot be divided over ranks"
)
#: Modules that were checked, in training (True) or in evaluation.
_checked: weakref.WeakKeyDictionary[torch.nn.Module, set[bool]] = weakref.WeakKeyDictionary()


def check_call(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Checks the first call over divided sequences, in training and in evaluation, of a model (which has this function
    as a hook) or of a module with distributed parameters. See [Note: Models that may be divided]."""
    sequences = current_sequences()
    if sequences is None or replacement() is not None:
        return
    _check_documents(sequences, module, (*args, *kwargs.values()))
    if sequences.group.size == 1:
        _check_attention(sequences, module)
        return
    modes = _checked.setdefault(module, set())
    if sequences.num_own > 1 and module.training not in modes:
        modes.add(module.training)
        is_model = check_call in module._forward_pre_hooks.values()
        _agree(_complaint(module, args, kwargs, sequences.num_own, is_model))


def _check_documents(sequences: Sequences, module: torch.nn.Module, values: tuple[Any, ...]) -> None:
    """Raises ValueError for tokens of an earlier `shard_sequence`, if attention would be over other documents."""
    given = [_sequences_of.get(x, sequences) for x in values if isinstance(x, Tensor)]
    documents = sequences.documents
    others = any(not torch.equal(each.documents, documents) for each in given if each is not sequences)
    # All micro-batches of a vertical order pass a Block after the last shard_sequence().
    is_held = getattr(module.__dict__.get("_runtime"), "is_held", False)
    is_vertical = is_held and current_engine(context()).rows is None
    if others or (is_vertical and (documents != documents[..., :1]).any()):
        raise ValueError(
            f"{type(module).__name__}: called after a shard_sequence() with other documents or padding than its tokens "
            "may have: attention keeps to the last one; expected shard_sequence(batch) right before the model, "
            "and micro-batches that pass the whole model one after the other"
        )


def _check_attention(sequences: Sequences, module: torch.nn.Module) -> None:
    """Raises NotImplementedError for documents on one rank that a transformers model's attention would ignore."""
    for member in module.modules():
        chosen = getattr(getattr(member, "config", None), "_attn_implementation", None)
        if chosen in (None, "sdpa", "bmtrain"):
            continue  # without reading documents, which may be on a device
        if (sequences.documents != sequences.documents[..., :1]).any():
            raise NotImplementedError(
                f"{type(member).__name__}: its attention is {chosen!r}, which ignores documents and padding of "
                'shard_sequence(); expected attn_implementation="sdpa"'
            )
        return


def belong_to(sequences: Sequences, tokens: Iterable[Any]) -> None:
    """Notes that these tensors have tokens of ``sequences``."""
    for x in tokens:
        if isinstance(x, Tensor):
            _sequences_of[x] = sequences


_sequences_of: MutableMapping[Tensor, Sequences] = WeakIdKeyDictionary()


def _agree(complaint: str | None) -> None:
    """Raises NotImplementedError on all ranks if there is a complaint on one. Collective, except in a pipeline."""
    flags = [complaint is not None]
    if current_engine(context()).rows is None:  # a stage runs its layers alone
        flags = largest(flags, "check of a divided model")
    if any(flags):
        raise NotImplementedError(complaint or "the model cannot be divided: another rank says why")


def _complaint(
    model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], num_own: int, is_model: bool
) -> str | None:
    """Returns the first problem with divided sequences; None without one, or where a module that is no whole model gets
    no tokens, or does not run on some of them."""
    tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and x.dim() > 1]
    if not is_model and all(x.shape[1] != num_own for x in tensors):
        return None
    labels = {name: kwargs[name] for name in _LABELS if isinstance(kwargs.get(name), Tensor)}
    kwargs = {**kwargs, **{name: torch.full_like(x, _LABELS[name]) for name, x in labels.items()}}
    has_labels = not kwargs.keys().isdisjoint(("labels", "shift_labels"))
    tokens = min(num_own, _NUM_TOKENS)
    runs = []
    for part in (slice(0, tokens), slice(0, tokens // 2), slice(tokens // 2, tokens)):
        run = _Run(part.stop - part.start, is_model)
        try:
            run(model, _cut(args, num_own, part), _cut(kwargs, num_own, part))
        except NotImplementedError as error:
            return str(error)
        except Exception:
            if is_model:
                raise
            return None
        runs.append(run)
    whole, *halves = runs
    if whole.random and is_model:
        return (
            f"{whole.random}: random numbers (not by dropout) in a model whose tokens are divided: ranks would draw "
            "the same for different tokens; do without"
        )
    for name, result in whole.results.items():
        is_loss = has_labels and result.dim() == 0
        if not (_is_sum if is_loss else _is_joined)(result, [run.results.get(name) for run in halves]):
            return f"{name}: {_NO_SUM if is_loss else _MIXED}"
    if is_model and not whole.num_attentions:
        return (
            f"{type(model).__name__}: no attention by torch's scaled_dot_product_attention, transformers' attention "
            "interface or bmtrain.nn.functional.attention: its sequences cannot be divided over ranks"
        )
    return None


def _cut(tree: Any, num_own: int, part: slice) -> Any:
    """Some tokens of the first sequence, of all tensors that have tokens, such as a table of positions."""
    if isinstance(tree, Tensor):
        if tree.dim() > 1 and tree.shape[1] == num_own:
            return tree[:1, part]
        return tree[part] if tree.dim() and len(tree) == num_own else tree
    if isinstance(tree, dict):
        return {name: _cut(value, num_own, part) for name, value in tree.items()}
    if type(tree) in (tuple, list):
        return type(tree)(_cut(value, num_own, part) for value in tree)
    return tree


def _is_joined(whole: Tensor, halves: list[Tensor | None]) -> bool:
    """Whether one tensor is the others, one behind the other along the dimension of tokens, up to rounding."""
    parts = [part for part in halves if part is not None]
    if len(parts) != len(halves) or whole.dim() < 2 or sum(part.shape[1] for part in parts) != whole.shape[1]:
        return False
    joined = torch.cat(parts, dim=1)
    if not whole.is_floating_point():
        return torch.equal(joined, whole)
    allowed = 1e-4 if torch.finfo(whole.dtype).bits >= 32 else 5e-2
    difference = (joined.double() - whole.double()).abs().max()
    return bool(difference <= allowed * whole.double().abs().max().clamp_min(1e-30))


def _is_sum(whole: Tensor, halves: list[Tensor | None]) -> bool:
    """Whether a loss is the sum of the losses of its parts, up to rounding."""
    total = sum(
        (part.double() for part in halves if part is not None), start=whole.new_zeros((), dtype=torch.double)
    )
    return bool(whole > 0 and (total - whole).abs() <= 1e-2 * whole)


class _Run:
    """One forward, with attention replaced.

    Attributes:
        results: by name of a module, the tensors ``(1, tokens, ...)`` it returned, in the order of their ends; then
            what the outermost module returned, of a model all tensors.
        num_attentions: calls of attention.
        random: the module that drew random numbers; empty if none did.
    """

    def __init__(self, tokens: int, is_model: bool) -> None:
        self.tokens, self.is_model = tokens, is_model
        self.results: dict[str, Tensor] = {}
        self.num_attentions = 0
        self.random = ""

    def __call__(self, model: torch.nn.Module, args: Any, kwargs: Any) -> None:
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            stack.enter_context(kept_generators(context().device))
            stack.enter_context(replaced_by(self.attend, self.tokens))
            stack.enter_context(self._recorded(model))
            stack.enter_context(uncompiled(_RandomNumbers, self))
            out = model(*args, **kwargs)
        values = out.items() if hasattr(out, "items") else enumerate(out if isinstance(out, tuple) else [out])
        for name, value in values:
            if isinstance(value, Tensor) and (self.is_model or value.shape[:2] == (1, self.tokens)):
                self._add(f"{type(model).__name__}'s result {name!r}", value)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """A function of each token alone, in the place of attention."""
        self.num_attentions += 1
        if q.shape[2] != self.tokens or k.shape[2] != self.tokens:
            raise NotImplementedError(
                f"attention of {q.shape[2]} to {k.shape[2]} tokens, where {self.tokens} are given: attention between "
                "other sequences than the divided ones (cross attention, images, a cache) is not implemented"
            )
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        return v + q.mean(-1, keepdim=True) + k.mean(-1, keepdim=True)

    @contextmanager
    def _recorded(self, model: torch.nn.Module) -> Iterator[None]:
        handles = [
            module.register_forward_hook(self._record(name)) for name, module in model.named_modules() if name
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _add(self, name: str, tensor: Tensor) -> None:
        if name in self.results:
            name += f", call {sum(other.startswith(name) for other in self.results) + 1}"
        self.results[name] = tensor

    def _record(self, name: str) -> Any:
        def hook(module: torch.nn.Module, args: Any, out: Any) -> None:
            tensor = out[0] if isinstance(out, tuple) and out else out
            if isinstance(tensor, Tensor) and tensor.dim() > 2 and tensor.shape[:2] == (1, self.tokens):
                self._add(f"{name} ({type(module).__name__})", tensor.detach())

        return hook


class _RandomNumbers(TorchDispatchMode):
    """Notices the first operation that draws random numbers."""

    def __init__(self, run: _Run) -> None:
        super().__init__()
        self._run = run

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags and "attention" not in func.__name__:
            self._run.random = self._run.random or func.__name__
        return func(*args, **(kwargs or {}))
