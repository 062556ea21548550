"""Makes tests/golden/tokenizers with the reference libraries (transformers, sentencepiece).

Run from the repository root, in an environment that has both:

    python scripts/make_tokenizer_golden.py --reference REF.npz --gguf SmolLM2-135M-Instruct.Q4_1.gguf

`--reference` holds texts and their ids (`p{i}_name`, `p{i}_text`, `p{i}_ids`). The small vocabularies are
trained here, on the texts of texts.json, so the golden files are small and free of anyone's data.
"""

import argparse
import io
import itertools
import json
import re
from pathlib import Path

import gguf
import numpy as np
import sentencepiece
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    AutoTokenizer,
    CohereTokenizer,
    GPT2Tokenizer,
    PreTrainedTokenizerFast,
    Qwen2Tokenizer,
)
from transformers.models.qwen3_5.tokenization_qwen3_5 import Qwen3_5Tokenizer

OUT = Path("tests/golden/tokenizers")
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
USER_DEFINED = ["<tool_call>"]
TEXTS = json.loads((OUT / "texts.json").read_text(encoding="utf-8"))
CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
TAIL = r"\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = rf"{CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{TAIL}"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
WORD = r"[^\r\n\p{L}\p{N}]?"
TEKKEN = rf"{WORD}{UPPER}*{LOWER}+|{WORD}{UPPER}+{LOWER}*|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{TAIL}"
GPT4O = (
    rf"{WORD}{UPPER}*{LOWER}+{CONTRACTION}?|{WORD}{UPPER}+{LOWER}*{CONTRACTION}?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{TAIL}"
)


def split(pattern: str) -> pre_tokenizers.PreTokenizer:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), byte_level])


def families() -> dict[str, tuple]:
    """GGUF name -> (pre-tokenizer, normalizer, ignore_merges), from transformers where its code has them."""
    digits = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    table = {
        "smollm": (digits, None, False),
        "llama-bpe": (split(LLAMA3), None, True),
        "tekken": (split(TEKKEN), None, True),
        "gpt-4o": (split(GPT4O), None, False),
    }
    classes = {
        "gpt-2": GPT2Tokenizer,
        "qwen2": Qwen2Tokenizer,
        "qwen35": Qwen3_5Tokenizer,
        "command-r": CohereTokenizer,
    }
    for name, cls in classes.items():
        inner = cls()._tokenizer
        table[name] = (inner.pre_tokenizer, inner.normalizer, False)
    return table


def train_bpe(pre_tokenizer, normalizer, ignore_merges) -> Tokenizer:
    """Learns merges from unsplit text: they cross word boundaries, so a wrong split changes the ids."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        TEXTS * 3, trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet, show_progress=False)
    )
    tokenizer.pre_tokenizer = pre_tokenizer
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.decoder = decoders.ByteLevel()
    state = json.loads(tokenizer.to_str())
    state["model"]["ignore_merges"] = ignore_merges
    tokenizer = Tokenizer.from_str(json.dumps(state))
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in USER_DEFINED])
    return tokenizer


def gguf_metadata(tokenizer: Tokenizer, pre: str) -> dict:
    tokens = [tokenizer.id_to_token(i) for i in range(tokenizer.get_vocab_size())]
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    if pre in ("llama-bpe", "tekken"):
        # Words that only ignore_merges can reach: without their last merge they stay two tokens.
        merges = merges[:-20]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if t in SPECIAL else 4 if t in USER_DEFINED else 1 for t in tokens],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in merges],
        "tokenizer.ggml.bos_token_id": tokens.index("<|endoftext|>"),
        "tokenizer.ggml.eos_token_id": tokens.index("<|im_end|>"),
        "tokenizer.ggml.add_bos_token": False,
    }


def make_byte_level() -> None:
    for pre, parts in families().items():
        tokenizer = train_bpe(*parts)
        metadata = gguf_metadata(tokenizer, pre)
        state = json.loads(tokenizer.to_str())
        state["model"]["merges"] = [merge.split(" ") for merge in metadata["tokenizer.ggml.merges"]]
        tokenizer = Tokenizer.from_str(json.dumps(state))
        write(f"bpe_{pre}.json", {"metadata": metadata, "ids": [tokenizer.encode(text).ids for text in TEXTS]})


def make_sentencepiece() -> None:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([line for text in TEXTS for line in text.split("\n") if line] * 3),
        model_writer=model, model_type="bpe", vocab_size=560, byte_fallback=True, character_coverage=0.98,
        normalization_rule_name="identity", remove_extra_whitespaces=False, split_digits=True,
        allow_whitespace_only_pieces=True, minloglevel=2,
    )  # fmt: skip
    (OUT / "sentencepiece.model").write_bytes(model.getvalue())
    processor = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    size = processor.vocab_size()
    kinds = [
        2 if processor.is_unknown(i) else 3 if processor.is_control(i) else 6 if processor.is_byte(i) else 1
        for i in range(size)
    ]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [processor.id_to_piece(i) for i in range(size)],
        "tokenizer.ggml.scores": [processor.get_score(i) for i in range(size)],
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.add_space_prefix": True,
    }
    ids = [encode_with_control_tokens(processor, text) for text in TEXTS]
    write("sentencepiece.json", {"metadata": metadata, "ids": ids})


def encode_with_control_tokens(processor, text: str) -> list[int]:
    """SentencePiece reads "<s>" in a text as plain text, so cut there; each stretch gets a space prefix."""
    ids = []
    for part in re.split(r"(<s>|</s>|<unk>)", text):
        ids += [processor.piece_to_id(part)] if part in ("<s>", "</s>", "<unk>") else processor.encode(part)
    return ids


def make_hf_directory() -> None:
    """A model directory as transformers writes it, and the ids and chats transformers gives for it."""
    tokenizer = train_bpe(*families()["llama-bpe"])
    bos = tokenizer.token_to_id("<|endoftext|>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", bos)]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|endoftext|>",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
    )
    fast.chat_template = (
        "{{- bos_token }}{% for message in messages %}\n"
        "    {%- if message.role not in ['system', 'user', 'assistant'] %}\n"
        "        {{- raise_exception('Unknown role: ' + message.role) }}\n"
        "    {%- endif %}\n"
        "    {%- if message.role == 'assistant' %}\n"
        "        {%- generation %}{{- '<|im_start|>assistant\\n' + message.content + '<|im_end|>\\n' }}"
        "{%- endgeneration %}\n"
        "        {%- continue %}\n"
        "    {%- endif %}\n"
        "    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}\n"
        "{% endfor %}\n"
        "{%- if tools %}{{- tools | tojson(indent=2) }}{% endif %}\n"
        "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"
    )
    directory = OUT / "hf_directory"
    fast.save_pretrained(directory)
    write("hf_directory/generation_config.json", {"eos_token_id": [fast.eos_token_id, bos]})
    fast = AutoTokenizer.from_pretrained(directory)
    chat = [
        {"role": "system", "content": "Be <brief> & \u201ckind\u201d."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello!"},
        {"role": "user", "content": "Bye"},
    ]
    tools = [{"type": "function", "function": {"name": "caf\u00e9", "description": "a < b & 'c'"}}]
    cases = [
        {"messages": chat, "add_generation_prompt": True},
        {"messages": chat[:3], "add_generation_prompt": False},
        {"messages": chat[1:2], "tools": tools, "add_generation_prompt": True},
    ]
    rendered = [fast.apply_chat_template(case["messages"], tokenize=False, **options(case)) for case in cases]
    ids = [fast.encode(text) for text in TEXTS]
    write("hf_directory_golden.json", {"ids": ids, "chats": cases, "rendered": rendered})


def options(case: dict) -> dict:
    return {name: value for name, value in case.items() if name != "messages"}


def make_smollm2(reference: Path, model: Path) -> None:
    """The reference prompts, and the part of SmolLM2's vocabulary that encoding them uses."""
    fields = gguf.GGUFReader(model).fields
    metadata = {key: field.contents() for key, field in fields.items() if key.startswith("tokenizer.")}
    arrays = np.load(reference)
    names = [str(arrays[f"p{i}_name"]) for i in range(8)]
    prompts = {n: (str(arrays[f"p{i}_text"]), arrays[f"p{i}_ids"].tolist()) for i, n in enumerate(names)}
    # This prompt was encoded by transformers' GGUF reader, which splits words as plain GPT-2 does. The model
    # and llama.cpp cut digits out first; the ids differ in one place.
    del prompts["long"]

    tokens = metadata["tokenizer.ggml.tokens"]
    ranks = {tuple(m.split(" ")): r for r, m in enumerate(metadata["tokenizer.ggml.merges"])}
    pre_tokenizer = families()["smollm"][0]
    used, kept = set(), set(range(17)) | {i for i, t in enumerate(tokens) if len(t) == 1}
    for text, ids in prompts.values():
        kept |= set(ids)
        for word, _ in pre_tokenizer.pre_tokenize_str(text):
            used |= merges_of(word, ranks)
    kept |= {tokens.index(left + right) for left, right in used}
    original = sorted(kept)
    small = {key: value for key, value in metadata.items() if not isinstance(value, list)}
    small["tokenizer.ggml.tokens"] = [tokens[i] for i in original]
    small["tokenizer.ggml.token_type"] = [metadata["tokenizer.ggml.token_type"][i] for i in original]
    small["tokenizer.ggml.merges"] = [" ".join(pair) for pair in sorted(used, key=ranks.__getitem__)]
    cases = {name: {"text": text, "ids": ids} for name, (text, ids) in prompts.items()}
    write("smollm2.json", {"metadata": small, "original_ids": original, "prompts": cases})


def merges_of(word: str, ranks: dict) -> set:
    parts, used = list(word), set()
    while pairs := [pair for pair in itertools.pairwise(parts) if pair in ranks]:
        best = min(pairs, key=ranks.__getitem__)
        used.add(best)
        at = next(i for i, pair in enumerate(itertools.pairwise(parts)) if pair == best)
        parts[at : at + 2] = ["".join(best)]
    return used


def write(name: str, value: object) -> None:
    text = json.dumps(value, ensure_ascii=True, separators=(",", ":"))
    (OUT / name).write_text(text + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--reference", type=Path, required=True)
    parser.add_argument("--gguf", type=Path, required=True)
    arguments = parser.parse_args()
    make_byte_level()
    make_sentencepiece()
    make_hf_directory()
    make_smollm2(arguments.reference, arguments.gguf)


if __name__ == "__main__":
    main()
