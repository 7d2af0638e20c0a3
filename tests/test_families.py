"""Every family's arithmetic against transformers' own modules on tiny models, baseline and after an intervention."""

import json
import shutil
import sys

import numpy as np
import pytest
import torch
from head_influence import StudyError
from head_influence.checkpoint import Checkpoint
from head_influence.families import check, family_of, layer_of
from head_influence.trace import trace
from models_tiny import COMMON, HYBRID, byte_tokenizer, token_ids
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

EXPERTS = {"num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 11}
SHARED = EXPERTS | {"shared_expert_intermediate_size": 9}
GQA = {"num_attention_heads": 6, "num_key_value_heads": 2}
LINEAR = HYBRID | {"attention_bias": True}

MODELS = {
    "llama": COMMON | {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "llama_odd_heads": COMMON
    | {"model_type": "llama", "hidden_size": 21, "num_attention_heads": 3, "num_key_value_heads": 1},
    "llama_untied": COMMON | {"model_type": "llama", "tie_word_embeddings": False, "hidden_act": "gelu_pytorch_tanh"},
    "llama_scaled_rotary": COMMON
    | {
        "model_type": "llama",
        "rope_parameters": {
            "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
        },
    },
    "mistral": COMMON | GQA | {"model_type": "mistral", "sliding_window": 9},
    "mistral_no_window": COMMON | {"model_type": "mistral", "sliding_window": None},
    "qwen2": COMMON | {"model_type": "qwen2", "hidden_size": 24, "head_dim": None},
    "qwen2_window": COMMON
    | {
        "model_type": "qwen2", "hidden_size": 24, "head_dim": None,
        "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1,
    },
    "qwen3": COMMON | GQA | {"model_type": "qwen3", "attention_bias": True},
    "qwen3_window": COMMON
    | {
        "model_type": "qwen3", "use_sliding_window": True, "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "qwen3_moe": COMMON | GQA | EXPERTS | {"model_type": "qwen3_moe", "norm_topk_prob": True},
    "qwen3_moe_raw_weights": COMMON | EXPERTS | {"model_type": "qwen3_moe", "norm_topk_prob": False},
    "qwen3_moe_some_dense": COMMON | EXPERTS | {"model_type": "qwen3_moe", "decoder_sparse_step": 2},
    "qwen3_moe_window": COMMON | EXPERTS | {"model_type": "qwen3_moe", "use_sliding_window": True, "sliding_window": 6},
    "qwen3_next": LINEAR | SHARED | {"model_type": "qwen3_next", "mlp_only_layers": [1]},
    "qwen3_5": LINEAR | {"model_type": "qwen3_5_text"},
    "qwen3_5_equal_heads": HYBRID | {"linear_num_key_heads": 3, "linear_num_value_heads": 3},
    "qwen3_5_moe": LINEAR | SHARED | {"model_type": "qwen3_5_moe_text"},
}  # fmt: skip
SPARSE = [name for name in MODELS if "moe" in name or "next" in name]
LONG = 70  # tokens: more than one chunk of the delta rule


def build(name):
    """A tiny model of transformers with heads of real size, and norms and biases that are not at their defaults."""
    fields = {key: value for key, value in MODELS[name].items() if value is not None or key == "sliding_window"}
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    torch.manual_seed(sorted(MODELS).index(name))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    if name in SPARSE:  # the default, a grouped product, refuses sizes that are no multiple of 4
        model.set_experts_implementation("eager")
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.add_(0.3 * torch.randn(parameter.shape))
            elif "conv1d" in parameter_name:
                parameter.copy_(torch.randn(parameter.shape))
            else:
                parameter.copy_(torch.randn(parameter.shape) / parameter.shape[-1] ** 0.5)
        model.model.embed_tokens.weight.mul_(config.hidden_size**0.5)
    return model


@pytest.fixture(scope="module", params=MODELS)
def tiny(request, tmp_path_factory):
    """A model of transformers, and the checkpoint that it saved itself."""
    model = build(request.param)
    folder = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(folder)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    ids = token_ids(LONG)
    checkpoint = Checkpoint(folder)
    check(checkpoint)
    return model, checkpoint, ids, trace(checkpoint, ids)


def assert_close(found, expected, limit=1e-5):
    assert found.shape == expected.shape
    assert np.abs(found - expected).max() <= limit * np.abs(expected).max()


def pieces(layer):
    """The parts of a real decoder layer: its mixer and output projection."""
    linear = hasattr(layer, "linear_attn")
    mixer = layer.linear_attn if linear else layer.self_attn
    return mixer, mixer.out_proj if linear else mixer.o_proj, linear


@torch.no_grad()
def real_recipient(model, index, residual, position_embeddings, mask):
    """Run real decoder layer `index` alone on a residual stream; return its effective Q, K, V and softmax rows."""
    layer = model.model.layers[index]
    mixer, _, linear = pieces(layer)
    code, seen = sys.modules[type(mixer).__module__], {}
    if linear:
        own = code.torch_chunk_gated_delta_rule

        def rule(query, key, value, **kwargs):
            groups = value.shape[2] // key.shape[2]
            q, k = (x[0].repeat_interleave(groups, dim=1) for x in (query, key))
            q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
            seen.update(q=q * q.shape[-1] ** -0.5, k=k, v=value[0])
            return own(query, key, value, **kwargs)

        code.torch_chunk_gated_delta_rule = rule
    else:
        own = code.eager_attention_forward

        def attention(module, query, key, value, *args, **kwargs):
            output, rows = own(module, query, key, value, *args, **kwargs)
            groups = query.shape[1] // key.shape[1]
            k, v = (x[0].repeat_interleave(groups, dim=0) for x in (key, value))
            seen.update(q=query[0].transpose(0, 1), k=k.transpose(0, 1), v=v.transpose(0, 1), rows=rows[0])
            return output, rows

        code.eager_attention_forward = attention
    try:
        layer(residual[None], position_embeddings=position_embeddings, attention_mask=None if linear else mask)
    finally:
        setattr(code, "torch_chunk_gated_delta_rule" if linear else "eager_attention_forward", own)
    return {name: value.numpy() for name, value in seen.items()}


@torch.no_grad()
def real_pass(model, ids):
    """Run the real model; return per layer what enters it and how, and its branch's input and output."""
    records, handles = [{} for _ in model.model.layers], []
    for record, layer in zip(records, model.model.layers, strict=True):

        def before(module, args, kwargs, record=record):
            record["residual"] = args[0][0]
            record["positions"] = kwargs["position_embeddings"]
            record["mask"] = kwargs.get("attention_mask")

        def projection(module, args, output, record=record):
            record.update(values=args[0][0], branch=output[0])

        handles.append(layer.register_forward_pre_hook(before, with_kwargs=True))
        handles.append(pieces(layer)[1].register_forward_hook(projection))
    model(torch.tensor([ids]), use_cache=False)
    for handle in handles:
        handle.remove()
    return records


def library_recipient(checkpoint, index, after_branch, cos, sin, scaling):
    """The library's effective Q, K, V (repeated to the heads that use them) and softmax rows of layer `index`."""
    source, recipient = layer_of(checkpoint, index - 1), layer_of(checkpoint, index)
    parts = recipient.project(recipient.normed(source.finish(after_branch)))
    vectors = recipient.effective({c: x[None] for c, x in parts.items()}, cos, sin)
    found = {c: recipient.slots(x[0], axis=1) for c, x in vectors.items()}
    if recipient.kind == "softmax":
        found["rows"] = recipient.retrieval(vectors["q"], vectors["k"], scaling)[0]
    return found


def test_trace_is_the_real_model(tiny):
    model, checkpoint, ids, (records, last) = tiny
    for record, real in zip(records, real_pass(model, ids), strict=True):
        assert_close(record["residual_in"], real["residual"].numpy())
        assert_close(record["branch_out"], real["branch"].numpy())
    with torch.no_grad():
        logits = model(torch.tensor([ids]), use_cache=False).logits[0].numpy()
    assert_close(last @ checkpoint.head_weight().T, logits)


def test_contributions_add_up_to_the_branch(tiny):
    model, checkpoint, ids, (records, _) = tiny
    for index, real in enumerate(real_pass(model, ids)):
        layer = layer_of(checkpoint, index)
        contribution = layer.contributions(records[index]["head_values"])
        assert len(contribution) == layer.heads
        total = contribution.astype(np.float64).sum(axis=0)
        if layer.out_bias is not None:
            total += layer.out_bias
        assert_close(total, real["branch"].numpy())


def test_intervened_recipient_is_the_real_one(tiny):
    """Nothing, one head, and half of the heads removed: the next real layer runs on the changed residual stream."""
    model, checkpoint, ids, (records, _) = tiny
    real = real_pass(model, ids)
    for index in range(1, len(records)):
        source, record = layer_of(checkpoint, index - 1), records[index - 1]
        layer = model.model.layers[index - 1]
        weight = pieces(layer)[1].weight
        size = weight.shape[1] // source.heads
        for removed in ([], [source.heads - 1], list(range(0, source.heads, 2))):
            values = real[index - 1]["values"].clone()
            for head in removed:
                values[:, head * size : (head + 1) * size] = 0
            with torch.no_grad():
                r = real[index - 1]["residual"] + pieces(layer)[1](values)
                after = r + layer.mlp(layer.post_attention_layernorm(r)[None])[0]
            expected = real_recipient(model, index, after, real[index]["positions"], real[index]["mask"])
            rows = record["residual_in"] + record["branch_out"]
            rows = rows - source.contributions(record["head_values"])[removed].sum(axis=0)
            found = library_recipient(
                checkpoint, index, rows, *(records[index].get(n) for n in ("cos", "sin", "scaling"))
            )
            assert found.keys() == expected.keys()
            for name, value in expected.items():
                assert_close(found[name], value)


def test_one_head_is_projected_as_among_all(tiny):
    _, checkpoint, _, (records, _) = tiny
    for index, record in enumerate(records):
        layer = layer_of(checkpoint, index)
        normed = layer.normed(record["residual_in"])
        every = layer.effective(
            {c: x[None] for c, x in layer.project(normed).items()}, record.get("cos"), record.get("sin")
        )
        for head in range(layer.heads):
            parts = {c: x[None] for c, x in layer.project(normed, head).items()}
            one = layer.effective(parts, record.get("cos"), record.get("sin"), head)
            for c, x in one.items():
                assert_close(x[0, :, 0], layer.slots(every[c], axis=2)[0, :, head])


def test_window_hides_earlier_keys(tiny):
    _, checkpoint, _, (records, _) = tiny
    for index, record in enumerate(records):
        layer = layer_of(checkpoint, index)
        if layer.window is None:
            continue
        rows = record["retrieval"]
        assert (rows[:, -1, : LONG - layer.window] == 0).all() and (rows[:, -1, LONG - layer.window :] > 0).all()


@pytest.mark.parametrize(
    ("name", "windows"),
    [
        ("mistral", [9, 9, 9]),
        ("mistral_no_window", [None] * 3),
        ("qwen2", [None] * 3),
        ("qwen2_window", [None, 5, 5]),
        ("qwen3_window", [5, None, 5]),
        ("qwen3_moe_window", [6, 6, 6]),
    ],
)
def test_windows(name, windows, tmp_path):
    build(name).save_pretrained(tmp_path)
    checkpoint = Checkpoint(tmp_path)
    assert [layer_of(checkpoint, index).window for index in range(3)] == windows


@pytest.mark.parametrize("name", SPARSE)
def test_removal_changes_the_routing(name, tmp_path):
    """The intervention test above means something for experts only if other experts are chosen."""
    build(name).save_pretrained(tmp_path)
    checkpoint = Checkpoint(tmp_path)
    records, _ = trace(checkpoint, token_ids(LONG))
    changed = 0
    for index, record in enumerate(records):
        layer = layer_of(checkpoint, index)
        if layer.sparse:
            rows = record["residual_in"] + record["branch_out"]
            less = rows - layer.contributions(record["head_values"])[0]
            routes = [np.sort(layer.route(layer.post_norm(x))[0]) for x in (rows, less)]
            changed += (routes[0] != routes[1]).any(axis=1).sum()
    assert changed > 2


def split_experts(folder, target):
    """Store fused experts one by one, as published checkpoints do."""
    shutil.copytree(folder, target, dirs_exist_ok=True)
    state, split = load_file(folder / "model.safetensors"), {}
    for name, value in state.items():
        for expert in range(len(value)) if ".mlp.experts." in name else ():
            start = name.rpartition(".")[0] + f".{expert}."
            if name.endswith("gate_up_proj"):
                gate, up = value[expert].chunk(2)
                split |= {start + "gate_proj.weight": gate.contiguous(), start + "up_proj.weight": up.contiguous()}
            else:
                split[start + "down_proj.weight"] = value[expert].contiguous()
        if ".mlp.experts." not in name:
            split[name] = value
    save_file(split, target / "model.safetensors")


@pytest.mark.parametrize("name", ["qwen3_moe", "qwen3_next", "qwen3_5_moe"])
def test_both_layouts_of_experts_are_the_same_model(name, tmp_path):
    model = build(name)
    model.save_pretrained(tmp_path / "saved")
    state = load_file(tmp_path / "saved/model.safetensors")
    fused = any(n.endswith("experts.gate_up_proj") for n in state)
    if not fused:
        merged = {n: v for n, v in model.state_dict().items() if not (n == "lm_head.weight" and n not in state)}
        shutil.copytree(tmp_path / "saved", tmp_path / "fused")
        save_file({n: v.contiguous() for n, v in merged.items()}, tmp_path / "fused/model.safetensors")
        folders = tmp_path / "fused", tmp_path / "saved"
    else:
        split_experts(tmp_path / "saved", tmp_path / "split")
        folders = tmp_path / "saved", tmp_path / "split"
    checkpoints = [Checkpoint(folder) for folder in folders]
    assert [layer_of(c, 0).fused for c in checkpoints] == [True, False]
    x = np.random.default_rng(0).standard_normal((13, 20), np.float32)
    for index in range(len(check(checkpoints[0]))):
        one, other = (layer_of(c, index) for c in checkpoints)
        other.check()
        assert (one.finish(x) == other.finish(x)).all()
        for key, value in one.module_tensors().items():
            assert (value == other.module_tensors()[key]).all()
    assert (trace(checkpoints[0], [1, 2, 3])[1] == trace(checkpoints[1], [1, 2, 3])[1]).all()


@pytest.mark.parametrize(("name", "missing"), [("qwen3_moe", "experts.6.up_proj"), ("qwen3_next", "A_log")])
def test_missing_tensor_is_named(name, missing, tmp_path):
    build(name).save_pretrained(tmp_path / "saved")
    folder = tmp_path / "saved"
    state = load_file(folder / "model.safetensors")
    if any(n.endswith("gate_up_proj") for n in state) and "experts" in missing:
        split_experts(folder, tmp_path / "split")
        folder = tmp_path / "split"
        state = load_file(folder / "model.safetensors")
    gone = next(n for n in state if missing in n)
    save_file({n: v for n, v in state.items() if n != gone}, folder / "model.safetensors")
    with pytest.raises(StudyError, match=rf"tensor {gone} is missing"):
        check(Checkpoint(folder))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_hidden_layers": 4}, "num_hidden_layers is 4, but the tensors are of 3"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers: expected a positive integer, found 1000000000"),
        ({"num_hidden_layers": True}, "num_hidden_layers: expected a positive integer, found True"),
        ({"num_attention_heads": 0}, "num_attention_heads: expected a positive integer, found 0"),
        (
            {"num_attention_heads": 5, "num_key_value_heads": 2},
            "num_attention_heads 5 is not a multiple of num_key_value_heads 2",
        ),
        ({"hidden_size": "21"}, "hidden_size: expected a positive integer, found '21'"),
        ({"hidden_size": 22}, r"input_layernorm.weight has shape \(21,\); config.json makes it \(22,\)"),
        ({"intermediate_size": 24}, r"mlp.gate_proj.weight has shape \(23, 21\); config.json makes it \(24, 21\)"),
        ({"vocab_size": 261}, r"embed_tokens.weight has shape \(260, 21\); config.json makes it \(261, 21\)"),
        ({"tie_word_embeddings": False}, "tensor lm_head.weight is missing and not tied to the embedding"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps: expected a small number, found nan"),
        ({"hidden_act": ["silu"]}, "hidden_act .* is not supported; supported: gelu_pytorch_tanh, relu, silu, swish"),
        ({"attention_bias": True}, "self_attn.q_proj.bias is missing"),
        ({"attention_bias": "yes"}, "attention_bias: expected true or false, found 'yes'"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config: quantised weights are not supported"),
        ({"model_type": "gpt2"}, "model_type 'gpt2' is not supported; supported: llama, mistral, qwen2"),
        ({"model_type": ["llama"]}, "model_type .* is not supported"),
        ({"model_type": "qwen3"}, "self_attn.q_norm.weight is missing"),
        ({"model_type": "gemma2"}, "normalises the attention branch before adding it"),
    ],
)
def test_configuration_that_does_not_fit(change, message, tmp_path):
    build("llama_odd_heads").save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(StudyError, match=message) as error:
        check(Checkpoint(tmp_path))
    assert "\n" not in str(error.value) and str(tmp_path) in str(error.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer_types": ["full_attention"]}, "layer_types: expected 5 of full_attention, linear_attention"),
        ({"layer_types": [["full_attention"]] * 5}, "layer_types: expected 5 of"),
        ({"layer_types": None, "full_attention_interval": 0}, "full_attention_interval: expected a positive integer"),
        ({"linear_num_value_heads": 3}, "linear_num_value_heads 3 is not a multiple of linear_num_key_heads 2"),
        ({"num_experts_per_tok": 8}, "num_experts_per_tok 8 is more than num_experts 7"),
        ({"mlp_only_layers": 1}, "mlp_only_layers: expected a list of layers"),
        ({"norm_topk_prob": 1}, "norm_topk_prob: expected true or false"),
    ],
)
def test_hybrid_configuration_that_does_not_fit(change, message, tmp_path):
    build("qwen3_next").save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(StudyError, match=message):
        check(Checkpoint(tmp_path))


def test_foreign_tensor_is_refused(tmp_path):
    build("llama_odd_heads").save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    state["model.layers.1.self_attn.q_norm.weight"] = torch.ones(6)
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(StudyError, match=r"layers.1.self_attn.q_norm.weight is not part of model_type llama"):
        check(Checkpoint(tmp_path))
    state["model.layers.1.self_attn.rotary_emb.inv_freq"] = torch.ones(3)
    del state["model.layers.1.self_attn.q_norm.weight"]
    save_file(state, tmp_path / "model.safetensors")
    assert len(check(Checkpoint(tmp_path))) == 3
    assert trace(Checkpoint(tmp_path), [1, 2])[1].shape == (2, 21)


@torch.no_grad()
def test_post_norms_break_the_additive_identity():
    """Why gemma2 is refused: what a layer adds to the stream is not the sum of what its heads write."""
    fields = {k: v for k, v in COMMON.items() if k != "rms_norm_eps"}
    config = AutoConfig.for_model("gemma2", **fields, sliding_window=64)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    seen, layer = {}, model.model.layers[0]
    layer.self_attn.o_proj.register_forward_hook(lambda _, args, output: seen.update(sum=output))
    layer.post_attention_layernorm.register_forward_hook(lambda _, args, output: seen.update(added=output))
    model(torch.tensor([token_ids(9)]))
    assert (seen["added"] - seen["sum"]).abs().max() > 0.5 * seen["added"].abs().max()


def test_supported_model_types_have_modules(tmp_path):
    build("qwen2").save_pretrained(tmp_path)
    checkpoint = Checkpoint(tmp_path)
    for name in ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"):
        checkpoint.text_config["model_type"] = name
        assert callable(family_of(checkpoint).layer)


def test_token_outside_the_vocabulary(tmp_path):
    build("qwen2").save_pretrained(tmp_path)
    with pytest.raises(StudyError, match=r"token 260, but the model's vocabulary has 260: tokenizer\.json"):
        trace(Checkpoint(tmp_path), [1, 260])
