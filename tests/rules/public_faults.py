"""Kinds of faults that were reported in public, each as a small model, what ``attemper.check`` says of it, and mended.

No code of the reports is here: only what went wrong. ``python -m tests.rules.public_faults`` writes the table of
docs/tasks/does-my-model-attend-where-it-should.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import attemper
from attemper.text import count

PAGE = Path(__file__).parents[2] / "docs" / "tasks" / "does-my-model-attend-where-it-should.md"
BEGIN, END = "<!-- faults: begin -->", "<!-- faults: end -->"
TOKENS = 48
SMALL = {
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
Rule = Callable[[Tensor, Tensor | None, Tensor | None], Tensor | None]
"""From ids, position_ids and attention_mask [B, T] to the keys that rows see, bool, [B or 1, T, T]; None for all."""


class Attention(nn.Module):
    """Attention of one head with a residual."""

    def __init__(self, dropout: Callable[[nn.Module], float], width: int = 16) -> None:
        super().__init__()
        self.project, self.dropout = nn.Linear(width, 3 * width), dropout

    def forward(self, states: Tensor, seen: Tensor | None) -> Tensor:
        query, key, value = self.project(states)[:, None].chunk(3, -1)
        mask = None if seen is None else seen[:, None]
        mixed = functional.scaled_dot_product_attention(query, key, value, mask, self.dropout(self))
        return states + mixed[:, 0]


class Tiny(nn.Module):
    """Two layers, with masks by ``rule``."""

    def __init__(
        self, rule: Rule, *, pool: bool | None = None, dropout: Callable[[nn.Module], float] = lambda _: 0.0
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(100, 16)
        self.layers = nn.ModuleList(Attention(dropout) for _ in range(2))
        self.rule, self.pool = rule, pool

    def forward(
        self, input_ids: Tensor, position_ids: Tensor | None = None, attention_mask: Tensor | None = None
    ) -> Tensor:
        states = self.embedding(input_ids)
        for layer in self.layers:
            states = layer(states, self.rule(input_ids, position_ids, attention_mask))
        if self.pool is None:
            return states
        marks = torch.ones_like(input_ids) if attention_mask is None or not self.pool else attention_mask
        return (states * marks[..., None]).sum(1) / marks.sum(1, keepdim=True)


class Decay(nn.Module):
    """A state that decays from token to token; ``masked``: padding does not enter it."""

    def __init__(self, *, masked: bool) -> None:
        super().__init__()
        self.embedding, self.enter, self.masked = nn.Embedding(100, 16), nn.Linear(16, 16, bias=False), masked

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        entering = self.enter(self.embedding(input_ids))
        return decay(entering * attention_mask[..., None] if self.masked else entering)


class Hybrid(nn.Module):
    """Attention that keeps documents apart, a convolution over three tokens, and a state that decays: ``apart`` names
    those of the two that begin anew with a document.
    """

    def __init__(self, *parts: str) -> None:
        super().__init__()
        self.embedding, self.attention = nn.Embedding(100, 16), Attention(lambda _: 0.0)
        self.convolution, self.state, self.apart = nn.Conv1d(16, 16, 3, groups=16), State(), parts

    def forward(self, input_ids: Tensor, cu_seqlens: Tensor) -> Tensor:
        starts = cu_seqlens.tolist()
        documents = torch.bucketize(torch.arange(input_ids.shape[1]), cu_seqlens, right=True)
        same = documents[:, None] == documents
        states = self.attention(self.embedding(input_ids), seen(input_ids) & same)
        for name, layer in (("convolution", self.convolve), ("state", self.state)):
            ends = starts if name in self.apart else [0, starts[-1]]
            states = torch.cat([layer(states[:, first:last]) for first, last in pairwise(ends)], 1)
        return states

    def convolve(self, states: Tensor) -> Tensor:
        return states + self.convolution(functional.pad(states.transpose(1, 2), (2, 0))).transpose(1, 2)


class State(nn.Module):
    """What enters a state that decays, through a projection."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(16, 16, bias=False)

    def forward(self, states: Tensor) -> Tensor:
        return decay(self.enter(states))


def decay(entering: Tensor) -> Tensor:
    """[B, T, E]: a state that decays from token to token, and what enters it."""
    states = [torch.zeros_like(entering[:, 0])]
    for token in entering.unbind(1):
        states.append(0.9 * states[-1] + token)
    return torch.stack(states[1:], 1)


class Cached(nn.Module):
    """One layer with a window of eight keys, and a cache of all; ``always``: the window holds with the cache, too."""

    def __init__(self, *, always: bool) -> None:
        super().__init__()
        self.embedding, self.project, self.always = nn.Embedding(100, 16), nn.Linear(16, 48), always
        self.config = SimpleNamespace(use_cache=True)

    def forward(self, input_ids: Tensor, past_key_values: Any = None, use_cache: bool = True) -> SimpleNamespace:
        query, key, value = self.project(self.embedding(input_ids)).chunk(3, -1)
        if past_key_values is not None:
            key, value = (torch.cat(pair, 1) for pair in zip(past_key_values, (key, value), strict=True))
        back = 7 if self.always or past_key_values is None else 1000
        mask = seen(torch.empty(1, key.shape[1]), back=back)[:, -query.shape[1] :]
        states = functional.scaled_dot_product_attention(query, key, value, mask)
        return SimpleNamespace(states=states, past_key_values=(key, value) if use_cache else None)


def seen(ids: Tensor, *, ahead: int = 0, back: int = 1000) -> Tensor:
    """Keys up to so many places behind a row's own, and before it."""
    distance = torch.arange(ids.shape[1]) - torch.arange(ids.shape[1])[:, None]
    return ((distance <= ahead) & (distance >= -back))[None]


def apart(ids: Tensor, positions: Tensor | None) -> Tensor:
    """The same, of a row's own document."""
    assert positions is not None
    documents = positions.eq(0).cumsum(1)
    return seen(ids) & (documents[:, :, None] == documents[:, None])


def real(ids: Tensor, mask: Tensor | None) -> Tensor:
    """Keys that are no padding."""
    return torch.ones_like(ids, dtype=torch.bool)[:, None] if mask is None else mask.bool()[:, None]


def transformers() -> Any:
    import transformers

    return transformers


def llama(**changes: Any) -> nn.Module:
    return transformers().LlamaForCausalLM(transformers().LlamaConfig(**SMALL | changes)).eval()


def qwen() -> nn.Module:
    sizes = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    config = transformers().Qwen3NextConfig(
        **{**SMALL, "num_hidden_layers": 4}, head_dim=8, linear_value_head_dim=8, **sizes, **experts,
        shared_expert_intermediate_size=32,
    )  # fmt: skip
    return transformers().Qwen3NextForCausalLM(config).eval()


def gpt2() -> nn.Module:
    sizes = {"vocab_size": 100, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}
    config = transformers().GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)
    return transformers().GPT2LMHeadModel(config).eval()


def gemma2(*, capped: bool) -> nn.Module:
    config = transformers().Gemma2Config(**SMALL, head_dim=8, sliding_window=64, attn_implementation="eager")
    model = transformers().Gemma2ForCausalLM(config).eval()
    for layer in model.model.layers:
        layer.self_attn.attn_logit_softcapping = 50.0 if capped else None
    return model


def forgetful() -> nn.Module:
    """A Llama whose cache drops its first key once it holds eight."""
    model = llama()

    def drop(_: nn.Module, __: Any, output: Any) -> None:
        for layer in () if output.past_key_values is None else output.past_key_values.layers:
            if layer.keys.shape[2] == 8:
                layer.keys, layer.values = layer.keys[:, :, 1:], layer.values[:, :, 1:]

    model.register_forward_hook(drop)
    return model


def ids(sequences: int = 2) -> Tensor:
    return torch.randint(5, 90, (sequences, TOKENS))


def positions(sequences: int = 1) -> Tensor:
    return torch.cat([torch.arange(28), torch.arange(20)]).expand(sequences, -1)


def mask(*, left: bool = False) -> Tensor:
    marks = torch.ones((2, TOKENS), dtype=torch.int64)
    marks[1, 36:] = 0
    return marks.flip(1) if left else marks


@dataclass(frozen=True)
class Fault:
    """A kind of fault: a model with it and one without, or a model that is given a batch with it and one without."""

    name: str
    reports: tuple[str, ...]
    """Of public repositories, as owner/name#number."""
    what: str
    rule: str
    wrong: Callable[[], nn.Module]
    batch: Callable[[], Mapping[str, Any]]
    declared: Mapping[str, Any] = field(default_factory=dict)
    """Beside the batch."""
    right: Callable[[], nn.Module] | None = None
    mended: Callable[[], Mapping[str, Any]] | None = None
    """The batch without the fault."""
    known: Mapping[str, Any] | None = None
    """What is declared beside that one, if it is something else."""


CAUSAL = {"causal": True}
WINDOW = {"causal": True, "window": 8}


def boundaries() -> dict[str, Tensor]:
    return {"documents": positions().eq(0).cumsum(1)}


def text(sequences: int = 2, **given: Tensor | bool) -> dict[str, Any]:
    return {"input_ids": ids(sequences), **given}


def packed(**given: Tensor | bool) -> dict[str, Any]:
    """One sequence of two documents, by their positions and without a cache."""
    return text(1, position_ids=positions(), use_cache=False, **given)


def lengths() -> dict[str, Tensor]:
    """The same by where documents begin."""
    return text(1, cu_seqlens=torch.tensor([0, 28, TOKENS]))


def padded() -> dict[str, Tensor]:
    return text(attention_mask=mask())


def left() -> dict[str, Tensor]:
    return text(attention_mask=mask(left=True))


def blocks(*, added: bool) -> Tensor:
    found = apart(positions(), positions())[:, None]
    return torch.where(found, 0.0, torch.finfo(torch.float32).min) if added else found


def separated() -> nn.Module:
    return Tiny(lambda one, places, _: apart(one, places))


def masked(**options: Any) -> nn.Module:
    return Tiny(lambda one, _, marks: real(one, marks), **options)


def causal(**options: Any) -> nn.Module:
    return Tiny(lambda one, *_: seen(one), **options)


FAULTS = (
    Fault(
        "batch of several", ("axolotl-ai-cloud/axolotl#1375",),
        "documents are kept apart in a batch of one sequence, and not in one of several", "documents",
        lambda: Tiny(lambda one, places, _: apart(one, places) if len(one) == 1 else seen(one)),
        lambda: text(position_ids=positions(2)), CAUSAL, separated,
    ),
    Fault(
        "concatenated", ("huggingface/trl#1230", "hiyouga/LLaMA-Factory#2289"),
        "texts are laid end to end, and nothing tells the model", "documents",
        llama, lambda: text(1), boundaries(), mended=packed,
    ),
    Fault(
        "mask of ones", ("huggingface/transformers#46634", "axolotl-ai-cloud/axolotl#3796"),
        "an attention_mask of ones turns off what `position_ids` declare", "documents",
        llama, lambda: packed(attention_mask=torch.ones((1, TOKENS), dtype=torch.int64)), mended=packed,
    ),
    Fault(
        "state of a delta rule",
        ("huggingface/transformers#44717", "radixark/miles#648", "nvidia-cosmos/cosmos-rl#638"),
        "attention keeps packed documents apart, the delta rule between carries its state on", "documents",
        qwen, packed, mended=lambda: padded() | {"use_cache": False},
        known={"documents": torch.zeros((2, TOKENS), dtype=torch.int64)},
    ),
    Fault(
        "boundaries in the convolution alone", ("THUDM/slime#1686",),
        "`cu_seqlens` reach the convolution of a linear attention, and not its state", "documents",
        lambda: Hybrid("convolution"), lengths, CAUSAL, lambda: Hybrid("convolution", "state"),
    ),
    Fault(
        "boundaries are lost", ("modelscope/ms-swift#9618", "huggingface/transformers#46093"),
        "`cu_seqlens` reach the attention, and get lost on the way to the linear attention", "documents",
        Hybrid, lengths, CAUSAL, lambda: Hybrid("convolution", "state"),
    ),
    Fault(
        "convolution over boundaries", ("huggingface/transformers#46588",),
        "a short convolution slides over the boundary of documents", "documents",
        lambda: Hybrid("state"), lengths, CAUSAL, lambda: Hybrid("convolution", "state"),
    ),
    Fault(
        "positions alone", ("huggingface/nanoVLM#204", "axolotl-ai-cloud/axolotl#3817"),
        "positions start anew with each document, the mask knows of none", "documents",
        causal, lambda: text(1, position_ids=positions()), CAUSAL, separated,
    ),
    Fault(
        "bool mask, added", ("NVIDIA-NeMo/Automodel#2116",),
        "eager attention adds a bool mask as 0 and 1", "documents",
        lambda: llama(attn_implementation="eager"), lambda: text(1, attention_mask=blocks(added=False)), boundaries(),
        mended=lambda: text(1, attention_mask=blocks(added=True)),
    ),
    Fault(
        "mask of an encoder", ("huggingface/transformers#48745", "keras-team/keras#23038"),
        "a decoder is given the mask of an encoder, or none", "causal",
        masked, text, CAUSAL, lambda: Tiny(lambda one, _, marks: real(one, marks) & seen(one)),
    ),
    Fault(
        "padding is text", ("huggingface/diffusers#8673",),
        "no mask for padded text", "padding",
        lambda: Tiny(lambda *_: None), padded, right=masked,
    ),
    Fault(
        "mean of padding", ("huggingface/sentence-transformers#2569",),
        "attention has the mask, the mean over tokens has not", "padding",
        lambda: masked(pool=False), padded, right=lambda: masked(pool=True),
    ),
    Fault(
        "positions of padding", ("TransformerLensOrg/TransformerLens#1005",),
        "learned positions are counted from the padding on the left", "padding",
        gpt2, left, mended=lambda: left() | {"position_ids": (mask(left=True).cumsum(1) - 1).clamp(min=0)},
    ),
    Fault(
        "padding in the state", ("huggingface/transformers#32080",),
        "a recurrent state takes in the padding on the left", "padding",
        lambda: Decay(masked=False), left, CAUSAL, lambda: Decay(masked=True),
    ),
    Fault(
        "one key more", ("vllm-project/vllm#3385", "huggingface/transformers#29623", "sgl-project/sglang#34273"),
        "a window of 8 counts the row's own key as a ninth", "window",
        lambda: Tiny(lambda one, *_: seen(one, back=8)), text, WINDOW,
        lambda: Tiny(lambda one, *_: seen(one, back=7)),
    ),
    Fault(
        "no window", ("sgl-project/sglang#33601",),
        "an encoder's window to both sides is left out", "window",
        lambda: Tiny(lambda *_: None), text, {"window": 8}, lambda: Tiny(lambda one, *_: seen(one, ahead=8, back=8)),
    ),
    Fault(
        "cache loses a key", ("huggingface/transformers#37574",),
        "a cache drops a key that is still needed", "cache",
        forgetful, text, right=llama,
    ),
    Fault(
        "no window with a cache", ("vllm-project/vllm#23969",),
        "the window holds in the pass over the prompt, and not for tokens that are read with the cache", "cache",
        lambda: Cached(always=False), text, WINDOW, lambda: Cached(always=True),
    ),
    Fault(
        "dropout at evaluation", ("pytorch/pytorch#124464", "karpathy/nanoGPT#240"),
        "dropout_p is given whatever the mode", "repeat",
        lambda: causal(dropout=lambda _: 0.1), text, CAUSAL,
        lambda: causal(dropout=lambda one: 0.1 if one.training else 0.0),
    ),
    Fault(
        "no softcap", ("sgl-project/sglang#33915", "vllm-project/vllm-metal#665"),
        "the softcap of the configuration does not reach the kernel", "scores",
        lambda: gemma2(capped=False), text, right=lambda: gemma2(capped=True),
    ),
)  # fmt: skip


CHINESE = {
    "batch of several": "batch 只有一个序列时文档被隔开，有多个序列时没有",
    "concatenated": "文本首尾相接，却没有告诉模型边界在哪里",
    "mask of ones": "全 1 的 attention_mask 让 `position_ids` 的声明失效",
    "state of a delta rule": "注意力隔开了打包的文档，夹在中间的 delta rule 却把状态带了过去",
    "boundaries in the convolution alone": "`cu_seqlens` 传到了线性注意力的卷积，却没有传到它的状态",
    "boundaries are lost": "`cu_seqlens` 传到了注意力，在去往线性注意力的途中丢失",
    "convolution over boundaries": "短卷积跨过了文档的边界",
    "positions alone": "位置在每篇文档重新计数，mask 却不知道文档",
    "bool mask, added": "eager 注意力把 bool mask 当作 0 和 1 加上去",
    "mask of an encoder": "解码器用了编码器的 mask，或者没有 mask",
    "padding is text": "带 padding 的文本没有 mask",
    "mean of padding": "注意力用了 mask，对 token 求均值时却没有用",
    "positions of padding": "可学习的位置从左边的 padding 开始计数",
    "padding in the state": "循环状态读入了左边的 padding",
    "one key more": "窗口大小是 8，却把行自己的 key 算作第九个",
    "no window": "编码器的双侧窗口没有生效",
    "cache loses a key": "缓存丢掉了还需要的 key",
    "no window with a cache": "读取提示词时窗口生效，用缓存逐 token 读取时没有生效",
    "dropout at evaluation": "不管什么模式都传入 dropout_p",
    "no softcap": "配置里的 softcap 没有传到 kernel",
}
"""What goes wrong, on the Chinese page."""


def check(fault: Fault, *, right: bool = False) -> attemper.types.Check:
    """What is said of a fault, or of what has it no more; the same each time."""
    model, batch, declared = fault.wrong, fault.batch, fault.declared
    if right:
        model, batch = fault.right or model, fault.mended or batch
        declared = declared if fault.known is None else fault.known
    torch.manual_seed(0)
    return attemper.check(model().eval(), batch(), **declared)


def line(fault: Fault, wrong: attemper.types.Check) -> str:
    """A row of the page's table."""
    reports = ", ".join(f"[{one.partition('/')[2]}]({_address(one)})" for one in fault.reports)
    found = wrong[fault.rule]
    assert found.verdict == "broken"
    said = f"`{found.name}` at `{found.site}`"
    said += "" if found.rows is None else f", {count(found.rows, 'row')}"
    return f"| {reports} | {fault.what} | {said} |"


def _address(report: str) -> str:
    place, _, number = report.partition("#")
    return f"https://github.com/{place}/issues/{number}"


def write(page: Path, head: str, lines: list[str]) -> None:
    """Puts the rows between the marks of a page."""
    before, rest = page.read_text("utf-8").split(BEGIN)
    rows = "\n".join(lines)
    page.write_text(f"{before}{BEGIN}\n\n{head}\n|---|---|---|\n{rows}\n\n{END}{rest.split(END)[1]}", "utf-8")


def main() -> None:
    lines = [line(fault, check(fault)) for fault in FAULTS]
    write(PAGE, "| reported | what goes wrong | broken |", lines)
    chinese = [
        one.replace(f"| {fault.what} |", f"| {CHINESE[fault.name]} |") for fault, one in zip(FAULTS, lines, strict=True)
    ]
    write(PAGE.with_suffix(".zh-CN.md"), "| 报告 | 出了什么错 | 违反 |", chinese)
    print("\n".join(lines))


if __name__ == "__main__":
    main()
