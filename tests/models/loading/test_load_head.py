"""EAGLE-3 heads compute what a plain implementation in NumPy computes."""

import json

import numpy as np
import pytest

from models import ModelConfigError, UnsupportedModelError, load_model
from models.loading.kernel_encoder import KernelEncoder
from models.loading.load_head import load_eagle3_head
from tests.models.drafters.eagle3_checkpoints import CONFIG, write_eagle3_head
from tests.models.drafters.head_stepper import HeadStepper

MAX_TOKENS = 24
# Tokens of the longer chunk.
WIDTH = 13


def norm(x, scale):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + CONFIG["rms_norm_eps"]) * scale


def turn(heads, positions):  # f[num_tokens, num_heads, head_dim]
    half = heads.shape[-1] // 2
    angles = positions[:, None] * CONFIG["rope_theta"] ** (-np.arange(half) / half)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    first, second = heads[..., :half], heads[..., half:]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


def plain_head(weights, embedded, hidden, *, norms_residual):
    """Hidden states of the head for a whole text; `hidden` comes out of fc."""
    w = {name.removeprefix("midlayer."): np.float64(weight) for name, weight in weights.items()}
    num_tokens, head_dim = len(hidden), CONFIG["head_dim"]
    normed = norm(hidden, w["hidden_norm.weight"])
    joined = np.concatenate([norm(embedded, w["input_layernorm.weight"]), normed], -1)
    q, k, v = (
        (joined @ w[f"self_attn.{name}_proj.weight"].T).reshape(num_tokens, -1, head_dim)
        for name in "qkv"
    )
    positions = np.arange(num_tokens)
    q, k = turn(q, positions), turn(k, positions)
    k, v = (np.repeat(x, q.shape[1] // k.shape[1], axis=1) for x in (k, v))
    scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(head_dim)
    scores = np.where(positions[:, None] >= positions[None], scores, -np.inf)
    probs = np.exp(scores - scores.max(-1, keepdims=True))
    probs /= probs.sum(-1, keepdims=True)
    attended = np.einsum("hqk,khd->qhd", probs, v).reshape(num_tokens, -1)
    residual = normed if norms_residual else hidden
    hidden = residual + attended @ w["self_attn.o_proj.weight"].T
    normed = norm(hidden, w["post_attention_layernorm.weight"])
    gate = normed @ w["mlp.gate_proj.weight"].T
    up = normed @ w["mlp.up_proj.weight"].T
    return hidden + (gate / (1 + np.exp(-gate)) * up) @ w["mlp.down_proj.weight"].T


def plain_tokens(weights, hidden):
    logits = norm(hidden, np.float64(weights["norm.weight"])) @ weights["lm_head.weight"].T
    draft_ids = logits.argmax(-1)
    return (draft_ids + weights["d2t"][draft_ids]).tolist() if "d2t" in weights else draft_ids


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """A Llama of transformers with three layers, and the same model here."""
    from tests.oracles import families

    folder = tmp_path_factory.mktemp("target")
    model, _ = families.make("llama", folder, 2)
    return model, load_model(folder, dtype="float32", max_model_len=MAX_TOKENS)


@pytest.mark.parametrize(
    ("layer_name", "fields", "draft_vocab_size"),
    [
        ("midlayer", {}, 100),
        ("layers.0", {"norm_before_residual": True}, 768),
    ],
)
def test_tokens_are_those_of_a_plain_implementation(
    target, tmp_path, layer_name, fields, draft_vocab_size
):
    """Of a prompt in two chunks, and of a draft that follows from the head's own hidden state."""
    import torch

    theirs, model = target
    weights = write_eagle3_head(
        tmp_path,
        vocab_size=768,
        draft_vocab_size=draft_vocab_size,
        layer_ids=[1, 2],
        layer_name=layer_name,
        **fields,
    )
    head = load_eagle3_head(model, tmp_path, encoder=KernelEncoder(platform=model.platform))
    stepper = HeadStepper(model, head, max_tokens=MAX_TOKENS, width=WIDTH)
    token_ids = np.random.RandomState(0).randint(2, 700, 21).tolist()
    with torch.no_grad():
        outputs = theirs(torch.tensor([token_ids[:20]]), output_hidden_states=True)
        taps = [outputs.hidden_states[idx][0].double().numpy() for idx in (1, 2)]
        table = theirs.get_input_embeddings().weight.double().numpy()
    fused = np.concatenate(taps, -1) @ weights["fc.weight"].T
    norms_residual = fields.get("norm_before_residual", False)
    wanted = plain_head(weights, table[token_ids[1:]], fused, norms_residual=norms_residual)
    rows = []
    for start, end in ((0, WIDTH), (WIDTH, 20)):
        hidden = stepper.compute_hidden(token_ids[start:end], start)
        rows.append(stepper.predict(token_ids[start + 1 : end + 1], hidden, start))
        np.testing.assert_allclose(rows[-1], wanted[start:end], atol=2e-4)
        assert stepper.choose(rows[-1]) == list(plain_tokens(weights, wanted[start:end]))
    (draft,) = stepper.choose(rows[-1][-1:])
    embedded = table[[*token_ids[1:], draft]]
    fused = np.concatenate([fused, wanted[-1:]])
    wanted = plain_head(weights, embedded, fused, norms_residual=norms_residual)
    found = stepper.predict([draft], rows[-1][-1:], 20)
    np.testing.assert_allclose(found, wanted[-1:], atol=2e-4)


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"vocab_size": 700}, ModelConfigError, "vocab_size is 700; the model has 768"),
        ({"num_hidden_layers": 2}, UnsupportedModelError, "num_hidden_layers is 2"),
        ({"norm_before_fc": True}, UnsupportedModelError, "norm_before_fc=True"),
        (
            {"eagle_aux_hidden_state_layer_ids": [2, 4]},
            ModelConfigError,
            r"is \[2, 4\]; expected different numbers from 1 to 3",
        ),
        ({"hidden_size": 48}, ModelConfigError, "needs embed_tokens.weight"),
    ],
)
def test_head_that_does_not_fit_is_refused(target, tmp_path, fields, error, message):
    write_eagle3_head(tmp_path, vocab_size=768, draft_vocab_size=100, layer_ids=[1, 2])
    config = json.loads((tmp_path / "config.json").read_text()) | fields
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(error, match=message):
        load_eagle3_head(target[1], tmp_path, encoder=KernelEncoder(platform=target[1].platform))
