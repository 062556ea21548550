"""The host side is imported without jax: it starts at once, and so do its tests elsewhere."""

import subprocess
import sys

import pytest

MODULES = [
    "jaxinfer",
    "jaxinfer.config",
    "jaxinfer.engine.request",
    "jaxinfer.engine.page_pool",
    "jaxinfer.engine.scheduler",
]


@pytest.mark.parametrize("module", MODULES)
def test_does_not_import_jax(module):
    program = (
        f"import sys, {module}\n"
        "heavy = {'jax', 'jaxlib', 'flax', 'torch', 'transformers', 'tokenizers'}\n"
        "print(*sorted(heavy & {name.partition('.')[0] for name in sys.modules}))"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.split() == []


def test_an_engine_needs_the_modules_of_the_decoder_only_to_compile():
    program = "import sys, jaxinfer.llm\nprint(*sorted({'flax', 'jaxinfer.model.decoder'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.split() == []


def test_the_public_names_are_found_when_asked_for():
    program = "import jaxinfer\nprint(jaxinfer.EngineConfig().page_size, 'LLM' in dir(jaxinfer))"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["16", "True"]
