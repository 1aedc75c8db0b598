"""Configurations of transformers made small by rule: by the names of their fields, never by the name of a model.

Every hidden size of a configuration becomes the same number, so that towers still fit together. Of layers as many stay
as there are kinds of them. A rule that does not fit a model makes it fail to build or to run: then the next recipe has
its turn, which changes less.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from typing import Any

import transformers

_tf: Any = transformers
WIDTH, HEADS, HEAD, VOCABULARY = 64, 4, 16, 128
RECIPES = ("small", "filled", "heads as they are", "shallow", "as it is")
"""Everything made small; what is absent filled, too; heads as large as they were; layers, vocabulary and experts alone
made small; nothing.
"""
_SMALL = RECIPES[:2]
FIRST_ID = 100
"""Ids of special tokens are from here on, those of texts below."""

_LAYERS = r"^(num_(hidden_|decoder_|encoder_|text_|vision_)?layers?|num_blocks|n_layers?|depth|.*_layers|.*_depth)$"
_NO_LAYERS = r"nextn|mtp|adapter_layers|num_feat|kv_shared|residual|max_window|hash_layers|unshared"
_WIDTHS = (
    r"^(.*hidden_(size|dim)|d_model|n_embd|dim|embed_dim|embedding_size|embed_size|lru_width|projection_dim|width"
    r"|.*output_size|.*_embed_dim)$"
)
_INNER = r"intermediate|(ffn|mlp|feedforward|inner|ff)_?(dim|size)?(_mlp)?$|^d_ff$|n_inner|encoder_ffn|decoder_ffn"
_HEADS = r"^((?!key_value|kv|index|mamba|ssm|linear).)*(n_heads?|num_heads|attention_heads|num_attn_heads|nhead)$"
_PAIRS = r"num_(key_value|kv)_heads|n_kv_heads|multi_query_group_num"
_COMPUTED = ("id2label", "label2id", "dtype", "transformers_version", "stage_names")
_IMAGE = ("image_size", "img_size", "input_size")
_HEAD_COUNTS = ("num_attention_heads", "num_heads", "n_head", "encoder_attention_heads", "attention_heads")
COUNTS: tuple[tuple[str, int], ...] = (
    (r"^(n_routed_experts|num_local_experts|num_experts|moe_num_experts|n_experts)$", 4),
    (r"^(num_experts_per_tok|moe_topk|moe_top_k|num_experts_per_token|moe_k|num_selected_experts)$", 2),
    (r"^(n|num|num_expert)_group$", 2),
    (r"^topk_group$", 1),
    (r"^(num_queries|num_object_queries|num_query_tokens|num_latents)$", 12),
    (r"^attn_layer_period$", 2),
    (r"^attn_layer_offset$", 1),
)
"""Fields of every recipe but the last, which are never made larger."""
SIZES: tuple[tuple[str, int], ...] = (
    (r"^(q_lora_rank|o_lora_rank)$", 24),
    (r"^kv_lora_rank$", 16),
    (r"^qk_rope_head_dim$", 8),
    (r"^qk_nope_head_dim$", 16),
    (r"^v_head_dim$", 16),
    (r"^qk_head_dim$", 24),
    (r"^index_head_dim$", 16),
    (r"^index_n_heads$", 2),
    (r"^index_topk$", 9),
    (r"^(head_dim|d_kv|attention_head_dim|attention_head_size|kv_channels|head_size|global_head_dim)$", HEAD),
    (r"^(mamba|ssm)_(n|num)_heads$", 8),
    (r"^(mamba_d_head|mamba_head_dim)$", 16),
    (r"^(mamba_d_state|ssm_state_size|mamba_state_size)$", 8),
    (r"^mamba_(chunk_size|d_ssm)$", 128),
    (r"^linear_num_key_heads$", 2),
    (r"^linear_num_value_heads$", 4),
    (r"^linear_num_heads$", HEADS),
    (r"^linear_((key|value)_)?head_dim$", 8),
    (r"^(sliding_window|local_window_size|attention_chunk_size|sliding_window_size)$", 7),
    (r"^block_size$|landmarks$", 8),
)
"""Fields with a value that fits the others, where heads are made small as well."""
ABSENT: tuple[tuple[str, Any], ...] = (
    (r"^vocab_size$", VOCABULARY),
    (r"^(n_routed_experts|num_local_experts|num_experts)$", 4),
    (r"^(num_experts_per_tok|top_k_experts)$", 2),
    (r"^(n_shared_experts|n_group|topk_group)$", 1),
    (r"expert_intermediate_size$|^moe_intermediate_size$", 32),
    (r"num_key_value_heads$|^index(er)?_(n|kv)_heads$", 2),
    (r"^index(er)?_head_dim$", HEAD),
    (r"^index(er)?_budget$", 16),
    (r"^index(er)?_compress_ratio$", 4),
    (r"^prediction_length$", 8),
    (r"^image_token_(id|index)$", FIRST_ID + 6),
    (r"^mlp_layer_types$", ["dense", "sparse"]),
    (r"^layer_types$", ["full_attention"] * 2),
    (r"^vocabulary_map$", {"<image>": FIRST_ID}),
    (r"^initializer_range$", 0.02),
    (r"dropout(_rate)?$", 0.0),
    (r"^rope_theta$", 10000.0),
    (r"^clip_qkv$", 8.0),
    (r"^sliding_window$", 7),
    (r"^pad_token_id$", 1),
)
"""Fields that are None by default, or missing, and what a model needs there."""


def shrunk(kind: type[Any], recipe: str) -> Any:
    """The configuration that ``kind`` makes without arguments, smaller as the recipe says."""
    plain = kind()
    widths: dict[int, int] = {}
    for node in _nodes(plain):
        width = _width(node)
        if width is not None:
            widths.setdefault(width, WIDTH if recipe in _SMALL else HEADS * _head(node))
    return _smaller(plain, recipe, widths)


def mended(config: Any, error: str) -> bool:
    """Whether a field that ``error`` misses in a part of the configuration has been given a value."""
    found = re.search(r"'(\w+)' object has no attribute '(\w+)'", error)
    if found is None:
        return False
    owner, name = found.groups()
    wanting = [node for node in _nodes(config) if type(node).__name__ == owner and name not in vars(node)]
    known = [vars(node)[name] for node in _nodes(config) if vars(node).get(name) is not None]
    known += [value for pattern, value in ABSENT if re.search(pattern, name)]
    for node in wanting if known else ():
        setattr(node, name, known[0])
    return bool(wanting and known)


def _nodes(config: Any) -> Iterator[Any]:
    yield config
    for value in vars(config).values():
        if isinstance(value, _tf.PreTrainedConfig):
            yield from _nodes(value)


def _number(config: Any, *names: str) -> int | None:
    """The first of these fields that is a whole number; configurations may name it otherwise, and may refuse to say."""
    for name in names:
        value = vars(config).get(config.attribute_map.get(name, name))
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    return None


def _width(config: Any) -> int | None:
    return _number(config, "hidden_size", "d_model", "n_embd", "dim", "embed_dim", "hidden_dim")


def _head(config: Any) -> int:
    """Features of a head."""
    return _number(config, "head_dim") or (_width(config) or HEAD) // max(1, _number(config, *_HEAD_COUNTS) or 1)


def _smaller(plain: Any, recipe: str, widths: dict[int, int]) -> Any:
    if getattr(plain, "model_type", "") == "timm_backbone":
        return _in_place_of_timm(plain)
    changes: dict[str, Any] = {}
    layers = _kept_layers(plain)
    for name, value in vars(plain).items():
        if name.startswith("_") or name in _COMPUTED:
            continue
        found = _field(plain, name, value, recipe, widths, layers)
        if found is not value and (isinstance(value, _tf.PreTrainedConfig) or found != value):
            changes[name] = found
    if not changes:
        return plain
    usual = vars(type(plain)())
    own = {name: value for name, value in vars(plain).items() if _is_own(name, value, usual) and name not in changes}
    try:
        made = type(plain)(**{name: value for name, value in own.items() if name in usual}, **changes)
    except Exception:  # a field that the class computes: then it is set as it stands
        made, own = copy.deepcopy(plain), own | changes
    for name, value in own.items():
        setattr(made, name, value)
    return _with_stages(plain, made)


def _is_own(name: str, value: Any, usual: dict[str, Any]) -> bool:
    """Whether the configuration that this one is a part of has set a field otherwise than its class does."""
    return (
        name not in _COMPUTED
        and not name.startswith("_")
        and not isinstance(value, _tf.PreTrainedConfig)
        and value != usual.get(name)
    )


def _with_stages(plain: Any, made: Any) -> Any:
    """A backbone gives as many of its stages as before: the last ones, where layers were taken away."""
    stages = vars(plain).get("_out_indices")
    if stages:
        most = len(vars(made).get("stage_names") or ()) - 1
        fewer = range(most - len(stages) + 1, most + 1)
        stages = list(stages) if max(stages) <= most else [max(0, one) for one in fewer]
        made.set_output_features_output_indices(out_features=None, out_indices=stages)
    return made


def _in_place_of_timm(plain: Any) -> Any:
    """A ResNet of transformers: timm's weights and kernels are another package's."""
    stages = [f"stage{place}" for place in range(1, 5)]
    wanted = plain.out_indices or [-1]
    features = [stages[min(place, 4) - 1] if place > 0 else stages[place] for place in wanted][-4:]
    sizes = [256, 512, 1024, 2048]
    return _tf.CONFIG_MAPPING["resnet"](
        depths=[1, 1, 1, 1], hidden_sizes=sizes, out_features=list(dict.fromkeys(features))
    )


def _field(plain: Any, name: str, value: Any, recipe: str, widths: dict[int, int], layers: dict[int, list[int]]) -> Any:
    if isinstance(value, _tf.PreTrainedConfig):
        return _smaller(value, recipe, widths)
    if recipe == "as it is":
        return value
    if value is None and name == "head_dim" and recipe in _SMALL:
        return HEAD
    if value is None and recipe == "filled":
        return next((given for pattern, given in ABSENT if re.search(pattern, name)), None)
    if isinstance(value, dict):
        return _rotary(plain, value, recipe) if name.startswith("rope") and recipe in _SMALL else value
    if isinstance(value, (list, tuple)):
        return _list(name, value, layers, widths)
    if not isinstance(value, int) or isinstance(value, bool):
        return value
    if re.search(_LAYERS, name) and not re.search(_NO_LAYERS, name) and value > 2:
        return len(layers.get(value, (0, 1)))
    if "vocab" in name and value > VOCABULARY and "type" not in name:
        return VOCABULARY
    if name.endswith(("_id", "_token_index", "_index")) and value >= FIRST_ID:
        return FIRST_ID + sum(map(ord, name)) % 20
    if re.search("kv_shared", name):
        return 0
    for pattern, fixed in (*COUNTS, *(SIZES if recipe in _SMALL else ())):
        if re.search(pattern, name):
            return min(value, fixed)
    if name in _IMAGE and recipe in _SMALL:
        patch = _number(plain, "patch_size")
        return min(value, 128 if patch is None else max(64, 8 * patch))
    staged = any(one == "depths" or one.endswith("_per_stage") for one in vars(plain))
    if name == "num_pos_feats":  # half of a width, twice for x and y
        return widths.get(2 * value, 2 * value) // 2
    if recipe == "shallow" or staged or name in _IMAGE:
        return value  # stages of different width follow rules of their own
    return _size(plain, name, value, widths)


def _size(plain: Any, name: str, value: int, widths: dict[int, int]) -> int:
    own = _width(plain) or max(widths, default=WIDTH)
    made = widths.get(own, WIDTH)
    if re.search(_PAIRS, name):
        heads = _number(plain, *_HEAD_COUNTS) or value
        return HEADS if value >= heads and value > HEADS else min(value, HEADS // 2)
    if re.search(_HEADS, name):
        return min(value, HEADS)
    if value <= WIDTH and value not in widths:
        return value
    if re.search(_INNER, name):
        return max(16, min(2 * made, made * value // own // 16 * 16))
    if value in widths and re.search(r"size|dim|width|d_model|n_embd|channels|groups", name) and "image" not in name:
        return widths[value]
    if re.search(_WIDTHS, name):
        return max(16, min(2 * made, made * value // own // 16 * 16))
    return value


def _rotary(plain: Any, given: dict[str, Any], recipe: str) -> dict[str, Any]:
    """Sections of rotary features as shares of a smaller head."""
    head = _head(plain)
    made = dict(given)
    kinds = vars(plain).get("layer_types")
    if recipe == "filled" and not given and kinds:
        return {kind: {"rope_type": "default", "rope_theta": 10000.0} for kind in sorted(set(kinds))}
    if recipe == "filled" and "rope_theta" in given and "mrope_section" not in given:
        pairs = int(HEAD * given.get("partial_rotary_factor", 1.0)) // 2
        made["mrope_section"] = [pairs - 2 * (pairs // 3), pairs // 3, pairs // 3]
    if head <= HEAD:
        return made
    for name, value in given.items():
        if isinstance(value, dict):
            made[name] = _rotary(plain, value, recipe)
        elif isinstance(value, (list, tuple)) and value and all(isinstance(part, int) for part in value):
            made[name] = [max(1, part * HEAD // head) for part in value]
            made[name][0] += sum(value) * HEAD // head - sum(made[name])
    return made


def _kept_layers(plain: Any) -> dict[int, list[int]]:
    """Number of layers -> the layers that stay: the first of each kind, and two at least."""
    found: dict[int, list[int]] = {}
    for name, count in vars(plain).items():
        if not isinstance(count, int) or isinstance(count, bool) or count < 3 or not re.search(_LAYERS, name):
            continue
        lists = [value for value in vars(plain).values() if isinstance(value, (list, tuple)) and len(value) == count]
        kinds = [tuple(str(value[layer]) for value in lists) for layer in range(count)]
        first = [kinds.index(kind) for kind in dict.fromkeys(kinds)][:4]
        taken = len(vars(plain).get("_out_indices") or ())
        found[count] = sorted({*first, *range(max(2, min(count, taken)))} if len(first) < max(2, taken) else first)
    return found


def _list(name: str, value: Any, layers: dict[int, list[int]], widths: dict[int, int]) -> Any:
    kind = type(value)
    numbers = all(isinstance(one, int) for one in value)
    if name in ("depths", "num_blocks", "layer_depths", "blocks_per_stage", "num_block_repeats") and numbers:
        return kind(min(one, 1) for one in value)
    if name.endswith("channels") and numbers and value and all(one in widths for one in value):
        return kind(widths[one] for one in value)
    if re.search(r"layers|types|pattern|freq|no_rope|indices|config", name) and len(value) in layers:
        return kind(value[layer] for layer in layers[len(value)])
    if name.endswith(("token_id", "_ids")) and numbers:
        return kind(FIRST_ID + number if one >= FIRST_ID else one for number, one in enumerate(value))
    if re.search(r"index|indices|indexes|layers", name) and numbers and layers and not re.search("out_|proj", name):
        # Places of layers: those that are left.
        most = max(len(kept) for kept in layers.values())
        kept = [one for one in value if one < most]
        return kind(kept or ([most - 1] if value else []))
    return value
