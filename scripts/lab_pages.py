"""Writes the output and the figure of every experiment into its page: NAME.md, NAME.png in docs/lab or docs/research.

.venv/bin/python scripts/lab_pages.py                    # run all of them, write output and figures
.venv/bin/python scripts/lab_pages.py scaling entropy    # only these
.venv/bin/python scripts/lab_pages.py --check            # say which page differs from what its experiment prints

Each block is what `COLUMNS=110 attemper lab NAME --png docs/lab/NAME.png` prints, without the tables and rows that
`scripts/lab_tables_left_out.json` leaves out: a page shows those that carry its answer. Experiments that train models
are not run: their pages show what is kept, as `attemper lab NAME --results docs/lab/results/NAME.json` does, and
`python -m research NAME --results research/results/NAME.json`. Tables that hold times or bytes of a machine are not
compared, nor are figures that show them; the others are, byte for byte.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGES = ROOT / "docs" / "lab"
BEGIN, END = "<!-- output: begin -->", "<!-- output: end -->"
LEFT_OUT: dict[str, dict[str, list[str] | None]] = json.loads(
    Path(__file__).with_name("lab_tables_left_out.json").read_text("utf-8")
)
"""Experiment -> title of a table -> how the rows begin that its page keeps; null leaves the whole table out.

A title ends before the number of threads, which is this machine's.
"""
THREADS = re.compile(r", \d+ threads?$")
COLUMNS = "110"
MEASURED = "(measured on this machine)"
SIGNED = b"Software\0"
"""Before what drew a picture, in its PNG file."""


def main(arguments: list[str]) -> int:
    from attemper.lab import EXPERIMENTS, TRAINED

    known = [*EXPERIMENTS, *TRAINED, *research_names()]
    check = "--check" in arguments
    names = [name for name in arguments if name != "--check"] or known
    if unknown := set(names) - set(known):
        print(f"no experiment: {', '.join(sorted(unknown))}. There are: {', '.join(known)}.", file=sys.stderr)
        return 2
    if check:
        found = [line for name in names for line in differences(name)]
        print("\n".join(found) or "every page is what its experiment prints")
        return 1 if found else 0
    for name in names:
        printed = output(name, folder(name) / f"{name}.png")
        for page in sorted(folder(name).glob(f"{name}.*md")):  # in every language
            page.write_text(replaced(page.read_text("utf-8"), printed), encoding="utf-8")
            print(page)
    return 0


def research_names() -> list[str]:
    """The experiments of ``research/``, which stands beside this folder."""
    if str(ROOT) not in sys.path:
        sys.path.append(str(ROOT))
    from research import EXPERIMENTS

    return list(EXPERIMENTS)


def folder(name: str) -> Path:
    """Where the page of an experiment stands."""
    return ROOT / "docs" / "research" if name in research_names() else PAGES


def output(name: str, picture: Path | None = None) -> str:
    """What the command prints for this experiment in a terminal of 110 columns, without trailing blanks."""
    before = dict(os.environ)
    printed = StringIO()
    try:
        # Whatever the terminal of the one who runs this: no colours, and this width.
        os.environ.pop("FORCE_COLOR", None)
        os.environ["COLUMNS"] = COLUMNS
        with redirect_stdout(printed), redirect_stderr(StringIO()):
            show(name, picture)
    finally:
        os.environ.clear()
        os.environ.update(before)
    return shortened(name, "\n".join(line.rstrip() for line in printed.getvalue().strip().splitlines()))


def shortened(name: str, printed: str) -> str:
    """Without the tables and rows that the page of this experiment leaves out; a last line says how many."""
    tables = LEFT_OUT.get(name, {})
    all_parts = printed.split("\n\n")
    parts = {THREADS.sub("", part.partition("\n")[0].removesuffix(f" {MEASURED}")): part for part in all_parts}
    if missing := [title for title in tables if title not in parts]:
        raise ValueError(f"{name} prints no table with the title {missing[0]!r}: mend lab_tables_left_out.json")
    gone = [title for title, starts in tables.items() if starts is None]
    rows = 0
    for title, starts in tables.items():
        if starts is not None:
            parts[title], fewer = with_rows(parts[title], starts)
            rows += fewer
    kept = [part for title, part in parts.items() if title not in gone]
    counts = [
        f"{count} more {what}{'s' * (count > 1)}" for count, what in ((len(gone), "table"), (rows, "row")) if count
    ]
    return "\n\n".join(kept + ([f"({' and '.join(counts)} in the terminal)"] if counts else []))


def with_rows(table: str, starts: list[str]) -> tuple[str, int]:
    """A printed table with only the rows that begin with the words of one of ``starts``, and how many it lost."""
    rows = {line: " ".join(line.replace("│", " ").split()) + " " for line in table.splitlines() if line[:1] == "│"}
    if unknown := [start for start in starts if not any(row.startswith(f"{start} ") for row in rows.values())]:
        raise ValueError(f"no row begins with {unknown[0]!r}: mend lab_tables_left_out.json")
    gone = [line for line, row in rows.items() if not row.startswith(tuple(f"{start} " for start in starts))]
    return "\n".join(line for line in table.splitlines() if line not in gone), len(gone)


def show(name: str, picture: Path | None) -> None:
    """Prints the tables of an experiment, and draws its charts."""
    if name in research_names():
        from research.__main__ import main as research

        drawn = ["--png", str(picture)] if picture else []
        research([name, "--results", str(ROOT / "research" / "results" / f"{name}.json"), *drawn])
        return
    from attemper.cli.lab import lab
    from attemper.lab import TRAINED

    results = PAGES / "results" / f"{name}.json" if name in TRAINED else None
    lab(name, seed=0, as_json=False, png=picture, results=results)


def block(page: str) -> str:
    """What stands between the marks of a page."""
    if page.count(BEGIN) != 1 or page.count(END) != 1 or page.index(BEGIN) > page.index(END):
        raise ValueError(f"a page needs one {BEGIN} and, after it, one {END}")
    return page[page.index(BEGIN) + len(BEGIN) : page.index(END)]


def replaced(page: str, printed: str) -> str:
    return page.replace(BEGIN + block(page) + END, f"{BEGIN}\n```text\n{printed}\n```\n{END}")


def differences(name: str) -> list[str]:
    """One line for each way in which the page of an experiment is not what it should be."""
    shown = "docs/research" if name in research_names() else "docs/lab"
    page, picture = folder(name) / f"{name}.md", folder(name) / f"{name}.png"
    missing = [f"{shown}/{path.name} is missing" for path in (page, picture) if not path.is_file()]
    if missing:
        return missing
    text = page.read_text("utf-8")
    found = []
    if f"]({picture.name})" not in text:
        found.append(f"{shown}/{page.name} does not show {picture.name}")
    with tempfile.TemporaryDirectory() as drawings:
        drawn = Path(drawings) / picture.name
        printed = f"\n```text\n{output(name, drawn)}\n```\n"
        if without_measured(block(text)) != without_measured(printed):
            found.append(f"{shown}/{page.name} is not what `{command(name)}` prints: scripts/lab_pages.py {name}")
        if MEASURED not in printed and not same_picture(picture.read_bytes(), drawn.read_bytes()):
            found.append(f"{shown}/{picture.name} is not what `{command(name)}` draws: lab_pages.py {name}")
    return found


def command(name: str) -> str:
    return f"python -m research {name}" if name in research_names() else f"attemper lab {name}"


def without_measured(printed: str) -> str:
    """The same with one word of each measured table, which is what stands between two empty lines."""
    parts = printed.split("\n\n")
    return "\n\n".join(
        f"{part.split()[0]} {MEASURED}" if MEASURED in " ".join(part.split()) else part for part in parts
    )


def same_picture(one: bytes, other: bytes) -> bool:
    """Whether two PNG files are the same bytes. Another version of matplotlib draws others: no telling then."""
    return one == other or drawn_by(one) != drawn_by(other)


def drawn_by(picture: bytes) -> bytes:
    """The version of matplotlib that wrote a PNG file; empty if it does not say."""
    _, _, after = picture.partition(SIGNED)
    return after.partition(b",")[0]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
