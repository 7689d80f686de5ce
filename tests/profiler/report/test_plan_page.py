"""The page and the pictures of a plan: complete, safe, and true to the plan."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from costmodel.io import shipped_directory
from costmodel.planning.drafting import DraftCost
from costmodel.planning.request import Goals, PlanRequest
from costmodel.planning.result import Plan
from costmodel.planning.search import plan
from costmodel.planning.traffic import Traffic
from costmodel.profile.store import ProfileStore
from profiler.report import plan_pictures as plan_pictures_module
from profiler.report.plan_page import plan_page
from profiler.report.plan_pictures import frontier, plan_pictures, plot_plan
from tests.profiler.page_reader import PageReader

HOSTILE = '<script>alert(1)</script>"><img src=x onerror=y>&amp; $x_1$'
GPUS = ("h100-sxm", "l40s")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ROOFTREE_HOME", str(tmp_path_factory.mktemp("home")))
        request = PlanRequest(
            target="Qwen/Qwen3-8B",
            gpus=GPUS,
            traffic=Traffic(prompt_tokens=1000.0, output_tokens=400.0),
            rate=5.0,
            goals=Goals(tpot_s=0.03),
            acceptance="gsm8k",
            prices={"h100-sxm": 2.5, "l40s": 0.9},
            currency="EUR",
            most_running=16,
        )
        return plan(request, ProfileStore([shipped_directory()]))


@pytest.fixture(scope="module")
def page(made: Plan) -> str:
    return plan_page(made)


def test_it_names_the_model_the_currency_and_every_gpu(made: Plan, page: str) -> None:
    reader = PageReader(page)
    assert reader.texts["h1"] == ["Capacity plan: Qwen/Qwen3-8B"]
    rows = reader.columns("options")
    assert set(rows) == set(GPUS)
    assert "EUR per hour" in reader.tables["options"][0]
    sizing = made.options[0].sizing
    assert sizing is not None and sizing.cost_per_hour is not None
    assert rows[made.options[0].gpu][8].startswith(f"{sizing.cost_per_hour.value:.2f}")
    titles = " ".join(reader.texts["h3"])
    assert all(gpu in titles for gpu in GPUS)  # one panel each
    assert reader.count("svg") == 1 + len(GPUS)
    assert "EUR an hour" in reader.texts["svg"][0]


def test_its_axes_have_plain_numbers(page: str) -> None:
    for picture in re.findall(r"<svg.*?</svg>", page, re.DOTALL):
        text = " ".join(re.findall(r">([^<]+)<", picture))
        assert re.search(r"\b10\b|\b1,024\b", text)
        assert "^" not in text and "times" not in text


def test_it_needs_nothing_else_and_is_readable_on_a_phone_and_in_the_dark(page: str) -> None:
    reader = PageReader(page)
    assert not re.search(r"https?:|//[a-z]|@import", page)
    assert reader.count("script") == reader.count("link") == reader.count("img") == 0
    assert ("meta", {"name": "viewport", "content": "width=device-width, initial-scale=1"}) in (
        reader.elements
    )
    assert "prefers-color-scheme:dark" in page and "currentColor" in page
    assert page.count('<div class="wide"><table') == reader.count("table")  # each scrolls alone
    # Twelve columns are cards on a phone, every cell with its heading.
    assert ("table", {"id": "options", "class": "many"}) in reader.elements
    assert "@media (max-width:40rem)" in page
    headings = [one["data-column"] for tag, one in reader.elements if tag == "td"]
    assert headings[:12] == reader.tables["options"][0]


def test_names_are_escaped(made: Plan) -> None:
    """A model, a GPU, a currency, a note: whatever a user or a file brings."""
    drafter = DraftCost(name=HOSTILE, label=HOSTILE)
    options = tuple(replace(option, gpu=HOSTILE, drafter=drafter) for option in made.options)
    request = replace(
        made.request, target=HOSTILE, gpus=(HOSTILE,), prices={HOSTILE: 1.0}, currency="<b>"
    )
    unplanned = tuple(replace(option, points=()) for option in options)
    hostile = replace(made, request=request, options=unplanned, notes=(HOSTILE,))
    text = plan_page(hostile)
    reader = PageReader(text)
    assert reader.count("script") == reader.count("img") == reader.count("b") == 0
    assert reader.texts["h1"] == [f"Capacity plan: {HOSTILE}"]
    assert HOSTILE in reader.columns("options")
    assert HOSTILE in reader.texts["li"]


def test_costs_are_those_of_the_options(made: Plan) -> None:
    """At the longest goal an option needs the fewest GPUs that it ever needs."""
    for option in made.options:
        goals_ms, costs = frontier(made, option)
        assert goals_ms == sorted(goals_ms)
        assert costs == sorted(costs, reverse=True)
        price = made.request.prices[option.gpu]
        most = max(point.requests_per_s for point in option.points)
        servers = -(-made.request.rate // (made.request.utilisation * most))
        assert costs[-1] == pytest.approx(servers * price)


def test_without_prices_gpus_are_counted(made: Plan) -> None:
    unpriced = replace(made, request=replace(made.request, prices={"l40s": 0.9}))
    (picture, *_) = plan_pictures(unpriced)
    assert picture.caption.startswith("GPUs to serve")
    _, costs = frontier(unpriced, unpriced.options[0])
    assert all(cost == round(cost) for cost in costs)


@pytest.mark.parametrize("ending", ["png", "svg", "pdf"])
def test_a_plan_is_drawn_in_every_form(
    made: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    monkeypatch.setattr(plan_pictures_module, "CONTEXTS", (512, 1024))
    one = replace(made, options=made.options[:1])
    path = plot_plan(one, tmp_path / f"plan.{ending}")
    start = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}[ending]
    assert path.read_bytes().startswith(start)


def test_it_says_first_whether_drafts_pay(made: Plan, page: str) -> None:
    reader = PageReader(page)
    assert made.best is not None
    first = made.best.choices[0]
    assert any(text.startswith("Does it pay? h100-sxm") for text in reader.texts["p"])
    assert reader.tables["pays"][0][:2] == ["at once", "plain ms"]
    assert reader.tables["pays"][1][:2] == [
        str(first.running), f"{first.plain.tpot_s * 1e3:.1f}"
    ]  # fmt: skip
