"""Tables, pictures and texts of a profile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import numpy as np

from costmodel.calibration.choices import USUAL_CURVE
from costmodel.profile.grade import counted, grade
from costmodel.profile.profile import Profile
from costmodel.profile.schema import SurfaceSection
from costmodel.profile.store import StoredProfile
from profiler.report import drawing
from profiler.report.console import print_facts, print_table

DRAWN_POINTS = 200
DRAWN_SIZES = (0, 1, 3, 7, 15, 63, 255, 1023)  # labelled on the axis of nodes
USUAL_CONTEXT = 1024
DECODED = ("packed", "graphs", "eager")  # runtimes of this decoder
MOST_PANELS = 6  # contexts in one picture
PANEL_IN = 3.4
SHOWN_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


def verdict(profile: Profile) -> str:
    """What the device is good for by this profile, how far to trust it, and its grade."""
    context = min(_contexts(profile), key=lambda one: abs(one - USUAL_CONTEXT))
    rows = np.arange(1, _most_rows(profile) + 1)
    compute_s, memory_s = profile.roofline("physical").branches_s(rows, context)
    bound = int(np.sum(np.logical_and.accumulate(memory_s >= compute_s)))
    best, gain = _paying_tree(profile, context)
    pays = f"a tree of {counted(best, 'node')} pays: {gain:.2f} times plain decoding"
    limit = f"memory up to {counted(bound, 'row')}, then by compute"
    if bound in (0, len(rows)):
        limit = f"{'memory' if bound else 'compute'} at all {counted(len(rows), 'row')}"
    trust = (
        "This profile was not checked against points held out; measure one with "
        "`rooftree calibrate` to know how far to trust it"
    )
    if profile.held_out is not None and profile.regret is not None:
        error, regret, spread = profile.held_out.error, profile.regret, ""
        if regret.interval is not None:
            spread = f" (with 90 % chance {regret.interval[0]:.2%} to {regret.interval[1]:.2%})"
        trust = (
            f"Choosing the tree size from this profile costs {regret.mean:.2%} of tokens/s on "
            f"average{spread} and at most {regret.worst:.1%}, over {regret.curves} acceptance "
            f"curves at {counted(len(regret.contexts), 'context')} held out. Predictions there are "
            f"off by {error.median:.1%} in the median and {error.worst:.1%} at worst"
        )
        noise = profile.held_out.repeat_noise
        if noise is not None:
            little = "by less than 0.1%, or by too few samples"
            shown = f"by {noise:.1%}" if noise >= 0.0005 else little
            trust += f"; the measurements themselves are uncertain {shown}"
    return (
        f"At context {context} this device is bound by {limit} (physical roofline). At the usual "
        f"acceptance, {USUAL_CURVE.text} tokens from N nodes, and with a free draft "
        f"{pays if best else 'no tree pays'}. {trust}. Grade: {grade(profile)}."
    )


def next_command(profile: Profile, path: Path | str) -> str:
    engine = " vllm" if profile.runtime.kind == "vllm" else ""
    again = f"rooftree calibrate{engine} --target {profile.target.name}"
    if profile.runtime.kind == "url":
        again = "rooftree calibrate url http://HOST:PORT"
    if profile.provenance.borrowed:
        return f"`{again}` on {profile.device.name}, which measures it"
    mine = f"rooftree generate --target {profile.target.name} --profile {path} --prompt TEXT"
    if grade(profile).word == "do not use":
        return f"stop what else runs, then `{again} --time-budget 3m`"
    if profile.runtime.kind not in DECODED:
        mine = f"rooftree export {path} --engine vllm --acceptance mt_bench"
    better = "" if grade(profile).word == "good" else f"; `{again} --time-budget 3m` improves it"
    return f"`{mine}`{better}"


def _paying_tree(profile: Profile, context: int) -> tuple[int, float]:
    """The nodes that pay most at the usual acceptance with a free draft, and the gain of them."""
    rows = np.arange(1, _most_rows(profile) + 1)
    times_s = profile.verify_calibration().predict_s(rows, context)
    gains = USUAL_CURVE.committed(rows - 1) * times_s[0] / times_s
    best = int(np.argmax(gains))
    return best, float(gains[best])


def print_markdown(profile: Profile, path: Path) -> None:
    """Print the profile for an issue or a pull request: a table of its points and the verdict."""
    made, runtime = profile.provenance, profile.runtime
    click.echo(
        f"### {profile.target.name} on {profile.device.name}\n\n"
        f"{runtime.kind}, {runtime.quantization or runtime.dtype}, torch {runtime.torch}; "
        f"{made.kind} on {made.created_utc[:10]} by rooftree {made.tool_version}: "
        f"{counted(made.points, 'point')}, {counted(made.samples, 'sample')} (`{path.name}`)\n"
    )
    if profile.surface is not None:
        columns, rows = surface_table(profile.surface)
        for cells in (columns, ["---:"] * len(columns), *rows):
            click.echo("| " + " | ".join("-" if one is None else str(one) for one in cells) + " |")
    click.echo(f"\n{linear_line(profile)}\n\n{verdict(profile)}")


def surface_table(surface: SurfaceSection) -> tuple[list[str], list[list[object]]]:
    """The measured points of the smallest batch: milliseconds by row count and context."""
    contexts = sorted(set(surface.context))
    cells = {
        (rows, context): round(seconds * 1e3, 2)
        for rows, context, batch, seconds in zip(
            surface.rows, surface.context, surface.batch, surface.median_s, strict=True
        )
        if batch == min(surface.batch)
    }
    table: list[list[object]] = [
        [rows, rows - 1, *(cells.get((rows, context)) for context in contexts)]
        for rows in sorted({rows for rows, _ in cells})
    ]
    return ["rows", "nodes", *(f"ms at context {context}" for context in contexts)], table


def linear_line(profile: Profile) -> str:
    """The paper's linear calibration, and its RMSE against that of the bare roofline."""
    linear = profile.calibration.linear
    before_s = linear.rmse_before_s
    gain = 1 - linear.rmse_after_s / before_s if before_s > 0 else 0.0
    misfit = ""
    if linear.intercept_s < 0:
        misfit = "; a poor fit: no forward starts below zero, times rise in steps of rows"
    return (
        f"linear calibration: {linear.slope:.3f} x roofline "
        f"{'-' if linear.intercept_s < 0 else '+'} {abs(linear.intercept_s) * 1e3:.2f} ms "
        f"(+- {linear.slope_se:.3f}, {linear.intercept_se_s * 1e3:.2f} ms); RMSE "
        f"{linear.rmse_before_s * 1e3:.1f} -> {linear.rmse_after_s * 1e3:.1f} ms ({gain:.0%} less)"
        f"{misfit}"
    )


def plot_profile(profile: Profile, path: Path) -> Path:
    """Draw latency against nodes, with one panel for each context; returns the picture's path.

    It shows the points with their MAD, the bare roofline, both calibrations, and the tree that pays
    at the usual acceptance. Raises InputError for a file that cannot be written, or is no picture.
    """
    drawing.check_picture(path)
    contexts = _contexts(profile, MOST_PANELS)
    figure, grid = drawing.panels(len(contexts), columns=3, size_in=(PANEL_IN, PANEL_IN))
    most = _most_rows(profile)
    rows = np.unique(np.rint(np.geomspace(1, most, DRAWN_POINTS)))
    selected, linear = profile.calibration.selected, profile.linear_calibration().predict_s
    chosen = profile.verify_calibration().predict_s
    curves = [
        (profile.roofline("paper").seconds, ":", drawing.GRAY, "bare roofline"),
        (linear, "--", drawing.SERIES[0], "linear calibration"),
        (chosen, "-", drawing.SERIES[1], f"{selected} calibration"),
    ][: 2 if selected == "linear" else 3]
    points = None if profile.surface is None else profile.surface.points()
    for axes, context in zip(grid, contexts, strict=True):
        for predict, form, color, label in curves:
            axes.plot(rows - 1, predict(rows, context) * 1e3, form, color=color, label=label)
        if points is not None:
            here = points.take((points.context == context) & (points.batch == points.batch.min()))
            axes.errorbar(
                here.rows - 1, here.seconds * 1e3, yerr=np.nan_to_num(here.mad_s) * 1e3,
                fmt="o", markersize=3, color="black", label=profile.provenance.kind,
            )  # fmt: skip
        best, _ = _paying_tree(profile, context)
        axes.axvline(best, color=drawing.SERIES[2], alpha=0.6, label="tree that pays")
        axes.set_yscale("log")
        drawing.tree_size_axis(axes, [size for size in DRAWN_SIZES if size < most])
        axes.set_xlim(-0.2, 1.1 * most)
        axes.set_title(f"context {context:,}", fontsize=9)
        axes.set_xlabel("nodes", fontsize=9)
        axes.set_ylabel("verification, ms", fontsize=9)
    low, high = (pick(axes.get_ylim()[end] for axes in grid) for end, pick in enumerate((min, max)))
    for axes in grid:
        axes.set_ylim(low, high)
        drawing.log_axes(axes, "y")
    handles, names = grid[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=min(4, len(names)), fontsize=8)
    runtime, kind = profile.runtime, profile.provenance.kind
    drawing.set_title(
        figure,
        f"{profile.target.name} on {profile.device.name} "
        f"({runtime.quantization or runtime.dtype}, {runtime.kind}, {kind})",
    )
    return drawing.save_figure(figure, path)


def list_record(stored: StoredProfile) -> dict[str, Any]:
    """The fields of one profile for `profiles list`; path and problem alone where it is broken."""
    record: dict[str, Any] = {"path": str(stored.path), "problem": stored.problem}
    profile = stored.profile
    if profile is None:
        return record
    held_out, regret = profile.held_out, profile.regret
    return record | {
        "device": profile.device.name,
        "target": profile.target.name,
        "architecture_hash": profile.target.architecture_hash,
        "dtype": profile.runtime.quantization or profile.runtime.dtype,
        "runtime": profile.runtime.kind,
        "tensor_parallel": profile.runtime.tensor_parallel,
        "provenance": profile.provenance.kind,
        "created_utc": profile.provenance.created_utc,
        "held_out_median": None if held_out is None else held_out.error.median,
        "regret_worst": None if regret is None else regret.worst,
        "grade": grade(profile).word,
    }


def print_profile(path: Path, profile: Profile) -> None:
    device, runtime, provenance = profile.device, profile.runtime, profile.provenance
    cpu = f", {device.threads} threads, {device.instruction_set}" if device.kind == "cpu" else ""
    facts: list[tuple[str, str | Path]] = [
        ("profile", path),
        ("device", f"{device.name}, {device.memory_bytes / 2**30:.1f} GiB{cpu}"),
        ("target", f"{profile.target.name} ({profile.target.architecture_hash})"),
        (
            "runtime",
            f"{runtime.kind}, {runtime.quantization or runtime.dtype}, attention "
            f"{runtime.attention}, reads {profile.roofline().read_bytes[0]:.3g} bytes a weight, "
            f"tensor-parallel {runtime.tensor_parallel}, "
            f"torch {runtime.torch or 'unknown'}",
        ),
        (
            "provenance",
            f"{provenance.kind}, {provenance.created_utc}, {counted(provenance.points, 'point')}, "
            f"{counted(provenance.samples, 'sample')}{provenance.note and f'; {provenance.note}'}",
        ),
        ("linear", linear_line(profile).removeprefix("linear calibration: ")),
        ("selected", profile.calibration.selected),
        ("trust", verdict(profile)),
        ("next", next_command(profile, path)),
        *(("warning", text) for text in profile.calibration.warnings),
    ]
    drafters = ", ".join(
        one.name + (f" ({one.kind}, {one.created_utc[:10]})" if one.created_utc else "")
        for one in profile.drafters.values()
    )
    print_facts([*facts, ("drafters", drafters or "none timed")])
    contexts = _contexts(profile)
    columns = ["rows", *(f"context {context}" for context in contexts)]
    predict_s = profile.verify_calibration().predict_s
    table = [
        [rows, *(f"{1e3 * seconds:.2f}" for seconds in predict_s(rows, contexts, 1))]
        for rows in SHOWN_ROWS
        if rows <= _most_rows(profile)
    ]
    click.echo(
        f"\nOne verification forward by the {profile.calibration.selected} calibration "
        "(fitted, not measured), ms:"
    )
    print_table(columns, table)


def _contexts(profile: Profile, most: int = 5) -> list[int]:
    """At most so many of the contexts of the points; one default where there are no points."""
    if profile.surface is None:
        return [1024]
    contexts = sorted(set(profile.surface.context))
    picked = np.linspace(0, len(contexts) - 1, min(most, len(contexts))).round().astype(int)
    return [contexts[index] for index in picked]


def _most_rows(profile: Profile) -> int:
    return max(profile.surface.rows) if profile.surface is not None else SHOWN_ROWS[-1]
