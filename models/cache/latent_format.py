"""`LatentFormat`: the latents of multi-head latent attention (MLA)."""

from dataclasses import dataclass
from typing import Literal

from models.cache.latent_self_test import LatentSelfTest
from models.cache.self_test import AttentionRules
from models.cache.vector_format import VectorFormat


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentFormat(VectorFormat):
    """The vector of a token is its latent, followed by its rotary key."""

    latent_dim: int
    rope_dim: int
    kind: Literal["latent"] = "latent"

    @classmethod
    def unpadded(cls, *, latent_dim: int, rope_dim: int, dtype: str) -> "LatentFormat":
        width = latent_dim + rope_dim
        return cls(latent_dim=latent_dim, rope_dim=rope_dim, width=width, dtype=dtype)

    @property
    def content_dim(self) -> int:
        return self.latent_dim + self.rope_dim

    def self_tests(
        self, attention: AttentionRules | None, block_size: int
    ) -> tuple[LatentSelfTest, ...]:
        if attention is None:
            return ()
        test = LatentSelfTest(
            scale=attention.scale,
            num_q_heads=attention.num_q_heads,
            latent_dim=self.latent_dim,
            rope_dim=self.rope_dim,
            width=self.width,
            block_size=block_size,
            dtype=self.dtype,
        )
        return (test,)
