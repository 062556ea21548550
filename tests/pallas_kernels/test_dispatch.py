import pytest

from pallas_kernels.dispatch import dispatch


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
