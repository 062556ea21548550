"""The KV write for Hopper: rotation, quantization and the writes of K and V in one launch."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.kv_write.mosaic_gpu_encode import RowFormat, encode_tile
from pallas_kernels.kv_write.reference import rotate
from pallas_kernels.kv_write.tiles import REGISTER_ROWS, TileConfig, choose_tiles
from pallas_kernels.pages import Pages
from pallas_kernels.target import require_hopper

SMEM_LIMIT = 227 * 1024


def write_kv_mosaic_gpu(
    k_pages: Pages,
    v_pages: Pages,
    k: Float[Array, "T K H"],
    v: Float[Array, "T K H"],
    slot_mapping: Int[Array, "*K T"],
    *,
    rope: tuple[jax.Array, jax.Array] | None = None,
    interpret: Any = False,
    tiles: TileConfig | None = None,
) -> tuple[Pages, Pages]:
    """See `write_kv`. One block of 128 threads for `block_tokens` tokens of one head.

    A block loads its rows of k, v, cos, sin and slots by TMA; V travels while K is worked on. What is stored as it
    came goes from shared memory to its pages untouched. The rest passes through registers, in the accumulator layout
    of wgmma (four threads a row, so that a row's maximum is two shuffles), in pieces of channels of which two make a
    pair of the rotation and 8 / bits one byte of packed codes. A row is then written by one TMA store, whose shared
    memory starts at a multiple of 128 bytes; its scale and zero point by plain stores. Rows of the null page are
    skipped, so that no two blocks write one place.

    FLOPs: about 10 an element of K, 7 of V. Bytes: k, v (T * K * H * itemsize each), cos and sin once a head (from L2
    but for the first), T * K * (stored bytes of a row + 4 or 8) for each of K and V.
    Tiles: 4 to 64 tokens x 1 head, see `choose_tiles`. Shared memory: 64 * H * (2 x itemsize in + 2 x stored) + 64 *
    rotary * 4 bytes at most: 80 KiB for bf16 to bf16, H = 128, with rotation, two blocks an SM.
    Expected on H200: decode (T <= 256) is bound by the launch and two trips to memory, 3-5 us, against three
    XLA fusions without it; prefill by memory: 8,192 tokens x 8 heads x 128 move 67 MB, 14 us at 4.8 TB/s, of which
    60-70 % should be reached (rows of 256 bytes are written one TMA each). Not measured on hardware.

    Raises:
        NotImplementedError: not a Hopper GPU, or rows that the copy engine cannot move.
    """
    require_hopper(interpret)
    if slot_mapping.ndim > 1:
        raise NotImplementedError("mosaic_gpu: a slot for each head")
    T, K, H = k.shape
    rows = min((tiles or choose_tiles(T, K)).block_tokens, T)
    k_format = RowFormat.of(k_pages, k, 0 if rope is None else rope[0].shape[1])
    if rope is not None and k_format.refusal:  # in pieces of half a head, as for H = 80; whole heads may do
        k, rope = rotate(k, *rope), None
        k_format = RowFormat.of(k_pages, k, 0)
    formats = (k_format, RowFormat.of(v_pages, v, 0))
    for name, f in zip("kv", formats):
        if f.refusal:
            raise NotImplementedError(f"mosaic_gpu: {name} would be stored in {f.refusal}")

    def load_rows(f, source, target, barrier):
        if not f.is_loaded_by_row:
            plgpu.copy_gmem_to_smem(source, target.at[pl.ds(0, rows)], barrier)
            return

        def load_row(row, _):
            plgpu.copy_gmem_to_smem(source.at[pl.ds(row, 1)], target.at[pl.ds(row, 1), pl.ds(0, H)], barrier)
            return _

        lax.fori_loop(0, rows, load_row, None)

    def body(slots_gmem, tables_gmem, *both, slots, tables, ready, cases):
        block, head = lax.axis_index("block"), lax.axis_index("head")
        # The last block starts early rather than reading past the end; it skips the rows it shares.
        first = jnp.minimum(block * rows, T - rows)
        window = pl.ds(first, rows)
        plgpu.copy_gmem_to_smem(slots_gmem.at[pl.ds(first, slots.shape[0])], slots, ready[0])
        for source, target in zip(tables_gmem, tables):
            plgpu.copy_gmem_to_smem(source.at[window], target.at[pl.ds(0, rows)], ready[0])
        for (x_gmem, _), case, f, barrier in zip(both, cases, formats, ready):
            load_rows(f, x_gmem.at[window, head], case["stored"] if f.is_copy else case["x"], barrier)

        for (_, pages), case, f, barrier in zip(both, cases, formats, ready):
            plgpu.barrier_wait(barrier)
            if not f.is_copy:
                encode_tile(f, case, tables)
                plgpu.commit_smem()

            def write_row(row, _, pages=pages, case=case, f=f):
                slot = slots[row]

                @pl.when((slot >= page_size) & (first + row >= block * rows))
                def _():
                    target = head * num_slots + slot
                    plgpu.copy_smem_to_gmem(
                        case["stored"].at[pl.ds(row, 1), pl.ds(0, f.width)], pages[0].at[pl.ds(target, 1)]
                    )
                    for gmem, smem in zip(pages[1:], case["scales"]):
                        gmem[target] = smem[row]

                return _

            lax.fori_loop(0, rows, write_row, None)
        plgpu.wait_smem_to_gmem(0)

    _, P, page_size, _ = k_pages.shape
    num_slots = P * page_size
    num_slot_words = -(-rows // 4) * 4  # TMA moves multiples of 16 bytes
    tables = () if rope is None else rope
    scratch = {
        "slots": plgpu.SMEM((num_slot_words,), jnp.int32),
        "tables": [plgpu.SMEM((REGISTER_ROWS, table.shape[1]), jnp.float32) for table in tables],
        "ready": [plgpu.Barrier(num_arrivals=n + f.num_loads(rows)) for n, f in zip((1 + len(tables), 0), formats)],
        "cases": [f.scratch() for f in formats],
    }
    num_bytes = sum(f.num_bytes for f in formats) + sum(REGISTER_ROWS * table.shape[1] * 4 for table in tables)
    if num_bytes + 2048 > SMEM_LIMIT:
        raise NotImplementedError(
            f"mosaic_gpu: heads of {H} channels need {num_bytes} bytes of shared memory, more than {SMEM_LIMIT}"
        )
    refs = [
        [jax.new_ref(x.reshape(K * num_slots, *x.shape[3:])) for x in jax.tree.leaves(p)] for p in (k_pages, v_pages)
    ]
    plgpu.kernel(
        body,
        out_type=(),
        grid=(-(-T // rows), K),
        grid_names=("block", "head"),
        scratch_types=scratch,
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        interpret=interpret,
        kernel_name="kv_write",
    )(jnp.pad(slot_mapping.astype(jnp.int32), (0, 4)), tables, (k, refs[0]), (v, refs[1]))
    return tuple(
        jax.tree.unflatten(
            jax.tree.structure(p), [jax.freeze(ref).reshape(x.shape) for ref, x in zip(rs, jax.tree.leaves(p))]
        )
        for p, rs in zip((k_pages, v_pages), refs)
    )
