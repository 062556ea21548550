"""Makes tests/golden/models/tiny-chat: a complete tiny chat model with a tokenizer, for end-to-end tests.

Run it after make_golden.py, in the same environment: python scripts/make_golden_chat.py
"""

import json
import shutil

import numpy as np
import torch
from make_golden import MIN_DISTINCT, MIN_MARGIN, MODELS, check_sensitive, golden, make_model, report, rope
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoTokenizer
from transformers.utils import logging

DIRECTORY = MODELS / "tiny-chat"
VOCAB = 320
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
TEXT = """The engine reads the prompt once and then writes one token after the other.
A system message says how the assistant should answer; the user asks, and the assistant answers.
The cache keeps the keys and the values of the tokens that were read, so that nothing is computed twice.
Write a short line about the sea, and tell the reader what the weather was like in 1984.
Hello there! How are you today? I am fine, thank you. What is the time? It is 10:45.
"""
CHATS = [
    [{"role": "user", "content": "Tell me about the sea."}],
    [
        {"role": "system", "content": "Answer in one line."},
        {"role": "user", "content": "What is 12 + 30?"},
        {"role": "assistant", "content": "It is 42."},
        {"role": "user", "content": "Naïve café, 你好 🙂?\n  def f(x):\treturn x"},
    ],
    [{"role": "user", "content": "a <|im_end|> inside the text is a special token"}],
]


def make_tokenizer() -> None:
    """Byte-level BPE as in SmolLM2: digits stand alone, no space is put before the text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=SPECIAL,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    tokenizer.save(str(DIRECTORY / "tokenizer.json"))
    write_json(
        "tokenizer_config.json",
        {
            "added_tokens_decoder": {
                str(i): {
                    "content": token,
                    "lstrip": False,
                    "normalized": False,
                    "rstrip": False,
                    "single_word": False,
                    "special": True,
                }
                for i, token in enumerate(SPECIAL)
            },
            "add_prefix_space": False,
            "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
            "bos_token": "<|im_start|>",
            "chat_template": CHAT_TEMPLATE,
            "clean_up_tokenization_spaces": False,
            "eos_token": "<|im_end|>",
            "model_max_length": 256,
            "pad_token": "<|im_end|>",
            "tokenizer_class": "PreTrainedTokenizerFast",
            "unk_token": "<|endoftext|>",
        },
    )


def write_json(name: str, value: dict | list) -> None:
    (DIRECTORY / name).write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def make_chats() -> np.ndarray:
    """Writes chat.json and returns the token ids of the first chat."""
    tokenizer = AutoTokenizer.from_pretrained(DIRECTORY)
    chats = []
    for messages in CHATS:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        token_ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        if tokenizer.decode(token_ids) != text:
            raise RuntimeError(f"the tokenizer does not give back {text!r}")
        chats.append({"messages": messages, "text": text, "token_ids": token_ids})
    write_json("chat.json", chats)
    return np.array(chats[0]["token_ids"], np.int32)


def stops_midway(greedy: np.ndarray, eos: int) -> bool:
    return eos in greedy[8:16] and eos not in greedy[:8]


def main() -> None:
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    shutil.rmtree(DIRECTORY, ignore_errors=True)
    DIRECTORY.mkdir(parents=True)
    make_tokenizer()
    prompt = make_chats()
    config = AutoConfig.for_model(
        "llama",
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
        **rope(10_000.0),
    )
    for seed in range(2000):  # until a model ends its answer by itself, about midway in the golden tokens
        model = make_model(config, seed)
        arrays = golden(model, prompt)
        varied = len(set(arrays["greedy"].tolist())) >= MIN_DISTINCT
        if varied and arrays["greedy_margin"].min() > MIN_MARGIN and stops_midway(arrays["greedy"], 2):
            break
    else:
        raise RuntimeError("no seed gives a model that stops by itself")
    check_sensitive(model, arrays)
    model.generation_config.eos_token_id = [2, 0]  # a list, as published chat models have
    model.save_pretrained(DIRECTORY)
    np.savez_compressed(DIRECTORY / "golden.npz", **arrays)
    print(f"seed {seed}, stops at {arrays['greedy'].tolist().index(2)}")
    report("tiny-chat", arrays)


if __name__ == "__main__":
    main()
