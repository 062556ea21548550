import os
from pathlib import Path

import pytest

from jaxinfer.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def prompts(golden):
    return golden("smollm2.json")["prompts"]


def test_reference_ids_with_the_part_of_the_vocabulary_they_use(golden, prompts):
    case = golden("smollm2.json")
    tokenizer = Tokenizer.from_gguf(case["metadata"])
    for prompt in prompts.values():
        ids = tokenizer.encode(prompt["text"])
        assert [case["original_ids"][i] for i in ids] == prompt["ids"]
        assert tokenizer.decode(ids, skip_special_tokens=False) == prompt["text"]


@pytest.mark.slow
def test_reference_ids_with_the_real_file(prompts):
    path = os.environ.get("JAXINFER_TEST_MODEL")
    if not path or not Path(path).is_file():
        pytest.skip("JAXINFER_TEST_MODEL does not name the SmolLM2 GGUF file")
    import gguf

    fields = gguf.GGUFReader(path).fields
    metadata = {key: field.contents() for key, field in fields.items() if key.startswith("tokenizer.")}
    tokenizer = Tokenizer.from_gguf(metadata)
    assert tokenizer.vocab_size == 49152
    assert tokenizer.eos_token_ids == (2, 0)
    for prompt in prompts.values():
        assert tokenizer.encode(prompt["text"]) == prompt["ids"]
        assert tokenizer.decode(prompt["ids"], skip_special_tokens=False) == prompt["text"]
