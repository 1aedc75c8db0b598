"""What a compiler takes as constant, without a compiler."""

import torch

from attemper.call.compiling import constant_in_graphs


def test_the_mark_is_that_of_pytorch():
    ours, theirs = (lambda: 1), (lambda: 1)
    assert constant_in_graphs(ours) is ours
    assert vars(ours) == vars(torch.compiler.assume_constant_result(theirs))
    assert vars(ours)


def test_a_graph_holds_the_answer_and_not_the_question():
    asked: list[int] = []

    @constant_in_graphs
    def many() -> int:
        asked.append(1)
        return 3

    compiled = torch.compile(lambda x: x * many(), fullgraph=True, backend="eager")
    for _ in range(2):
        assert compiled(torch.ones(())) == 3
    assert len(asked) == 1
