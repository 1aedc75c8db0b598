"""Document 002: controlling the distribution with entropy regularisation, in Keras."""

from __future__ import annotations

from tests.articles.case import Case, Document, Step, Text

CROSS = Case(
    name="002_cross_attention",
    title=Text("`CrossAttention`", "`CrossAttention`"),
    verdict=Text(
        "The penalty is right. The output projection uses only the diagonal of its matrices.",
        "惩罚项是对的；输出投影只用到矩阵的对角线",
    ),
    line='attention(..., stats=("entropy",))',
    steps=(
        Step(
            Text(
                "The penalty is (H - alpha)² of each row, as the text says:",
                "惩罚项就是每一行的 (H - alpha)²，与正文一致：",
            ),
            """\
layer = article.CrossAttention(3, 16, 0.2)
Q, KV = torch.rand(1, 4, 16), torch.rand(1, 6, 16)
output, weights = layer((Q, KV))
print(layer.losses[0], (functional.entropy_of(weights) - 0.2).square().mean())
""",
        ),
        Step(
            Text(
                '`"abcd, cdd->abd"` repeats d: 720 of the 768 entries are never used:',
                '`"abcd, cdd->abd"` 里 d 重复，768 个元素有 720 个从未用到。应当是 `abcd, cde->abe`：',
            ),
            """\
heads, kernel = torch.randn(1, 4, 3, 16), layer.odk.detach()
theirs = torch.einsum("abcd, cdd->abd", heads, kernel)
print(torch.allclose(theirs, torch.einsum("abcd, cd->abd", heads, kernel.diagonal(dim1=1, dim2=2)), atol=1e-6))
""",
        ),
        Step(
            None,
            """\
print(np.allclose(theirs, np.einsum("abcd, cdd->abd", heads, kernel), atol=1e-6))
print(torch.allclose(theirs, torch.einsum("abcd, cde->abe", heads, kernel), atol=1e-6))
""",
            "True\nFalse",
        ),
    ),
    here=Step(
        Text(
            "`attemper.nn.CrossAttention`, or in Keras 3 "
            "`attemper.integrations.keras.CrossAttention(3, 16, entropy_regularizer=0.2)`. For "
            "any attention, one line:",
            "用 `attemper.nn.CrossAttention`；Keras 3 里用 `attemper.integrations.keras.CrossAtte"
            "ntion(3, 16, entropy_regularizer=0.2)`。换成别的注意力，惩罚项也只要一行：",
        ),
        """\
q = torch.einsum("abc, cde->adbe", Q, layer.qdk)  # [B, heads, queries, 16]
k, v = (torch.einsum("abc, cde->adbe", KV, weight) for weight in (layer.kdk, layer.vdk))
result = attemper.attention(q, k, v, stats=("entropy",))
print((result.stats.entropy - 0.2).square().mean().item())
""",
    ),
)

FIT = Case(
    name="002_fit",
    title=Text("`fit`", "`fit`"),
    verdict=Text(
        "It trains, but never prints its loss: `print` lacks `%s`.", "能训练，但从不打印损失：`print` 里少了 `%s`"
    ),
    line="regularize(model, penalty)",
    builds_on=("002_cross_attention",),
    steps=(
        Step(
            None,
            """\
class Probabilities(article.CrossAttention):
    def call(self, inputs):
        output, weights = super().call(inputs)
        return torch.sigmoid(output.mean(-1)), weights

model = Probabilities(3, 16, 0.2)
article.fit((torch.rand(1, 4, 16), torch.rand(1, 6, 16)), torch.ones(1, 4), epochs=1, model=model)
print("loss" % 0.5)
""",
            """\
Start of epoch 0
[tensor(2.5334, grad_fn=<MeanBackward0>)]
attention scores entropy loss: tensor(2.5334, grad_fn=<AddBackward0>)
loss
TypeError: not all arguments converted during string formatting""",
        ),
    ),
    here=Step(
        Text(
            "Attach a penalty to the loss of any model (in Keras 3, `fit` adds it):",
            "给任何模型的损失挂上惩罚项（Keras 3 的 `fit` 会自动加上）：",
        ),
        """\
layer = attemper.nn.CrossAttention(16, num_heads=4)
penalty = attemper.regularize(layer, attemper.EntropyTarget(0.2, coef=1.0))
output, _ = layer(torch.rand(1, 4, 16), torch.rand(1, 6, 16))
penalty.attach(output.square().mean()).backward()
print(layer.q_proj.weight.grad.isfinite().all(), penalty.value > 0)
""",
    ),
)

MODEL = Case(
    name="002_model",
    title=Text("`model` and 1,000 steps", "`model` 与 1000 步训练"),
    verdict=Text("It ends at a mean entropy of 0.19; alpha is 0.2.", "训练后的平均熵是 0.19，alpha 是 0.2"),
    line="nn.CrossAttention(...)",
    builds_on=("002_cross_attention", "002_fit"),
    slow=True,
    steps=(
        Step(
            Text(
                "Mean entropy of twelve rows after 1,000 steps, and mean distance from 0.2 (other "
                "random numbers than the article's):",
                "1,000 步后十二行的平均熵，以及与 0.2 的平均距离（随机数与原文不同）：",
            ),
            """\
weights = article.model((article.Q, article.KV))[1].detach()
entropy = functional.entropy_of(weights)
print(tuple(entropy.shape), f"{entropy.mean().item():.2f}, {(entropy - 0.2).abs().mean().item():.2f}")
""",
        ),
    ),
    here=Step(
        Text(
            "Every row reaches the target. Full examples: "
            "[PyTorch](../../examples/entropy_target.py), "
            "[Keras](../../examples/entropy_target_keras.py), [the "
            "experiment](../lab/regularization.md).",
            "每一行都达到目标。完整例子：[PyTorch](../../examples/entropy_target.py)、[Keras](../"
            "../examples/entropy_target_keras.py)、[实验](../lab/regularization.zh-CN.md)。",
        ),
        """\
query, context, labels = torch.rand(1, 4, 16), torch.rand(1, 6, 16), torch.tensor([[0.0, 1.0]])
layer = attemper.nn.CrossAttention(16, num_heads=3, head_dim=16, stats=("entropy",))
classify = torch.nn.Linear(64, 2)
optimizer = torch.optim.Adam([*layer.parameters(), *classify.parameters()], lr=0.01, betas=(0.9, 0.99))
for step in range(1000):
    output, stats = layer(query, context)
    logits = classify((output + query).flatten(1))
    loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, labels)
    optimizer.zero_grad()
    (loss + functional.entropy_target(stats, 0.2)).backward()
    optimizer.step()
print((stats.entropy - 0.2).abs().mean().item() <= 0.02)
""",
    ),
)

WEIGHTS = Case(
    name="002_weights",
    title=Text("the printed weights", "打印出的权重"),
    verdict=Text(
        "Twelve rows, with a mean entropy of 0.194 nats and a mean distance from 0.2 of 0.033.",
        "十二行：平均熵 0.194 nats，与 0.2 的平均距离 0.033",
    ),
    line="entropy_of(weights)",
    snippet=False,
    steps=(),
    here=Step(
        Text(
            "`printed` is the article's array; its rows lie between 0.11 and 0.23 nats:",
            "`printed` 是原文打印的数组，各行在 0.11 到 0.23 nats 之间：",
        ),
        """\
import re

weights = torch.tensor([float(number) for number in re.findall(r"\\d\\.\\d+e[-+]\\d+", printed)]).view(3, 4, 6)
entropy = functional.entropy_of(weights)
print(entropy)
print(f"{entropy.mean().item():.3f} {(entropy - 0.2).abs().mean().item():.3f}")
""",
    ),
)

DOCUMENT = Document(
    number="002",
    title=Text("controlling the distribution with entropy regularisation", "用熵正则化控制注意力分数的分布"),
    about=Text(
        "The Keras snippets run unchanged on [a stand-in made of "
        "torch](../../tests/articles/tensorflow_stand_in.py): you see their arithmetic, not "
        "TensorFlow.",
        "这些 Keras 片段原样跑在[用 torch 写的替身](../../tests/articles/tensorflow_stand_in."
        "py)上：看到的是算术结果，不是 TensorFlow 的行为。",
    ),
    cases=(CROSS, FIT, MODEL, WEIGHTS),
)
