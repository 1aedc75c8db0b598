"""Document 002: controlling the distribution with entropy regularisation, in Keras."""

from __future__ import annotations

from tests.articles.case import Case, Document, Step, Text

CROSS = Case(
    name="002_cross_attention",
    title=Text("`CrossAttention`", "`CrossAttention`"),
    verdict=Text(
        "The penalty is right. The output projection uses only the diagonal of its matrices.",
        "惩罚项正确；输出投影只用到矩阵的对角线",
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
                '`"abcd, cdd->abd"` repeats d, so 720 of the 768 entries are never used. The matrix product is `abcd, '
                "cde->abe`:",
                '输出投影 `"abcd, cdd->abd"` 里 d 写了两次：torch 和 numpy 都只取每个头矩阵的对角线，768 个元素里'
                "有 720 个从未用到。真正的矩阵乘法是 `abcd, cde->abe`。",
            ),
            """\
heads, kernel = torch.randn(1, 4, 3, 16), layer.odk.detach()
theirs = torch.einsum("abcd, cdd->abd", heads, kernel)
print(np.allclose(theirs, np.einsum("abcd, cdd->abd", heads, kernel), atol=1e-6))
print(torch.allclose(theirs, torch.einsum("abcd, cd->abd", heads, kernel.diagonal(dim1=1, dim2=2)), atol=1e-6))
print(torch.allclose(theirs, torch.einsum("abcd, cde->abe", heads, kernel), atol=1e-6))
""",
        ),
    ),
    here=Step(
        Text(
            "In Keras 3, use `attemper.integrations.keras.CrossAttention(3, 16, entropy_regularizer=0.2)`, on "
            "torch, jax or tensorflow. In PyTorch, use `attemper.nn.CrossAttention`. For any attention, the exact "
            "penalty is one line:",
            "在 Keras 3 里，这个层是 `attemper.integrations.keras.CrossAttention(3, 16, entropy_regularizer=0.2)`，后端"
            "可用 torch、jax 或 tensorflow，用的是真正的矩阵乘法，也支持掩码；在 PyTorch 里是 "
            "`attemper.nn.CrossAttention`。任意注意力的惩罚项只需一行，而且是精确的：对数里没有 1e-7。",
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
    verdict=Text("It trains, but never prints its loss.", "能训练；但从不打印损失"),
    line="regularize(model, penalty)",
    builds_on=("002_cross_attention",),
    steps=(
        Step(
            Text(
                '`print("loss" % loss_value)` has no `%s`, so a tensor prints only the word. A number raises a '
                "TypeError:",
                '`print("loss" % loss_value)` 里没有 `%s`。传张量时只打印出这个单词；传数字则会抛 TypeError。',
            ),
            """\
class Probabilities(article.CrossAttention):
    def call(self, inputs):
        output, weights = super().call(inputs)
        return torch.sigmoid(output.mean(-1)), weights

model = Probabilities(3, 16, 0.2)
article.fit((torch.rand(1, 4, 16), torch.rand(1, 6, 16)), torch.ones(1, 4), epochs=1, model=model)
print("loss" % 0.5)
""",
        ),
    ),
    here=Step(
        Text(
            "In Keras 3, `fit` adds the layer's loss. In PyTorch, attach a penalty to the loss of any model:",
            "在 Keras 3 里，`fit` 会自己加上这个层的损失。在 PyTorch 里，惩罚项可以挂到任何模型的损失上：",
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
    verdict=Text("It ends at a mean entropy of 0.19; alpha is 0.2.", "训练后平均熵 0.19，alpha 为 0.2"),
    line="nn.CrossAttention(...)",
    builds_on=("002_cross_attention", "002_fit"),
    slow=True,
    steps=(
        Step(
            Text(
                "After 1,000 steps: the mean entropy of twelve rows, and their mean distance from 0.2. The random "
                "numbers differ from the article's.",
                "训练 1000 步之后（随机数与文章不同）：十二行的平均熵，以及与 alpha = 0.2 的平均距离。类名和实例名"
                "都叫 `model`，所以没法再建第二个。",
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
            "Here every row reaches the target. See the full example for "
            "[PyTorch](../../examples/entropy_target.py) or [Keras](../../examples/entropy_target_keras.py), and "
            "[the experiment](../lab/regularization.md) with two optimizers and four targets.",
            "同样的事在 PyTorch 里这样做，完整代码见 [examples/entropy_target.py](../../examples/entropy_target.py)；"
            "Keras 版见 [examples/entropy_target_keras.py](../../examples/entropy_target_keras.py)。用一个会忘掉最初"
            "几步陡峭梯度的优化器，每一行都到达目标。`attemper lab regularization` 用两种优化器、四个目标、每个目标八次"
            "抽样重做了这个演示（[regularization.md](../lab/regularization.zh-CN.md)）。",
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
            "`printed` is the article's array. Single rows lie between 0.11 and 0.23 nats:",
            "`printed` 是文章给出的数组。各行确实接近 one-hot，但只是平均接近 0.2 nats：各行在 0.11 到 0.23 之间。",
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
        "The article uses Keras and prints each snippet on one line. Here they run unchanged on [a small "
        "stand-in made of torch](../../tests/articles/tensorflow_stand_in.py). You see their arithmetic, not "
        "TensorFlow's behaviour.",
        "Keras 代码，每个片段都挤在一行。往下读不需要 TensorFlow：片段原封不动地跑在一个用 torch 写的小替身上（"
        "[tensorflow_stand_in.py](../../tests/articles/tensorflow_stand_in.py)），因此这里展示的是它们的算术，而不"
        "是 TensorFlow 自身的行为。",
    ),
    cases=(CROSS, FIT, MODEL, WEIGHTS),
)
