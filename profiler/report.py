"""Tables, pictures and the verdict of a profile."""

from __future__ import annotations

import contextlib
import io
import os
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from costmodel.errors import InputError
from costmodel.profile import Profile

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DRAWN_POINTS = 200


def verdict(profile: Profile) -> str:
    """How far to trust the profile, in words a user can act on."""
    if profile.held_out is None or profile.regret is None:
        return (
            "This profile was not checked against points held out; measure one with "
            "`rooftree calibrate` to know how far to trust it."
        )
    error, regret = profile.held_out.error, profile.regret
    text = (
        f"Choosing the tree size from this profile costs at most {regret.worst:.1%} of tokens/s "
        f"({regret.mean:.2%} on average), over {regret.curves} acceptance curves at "
        f"{len(regret.contexts)} contexts held out. Predictions there are off by "
        f"{error.median:.1%} in the median and {error.worst:.1%} at worst"
    )
    noise = profile.held_out.repeat_noise
    if noise is not None:
        text += f"; the measurements themselves are uncertain by {noise:.1%}"
    if regret.worst > 0.05:
        text += (
            ". That is too much: stop other work on this machine and run `rooftree calibrate "
            "--fresh`, with a larger --time-budget"
        )
    return text + "."


def profile_rows(profile: Profile) -> list[list[object]]:
    """A table of the measured surface: rows down, contexts across, milliseconds."""
    if profile.surface is None:
        return []
    surface = profile.surface
    contexts = sorted(set(surface.context))
    cells = {
        (rows, context): seconds
        for rows, context, batch, seconds in zip(
            surface.rows, surface.context, surface.batch, surface.median_s, strict=True
        )
        if batch == min(surface.batch)
    }
    return [
        [rows, rows - 1, *(_ms(cells.get((rows, context))) for context in contexts)]
        for rows in sorted({rows for rows, _ in cells})
    ]


def profile_columns(profile: Profile) -> list[str]:
    """The headings that belong to `profile_rows`."""
    contexts = sorted(set(profile.surface.context)) if profile.surface else []
    return ["rows", "nodes", *(f"ms at context {context}" for context in contexts)]


def linear_line(profile: Profile) -> str:
    """The paper's calibration and what it gains over the bare roofline, in one line."""
    linear = profile.calibration.linear
    gain = 1 - linear.rmse_after_s / linear.rmse_before_s
    return (
        f"linear calibration: {linear.slope:.3f} x roofline + {linear.intercept_s * 1e3:.2f} ms "
        f"(+- {linear.slope_se:.3f}, {linear.intercept_se_s * 1e3:.2f} ms); RMSE "
        f"{linear.rmse_before_s * 1e3:.1f} -> {linear.rmse_after_s * 1e3:.1f} ms ({gain:.0%} less)"
    )


def plot_profile(profile: Profile, path: Path) -> Path:
    """Draw latency against nodes, one panel a context; returns the PNG's path.

    Measured medians (with their MAD), the bare roofline, the calibrated line and
    the selected richer calibration. Raises InputError where it cannot be written.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    surface = profile.surface
    contexts = sorted(set(surface.context)) if surface else [256, 1024, 4096]
    figure = Figure(figsize=(3.4 * len(contexts), 3.6), layout="constrained")
    axes = figure.subplots(1, len(contexts), sharey=True, squeeze=False)[0]
    for axis, context in zip(axes, contexts, strict=True):
        _draw_context(axis, profile, context)
    axes[0].set_ylabel("verification, ms")
    axes[0].legend(fontsize=7, loc="upper left")
    runtime, kind = profile.runtime, profile.provenance.kind
    figure.suptitle(
        f"{profile.target.name} on {profile.device.name} ({runtime.dtype}, {runtime.kind}, {kind})",
        fontsize=10,
    )
    return save_figure(figure, path)


def _draw_context(axis: Axes, profile: Profile, context: int) -> None:
    most = max(profile.surface.rows) if profile.surface else 256
    rows = np.unique(np.rint(np.geomspace(1, most, DRAWN_POINTS)))
    nodes = rows - 1
    roofline_s = profile.roofline("paper").seconds(rows, context)
    linear_s = profile.linear_calibration().predict_s(rows, context)
    axis.plot(nodes, roofline_s * 1e3, ":", color="tab:gray", label="bare roofline")
    axis.plot(nodes, linear_s * 1e3, "--", color="tab:blue", label="linear calibration")
    if profile.calibration.selected != "linear":
        chosen_s = profile.verify_calibration().predict_s(rows, context)
        label = f"{profile.calibration.selected} calibration"
        axis.plot(nodes, chosen_s * 1e3, "-", color="tab:orange", label=label)
    if profile.surface is not None:
        points = profile.surface.points()
        here = (points.context == context) & (points.batch == points.batch.min())
        axis.errorbar(
            points.rows[here] - 1,
            points.seconds[here] * 1e3,
            yerr=np.nan_to_num(points.mad_s[here]) * 1e3,
            fmt="o",
            markersize=3,
            color="black",
            label="measured",
        )
    axis.set_xscale("symlog", base=2, linthresh=1)
    axis.set_yscale("log")
    axis.set_title(f"context {context}", fontsize=9)
    axis.set_xlabel("nodes")
    axis.grid(alpha=0.3)


def save_figure(figure: Figure, path: Path) -> Path:
    """Write the PNG in one step, so that an interrupted run leaves no half picture."""
    picture = io.BytesIO()
    figure.savefig(picture, dpi=130, format="png")
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(picture.getvalue())
        temporary.replace(path)
    except OSError as error:
        raise InputError(
            f"cannot write the picture {path}: {error.strerror or error}",
            hint="Free some space, or choose a folder you can write to.",
        ) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()  # gone already where it was renamed
    return path


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e3, 2)
