"""Pages of the lab in Chromium: what they compute is what the lab's Python computes, by mouse and by keyboard."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import torch

from attemper import functional
from attemper.errors import InputError
from attemper.lab import complexity, entropy, pages, saturation, scaling, temperature
from tests.report.conftest import Open

if TYPE_CHECKING:
    from playwright.sync_api import Page

Values = dict[str, float | str]
CLOSE = 1e-9
"""Relative: both sides compute in float64, sums of up to 64 terms in another order."""


@pytest.fixture
def rows() -> torch.Tensor:
    return torch.tensor(pages.random_rows(0), dtype=torch.float64)


def move(page: Page, key: str, place: int) -> float:
    """Puts a slider to one of its places by the keyboard; the value that it then stands for."""
    slider = page.locator(f"#control-{key}")
    slider.focus()
    page.keyboard.press("Home")
    for _ in range(place):
        page.keyboard.press("ArrowRight")
    assert slider.input_value() == str(place)
    return place


def choose(page: Page, key: str, option: str) -> None:
    page.locator(f"input[name='{key}'][value='{option}'] + span").click()


def numbers(page: Page) -> dict[str, float]:
    """Every number that stands on the page, to all its digits."""
    found = page.locator("#numbers data").evaluate_all("(all) => all.map((one) => [one.dataset.number, one.value])")
    return {name: float(value) for name, value in found}


def curves(page: Page, chart: str) -> list[list[float | None]]:
    """The table of a chart, column by column: x, then each curve."""
    table = page.locator(f"#chart-{chart}")
    if not table.locator("table tbody").count():
        table.locator("summary").click()
    table.locator("tbody tr").first.wait_for()
    cells = table.locator("tbody tr").evaluate_all(
        "(rows) => rows.map((row) => [...row.cells].map((cell) => cell.firstElementChild?.value ?? null))"
    )
    return [[None if cell is None else float(cell) for cell in column] for column in zip(*cells, strict=True)]


def agree(page: Page, chart: str, exact: list[Callable[[float], float | None]]) -> None:
    """Every curve of a chart is that of a function of Python."""
    x, *drawn = curves(page, chart)
    assert len(drawn) == len(exact)
    assert len(x) > 10
    for curve, function in zip(drawn, exact, strict=True):
        assert curve == pytest.approx([function(value or 0.0) for value in x], rel=CLOSE)


@pytest.mark.slow("a browser for seconds")
def test_scaling_computes_what_the_lab_computes(open_page: Open, rows: torch.Tensor) -> None:
    page = open_page(pages.page("scaling"))
    move(page, "d", 8)
    choose(page, "divisor", "d")
    move(page, "T", 20)
    T, d = temperature.CURVE[20], 2**9
    variance = scaling.exact_variance(d, 1.0) / T**2
    weights = functional.softmax(rows * math.sqrt(variance))
    assert numbers(page) == pytest.approx(
        {
            "variance": variance,
            "spread": math.sqrt(variance),
            "range": 2 * math.sqrt(variance),
            "largest": float(functional.max_weight(weights).mean()),
            "tokens": float(functional.effective_tokens(weights).mean()),
            "share": float(functional.entropy(rows * math.sqrt(variance)).mean()) / math.log(64),
        },
        rel=CLOSE,
    )
    agree(
        page,
        "variance",
        [lambda d, e=exponent: scaling.exact_variance(d, e) / T**2 for exponent in scaling.EXPONENTS],  # type: ignore[misc]
    )
    ordered = functional.softmax(rows[0] * math.sqrt(variance)).sort(descending=True).values
    assert curves(page, "weights")[1] == pytest.approx(ordered.tolist(), rel=CLOSE)


@pytest.mark.slow("takes many seconds")
def test_saturation_computes_what_the_lab_computes(open_page: Open, rows: torch.Tensor) -> None:
    page = open_page(pages.page("saturation"))
    move(page, "d", 4)
    move(page, "gap", 7)
    spread = math.sqrt(32)
    found = numbers(page)
    _, spectral = saturation.jacobian_norms(rows * spread)
    gap = torch.tensor([3.5, 0.0], dtype=torch.float64)
    assert found.pop("float32") == pytest.approx(
        float(saturation.gradient_of_first(gap.float(), through=saturation.usual)[0][0]), rel=1e-5
    ), "the last bits of exp in float32 are the machine's own"
    assert found == pytest.approx(
        {
            "spread": spread,
            "largest": float(functional.max_weight(functional.softmax(rows * spread)).mean()),
            "entropy": float(functional.entropy(rows * spread).mean()),
            "norm": float(spectral.median()),
            "exact": float(saturation.gradient_of_first(gap)[0][0]),
        },
        rel=CLOSE,
    )

    def norm(of: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Callable[[float], float]:
        return lambda spread: float(of(*saturation.jacobian_norms(rows * spread)))

    agree(page, "norms", [norm(lambda f, _: f.mean()), norm(lambda _, s: s.mean()), norm(lambda _, s: s.median())])
    _, exact, rounded = curves(page, "gap")
    gradients = [float(saturation.gradient_of_first(torch.tensor([g, 0.0]).double())[0][0]) for g in range(31)]
    assert exact == pytest.approx(gradients, rel=CLOSE)
    assert [value is None for value in rounded] == [gap >= 17 for gap in range(31)]


@pytest.mark.slow("a browser for seconds")
@pytest.mark.parametrize("row", ["random", "tied", "biased"])
@pytest.mark.quick("biased")
def test_temperature_computes_what_the_lab_computes(open_page: Open, rows: torch.Tensor, row: str) -> None:
    page = open_page(pages.page("temperature"))
    choose(page, "row", row)
    move(page, "T", 15)
    T = temperature.CURVE[15]
    tied, biased, bias = (torch.tensor(r).double() for r in (temperature.TIED, temperature.BIASED, temperature.BIAS))
    kinds: dict[str, tuple[torch.Tensor, torch.Tensor | None]] = {
        "random": (rows, None),
        "tied": (tied[None], None),
        "biased": (biased[None], bias),
    }

    def entropy_at(kind: str) -> Callable[[float], float]:
        y, b = kinds[kind]
        return lambda T: float(functional.entropy(y / T + (0.0 if b is None else b)).mean())

    def slope_at(kind: str) -> Callable[[float], float]:
        y, b = kinds[kind]
        return lambda T: float(functional.entropy_slope(y, T, bias=b).mean())

    y, b = kinds[row]
    weights = functional.softmax(y / T + (0.0 if b is None else b))
    assert numbers(page) == pytest.approx(
        {
            "entropy": entropy_at(row)(T),
            "share": entropy_at(row)(T) / math.log(y.shape[-1]),
            "tokens": float(functional.effective_tokens(weights).mean()),
            "largest": float(functional.max_weight(weights).mean()),
            "slope": slope_at(row)(T),
        },
        rel=CLOSE,
    )
    agree(page, "entropy", [entropy_at(kind) for kind in kinds])
    _, *drawn = curves(page, "slope")
    for curve, kind in zip(drawn, kinds, strict=True):
        # Near one key a slope is what is left of a difference: below 1e-12 it is rounding.
        assert curve == pytest.approx([slope_at(kind)(T) for T in temperature.CURVE], rel=CLOSE, abs=1e-12)


@pytest.mark.slow("takes many seconds")
def test_entropy_computes_what_the_lab_computes(open_page: Open) -> None:
    page = open_page(pages.page("entropy"))
    choose(page, "shape", "1/rank")
    move(page, "T", 30)
    move(page, "n", 16)
    move(page, "eps", 5)
    weights = functional.softmax(entropy.distributions()["1/rank"].log(), temperature=temperature.CURVE[30])
    H = float(functional.entropy_of(weights))
    n, eps = 2**17, 1e-5
    assert numbers(page) == pytest.approx(
        {
            "entropy": H,
            "bits": float(functional.entropy_of(weights, unit="bits")),
            "keys": math.exp(H),
            "tokens": float(functional.effective_tokens(weights)),
            "largest": float(weights.max()),
            "gini": float(functional.gini(weights)),
            "with_eps": float(entropy.with_eps(weights, eps)),
            "uniform": math.log(n),
            "lost": math.log1p(n * eps),
        },
        rel=CLOSE,
    )
    x, *lost = curves(page, "lost")
    for curve, eps in zip(lost, entropy.EPSILONS, strict=True):
        exact = [entropy.eps_bias(round(n or 0), eps) for n in x]
        # The lab takes the difference of two entropies, whose rounding is 1e-13 or so.
        shown = [c if c is not None else 0.0 for c in curve]
        assert shown == pytest.approx(
            [e if c is not None else 0.0 for c, e in zip(curve, exact, strict=True)], abs=1e-12
        )
        assert all(e < 2e-10 for c, e in zip(curve, exact, strict=True) if c is None)


@pytest.mark.slow("takes many seconds")
def test_complexity_counts_what_the_lab_counts(open_page: Open) -> None:
    page = open_page(pages.page("complexity"))
    move(page, "tokens", 4)
    move(page, "d", 5)
    counted = complexity.operations(512, 64)
    eager, blocked = complexity.bytes_eager(512, 64), complexity.blocked_bytes(512, 64)
    assert numbers(page) == {
        "operations": counted.total,
        "share": counted.softmax / counted.total,
        "eager": eager,
        "blocked": blocked,
        "ratio": eager / blocked,
    }
    x, drawn_eager, drawn_blocked = curves(page, "bytes")
    lengths = [round(n or 0) for n in x]
    assert drawn_eager == [complexity.bytes_eager(n, 64) for n in lengths]
    assert drawn_blocked == [complexity.blocked_bytes(n, 64) for n in lengths]


@pytest.mark.slow("a browser for a second")
def test_a_press_in_a_chart_moves_its_slider_and_a_suggestion_moves_all(open_page: Open) -> None:
    page = open_page(pages.page("temperature"))
    drawn = page.locator("#chart-entropy svg").first
    box = drawn.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 60)
    page.mouse.down()
    pressed = page.text_content("#value-T")
    page.mouse.move(box["x"] + box["width"] * 0.9, box["y"] + 90, steps=4)
    dragged = page.text_content("#value-T")
    page.mouse.up()
    page.mouse.move(box["x"] + 80, box["y"] + 90)
    assert page.text_content("#value-T") == dragged, "let go, it stays"
    assert 0.5 < float(pressed or 0) < float(dragged or 0)
    page.locator("#tries button").last.click()
    assert page.text_content("#value-T") == "0.5012"
    assert page.locator("input[name='row'][value='biased']").is_checked()
    page.click("#reset")
    assert page.text_content("#value-T") == "1"


@pytest.mark.slow("takes many seconds")
@pytest.mark.parametrize("name", pages.PAGES)
@pytest.mark.parametrize("width", [390, 1440])
@pytest.mark.quick("390-saturation")
def test_both_languages_and_themes_fit_the_screen(open_page: Open, name: str, width: int) -> None:
    page = open_page(pages.page(name), width=width, locale="zh-CN", color_scheme="dark")
    given = pages.texts(name)
    for language in ("zh", "en"):
        assert page.text_content("h1") == given["question"][language]
        assert "{" not in (page.text_content("main") or ""), "every blank of a text is filled"
        for button in range(page.locator("#tries button").count()):
            page.locator("#tries button").nth(button).click()
            assert page.evaluate("document.documentElement.scrollWidth") <= width
        chinese = re.findall("[一-鿿]", page.inner_text("main"))
        assert bool(chinese) is (language == "zh")
        page.click("#language")
        page.click("#theme")


@pytest.mark.slow("takes many seconds")
def test_what_moves_is_heard(open_page: Open) -> None:
    page = open_page(pages.page("saturation"))
    move(page, "gap", 36)
    assert page.get_attribute("#control-gap", "aria-valuetext") == "18 logit"
    assert page.get_attribute("#verdict", "aria-live") == "polite"
    labels: Any = page.locator("input[type=range]").evaluate_all("(all) => all.map((one) => one.labels[0].textContent)")
    assert all(labels)
    assert page.locator("svg[role=img]").evaluate_all("(all) => all.every((one) => one.getAttribute('aria-label'))")


def test_every_text_is_there_in_both_languages_with_the_same_blanks() -> None:
    for name in pages.PAGES:
        for key, said in pages.texts(name).items():
            blanks = [sorted(re.findall(r"\{(\w+)\}", said[language])) for language in ("en", "zh")]
            assert blanks[0] == blanks[1], key
            assert all(said.values()), key


def test_a_page_is_small_and_the_same_for_the_same_seed() -> None:
    first = pages.page("scaling", seed=3)
    assert first == pages.page("scaling", seed=3) != pages.page("scaling", seed=4)
    assert len(first.encode()) < 100_000
    with pytest.raises(InputError, match="lab page must be one of"):
        pages.page("length")
