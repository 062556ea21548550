"""Grouped-query attention over the paged cache; with `open_pages.py` and `heavy_hitters.py`, all that calls kernels."""

from typing import Any

import flax.linen as nn
import jax
from jaxtyping import Array, Float

from jaxinfer.config import ModelConfig
from jaxinfer.model import heavy_hitters, open_pages
from jaxinfer.model.batch import TokenBatch
from jaxinfer.model.join import join
from jaxinfer.model.kv_cache import KeyLog, OpenPages
from jaxinfer.model.layers import Linear, RMSNorm, project
from jaxinfer.model.rope import apply_rope
from jaxinfer.model.sinks import SinkPlan, attend_to_sinks
from pallas_kernels.kv_write import write_kv
from pallas_kernels.paged_attention import Schedule, ragged_paged_attention
from pallas_kernels.pages import Pages

Beside = OpenPages | KeyLog | None  # what a layer's cache holds beside its pages
Plan = open_pages.OpenPlan | heavy_hitters.H2OPlan | None  # of a step, for what is beside the pages


class Attention(nn.Module):
    """MHA, GQA and MQA in one (Ainslie et al., 2023); `window` and `use_rope` are what may differ between layers."""

    config: ModelConfig
    window: int | None
    use_rope: bool
    dtype: Any
    implementation: str | None
    activations: str | None = None

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "T D"],
        rope: tuple[jax.Array, jax.Array],
        k_pages: Pages,
        v_pages: Pages,
        beside: Beside,
        batch: TokenBatch,
        schedule: Schedule,
        plan: Plan,
        sinks: SinkPlan | None,
    ) -> tuple[Float[Array, "T D"], Pages, Pages, Beside]:
        """Returns f[T, D] and the layer's cache with this step's keys and values written."""
        c, T = self.config, x.shape[0]

        options = (self.dtype, c.qkv_bias, self.activations)
        heads = {"q": c.num_heads, "k": c.num_kv_heads, "v": c.num_kv_heads}
        layers = (Linear(n * c.head_dim, *options, name=name) for name, n in heads.items())
        q, k, v = (y.reshape(T, -1, c.head_dim) for y in project(x, *layers))
        if c.qk_norm:
            q = RMSNorm(c.rms_norm_eps, self.dtype, name="q_norm")(q)
            k = RMSNorm(c.rms_norm_eps, self.dtype, name="k_norm")(k)
        unrotated = q
        if self.use_rope:
            q = apply_rope(q, *rope)
        plain = "xla" if self.implementation == "reference" else None  # wanted for shapes, or as an oracle
        key_rope, scale = rope if self.use_rope else None, c.head_dim**-0.5
        out: Any  # with its log-sum-exp, if there are sinks
        if plan is not None:
            attend: Any = (open_pages if isinstance(plan, open_pages.OpenPlan) else heavy_hitters).attend
            part, (k_pages, v_pages), beside = attend(
                q, k, v, (k_pages, v_pages), beside, batch, schedule, plan, rope=key_rope, scale=scale,
                window=self.window, implementation=self.implementation, write_implementation=plain,
            )  # fmt: skip
            out = part[0] if sinks is None else part
        else:
            k_pages, v_pages = write_kv(
                k_pages, v_pages, k, v, batch.slot_mapping, rope=key_rope, implementation=plain
            )  # fmt: skip
            out = ragged_paged_attention(
                q, k_pages, v_pages, batch.page_indices, batch.kv_lens, batch.cu_q_lens, batch.num_decode_rows,
                scale=scale, sliding_window=self.window, schedule=schedule, return_lse=sinks is not None,
                implementation=self.implementation,
            )  # fmt: skip
        if sinks is not None:
            out, _ = join(attend_to_sinks(unrotated, (k_pages, v_pages), sinks, scale, self.use_rope), out)
        out = out.reshape(T, c.num_heads * c.head_dim)
        project_out = Linear(c.hidden_size, self.dtype, c.o_bias, self.activations, name="o")
        return project_out(out), k_pages, v_pages, beside
