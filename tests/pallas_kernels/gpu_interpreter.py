"""Two gaps of JAX's Mosaic GPU interpreter, closed for the tests.

The interpreter of jax 0.12 knows neither `wgmma` with its left operand in registers nor `pl.run_state` with an
initialised accumulator, on which FlashAttention-3 rests. Both are added by the interpreter's own means, as buffers in
register memory, so that the kernels are tested as they run.
"""

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import jax
from jax._src.pallas.mosaic_gpu import core as gpu_core
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks, jaxpr_interpret, race_detection_state
from jax._src.pallas.mosaic_gpu.interpret import shared_memory as memory
from jax._src.state.discharge import run_state_p
from jax._src.state.types import AbstractRef
from jax.experimental.pallas import mosaic_gpu as plgpu

# What the interpreter may say first of a kernel that forgets to wait; which of them depends on its threads' timing.
MISSING_WAIT = "RACE DETECTED|no threads observed|missed observing phase|barrier is already at phase"

_Interpreter: Any = jaxpr_interpret.JaxprInterpreter
_wgmma_of_refs = _Interpreter._interpret_wgmma_ref_p
_interpret_without_run_state = _Interpreter.interpret
_Races: Any = race_detection_state.GPURaceDetectionState
_checks = {name: getattr(_Races, name) for name in ("check_read", "check_write")}


@contextlib.contextmanager
def interpreted(detect_races: bool = False) -> Iterator[plgpu.InterpretGPUParams]:
    """Gives the `interpret` argument of a Mosaic GPU kernel; an error inside leaves nothing behind."""
    _Interpreter._interpret_wgmma_ref_p = _wgmma
    _Interpreter.interpret = _interpret
    for name, check in _checks.items():
        setattr(_Races, name, _outside_registers(check))
    gpu_callbacks.reset_gpu_interpret_mode_state()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # NumPy multiplies the NaN of what must not matter
            yield plgpu.InterpretGPUParams(detect_races=detect_races)
    finally:
        gpu_callbacks.reset_gpu_interpret_mode_state()


def _outside_registers(check: Any) -> Any:
    """Registers are private, so they cannot race; but their names are used again for the next block of the grid."""

    def checked(self: Any, thread: Any, clock: Any, key: Any, *args: Any, **kwargs: Any) -> None:
        if key.memory_space_id != memory.get_memory_space_idx(gpu_core.MemorySpace.REGS):
            check(self, thread, clock, key, *args, **kwargs)

    return checked


def _wgmma(self: Any, eqn: Any, token: jax.Array, get_invals: Any) -> Any:
    if isinstance(eqn.invars[1].aval, AbstractRef):
        return _wgmma_of_refs(self, eqn, token, get_invals)
    accumulator, a, *rest = get_invals()
    token, key = _allocate(self, eqn, token, a)
    as_ref = eqn.replace(invars=[eqn.invars[0], eqn.invars[0], *eqn.invars[2:]])
    token, out = _wgmma_of_refs(self, as_ref, token, lambda: [accumulator, key, *rest])
    return _deallocate(self, eqn, token, key), out


def _interpret(self: Any, jaxpr: Any, token: jax.Array, *args: Any) -> Any:
    """Interprets the equations before the first `run_state`, the `run_state`, and those after it, in turn."""
    first = next((i for i, eqn in enumerate(jaxpr.eqns) if eqn.primitive is run_state_p), None)
    if first is None:
        return _interpret_without_run_state(self, jaxpr, token, *args)
    env = dict(zip([*jaxpr.constvars, *jaxpr.invars], args, strict=True))
    made = [v for eqn in jaxpr.eqns[:first] for v in eqn.outvars if type(v).__name__ != "DropVar"]
    before = jaxpr.replace(eqns=jaxpr.eqns[:first], outvars=made, debug_info=_unnamed(jaxpr))
    token, values = _interpret_without_run_state(self, before, token, *args)
    env.update(zip(made, values, strict=True))

    eqn = jaxpr.eqns[first]
    values = [v.val if hasattr(v, "val") else env[v] for v in eqn.invars]
    inner, keys = eqn.params["jaxpr"], []
    for var, value in zip(eqn.invars, values, strict=True):
        token, key = (token, value) if isinstance(var.aval, AbstractRef) else _allocate(self, eqn, token, value)
        keys.append(key)
    token, _ = self.interpret(inner, token, *inner.consts, *keys)
    for var, out, key in zip(eqn.invars, eqn.outvars, keys, strict=True):
        if isinstance(var.aval, AbstractRef):
            env[out] = key
            continue
        token, env[out] = gpu_callbacks.call_get(
            token=token, result_shape_and_dtype=out.aval, mesh_location=self.mesh_location, thread=self.thread,
            allocation_key_as_array=key, transforms=(), source_info=eqn.source_info,
        )  # fmt: skip
        token = _deallocate(self, eqn, token, key)

    live = [v for v in env if type(v).__name__ != "DropVar"]
    after = jaxpr.replace(constvars=[], invars=live, eqns=jaxpr.eqns[first + 1 :], debug_info=_unnamed(jaxpr))
    return self.interpret(after, token, *(env[v] for v in live))


def _unnamed(jaxpr: Any) -> Any:
    return jaxpr.debug_info._replace(arg_names=None, result_paths=None)


def _allocate(self: Any, eqn: Any, token: jax.Array, value: jax.Array) -> tuple[jax.Array, jax.Array]:
    token, request = gpu_callbacks.call_make_allocation_request_array(
        token=token, compute_unit=self.thread, initial_ref_count=1,
        memory_space_id=memory.get_memory_space_idx(gpu_core.MemorySpace.REGS),
    )  # fmt: skip
    return gpu_callbacks.call_allocate_buffer(
        token=token, mesh_location=self.mesh_location, thread=self.thread, allocation_request_as_array=request,
        value=value, source_info=eqn.source_info,
    )  # fmt: skip


def _deallocate(self: Any, eqn: Any, token: jax.Array, key: jax.Array) -> jax.Array:
    return gpu_callbacks.call_deallocate_buffer(
        token=token, mesh_location=self.mesh_location, thread=self.thread, allocation_key_as_array=key,
        source_info=eqn.source_info,
    )  # fmt: skip
