import json

import pytest

from jaxinfer.bench.workloads import LATENCY, THROUGHPUT, BenchRequest, made_up, read_workloads, rounds, select

REQUEST = {"prompt": [1], "n_out": 2}
TABLES = {
    "W1": {"desc": "one stream", "requests": [{"prompt": [1, 2, 3], "n_out": 4}]},
    "W2": {"variants": [{"prompt": [1, 2], "n_out": 1}, {"prompt": [3, 4], "n_out": 1}]},
    "W4": {"prefix": [7, 8], "requests": [{"suffix": [9], "n_out": 2}, {"suffix": [10], "n_out": 2}]},
    "W5": {"unit_gaps": [1.0], "requests": [REQUEST]},
    "W6": {"requests": [REQUEST] * 9},
}


@pytest.fixture
def write(tmp_path):
    def write_file(content):
        path = tmp_path / "workloads.json"
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return path

    return write_file


def test_reads_every_form_and_leaves_out_what_is_online(write):
    found = read_workloads(write({"models": {"tiny": TABLES}}))
    assert found == {
        "W1": [BenchRequest([1, 2, 3], 4)],
        "W2": [BenchRequest([1, 2], 1), BenchRequest([3, 4], 1)],
        "W4": [BenchRequest([7, 8, 9], 2), BenchRequest([7, 8, 10], 2)],
        "W6x8": [BenchRequest([1], 2)] * 8,
    }


def test_the_model_is_named_where_there_are_several(write):
    path = write({"models": {"tiny": TABLES, "big": {"W1": TABLES["W1"]}}})
    assert list(read_workloads(path, "big")) == ["W1"]
    for model in (None, "huge"):
        with pytest.raises(ValueError, match=f"no workloads for {model!r}; --workload-model can be tiny, big"):
            read_workloads(path, model)


def with_requests(*requests):
    return {"models": {"tiny": {"W1": {"requests": list(requests)}}}}


@pytest.mark.parametrize(
    ("content", "match"),
    [
        ("{", "not valid JSON"),
        ([], "not a workload file"),
        ({"other": {}}, "not a workload file: KeyError"),
        (with_requests({"prompt": [1]}), "not a workload file: KeyError"),
        (with_requests({"prompt": [], "n_out": 1}), "W1: a request needs a prompt"),
        (with_requests({"prompt": ["a"], "n_out": 1}), "W1: a request needs a prompt"),
        (with_requests({"prompt": [1], "n_out": 0}), "n_out of at least 1"),
        (with_requests(), "W1 has no requests"),
    ],
)
def test_a_file_of_another_form_is_refused(write, content, match):
    with pytest.raises(ValueError, match=match):
        read_workloads(write(content), "tiny")


def test_made_up_workloads_are_the_same_every_time_and_within_the_vocabulary():
    found = made_up(50)
    assert found == made_up(50)
    assert set(found) == {*LATENCY, *THROUGHPUT}
    assert all(0 <= token < 50 for requests in found.values() for request in requests for token in request.prompt)
    assert [(len(found[name]), len(found[name][0].prompt)) for name in ("W1", "W2", "W4", "W6x32")] == [
        (8, 128), (4, 2048), (32, 1056), (32, 128),
    ]  # fmt: skip
    assert len({len(request.prompt) for request in found["W3"]}) > 20


def test_select_refuses_what_is_missing_or_too_long():
    workloads = {"W1": [BenchRequest([1, 2], 3)], "W2": [BenchRequest([1], 1)]}
    assert list(select(workloads, ("W2", "W1"), 5)) == ["W2", "W1"]
    with pytest.raises(ValueError, match="no workload W4; there are W1, W2"):
        select(workloads, ("W4",), 5)
    with pytest.raises(ValueError, match="W1 needs 5 tokens, the model takes 4"):
        select(workloads, ("W1",), 4)


def test_a_single_stream_takes_another_prompt_in_every_round():
    a, b, c, d = (BenchRequest([i], 1) for i in range(4))
    assert rounds("W2", [a, b, c, d], 3) == [[d], [a], [b], [c]]
    assert rounds("W1", [a], 2) == [[a], [a], [a]]
    assert rounds("W3", [a, b], 2) == [[a, b]] * 3
