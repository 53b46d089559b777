"""Compares the orders in which two kernels compute a row, and finds the first difference."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from flashsmith.chooser.choice import choose
from flashsmith.errors import ArgumentError
from flashsmith.families import (
    DeviceSpec,
    KernelConfig,
    Problem,
    check_legal,
    device_spec,
    parse_kernel_name_into_config,
)
from flashsmith.families.canonical import emulated_arch, version_of
from flashsmith.families.order import Difference, Order, order_name
from flashsmith.printable import printable, quoted
from flashsmith.runtime.target import choose_target


@dataclass(frozen=True)
class OrderComparison:
    """Two configs on a device, and the orders of operations in which their kernels compute a
    row."""

    device: DeviceSpec
    configs: tuple[KernelConfig, KernelConfig]
    orders: tuple[Order, Order]

    @property
    def difference(self) -> Difference | None:
        """The first operation in which the two orders differ; None if they are equal."""
        return self.orders[0].difference(self.orders[1])

    @property
    def equal_bits(self) -> bool:
        """Whether both configs give a row the same bits in all calls.

        This is guaranteed only if the two orders are equal and canonical.
        """
        return self.difference is None and all(map(version_of, self.configs))

    def __str__(self) -> str:
        named = zip("AB", self.configs, strict=True)
        lines = [f"{name}  {cfg}: {order_name(cfg)}" for name, cfg in named]
        found = self.difference
        if found is not None:
            lines += [
                f"another order: {found.operation}",
                f"A  {found.first}",
                f"B  {found.second}",
            ]
        elif self.equal_bits:
            lines.append("one order: a row has the same bits with both")
        else:
            lines.append(
                "one order, but not canonical: bits may depend on other rows and on idle SMs"
            )
        return "\n".join(map(printable, lines))

    def to_json(self) -> dict[str, Any]:
        found = self.difference
        return {
            "device": self.device.name,
            "arch": f"sm_{self.device.arch}",
            "configs": [str(cfg) for cfg in self.configs],
            "names": [order_name(cfg) for cfg in self.configs],
            "one_order": found is None,
            "equal_bits": self.equal_bits,
            "difference": None if found is None else found._asdict(),
            "orders": [asdict(order) for order in self.orders],
        }


def compare_orders(
    first: str, second: str, device: DeviceSpec | str | int | None = None
) -> OrderComparison:
    """Compares the orders in which two configs compute a row.

    A problem stands for the config that attention() uses for it.

    Args:
        first, second: the short form of a config, or a problem string such as 'b1 s4096 h32
            d128 bf16 causal'.
        device: as for ``choose``. None is this machine's first GPU; if a config is given, it is the
            first architecture that can run both kernels.

    Raises:
        ArgumentError: a text is neither a config nor a problem, no kernel serves a problem, the
            dtypes differ, or the kernels of a config do not compute rows of attention.
        IllegalConfigError: a config is illegal on the device.
    """
    asked = [_parsed(text) for text in (first, second)]
    spec = _device_of(asked, device)
    configs = [
        choose(it, spec).config if isinstance(it, Problem) else _legal(it, spec) for it in asked
    ]
    a, b = configs
    if a.dtype is not b.dtype:
        raise ArgumentError(
            f"B: dtype {b.dtype.name}, but A has {a.dtype.name}: rows of different dtypes cannot "
            "have equal bits; give two of one dtype"
        )
    return OrderComparison(spec, (a, b), (_order_of(a, spec), _order_of(b, spec)))


def _parsed(text: str) -> Problem | KernelConfig:
    # The string of a config contains a bracket; that of a problem does not.
    return parse_kernel_name_into_config(text) if "(" in text else Problem.parse(text)


def _device_of(
    asked: list[Problem | KernelConfig], device: DeviceSpec | str | int | None
) -> DeviceSpec:
    if isinstance(device, DeviceSpec):
        return device
    if device is not None:
        return device_spec(device)
    archs = [emulated_arch(it) for it in asked if not isinstance(it, Problem)]
    return device_spec(max(archs)) if archs else choose_target().device


def _legal(cfg: KernelConfig, device: DeviceSpec) -> KernelConfig:
    check_legal(cfg, device)
    return cfg


def _order_of(cfg: KernelConfig, device: DeviceSpec) -> Order:
    order = cfg.family.order(cfg, device.arch)
    if order is None:
        raise ArgumentError(
            f"config={quoted(str(cfg))}: a kernel of {cfg.family.operation}, which computes no "
            "rows of attention; give one of forward or decode"
        )
    return order
