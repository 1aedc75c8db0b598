"""The records: look-up by title and column, JSON without NaN."""

from __future__ import annotations

import json
import math

import pytest

from attemper.errors import InputError
from attemper.lab.experiment import Axis, Chart, Column, Experiment, Series, Table, headings

TABLE = Table(
    "numbers", "the second is not a number", (Column("n", "keys"), Column("name")), ((1, "a"), (math.nan, None))
)
CHART = Chart("curve", Axis("x"), Axis("y", "log"), (Series("s", (1.0, 2.0), (math.inf, None), errors=(0.1, 0.2)),))
EXPERIMENT = Experiment("made", "what is it?", 3, (TABLE,), (CHART,))


def test_a_table_and_a_column_are_found_by_name_or_the_names_are_told():
    assert TABLE.column("name") == ("a", None)
    with pytest.raises(InputError, match=r"table 'numbers' has no column 'm'\. Columns: n, name"):
        TABLE.column("m")
    assert EXPERIMENT.table("numbers") is TABLE
    with pytest.raises(InputError, match=r"experiment made has no table 'x'\. Tables: numbers"):
        EXPERIMENT.table("x")


def test_a_row_of_another_length_is_a_mistake_of_the_experiment():
    with pytest.raises(AssertionError, match="numbers: 1 cells under 2 columns"):
        Table("numbers", "", TABLE.columns, ((1,),))


def test_json_has_null_where_json_has_no_number():
    document = json.loads(EXPERIMENT.to_json())
    assert (document["schema"], document["experiment"], document["seed"]) == (1, "made", 3)
    assert document["tables"][0]["rows"] == [[1, "a"], [None, None]]
    assert document["tables"][0]["columns"][0] == {"name": "n", "unit": "keys"}
    assert document["charts"][0]["series"][0]["y"] == [None, None]
    assert document["charts"][0]["series"][0]["errors"] == [0.1, 0.2]


def test_a_heading_is_a_name_and_the_unit_in_its_last_brackets():
    made = headings("T", "entropy [nats]", "entropy of [3, 1] [nats]")
    assert made == (Column("T"), Column("entropy", "nats"), Column("entropy of [3, 1]", "nats"))
    assert [column.heading for column in made] == ["T", "entropy [nats]", "entropy of [3, 1] [nats]"]
