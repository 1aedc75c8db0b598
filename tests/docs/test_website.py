"""The documentation site: its sources, its reference, its languages, and, with --all, the site itself in Chromium."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import typer
from filelock import FileLock

from attemper.cli import app
from attemper.errors import InputError
from scripts.website import api, commands, drawing, links, llms, sources
from scripts.website.sources import DOCS, ROOT
from tests.docs.pages import run_code
from tests.docs.test_chinese import TRANSLATED_PAGES
from tests.support.experiments import shared_folder

BUILT = ROOT / "build" / "docs"


@pytest.fixture(scope="module")
def staged(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Language -> the sources of its site."""
    folders = {language: tmp_path_factory.mktemp(language) for language in sources.LANGUAGES}
    for language, folder in folders.items():
        sources.write(folder, language)
    return folders


def test_every_page_stands_in_one_table_of_contents(staged: dict[str, Path]) -> None:
    for folder in staged.values():
        written = {path.relative_to(folder).with_suffix("").as_posix() for path in folder.rglob("*.md")}
        listed = Counter(
            name
            for path in folder.rglob("index.md")
            for tree in re.findall(r"^```\{toctree\}\n(.*?)^```$", path.read_text("utf-8"), re.MULTILINE | re.DOTALL)
            for name in re.findall(r"^/(\S+)$", tree, re.MULTILINE)
        )
        generated = {page.rsplit(".", 1)[0] for page in sources.GENERATED.values()}
        assert set(listed) == (written - {"index"}) | generated
        assert set(listed.values()) == {1}


def test_a_diagram_becomes_a_drawing_of_every_name_and_every_arrow() -> None:
    drawn = drawing.svg("graph TD\n    a --> b\n    b --> c\n    a --> c\n")
    assert re.findall(r"<text [^>]*>(\w+)</text>", drawn) == ["a", "b", "c"]
    assert drawn.count('class="arrow"') == 3
    assert drawing.rows([("a", "b"), ("b", "c"), ("a", "c")]) == {"a": 0, "b": 1, "c": 2}
    with pytest.raises(ValueError, match="the site draws nothing else"):
        drawing.svg("graph LR\n    a --> b")
    with pytest.raises(ValueError, match="round in a circle"):
        drawing.svg("graph TD\n    a --> b\n    b --> a")


def test_a_link_that_leads_to_no_file_stops_the_build() -> None:
    with pytest.raises(FileNotFoundError, match=r"docs/maths\.md: \[x\]\(gone\.md\) leads to no file"):
        sources.LINK.sub(lambda link: sources.mended(link, DOCS / "maths.md", DOCS), "[x](gone.md)")


def test_pages_without_a_chinese_version_say_so_and_the_others_do_not(staged: dict[str, Path]) -> None:
    for path in sources.originals():
        if path.suffix == ".md":
            text = (staged["zh-CN"] / sources.place(path)).read_text("utf-8")
            assert (sources.ENGLISH_ONLY in text) == (path not in TRANSLATED_PAGES), path
            assert sources.ENGLISH_ONLY not in (staged["en"] / sources.place(path)).read_text("utf-8")


def without_digits(text: str) -> str:
    return re.sub(r"\d+(\.\d+)?", "#", text)


@pytest.mark.slow("trains three times")
def test_the_tutorial_runs_in_both_languages_as_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its code is the same in both (test_chinese.py). The run goes wrong as it says, and is held as it says."""
    monkeypatch.chdir(tmp_path)
    names, page = run_code("docs/tutorial.md"), (DOCS / "tutorial.md").read_text("utf-8")
    assert (names["first"].site, names["first"].since) == ("blocks.0.attention", 44)
    assert names["run"].history("max_logit").values.max() > 1000
    # How far one step at that rate goes beyond the threshold of 50 differs from processor to processor.
    assert names["clipped"].history("max_logit").values.max() < names["run"].history("max_logit").values.max() / 5
    assert {alarm.kind for alarm in names["run"].alarms()} >= {"logits", "logit_growth", "layer_fallen"}
    quoted = re.findall(r"^attemper: (step .*?) \.\.\.$", page, re.M)
    assert len(quoted) == 2
    said = without_digits(caplog.text)  # so do the numbers of a training that goes wrong
    assert all(without_digits(line) in said for line in quoted), caplog.text
    assert "step 45:" not in caplog.text, "QKClip, which looks at every step, rings no alarm of its own"


@pytest.mark.parametrize("page", [page for page in api.PAGES if page.name != "keras"], ids=lambda page: page.name)
def test_every_public_name_stands_on_its_page_of_the_reference(page: api.Page) -> None:
    if page.name in ("transformers", "lightning"):
        pytest.importorskip(page.name)
    api.check_complete(page)
    text = api.page(page)
    names = [name.rpartition(".")[2] for group in page.groups.values() for name in group]
    assert all(re.search(rf"\W{re.escape(name)}\W", text) for name in names)


def test_a_public_name_without_a_place_stops_the_build() -> None:
    with pytest.raises(InputError, match=r"missing: \['AttentionOutput'.*not public: \['gone'\]"):
        api.check_complete(api.Page("x", "x", "attemper.functional", {"": ("gone",)}))


def test_the_reference_of_commands_has_every_verb_and_every_option() -> None:
    page = commands.page()
    group: Any = typer.main.get_command(app)
    for name, verb in group.commands.items():
        section = page.split(f"\n## `attemper {name}`\n")[1].split("\n## ")[0]
        for parameter in verb.params:
            assert all(option in section for option in parameter.opts if option.startswith("--")), name
    assert "130" in page.split("\n## ")[0], "exit codes"


def test_llms_txt_lists_the_pages_of_the_first_page(staged: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(staged["en"], tmp_path, dirs_exist_ok=True)
    for page in sources.GENERATED.values():
        (tmp_path / page).parent.mkdir(exist_ok=True)
        (tmp_path / page).write_text("# Generated\n", encoding="utf-8")
    text = llms.text(tmp_path)
    assert text.startswith("# attemper\n\n> attemper measures and tempers")
    assert "- [What the numbers mean](_sources/maths.md.txt): what a number means" in text
    assert "- [Generated](api/index.html): " in text


def test_links_that_lead_nowhere_and_files_from_elsewhere_are_found(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text(
        '<h1 id="top">a</h1><a href="b.html#there">1</a><a href="b.html#gone">2</a><a href="c.html">3</a>'
        '<a href="#top">4</a><a href="https://x.org">5</a><script src="https://x.org/a.js"></script>'
    )
    (tmp_path / "b.html").write_text('<p id="there">b</p>')
    pages = links.read(tmp_path)
    assert [line.split(": ", 1)[1] for line in links.broken(pages)] == [
        "b.html#gone leads nowhere", "c.html leads nowhere", "loads https://x.org/a.js from elsewhere",
    ]  # fmt: skip
    assert links.outside(pages) == ["https://x.org"]


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built anew: once in a run of the tests, by whichever worker asks first."""
    if not (ROOT / "build" / "docs-venv" / ".attemper").exists():
        pytest.skip("needs Sphinx in build/docs-venv: bash scripts/docs.sh")
    folder = shared_folder(tmp_path_factory)
    said = folder / "site.txt"
    with FileLock(folder / "site.lock"):
        if not said.exists():
            command = ["bash", str(ROOT / "scripts" / "docs.sh"), "--only-build"]
            done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
            said.write_text(done.stdout + done.stderr if done.returncode else "", encoding="utf-8")
            print(done.stdout.splitlines()[-1])
    assert not said.read_text("utf-8"), said.read_text("utf-8")
    return BUILT / "site"


@pytest.mark.slow("builds the documentation site")
@pytest.mark.parametrize(
    ("folder", "words", "found"),
    [("", "thermostat", "Thermostat"), ("zh-CN/", "坍缩", "坍缩"), ("zh-CN/", "Thermostat", "Thermostat")],
)
def test_the_search_finds_words_offline(site: Path, browser: Any, folder: str, words: str, found: str) -> None:
    page = browser.new_page()
    said: list[str] = []
    asked: list[str] = []
    page.on("console", lambda message: said.append(message.text) if message.type == "error" else None)
    page.on("request", lambda request: asked.append(request.url))
    page.goto(f"{(site / folder / 'search.html').as_uri()}?q={words}")
    page.wait_for_selector("#search-results li")
    page.wait_for_timeout(1000)
    assert found in page.inner_text("#search-results")
    assert said == []
    assert all(url.startswith("file:") for url in asked)
    page.close()


@pytest.mark.slow("builds the documentation site")
def test_every_public_name_is_in_the_index_of_the_site(site: Path) -> None:
    index = (site / "genindex.html").read_text("utf-8")
    for page in api.PAGES:
        names = [name for group in page.groups.values() for name in group]
        missing = [name for name in names if f">{name.rpartition('.')[2]}" not in index]
        assert missing == [], page.name


def test_a_link_to_a_heading_leads_to_the_same_heading_of_the_chinese_page(staged: dict[str, Path]) -> None:
    there = {language: (folder / "training.md").read_text("utf-8") for language, folder in staged.items()}
    assert "(/tasks/many-ranks.md#context-parallelism)" in there["en"]
    assert "(/tasks/many-ranks.md#上下文并行)" in there["zh-CN"]


@pytest.mark.slow("builds the documentation site")
def test_the_chinese_site_speaks_chinese_around_its_text_and_in_its_gallery(site: Path, browser: Any) -> None:
    page = browser.new_page(locale="en-US")
    page.goto((site / "zh-CN" / "gallery.html").as_uri())
    assert page.inner_text(".toc-title").strip() == "本页内容"
    assert "打开或关闭导航" in page.content()
    page.locator("iframe").first.scroll_into_view_if_needed()
    verdict = page.frame_locator("iframe >> nth=0").locator(".verdict").first
    verdict.wait_for()
    assert re.search("[一-鿿]", verdict.inner_text())
    page.close()
