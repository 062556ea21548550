import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.dispatch import chosen, dispatch, explain


def declines(*args, **kwargs):
    raise NotImplementedError("only on a GPU")


def breaks(*args, **kwargs):
    raise RuntimeError("a bug")


def works(*args, **kwargs):
    return args, kwargs


def test_the_first_that_accepts_is_taken_and_gets_the_arguments():
    assert dispatch("op", {"fast": declines, "plain": works, "later": breaks}, None, 1, x=2) == ((1,), {"x": 2})


def test_a_name_is_obeyed():
    assert dispatch("op", {"fast": breaks, "plain": works}, "plain", 1) == ((1,), {})
    with pytest.raises(NotImplementedError, match="only on a GPU"):
        dispatch("op", {"fast": declines, "plain": works}, "fast")


def test_unknown_name():
    with pytest.raises(ValueError, match=r"op: unknown implementation='slow'; choose from \['fast', 'plain'\] or None"):
        dispatch("op", {"plain": works, "fast": works}, "slow")


def test_all_decline():
    with pytest.raises(ExceptionGroup, match="op: no implementation accepts these arguments") as raised:
        dispatch("op", {"a": declines, "b": declines}, None)
    assert [str(error) for error in raised.value.exceptions] == ["only on a GPU"] * 2


def test_a_bug_is_not_a_refusal():
    with pytest.raises(RuntimeError, match="a bug"):
        dispatch("op", {"fast": breaks, "plain": works}, None)


def only_even(x, *, window):
    if x.shape[0] % 2:
        raise NotImplementedError(f"only an even length, got {x.shape[0]}")
    return jnp.sum(x[:window])


def test_explain_says_what_dispatch_would_do_without_running():
    def must_not_run(x, *, window):
        assert isinstance(x, jax.core.Tracer)
        return x * window

    implementations = {"gpu": declines, "even": only_even, "plain": must_not_run}
    odd, even = (jax.ShapeDtypeStruct((n,), jnp.float32) for n in (3, 4))
    reasons = explain(implementations, odd, window=2)
    assert reasons == {"gpu": "only on a GPU", "even": "only an even length, got 3", "plain": None}
    assert list(reasons) == list(implementations)
    assert chosen(reasons) == "plain"
    assert chosen(explain(implementations, even, window=2)) == "even"
    assert chosen(explain(implementations, jnp.ones(4), window=2)) == "even"
    assert chosen({"gpu": "only on a GPU"}) is None


def test_explain_keeps_what_is_no_array_as_it_is():
    def static(x, mode, *, window, mask):
        assert (mode, window, mask) == ("fast", 3, None)
        return x

    assert explain({"static": static}, jnp.ones(2), "fast", window=3, mask=None) == {"static": None}


def test_explain_raises_bugs():
    with pytest.raises(RuntimeError, match="a bug"):
        explain({"fast": breaks, "plain": works}, jnp.ones(2))


def test_a_refusal_without_words_is_named():
    def silent(x):
        raise NotImplementedError

    assert explain({"silent": silent}, jnp.ones(2)) == {"silent": "NotImplementedError"}
