"""The traditional scheme in plain torch: a preallocated contiguous cache and static batches.

Every row of a batch owns `[max_len]` positions of the cache, reserved before the first token. The
row's tokens fill the positions from 0 on. Requests run in order of arrival in batches of
`batch_size`, and all wait for the longest output of their batch.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch.nn import functional as F

from benchmarks.compare_torch.transformers_model import TORCH_DTYPES
from benchmarks.engine.offline_engine import EngineOutput, EngineSpec
from benchmarks.workloads import Workload, WorkloadRequest


def load_engine(spec: EngineSpec, workload: Workload) -> "ContiguousEngine":
    del workload
    torch.set_num_threads(spec.num_threads)
    return ContiguousEngine(Path(spec.checkpoint), TORCH_DTYPES[spec.dtype])


class ContiguousCache:
    """Keys and values of all layers and rows, allocated once and reused by every batch."""

    def __init__(self, config: dict[str, int], batch_size: int, dtype: torch.dtype) -> None:
        shape = (
            config["num_hidden_layers"],
            batch_size,
            config["num_key_value_heads"],
            config["max_position_embeddings"],
            config["head_dim"],
        )
        # f[num_layers, batch_size, num_kv_heads, max_len, head_dim]
        self.k = torch.zeros(shape, dtype=dtype)
        self.v = torch.zeros(shape, dtype=dtype)


class Qwen3:
    """A Qwen3 with a tied head."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        self.config = json.loads((folder / "config.json").read_text())
        weights = load_file(folder / "model.safetensors")
        self._weights = {name: weight.to(dtype) for name, weight in weights.items()}
        head_dim, max_len = self.config["head_dim"], self.config["max_position_embeddings"]
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        angles = torch.outer(
            torch.arange(max_len, dtype=torch.float32), self.config["rope_theta"] ** -exponents
        )
        # f[max_len, head_dim]
        self._cos = torch.cat((angles, angles), dim=-1).cos().to(dtype)
        self._sin = torch.cat((angles, angles), dim=-1).sin().to(dtype)

    def prefill(
        self,
        token_ids: torch.Tensor,  # i64[batch_size, num_tokens], padded on the right
        lengths: torch.Tensor,  # i64[batch_size]
        cache: ContiguousCache,
    ) -> torch.Tensor:  # f[batch_size, vocab_size]
        """Logits after each prompt.

        Padding tokens are written after the row's last position. The row's next tokens overwrite
        them before they are read.
        """
        batch_size, num_tokens = token_ids.shape
        positions = torch.arange(num_tokens).expand(batch_size, -1)
        hidden = self._weights["model.embed_tokens.weight"][token_ids]
        for layer_idx in range(self.config["num_hidden_layers"]):
            q, k, v = self._qkv(layer_idx, hidden, positions)
            cache.k[layer_idx, :batch_size, :, :num_tokens] = k
            cache.v[layer_idx, :batch_size, :, :num_tokens] = v
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            hidden = self._after_attention(layer_idx, hidden, attended)
        return self._logits(hidden[torch.arange(batch_size), lengths - 1])

    def decode(
        self,
        token_ids: torch.Tensor,  # i64[batch_size]
        positions: torch.Tensor,  # i64[batch_size]
        cache: ContiguousCache,
    ) -> torch.Tensor:  # f[batch_size, vocab_size]
        """Logits after one more token of each row."""
        batch_size = len(token_ids)
        num_kv_heads, head_dim = self.config["num_key_value_heads"], self.config["head_dim"]
        rows = torch.arange(batch_size)
        num_keys = int(positions.max()) + 1
        mask = (torch.arange(num_keys) <= positions[:, None])[:, None, None, :]
        hidden = self._weights["model.embed_tokens.weight"][token_ids][:, None]
        for layer_idx in range(self.config["num_hidden_layers"]):
            q, k, v = self._qkv(layer_idx, hidden, positions[:, None])
            cache.k[layer_idx, rows, :, positions] = k[:, :, 0]
            cache.v[layer_idx, rows, :, positions] = v[:, :, 0]
            # The query heads of a KV head are passed as query tokens, so no key is repeated.
            attended = F.scaled_dot_product_attention(
                q.view(batch_size, num_kv_heads, -1, head_dim),
                cache.k[layer_idx, :batch_size, :, :num_keys],
                cache.v[layer_idx, :batch_size, :, :num_keys],
                attn_mask=mask,
            )
            attended = attended.reshape(batch_size, -1, 1, head_dim)
            hidden = self._after_attention(layer_idx, hidden, attended)
        return self._logits(hidden[:, 0])

    def _qkv(
        self, layer_idx: int, hidden: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # f[batch_size, heads, tokens, head_dim]
        prefix = f"model.layers.{layer_idx}"
        normed = self._norm(f"{prefix}.input_layernorm", hidden)
        q, k, v = (
            F.linear(normed, self._weights[f"{prefix}.self_attn.{name}_proj.weight"])
            .unflatten(-1, (-1, self.config["head_dim"]))
            .transpose(1, 2)
            for name in "qkv"
        )
        cos, sin = self._cos[positions][:, None], self._sin[positions][:, None]
        q = _rotated(self._norm(f"{prefix}.self_attn.q_norm", q), cos, sin)
        k = _rotated(self._norm(f"{prefix}.self_attn.k_norm", k), cos, sin)
        return q, k, v

    def _after_attention(
        self, layer_idx: int, hidden: torch.Tensor, attended: torch.Tensor
    ) -> torch.Tensor:
        prefix = f"model.layers.{layer_idx}"
        attended = attended.transpose(1, 2).flatten(2)
        hidden = hidden + F.linear(attended, self._weights[f"{prefix}.self_attn.o_proj.weight"])
        normed = self._norm(f"{prefix}.post_attention_layernorm", hidden)
        gate, up = (
            F.linear(normed, self._weights[f"{prefix}.mlp.{name}_proj.weight"])
            for name in ("gate", "up")
        )
        return hidden + F.linear(F.silu(gate) * up, self._weights[f"{prefix}.mlp.down_proj.weight"])

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        normed = self._norm("model.norm", hidden)
        return F.linear(normed, self._weights["model.embed_tokens.weight"])

    def _norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        weight = self._weights[f"{name}.weight"]
        return F.rms_norm(x, weight.shape, weight, self.config["rms_norm_eps"])


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotates pairs that are half a head apart, as in Hugging Face checkpoints."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class ContiguousEngine:
    """Batches of `batch_size` over one cache, which the first run of that size allocates."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        self._model = Qwen3(folder, dtype)
        self._dtype = dtype
        self._caches: dict[int, ContiguousCache] = {}

    def prepare(self) -> None:
        pass

    @torch.inference_mode()
    def run(self, workload: Workload, batch_size: int) -> EngineOutput:
        if batch_size not in self._caches:
            cache = ContiguousCache(self._model.config, batch_size, self._dtype)
            self._caches[batch_size] = cache
        token_ids = []
        for start in range(0, len(workload.requests), batch_size):
            batch = workload.requests[start : start + batch_size]
            token_ids += self._run_batch(batch, self._caches[batch_size])
        return EngineOutput(token_ids=token_ids)

    def _run_batch(
        self, requests: list[WorkloadRequest], cache: ContiguousCache
    ) -> list[list[int]]:
        prompts = [torch.tensor(request.prompt_token_ids) for request in requests]
        lengths = torch.tensor([len(prompt) for prompt in prompts])
        padded = torch.nn.utils.rnn.pad_sequence(prompts, batch_first=True)
        new_ids = [self._model.prefill(padded, lengths, cache).argmax(-1)]
        for step in range(max(request.num_output_tokens for request in requests) - 1):
            # A finished row continues within its reserved positions.
            positions = (lengths + step).clamp(max=cache.k.shape[3] - 1)
            new_ids.append(self._model.decode(new_ids[-1], positions, cache).argmax(-1))
        return [
            row[: request.num_output_tokens]
            for row, request in zip(torch.stack(new_ids, 1).tolist(), requests, strict=True)
        ]

    def logit_gap(self, token_ids: list[int], first: int, second: int) -> float:
        raise NotImplementedError("transformers computes logit gaps.")

    def close(self) -> None:
        pass
