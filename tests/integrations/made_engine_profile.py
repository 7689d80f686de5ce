"""A profile of an engine, made by hand: steps and drafts whose seconds a test can work out."""

from itertools import product

import numpy as np

from costmodel.calibration.physical import fit_physical
from costmodel.calibration.points import Points
from costmodel.calibration.stairs import fit_stairs
from costmodel.profile import schema
from costmodel.profile.profile import Profile
from costmodel.profile.schema import CalibrationSection, EngineDrafterSection, EngineSection
from tests.profiler.made_profile import make_profile

DRAFTER = "vllm-ngram"
ROWS, CONTEXTS, BATCHES = (1, 2, 4, 8, 12, 16), (64, 200, 1024, 2048), (1, 2, 4, 8)
ENGINE = EngineSection(
    version="0.32.0", compilation="none", graphs="none", executor="mp", max_num_seqs=8
)


def step_s(rows, context, batch):
    """20 ms, 1 ms a row, and 1 ms for 256 tokens that a row reads."""
    total = np.asarray(rows) * batch
    return 0.020 + 0.001 * total + 0.001 * total * np.asarray(context) / 256 / 8


def make_engine_profile(draft_s: float = 0.001, a_token_s: float = 0.0) -> Profile:
    """A profile that holds `step_s` exactly at its points, and a drafter's cost."""
    grid = np.array(list(product(BATCHES, CONTEXTS, ROWS)))
    batch, context, rows = grid.T
    points = Points(
        rows=rows, context=context, batch=batch, seconds=step_s(rows, context, batch),
        mad_s=np.full(len(grid), 1e-5), n=np.full(len(grid), 10),
    )  # fmt: skip
    drafts = np.array(list(product((1, 8), (0, 1, 15), (64, 2048))))
    median_s = draft_s + a_token_s * drafts[:, 1] * drafts[:, 0]
    base = make_profile()
    section = EngineDrafterSection(
        name="ngram", batch=drafts[:, 0].tolist(), tokens=drafts[:, 1].tolist(),
        context=drafts[:, 2].tolist(), median_s=median_s.tolist(), mad_s=[None] * len(drafts),
        n=[1] * len(drafts),
    )  # fmt: skip
    linear = base.calibration.linear
    physical = fit_physical(points, base.roofline())
    scales = fit_stairs(points, physical, exact=True).scales
    fields = {name: getattr(base, name) for name in Profile.model_fields}
    runtime = {"kind": "vllm", "dtype": "bfloat16", "attention": "CPU_ATTN", "engine": ENGINE}
    fits = {"linear": linear, "physical": physical, "stairs": scales}
    fields |= {
        "runtime": schema.RuntimeSection(**runtime),
        "calibration": CalibrationSection(selected="stairs", **fits),
        "surface": schema.SurfaceSection.of(points), "engine_drafters": {DRAFTER: section},
    }  # fmt: skip
    return Profile(**fields)
