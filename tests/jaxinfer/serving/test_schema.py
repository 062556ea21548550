"""Requests made from the OpenAPI schema, and broken on purpose, never find a defect of the server."""

import hypothesis
import pytest
import schemathesis
from schemathesis.generation import GenerationMode


@pytest.mark.slow
@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
def test_no_request_finds_a_defect(live, mode):
    schema = schemathesis.openapi.from_url(f"{live.url}/openapi.json")
    paths = set()
    for operation in schema.get_all_operations():
        cases = operation.ok().as_strategy(generation_mode=mode)

        @hypothesis.settings(max_examples=60, suppress_health_check=list(hypothesis.HealthCheck))
        @hypothesis.given(case=cases)
        def never_500(case):
            response = case.call(timeout=60)
            paths.add(case.path)
            assert response.status_code < 500
            if response.status_code >= 400:
                assert set(response.json()["error"]) == {"message", "type", "param", "code"}

        try:
            never_500()
        except hypothesis.errors.Unsatisfiable:  # nothing can be wrong in a GET without parameters
            assert mode is GenerationMode.NEGATIVE
    assert {"/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"} <= paths
    live.wait_idle()
