"""What a profile is looked up by: hard keys that must agree, soft keys that warn."""

from __future__ import annotations

import dataclasses

# Cards with error correction switched on report up to 7 % less than they have (A6000, L40S).
MEMORY_TOLERANCE = 0.08


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ProfileKey:
    """Hard keys: a profile whose key differs is never used silently.

    `threads` and `instruction_set` are None except on a CPU. `quantization` is None for
    plain weights.
    """

    device_name: str
    memory_bytes: int
    architecture_hash: str
    dtype: str
    runtime: str
    attention: str
    mig: str | None = None
    threads: int | None = None
    instruction_set: str | None = None
    quantization: str | None = None
    tensor_parallel: int = 1

    def differences(self, other: ProfileKey) -> list[str]:
        """Names of the fields that differ; memory agrees within 8 %."""
        different = []
        for field in dataclasses.fields(self):
            mine, theirs = getattr(self, field.name), getattr(other, field.name)
            if field.name == "memory_bytes":
                same = abs(mine - theirs) <= MEMORY_TOLERANCE * max(mine, theirs)
            else:
                same = mine == theirs
            if not same:
                different.append(field.name)
        return different


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SoftKey:
    """What may differ at the price of a warning and online correction; None: not known."""

    driver: str | None = None
    torch: str | None = None
    transformers: str | None = None
    cuda: str | None = None
    power_limit_w: float | None = None

    def differences(self, other: SoftKey) -> list[str]:
        """Names of the fields that both know and that differ; power agrees within 1 %."""
        different = []
        for field in dataclasses.fields(self):
            mine, theirs = getattr(self, field.name), getattr(other, field.name)
            if mine is None or theirs is None:
                continue
            if field.name == "power_limit_w":
                same = abs(mine - theirs) <= 0.01 * max(mine, theirs)
            else:
                same = mine == theirs
            if not same:
                different.append(field.name)
        return different
