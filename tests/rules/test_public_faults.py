"""Kinds of faults that were reported in public: named where they are, and nothing blamed once they are mended."""

from __future__ import annotations

import pytest

from tests.rules.public_faults import BEGIN, END, FAULTS, PAGE, Fault, check, line

pytest.importorskip("transformers")


@pytest.mark.quick("one key more")
@pytest.mark.parametrize("fault", [pytest.param(fault, id=fault.name) for fault in FAULTS])
def test_a_fault_is_named_and_its_mended_version_is_not_blamed(fault: Fault):
    wrong, right = check(fault), check(fault, right=True)
    assert fault.rule in {rule.name for rule in wrong.broken}
    assert not right.broken
    one_document = fault.name == "state of a delta rule"  # mended by a batch that packs none
    assert right[fault.rule].verdict == ("cannot tell" if one_document else "kept")
    said = PAGE.read_text("utf-8").partition(BEGIN)[2].partition(END)[0]
    assert line(fault, wrong) in said, "python -m tests.rules.public_faults writes the page"
