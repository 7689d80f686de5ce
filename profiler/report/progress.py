"""Progress on stderr: a bar on a terminal, a line now and then elsewhere, and messages."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

STEPS = 10  # lines of a whole run where there is no terminal


@dataclass(frozen=True, slots=True)
class Progress:
    """Prints messages, and shows the share that is done with a few words."""

    say: Callable[[str], None]
    update: Callable[[float, str], None]

    def count(self, done: int, of: int) -> None:
        self.update(done / of, f"{done} of {of}")


@contextlib.contextmanager
def progress(name: str) -> Iterator[Progress]:
    """The progress of something that loads the target first."""
    from rich.console import Console

    console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
    if not console.is_terminal:
        told = 0

        def tell(share: float, state: str) -> None:
            nonlocal told
            if int(STEPS * share) > told:
                told = int(STEPS * share)
                console.print(f"{name}: {state}")

        yield Progress(console.print, tell)
        return
    from rich.progress import BarColumn, TextColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn(name), BarColumn(), TextColumn("{task.fields[state]}"))
    with Bar(*columns, console=console, transient=True) as bar:
        task = bar.add_task(name, total=1.0, state="loading the target")
        yield Progress(
            console.print, lambda share, state: bar.update(task, completed=share, state=state)
        )
