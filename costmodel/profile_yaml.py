"""Write plain values as YAML that a person can read: flow lists, six significant digits."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import yaml

HEADER = "# rooftree calibration profile; docs/profile-format.md explains every field\n"

_Dumper: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


class _ProfileDumper(_Dumper):  # type: ignore[misc]
    """Sequences in flow style, floats with six significant digits, nothing aliased."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_sequence(dumper: Any, data: Any) -> Any:
    return dumper.represent_sequence("tag:yaml.org,2002:seq", data, flow_style=True)


def _represent_float(dumper: Any, data: float) -> Any:
    return dumper.represent_scalar("tag:yaml.org,2002:float", float_text(data))


_ProfileDumper.add_representer(list, _represent_sequence)
_ProfileDumper.add_representer(tuple, _represent_sequence)
_ProfileDumper.add_representer(float, _represent_float)


def float_text(value: float) -> str:
    """Six significant digits in a form that YAML 1.1 reads back as a float."""
    if not math.isfinite(value):
        return {math.inf: ".inf", -math.inf: "-.inf"}.get(value, ".nan")
    text = f"{value:.6g}"
    mantissa, mark, exponent = text.partition("e")
    if "." not in mantissa:
        mantissa += ".0"
    return mantissa + mark + exponent


def dump_yaml(data: Mapping[str, Any]) -> str:
    """YAML text of plain values, in the given order."""
    body: str = yaml.dump(
        dict(data),
        Dumper=_ProfileDumper,
        sort_keys=False,
        default_flow_style=False,
        allow_unicode=True,
        width=100,
    )
    return HEADER + body
