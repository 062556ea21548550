"""Requests made from the OpenAPI schema, and broken on purpose, never find a defect of the server."""

import pytest
import schemathesis
from schemathesis.checks import not_a_server_error


@pytest.fixture(scope="module")
def schema(live):
    return schemathesis.openapi.from_url(f"{live.url}/openapi.json")


lazy = schemathesis.pytest.from_fixture("schema")


@pytest.mark.slow
@lazy.parametrize()
def test_no_request_finds_a_defect(case):
    response = case.call(timeout=60)
    case.validate_response(response, checks=[not_a_server_error])
    if response.status_code >= 400:
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}
