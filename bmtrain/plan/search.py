"""Search for the best policy, and for changes that would make a run fit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from .._base.arguments import require_kind
from .._engine.policy import Recompute
from .estimates import Plan
from .estimator import estimate
from .machine import Machine
from .model import ModelDescription
from .policy import TrainingPolicy

__all__ = ["choose_policy", "remedies"]

_OFFLOADS = (0.0, 0.25, 0.5, 0.75, 1.0)
_HOST_SHARES = _OFFLOADS[1:]
_MAX_DOUBLINGS = 10


def choose_policy(
    model: ModelDescription, machine: Machine, base: TrainingPolicy | None = None
) -> Plan | None:
    """The fastest plan that fits, over ZeRO level, recomputation, offload and micro-batch; where nothing fits,
    over those with as few quarters of the blocks on the host of GPUs as fit.

    Args:
        model: the model to train.
        machine: the machine.
        base: the choices that stay (accumulation, tensor-parallel size, stages).

    Returns:
        None if nothing fits, not even one sample with everything offloaded.

    Raises:
        ValueError: as :func:`estimate`.

    Example:
        >>> from bmtrain.plan import MACHINES, choose_policy, gpt2
        >>> plan = choose_policy(gpt2(4, 256, 4), MACHINES["a100-80gb"].with_devices(2))
        >>> plan.fits
        True
    """
    base = TrainingPolicy() if base is None else base
    require_kind("base", base, TrainingPolicy)
    at_least_2 = base.parameters == "host" or "parameters" in base.disk  # see BlockPolicy
    lowest = 2 if at_least_2 else int("gradients" in base.disk)
    best: Plan | None = None
    for level in range(lowest, 4):
        for recompute in (Recompute.OFF, Recompute.SELECTIVE, Recompute.WHOLE):
            for offload in _offloads(base):
                policy = replace(_at_level(base, level), recompute=recompute, offload=offload)
                found, is_full = _fastest(model, machine, policy)
                if found is not None and (best is None or found.samples_per_second > best.samples_per_second):
                    best = found
                if not is_full:
                    break  # a larger share on the host is slower, unless it makes room for a larger batch
    if best is None and base.parameters == "device" and _may_move(base, machine):
        moved = (choose_policy(model, machine, policy) for _, policy in _moved(replace(base, level=3)))
        return next((plan for plan in moved if plan is not None), None)
    return best


def _may_move(policy: TrainingPolicy, machine: Machine) -> bool:
    """Whether blocks can move to the host, at level 2 or 3."""
    return not (machine.shares_memory or policy.survive)


def _moved(policy: TrainingPolicy) -> Iterator[tuple[str, TrainingPolicy]]:
    """Yields changes that move blocks to the host, and the policies; those on drives move as a whole."""
    if policy.disk:
        yield "blocks on the host (--parameters host)", replace(policy, parameters="host")
        return
    for share in _HOST_SHARES:
        change = f"{share:.0%} of the blocks on the host (--host-share {share:g})"
        yield change, replace(policy, parameters="host", host_share=share)


def _at_level(policy: TrainingPolicy, level: int) -> TrainingPolicy:
    """The policy at a ZeRO level; at level 0 without the options of sharding and gathering."""
    if level == 0:
        return replace(policy, level=level, zero_size=None, gather_dtype=None)
    return replace(policy, level=level)


def _fastest(model: ModelDescription, machine: Machine, policy: TrainingPolicy) -> tuple[Plan | None, bool]:
    """The fastest of the micro-batches 1, 2, 4, ... that fit, and whether memory has no room for larger ones."""
    best: Plan | None = None
    for doubling in range(_MAX_DOUBLINGS):
        plan = estimate(model, machine, replace(policy, micro_batch=2**doubling))
        if not plan.fits:
            return best, True
        if best is not None and plan.samples_per_second < 1.01 * best.samples_per_second:
            break
        best = plan
    return best, False


def _changes(policy: TrainingPolicy) -> Iterator[tuple[str, TrainingPolicy]]:
    for level in range(policy.level + 1, 4):
        yield f"ZeRO level {level} instead of {policy.level} (--level {level})", replace(policy, level=level)
    if policy.zero_size is not None:
        yield "sharding over all devices (no --zero-size)", replace(policy, zero_size=None)
    if policy.recompute is Recompute.OFF:
        yield (
            "recomputation of all but products (--selective)",
            replace(policy, recompute=Recompute.SELECTIVE),
        )
    if policy.recompute is not Recompute.WHOLE:
        yield "recomputation of everything (the default)", replace(policy, recompute=Recompute.WHOLE)
    batch = policy.micro_batch // 2
    while batch >= 1:
        yield (
            f"micro-batch {batch} instead of {policy.micro_batch} (--micro-batch {batch})",
            replace(policy, micro_batch=batch),
        )
        batch //= 2
    for offload in _offloads(policy):
        if offload > policy.offload:
            yield (
                f"{offload:.0%} of the optimizer on the host (--offload {offload:g})",
                replace(policy, offload=offload),
            )


def _offloads(policy: TrainingPolicy) -> tuple[float, ...]:
    """Shares on the host that the optimizer can have."""
    return _OFFLOADS if policy.optimizer == "adam" else (0.0, 1.0)


def remedies(plan: Plan) -> list[str]:
    """Single changes of the policy, or of the number of devices, each of which makes a plan fit; none if it does.

    Args:
        plan: by :func:`estimate`.

    Example:
        >>> from bmtrain.plan import MACHINES, TrainingPolicy, estimate, gpt2, remedies
        >>> plan = estimate(gpt2(40, 5120, 40), MACHINES["a100-80gb"].with_devices(2), TrainingPolicy())
        >>> plan.fits, remedies(plan)[-1]
        (False, '4 devices instead of 2 (--nodes 2)')
    """
    require_kind("plan", plan, Plan)
    if plan.fits:
        return []
    found, kinds = [], set()
    changes = list(_changes(plan.policy))
    if plan.policy.level >= 2 and _may_move(plan.policy, plan.machine):
        share = plan.policy.host_share if plan.policy.parameters == "host" else 0
        changes += [(change, policy) for change, policy in _moved(plan.policy) if policy.host_share > share]
    for change, policy in changes:
        kind = change.rpartition("(")[2].split()[0]
        if kind not in kinds and estimate(plan.model, plan.machine, policy).fits:
            kinds.add(kind)
            found.append(change)
    for doubling in range(1, 8):
        machine = plan.machine.sized(num_nodes=plan.machine.num_nodes * 2**doubling)
        if estimate(plan.model, machine, plan.policy).fits:
            found.append(
                f"{machine.num_devices} devices instead of {plan.machine.num_devices} (--nodes {machine.num_nodes})"
            )
            break
    return found
