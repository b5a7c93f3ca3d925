"""Random MiMo checkpoints. transformers has no MiMo, so its Qwen2 is the reference of the model.

The reference of the layer for multi-token prediction is a module of Qwen2's parts, put together as
`modeling_mimo.py` of XiaomiMiMo/MiMo-7B-Base says.
"""

import json
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn
from transformers.models.qwen2 import modeling_qwen2 as qwen2

from tests.oracles import families


class TorchMiMoMTP(nn.Module):
    """The layer, whose parameters have the names of the hub."""

    def __init__(self, config: transformers.Qwen2Config) -> None:
        super().__init__()

        def norm() -> nn.Module:
            return qwen2.Qwen2RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

        self.token_layernorm, self.hidden_layernorm, self.final_layernorm = norm(), norm(), norm()
        self.input_layernorm, self.post_attention_layernorm = norm(), norm()
        self.input_proj = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.self_attn = qwen2.Qwen2Attention(config, layer_idx=0)
        self.mlp = qwen2.Qwen2MLP(config)
        self._rope = qwen2.Qwen2RotaryEmbedding(config)

    def forward(
        self,
        embedded: torch.Tensor,  # f[num_tokens, hidden], of the next tokens
        hidden: torch.Tensor,  # f[num_tokens, hidden], before the last norm of the target
    ) -> torch.Tensor:  # f[num_tokens, hidden]
        num_tokens = hidden.shape[0]
        joined = torch.cat([self.hidden_layernorm(hidden), self.token_layernorm(embedded)], dim=-1)
        residual = self.input_proj(joined)[None]
        attended, _ = self.self_attn(
            self.input_layernorm(residual),
            position_embeddings=self._rope(residual, torch.arange(num_tokens)[None]),
            attention_mask=torch.full((num_tokens, num_tokens), -torch.inf).triu(1)[None, None],
        )
        residual = residual + attended
        residual = residual + self.mlp(self.post_attention_layernorm(residual))
        return self.final_layernorm(residual)[0]


def make_mimo(folder: Path, *, seed: int) -> tuple[transformers.Qwen2ForCausalLM, TorchMiMoMTP]:
    """Saves a checkpoint with the layer, and returns the model and the layer."""
    table = {"mimo": lambda: families._c("Qwen2Config", num_hidden_layers=2)}
    model, config = families.build("mimo", seed, table)
    families.sharpen(model, seed)
    families.finish(model, folder)
    path = folder / "config.json"
    fields = json.loads(path.read_text()) | {
        "architectures": ["MiMoForCausalLM"],
        "model_type": "mimo",
        "num_nextn_predict_layers": 1,
    }
    path.write_text(json.dumps(fields))
    layer = families.seeded(TorchMiMoMTP(config).float().eval(), seed + 1)
    tensors = {f"model.mtp_layers.0.{name}": t for name, t in layer.state_dict().items()}
    path = folder / "model.safetensors"
    save_file(load_file(path) | tensors, path, metadata={"format": "pt"})
    return model, layer
