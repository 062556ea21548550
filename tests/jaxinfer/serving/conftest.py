import dataclasses

import openai
import pytest

from jaxinfer.config import EngineConfig
from jaxinfer.engine.engine import Engine
from tests.jaxinfer.serving.live import serving


@pytest.fixture(scope="session")
def engine(model, llm):
    """One engine for all servers of a test process, one after the other, with the steps of the offline one."""
    config = EngineConfig(max_num_seqs=4, max_num_batched_tokens=32, max_model_len=96, policy="priority")
    engine = Engine(model, dataclasses.replace(config, num_pages=llm.engine.scheduler.pool.num_pages))
    engine.runner._compiled = llm.engine.runner._compiled
    return engine


@pytest.fixture(scope="module")
def live(engine):
    with serving(engine) as live:
        yield live


@pytest.fixture(scope="module")
def client(live):
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def http(live):
    with live.client() as client:
        yield client
