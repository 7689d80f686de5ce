"""The adaptive tree decoder: targets, drafters, policies, acceptance and the decode loop.

`from decoder import TreeDecoder` is its public class. Imports costmodel, torch and transformers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from decoder.engine import Generation, TreeDecoder

__all__ = ["Generation", "TreeDecoder"]


def __getattr__(name: str) -> object:
    # torch and transformers are imported on first use, to keep `import decoder` cheap.
    if name in __all__:
        from decoder import engine

        return getattr(engine, name)
    raise AttributeError(f"module 'decoder' has no attribute {name!r}")
