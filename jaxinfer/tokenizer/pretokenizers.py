"""How each family of byte-level BPE tokenizers cuts text into words, keyed by GGUF's `tokenizer.ggml.pre`.

A GGUF file stores the vocabulary and the merges but only the *name* of the word splitter. The patterns are
those of the models' own tokenizer.json files; which name means which follows llama.cpp's `llama-vocab.cpp`.
"""

import dataclasses

from tokenizers import Regex, normalizers, pre_tokenizers


@dataclasses.dataclass(frozen=True)
class PreTokenizer:
    """What the value of `tokenizer.ggml.pre` stands for.

    Attributes:
        patterns: Regular expressions (Oniguruma); each cuts the pieces left by the one before into matches
            and the text between matches.
        ignore_merges: A word that is itself in the vocabulary becomes that token without applying merges.
        nfc: Text is put into Unicode normal form C first.
        add_bos: Default for `tokenizer.ggml.add_bos_token`.
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    nfc: bool = False
    add_bos: bool = False

    def build(self) -> pre_tokenizers.PreTokenizer:
        """Returns the splitter followed by the byte-to-character map of GPT-2."""
        splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in self.patterns]
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=False)
        return pre_tokenizers.Sequence([*splits, byte_level])

    def normalizer(self) -> normalizers.Normalizer | None:
        """Returns the Unicode normalizer, or None where text is taken as it is."""
        return normalizers.NFC() if self.nfc else None


_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_PUNCTUATION = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CL100K = rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_PUNCTUATION}|{_SPACES}"
_QWEN2 = rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_PUNCTUATION}|{_SPACES}"
_QWEN35 = (
    rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s"
_CASED_TAIL = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
_O200K = _CASED % (_CONTRACTION + "?", _CONTRACTION + "?") + r"|\p{N}{1,3}|" + _CASED_TAIL
_TEKKEN = _CASED % ("", "") + r"|\p{N}|" + _CASED_TAIL
_BAILING = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
)
_SEED_CODER = (
    rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1}}"
    rf"| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}"
)
_DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"
    r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"
) + _SPACES
# Cased letters of the Unicode version that DeepSeek's tokenizer was made with, hence ranges and no \p{...}.
_CASED_LETTERS = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af"
    "\u0370-\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5"
    "\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba"
    "\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45"
    "\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe"
    "\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102"
    "\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139"
    "\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3"
    "\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06"
    "\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df"
    "\U0001e900-\U0001e943"
)
_DEEPSEEK_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_DEEPSEEK3_CJK = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_DEEPSEEK_PUNCTUATION = r"\s?[!-/:-~" + "\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+"
_DIGIT = r"\p{N}"

_FAMILIES: tuple[tuple[str, PreTokenizer], ...] = (
    (
        "gpt-2 phi-2 exaone4 a.x-4.0 gigachat mellum modern-bert jais trillion granite-docling",
        PreTokenizer((_GPT2,)),
    ),
    ("mpt olmo", PreTokenizer((_GPT2,), nfc=True)),
    ("smollm starcoder refact codeshell exaone minerva-7b", PreTokenizer((_DIGIT, _GPT2))),
    ("command-r", PreTokenizer((_DIGIT, _GPT2), nfc=True)),
    (
        "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2",
        PreTokenizer((_CL100K,), ignore_merges=True, add_bos=True),
    ),
    ("dbrx smaug-bpe", PreTokenizer((_CL100K,))),
    ("chatglm-bpe glm4", PreTokenizer((_CL100K,), ignore_merges=True)),
    ("qwen2", PreTokenizer((_QWEN2,), nfc=True)),
    ("qwen35", PreTokenizer((_QWEN35,), nfc=True)),
    ("deepseek-r1-qwen stablelm2 megrez hunyuan grok-2", PreTokenizer((_QWEN2,))),
    ("gpt-4o llama4 kanana2 minimax-m2", PreTokenizer((_O200K,))),
    ("tekken", PreTokenizer((_TEKKEN,), ignore_merges=True, add_bos=True)),
    ("bailingmoe bailingmoe2 llada-moe", PreTokenizer((_BAILING,))),
    ("seed-coder", PreTokenizer((_SEED_CODER,))),
    (
        "deepseek-llm",
        PreTokenizer((r"[\r\n]", rf"\s?[{_CASED_LETTERS}]+", _DEEPSEEK_PUNCTUATION, r"\s+$", _DEEPSEEK_CJK, r"\p{N}+")),
    ),
    ("deepseek-coder", PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK_CJK, _DIGIT))),
    ("deepseek-v3 hunyuan-dense", PreTokenizer((r"\p{N}{1,3}", _DEEPSEEK3_CJK, _DEEPSEEK3))),
    ("falcon", PreTokenizer((r"[\p{P}$+<=>^~|`]+", _GPT2, "[0-9][0-9][0-9]"))),
    ("default", PreTokenizer((r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"))),
)


def find_pre_tokenizer(name: str) -> PreTokenizer:
    """Returns the word splitter that `tokenizer.ggml.pre` names.

    Args:
        name: Value of the metadata key, for example "smollm".

    Raises:
        ValueError: The name is not in the table; the message lists those that are.
    """
    known = {alias: family for aliases, family in _FAMILIES for alias in aliases.split()}
    if name not in known:
        raise ValueError(
            f"unknown pre-tokenizer {name!r} in tokenizer.ggml.pre; known ones: {', '.join(sorted(known))}. "
            "Load the tokenizer from the model's tokenizer.json instead, or set the key to the name of a "
            "pre-tokenizer that splits words the same way."
        )
    return known[name]
