"""Legality: decides whether a kernel can be built for a config, by the rules of the config's
family."""

from __future__ import annotations

from flashsmith.errors import ArgumentError
from flashsmith.families.config import KernelConfig
from flashsmith.families.device import DeviceSpec, default_device
from flashsmith.families.family import families
from flashsmith.families.head_dims import HeadDims, fitting_dims
from flashsmith.families.rule import BrokenRule, Rule
from flashsmith.operations.problem import Problem
from flashsmith.operations.registry import DEFAULT

# The number of 16-bit elements in 16 bytes. Head dimensions must be multiples of this number.
D_STEP = 8


def supported_d_heads() -> tuple[int, ...]:
    """The values of d_head for which forward kernels exist, smallest first.

    Only families with a cost model count, because attention() chooses only among the kernels of
    such families.
    """
    modelled = (family for family in families("forward") if family.has_cost_model)
    values = (family.knob_values["d_head"] for family in modelled)
    return tuple(sorted({d_head for listed in values for d_head in listed}))


def compiled_d_head(d: int) -> int:
    """The smallest d_head whose kernels can compute head dimension `d`.

    Raises:
        ArgumentError: `d` is not a multiple of 8 between 8 and 512.
    """
    d_heads = supported_d_heads()
    largest = d_heads[-1]
    if d < 1 or d % D_STEP or d > largest:
        advice = "there is none for larger heads; PyTorch's attention takes any"
        if d <= largest:
            advice = padding_advice(d)
        raise ArgumentError(
            f"d={d}: kernels exist for multiples of {D_STEP} from {D_STEP} to {largest} ({advice})"
        )
    return next(d_head for d_head in d_heads if d <= d_head)


def d_head_for(problem: Problem) -> HeadDims:
    """The smallest d_head that is at least the problem's d, among the kernels for the problem's
    operation. If the problem's d_v differs from its d, returns the smallest sufficient pair of
    widths.

    Raises:
        ArgumentError: there is no kernel for these widths.
    """
    if problem.d_v != problem.d:
        return _pair_for(problem)
    if problem.operation == DEFAULT:
        return compiled_d_head(problem.d)
    d_heads = _d_heads(problem.operation)
    found = next(iter(fitting_dims(problem, d_heads)), None)
    if found is None:
        allowed = ", ".join(map(str, sorted(d_heads))) or "none: no family of kernels computes it"
        raise ArgumentError(
            f"d={problem.d}: {problem.operation} has kernels of d_head {allowed}, and a smaller d "
            "runs on the next larger one"
        )
    return found


def _d_heads(operation: str) -> set[int]:
    listed = (family.knob_values["d_head"] for family in families(operation))
    return {d_head for values in listed for d_head in values}


def _pair_for(problem: Problem) -> HeadDims:
    pairs = {pair for family in families(problem.operation) for pair in family.pairs}
    found = next(iter(fitting_dims(problem, pairs)), None)
    if found is None or problem.d % D_STEP or problem.d_v % D_STEP:
        allowed = ", ".join(map(str, sorted(pairs))) or "none"
        wider, widest_pair = max(problem.d, problem.d_v), max(map(max, pairs), default=0)
        widths = "such widths"
        if widest_pair < wider <= max(_d_heads(problem.operation), default=0):
            widths = "one width"  # kernels for the widest heads need d_v equal to d
        raise ArgumentError(
            f"d={problem.d}, d_v={problem.d_v}: {problem.operation} has kernels of the pairs "
            f"{allowed} (d_head:d_v), and smaller multiples of {D_STEP} run on the next larger "
            f"pair; pad q, k and v with zeros to {widths}, and pass scale=1/sqrt(d) of the d "
            "before padding"
        )
    return found


def serves_gradients(cfg: KernelConfig, problem: Problem) -> bool:
    """Whether a config's kernels compute the gradients that a problem needs."""
    return cfg.family.gradients_of(cfg) in ("", problem.gradients)


def padding_advice(d: int) -> str:
    """Returns advice, for an error message, about a head dimension `d` that is not a multiple of
    D_STEP."""
    padded = -(-max(d, 1) // D_STEP) * D_STEP
    return (
        f"pad q, k and v with zeros to d {padded}, pass scale=1/sqrt({d}) of the d before padding, "
        f"and keep the output's first {d} columns"
    )


def unequal_d_advice(name: str, d: int, d_q: int) -> str:
    """Returns advice, for an error message, about a tensor of keys ('k' or 'k_cache') whose d
    differs from the d of q.

    If q must be padded, the advice mentions the scale, because padding changes d and therefore the
    default scale.
    """
    if d > d_q:
        scale = f"pass scale=1/sqrt({d_q}) of the d before padding, not the default"
        return f"reorder the dimensions, or pad q with zeros to d {d}, and {scale}"
    return f"reorder the dimensions, or pad {name} with zeros to d {d_q}"


def rules_of(cfg: KernelConfig) -> tuple[Rule, ...]:
    """Returns the rules of a config's family.

    Raises:
        ArgumentError: the family is not registered.
    """
    if not hasattr(cfg, "family"):
        raise ArgumentError(
            f"config: {type(cfg).__name__} belongs to no registered family; register it with "
            "register_family() first"
        )
    return cfg.family.rules


def broken_rules(cfg: KernelConfig, device: DeviceSpec | None = None) -> list[BrokenRule]:
    """The rules that `cfg` breaks, in the order of the family's rules.

    If `device` is None, it is the default device of the family.
    """
    device = device or default_device(cfg.OLDEST_ARCH)
    return [
        BrokenRule(rule.name, rule.message(cfg, device))
        for rule in rules_of(cfg)
        if not rule.predicate(cfg, device)
    ]


def rule_bitmask(cfg: KernelConfig, device: DeviceSpec | None = None) -> int:
    """The rules that `cfg` breaks, as bits: bit i stands for rule i, and 0 means that
    `cfg` is legal."""
    device = device or default_device(cfg.OLDEST_ARCH)
    return sum(
        1 << bit for bit, rule in enumerate(rules_of(cfg)) if not rule.predicate(cfg, device)
    )


def is_legal(cfg: KernelConfig, device: DeviceSpec | None = None) -> bool:
    """Whether a kernel can be built for `cfg`.

    If `device` is None, it is the default device of the family.
    """
    device = device or default_device(cfg.OLDEST_ARCH)
    return all(rule.predicate(cfg, device) for rule in rules_of(cfg))
