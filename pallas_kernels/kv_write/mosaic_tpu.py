"""The KV write for TPU: pages are read, changed and written back by double-buffered DMA."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels.kv_write.reference import encode, rotate, scatter
from pallas_kernels.pages import Pages
from pallas_kernels.target import require_tpu

VMEM_LIMIT = 12 * 2**20  # of 16 MiB that XLA gives a kernel on v5e


def write_kv_mosaic_tpu(
    k_pages: Pages,
    v_pages: Pages,
    k: Float[Array, "T K H"],
    v: Float[Array, "T K H"],
    slot_mapping: Int[Array, "*K T"],
    *,
    rope: tuple[jax.Array, jax.Array] | None = None,
    interpret: Any = False,
) -> tuple[Pages, Pages]:
    """See `write_kv`. XLA rotates and quantizes (it fuses both); the kernel merges the rows into their pages.

    A DMA cannot start inside a tile of 8 to 32 rows, so a token cannot be written by itself: its page is. Tokens are
    sorted by slot (by XLA: T integers), which makes those of one page one run and the pages of all runs distinct: the
    page of run r + 1 is loaded while r is merged and r - 1 is written back, without hazards. Scales, f32[K, P,
    page_size], have no rows to start a DMA at and are scattered by XLA.

    FLOPs: one select an element of a page and token. Bytes: for each run 2 pages of K heads and page_size new rows.
    VMEM: two pages and two times page_size rows of each cache. Not measured on hardware.

    Raises:
        NotImplementedError: not a TPU, f16, or pages too large for VMEM.
    """
    require_tpu(interpret)
    if slot_mapping.ndim > 1:
        raise NotImplementedError("mosaic_tpu: a slot for each head")
    if rope is not None:
        k = rotate(k, *rope)
    both = (k_pages, v_pages)
    encoded = [encode(pages, new) for pages, new in zip(both, (k, v))]
    leaves = [jax.tree.leaves(pages) for pages in both]
    new_leaves = [jax.tree.leaves(x) for x in encoded]
    data = _merge([_as_signed(x[0]) for x in leaves], [_as_signed(x[0]) for x in new_leaves], slot_mapping, interpret)
    results = []
    for pages, stored, old, new in zip(both, data, leaves, new_leaves):
        scales = [scatter(a, b, slot_mapping) for a, b in zip(old[1:], new[1:])]
        first = stored if stored.dtype == old[0].dtype else lax.bitcast_convert_type(stored, old[0].dtype)
        results.append(jax.tree.unflatten(jax.tree.structure(pages), [first, *scales]))
    return tuple(results)


def _as_signed(x: jax.Array) -> jax.Array:
    """Returns 8-bit data as int8, the one such type that every TPU converts."""
    if x.dtype == jnp.float16:
        raise NotImplementedError("mosaic_tpu: float16 pages; TPUs compute in bfloat16")
    return lax.bitcast_convert_type(x, jnp.int8) if x.dtype.itemsize == 1 and x.dtype != jnp.int8 else x


def _merge(
    pages: list[jax.Array], new: list[jax.Array], slot_mapping: Int[Array, " T"], interpret: Any
) -> list[jax.Array]:
    K, _, page_size, _ = pages[0].shape
    T = slot_mapping.shape[0]
    num_bytes = sum(2 * K * page_size * max(x.shape[-1], 128) * (2 * x.dtype.itemsize + 4) for x in pages)
    if num_bytes > VMEM_LIMIT:
        raise NotImplementedError(f"mosaic_tpu: pages need {num_bytes} bytes of VMEM, more than {VMEM_LIMIT}")
    order = jnp.argsort(slot_mapping)
    slots = slot_mapping.astype(jnp.int32)[order]
    page = slots // page_size
    is_first = jnp.concatenate([page[:1] > 0, page[1:] != page[:-1]])  # the null page comes first and is no run
    starts = jnp.nonzero(is_first, size=T + 1, fill_value=T)[0].astype(jnp.int32)
    num_runs = jnp.sum(is_first, dtype=jnp.int32)[None]
    rows = [jnp.pad(x[:, :, 0].transpose(1, 0, 2)[order], ((0, page_size), (0, 0), (0, 0))) for x in new]

    def kernel(starts, slots, num_runs, *refs):
        n = len(pages)
        new_refs, page_refs = refs[:n], refs[2 * n : 3 * n]
        new_buffers, page_buffers, (new_done, loaded, stored) = refs[3 * n : 4 * n], refs[4 * n : 5 * n], refs[5 * n :]

        def copies(kind: str, run: Any) -> list[Any]:
            start, half = starts[run], run % 2
            number = slots[start] // page_size
            if kind == "load":
                return [
                    copy
                    for i in range(n)
                    for copy in (
                        pltpu.make_async_copy(
                            new_refs[i].at[pl.ds(start, page_size)], new_buffers[i].at[half], new_done.at[i, half]
                        ),
                        pltpu.make_async_copy(page_refs[i].at[:, number], page_buffers[i].at[half], loaded.at[i, half]),
                    )
                ]
            return [
                pltpu.make_async_copy(page_buffers[i].at[half], page_refs[i].at[:, number], stored.at[i, half])
                for i in range(n)
            ]

        def start(kind: str, run: Any) -> None:
            for copy in copies(kind, run):
                copy.start()

        def wait(kind: str, run: Any) -> None:
            for copy in copies(kind, run):
                copy.wait()

        def merge(run: Any, _: None) -> None:
            pl.when(run > 0)(lambda: wait("store", run - 1))  # frees the buffers that the next load fills
            pl.when(run + 1 < num_runs[0])(lambda: start("load", run + 1))
            wait("load", run)
            first, half = starts[run], run % 2
            for new_buffer, buffer in zip(new_buffers, page_buffers):
                wide = jnp.int32 if buffer.dtype == jnp.int8 else jnp.float32
                row_of = lax.broadcasted_iota(jnp.int32, buffer.shape[1:], 1)

                def put(token, page, new_buffer=new_buffer, wide=wide, row_of=row_of):
                    row = new_buffer[half, token - first].astype(wide)[:, None, :]
                    offset = slots[token] % page_size
                    return jnp.where(row_of == offset, jnp.broadcast_to(row, page.shape), page)

                page = lax.fori_loop(first, starts[run + 1], put, buffer[half].astype(wide))
                buffer[half] = page.astype(buffer.dtype)
            start("store", run)

        @pl.when(num_runs[0] > 0)
        def _():
            start("load", 0)
            lax.fori_loop(0, num_runs[0], merge, None)
            wait("store", num_runs[0] - 1)

    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    return pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(1,),
            in_specs=[anywhere] * (2 * len(pages)),
            out_specs=[anywhere] * len(pages),
            scratch_shapes=[
                *(pltpu.VMEM((2, page_size, K, x.shape[-1]), x.dtype) for x in pages),
                *(pltpu.VMEM((2, K, page_size, x.shape[-1]), x.dtype) for x in pages),
                *(pltpu.SemaphoreType.DMA((len(pages), 2)) for _ in range(3)),
            ],
        ),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in pages],
        input_output_aliases={3 + len(pages) + i: i for i in range(len(pages))},
        interpret=interpret,
        name="kv_write",
    )(starts, slots, num_runs, *rows, *pages)
