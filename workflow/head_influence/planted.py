"""A two-layer model made by hand whose retrieval head is known: the curves' sign is checked on it.

Layer 0 has one head that writes the previous token to every position. In layer 1 KV head 1 looks for the place where
the current token was the previous one and writes the token that stands there: after "... a b ... a" it predicts b. KV
head 0 writes nothing. Where nothing is found, attention rests on the first token, which stays in every cache.
"""

import json
from pathlib import Path

import numpy as np

from head_influence.contexts import TokenContext, TokenItem

TOKENS, CODE, HEAD_DIM = 61, 40, 64  # vocabulary; dimensions of a token's code; the rotary ones below turn too fast
HIDDEN = 3 * CODE
THETA = 1e12
RETRIEVAL = 1, 1  # layer, KV head
LAST_SLOWLY = 12  # pairs of rotary dimensions before this one turn too fast for matching


def _codes(rng):
    """Nearly orthogonal codes (TOKENS, CODE) of length 1."""
    codes = rng.choice([-1.0, 1.0], (TOKENS, CODE))
    return codes / np.linalg.norm(codes, axis=1, keepdims=True)


def _slow_columns():
    """Head dimensions that hardly rotate: (CODE,)."""
    half = HEAD_DIM // 2
    slow = np.arange(LAST_SLOWLY, half)
    return np.concatenate((slow, slow + half))[:CODE]


def write_planted(folder, seed=0):
    """Write the model as a Llama checkpoint.

    The residual stream holds the token's code, the previous token's code, and what layer 1 retrieved; norms leave their
    proportions alone.
    """
    from safetensors.numpy import save_file

    folder, rng = Path(folder), np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    codes = _codes(rng)
    own, before, found = (slice(i * CODE, (i + 1) * CODE) for i in range(3))
    heads, size = 2, HEAD_DIM
    root = np.sqrt(HIDDEN)  # RMSNorm gives a vector of unit length the length sqrt(HIDDEN)
    zeros = {
        "self_attn.q_proj.weight": (heads * size, HIDDEN), "self_attn.k_proj.weight": (heads * size, HIDDEN),
        "self_attn.v_proj.weight": (heads * size, HIDDEN), "self_attn.o_proj.weight": (HIDDEN, heads * size),
        "self_attn.q_proj.bias": (heads * size,), "self_attn.k_proj.bias": (heads * size,),
        "self_attn.v_proj.bias": (heads * size,), "self_attn.o_proj.bias": (HIDDEN,),
        "mlp.gate_proj.weight": (8, HIDDEN), "mlp.up_proj.weight": (8, HIDDEN), "mlp.down_proj.weight": (HIDDEN, 8),
    }  # fmt: skip
    layers = [{name: np.zeros(shape) for name, shape in zeros.items()} for _ in range(2)]
    for layer in layers:
        layer["input_layernorm.weight"] = layer["post_attention_layernorm.weight"] = np.ones(HIDDEN)

    first = layers[0]  # KV head 0: constant query and key, turned so that the logit is largest one position back
    half = size // 2
    angles = THETA ** (-np.arange(half) * 2 / size)
    first["self_attn.k_proj.bias"][:half] = 1
    first["self_attn.q_proj.bias"][:half] = 30 * np.cos(angles)
    first["self_attn.q_proj.bias"][half:size] = -30 * np.sin(angles)
    first["self_attn.v_proj.weight"][:CODE, own] = np.eye(CODE) / root
    first["self_attn.o_proj.weight"][before, :CODE] = np.eye(CODE)

    second, columns = layers[1], size + _slow_columns()  # KV head 1
    scale = np.sqrt(2) / root  # own and previous code have the same length after layer 0
    second["self_attn.q_proj.weight"][columns, own] = np.eye(CODE) * scale * 40 * np.sqrt(size)
    second["self_attn.k_proj.weight"][columns, before] = np.eye(CODE) * scale
    second["self_attn.q_proj.bias"][columns] = codes[0] * 20 * np.sqrt(size)  # at half strength to the first token
    second["self_attn.v_proj.weight"][size : size + CODE, own] = np.eye(CODE) * scale
    second["self_attn.v_proj.bias"][size : size + CODE] = -codes[0]  # the first token's value is nothing
    second["self_attn.o_proj.weight"][found, size : size + CODE] = np.eye(CODE)

    unembedding = np.zeros((TOKENS, HIDDEN))
    unembedding[:, found] = codes * 2
    embedding = np.zeros((TOKENS, HIDDEN))
    embedding[:, own] = codes
    tensors = {
        "model.embed_tokens.weight": embedding,
        "model.norm.weight": np.ones(HIDDEN),
        "lm_head.weight": unembedding,
    }
    for i, layer in enumerate(layers):
        tensors |= {f"model.layers.{i}.{name}": x for name, x in layer.items()}
    save_file({name: np.ascontiguousarray(x, np.float32) for name, x in tensors.items()}, folder / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": TOKENS, "hidden_size": HIDDEN,
        "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": heads, "num_key_value_heads": heads,
        "head_dim": size, "hidden_act": "silu", "rms_norm_eps": 1e-12, "attention_bias": True, "mlp_bias": False,
        "max_position_embeddings": 1024, "tie_word_embeddings": False, "dtype": "float32",
        "rope_parameters": {"rope_theta": THETA, "rope_type": "default"},
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")


def planted_context(seed=0):
    """Return a context of 60 different tokens after the first token; items ask for every part of it alike."""
    article = tuple(int(t) for t in np.random.default_rng(seed).permutation(np.arange(1, TOKENS)))
    items = [TokenItem(f"item{i}", article[i : i + 1], article[i + 1 : i + 6]) for i in range(0, 55, 5)]
    return TokenContext("planted", (0,), article, (), (), tuple(items))
