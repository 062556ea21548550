"""Joins the parts of jobs whose keys were split over several work items."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels.paged_attention.work import BEGIN, END, JOB, Work


def combine(
    work: Work, out: Float[Array, "W K C R H"], lse: Float[Array, "W K C R"]
) -> tuple[Float[Array, "J K C R H"], Float[Array, "J K C R"]]:
    """Returns f32 outputs and log-sum-exp of the jobs from those of their items; undefined for jobs without work.

    Most jobs of a full step have one item, which is theirs as it is. The others are few (splitting adds at most
    W - J items), so they are joined by a small dense product with fixed order: bit-equal on every run, unlike a
    scatter-add.
    """
    W, J = work.items.shape[0], work.counts.shape[0]
    has_work = work.items[:, END] > work.items[:, BEGIN]
    first = jnp.minimum(work.first_item, W - 1)
    num_jobs, num_items = min(J, W - J), min(W, 2 * (W - J))

    is_split = work.counts > 1
    jobs = jnp.argsort(~is_split, stable=True)[:num_jobs]
    belongs = is_split[work.items[:, JOB]] & has_work
    items = jnp.argsort(~belongs, stable=True)[:num_items]
    mine = (work.items[items, JOB][None] == jobs[:, None]) & belongs[items][None]  # [jobs, items]
    part_lse = jnp.where(mine[:, :, None, None, None], lse[items][None], -jnp.inf)
    top = jnp.maximum(jnp.max(part_lse, axis=1, keepdims=True), -1e30)
    weights = jnp.exp(part_lse - top)
    total = jnp.sum(weights, axis=1)
    values = jnp.where(belongs[items][:, None, None, None, None], out[items].astype(jnp.float32), 0.0)
    joined = jnp.einsum("jikcr,ikcrh->jkcrh", weights, values, precision=lax.Precision.HIGHEST)
    joined = joined / jnp.where(total == 0, 1.0, total)[..., None]
    joined_lse = top[:, 0] + jnp.log(total)

    place = jnp.clip(jnp.cumsum(is_split, dtype=jnp.int32) - 1, 0, num_jobs - 1)
    where = is_split[:, None, None, None]
    result = jnp.where(where[..., None], joined[place], out[first].astype(jnp.float32))
    return result, jnp.where(where, joined_lse[place], lse[first])
