"""The adaptive tree decoder: `from decoder import TreeDecoder`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from decoder.engine import Generation, TreeDecoder

__all__ = ["Generation", "TreeDecoder"]


def __getattr__(name: str) -> object:
    # torch and transformers are imported on first use, so that `import decoder` stays cheap.
    if name in __all__:
        from decoder import engine

        return getattr(engine, name)
    raise AttributeError(f"module 'decoder' has no attribute {name!r}")
