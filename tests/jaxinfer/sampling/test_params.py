import dataclasses
import math
import subprocess
import sys

import numpy as np
import pytest

from jaxinfer.sampling import SamplingParams
from jaxinfer.sampling.h2o import H2O
from jaxinfer.sampling.params import validate_token_ids


def test_defaults_are_valid_and_hashable():
    params = SamplingParams()
    assert params.max_tokens == 256
    assert hash(params) == hash(SamplingParams())


def test_values_are_normalised():
    params = SamplingParams(
        temperature=1,
        stop="END",
        logit_bias={5: 1, 2: -3.0},
        stop_token_ids=[np.int64(3)],
        bad_words=["a", "b"],
    )
    assert isinstance(params.temperature, float)
    assert params.stop == ("END",)
    assert params.bad_words == ("a", "b")
    assert params.logit_bias == ((2, -3.0), (5, 1.0))
    assert type(params.stop_token_ids[0]) is int
    assert hash(params) == hash(dataclasses.replace(params, n=1))


def test_a_budget_may_be_json_or_text():
    wanted = SamplingParams(h2o=H2O(3, 4))
    assert SamplingParams.from_dict({"h2o": {"heavy": 3, "recent": 4}}) == wanted
    assert SamplingParams.from_dict({"h2o": "3,4"}) == wanted
    assert dataclasses.replace(wanted).h2o == H2O(heavy=3, recent=4)


@pytest.mark.parametrize(
    ("name", "value", "match"),
    [
        ("n", 0, "n must be at least 1, got 0"),
        ("n", True, "n must be an int, got True"),
        ("temperature", -0.1, "temperature must be finite and at least 0, got -0.1"),
        ("temperature", math.nan, "temperature must be .* got nan"),
        ("temperature", math.inf, "temperature must be .* got inf"),
        ("temperature", 10**400, "temperature must be .* got inf"),
        ("temperature", 1e-9, "temperature must be 0 .greedy. or at least"),
        ("temperature", "1", "temperature must be a number, got '1'"),
        ("temperature", False, "temperature must be a number"),
        ("top_k", -2, "top_k must be between -1"),
        ("top_k", 1.5, "top_k must be an int, got 1.5"),
        ("top_p", 0, "top_p must be greater than 0"),
        ("top_p", 1.1, "top_p must be between 0 and 1, got 1.1"),
        ("typical_p", 0.0, "typical_p must be greater than 0"),
        ("min_p", -0.5, "min_p must be between 0 and 1"),
        ("repetition_penalty", 0, "repetition_penalty must be between 0.01 and 100"),
        ("presence_penalty", 2.5, "presence_penalty must be between -2 and 2, got 2.5"),
        ("frequency_penalty", -3, "frequency_penalty must be between"),
        ("logit_bias", {1: 101}, r"logit_bias\[1\] must be between -100 and 100"),
        ("logit_bias", {-1: 1.0}, "an id in logit_bias must be at least 0"),
        ("logit_bias", {"1": 1.0}, "an id in logit_bias must be an int"),
        ("logit_bias", [1], "logit_bias must map"),
        ("logit_bias", (1, 2), "logit_bias must map"),
        ("seed", -1, "seed must be between 0"),
        ("seed", 2**63, "seed must be between 0"),
        ("seed", 1.0, "seed must be an int"),
        ("max_tokens", 0, "max_tokens must be at least 1"),
        ("min_tokens", 300, "min_tokens must not exceed max_tokens, got min_tokens=300, max_tokens=256"),
        ("stop", ["a", ""], "stop must not hold an empty string"),
        ("stop", [1], "stop must hold only str, got 1"),
        ("stop", None, "stop must be a str or a sequence of str, got None"),
        ("bad_words", "", "bad_words must not hold an empty"),
        ("stop_token_ids", "12", "stop_token_ids must be a sequence of ints"),
        ("stop_token_ids", [True], "an id in stop_token_ids must be an int"),
        ("allowed_token_ids", [], "allowed_token_ids must name at least one token"),
        ("logprobs", 21, "logprobs must be between 0 and 20"),
        ("prompt_logprobs", -1, "prompt_logprobs must be between"),
        ("ignore_eos", 1, "ignore_eos must be True or False, got 1"),
        ("echo", "yes", "echo must be True or False"),
        ("h2o", "128", "h2o must be .* got '128'"),
        ("h2o", "1,2,3", "h2o must be"),
        ("h2o", {"heavy": 3}, "h2o must be"),
        ("h2o", {"heavy": -1, "recent": 2}, "h2o.heavy must be between 0"),
        ("h2o", "4,0", "h2o.recent must be between 1"),
    ],
)
def test_bad_value_is_named(name, value, match):
    with pytest.raises(ValueError, match=match):
        SamplingParams(**{name: value})


def test_every_field_is_checked():
    for field in dataclasses.fields(SamplingParams):
        with pytest.raises(ValueError, match=field.name):
            SamplingParams(**{field.name: object()})


def test_no_limit_allows_any_min_tokens():
    assert SamplingParams(max_tokens=None, min_tokens=10**6).max_tokens is None


def test_from_dict():
    params = SamplingParams.from_dict({"temperature": 0, "logit_bias": {"7": 2}})
    assert params == SamplingParams(temperature=0, logit_bias={7: 2})
    with pytest.raises(ValueError, match=r"'temprature'; did you mean 'temperature'.*valid names: n, best_of"):
        SamplingParams.from_dict({"temprature": 1})


@pytest.mark.parametrize("field", [{"logit_bias": {10: 1.0}}, {"allowed_token_ids": [3, 10]}, {"stop_token_ids": [10]}])
def test_ids_are_checked_against_the_vocabulary(field):
    params = SamplingParams(**field)
    validate_token_ids(params, 11)
    with pytest.raises(ValueError, match=rf"{next(iter(field))} must hold ids below .* 10, got \[10\]"):
        validate_token_ids(params, 10)


def test_host_side_does_not_import_jax():
    code = "import sys, jaxinfer.sampling.rows, jaxinfer.sampling.result; assert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
