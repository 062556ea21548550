"""Writes model.gguf and golden_gguf.npz beside some of the models that make_golden.py made.

Run it after the other two, in the same environment: python scripts/make_golden_gguf.py [CASE ...]

The files follow llama.cpp's convert_hf_to_gguf.py: its metadata keys and tensor names, q and k permuted for
arch "llama", rope_freqs.weight for llama3 scaling. The golden logits come from transformers on the weights
read back out of the file (dequantized and un-permuted), so that they hold the loss of quantization.
"""

import json
import math
import sys
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Q
from make_golden import MODELS, golden, report
from make_golden_chat import SPECIAL
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

# case -> arch, and the type of each kind of matrix ("*": all others). Vectors are F32, as in llama.cpp.
TWINS: dict[str, tuple[str, dict[str, Q]]] = {
    "llama-untied": ("llama", {"*": Q.F32}),
    "llama-tied": ("llama", {"*": Q.Q8_0}),
    "llama-mha-bias": ("llama", {"*": Q.F16}),
    "llama3-rope": ("llama", {"*": Q.F16, "token_embd": Q.Q8_0}),
    "llama-linear-rope": ("llama", {"*": Q.F16}),
    "llama-yarn": ("llama", {"*": Q.F16}),
    "qwen2": ("qwen2", {"*": Q.F16, "output": Q.Q8_0}),
    "qwen3": ("qwen3", {"*": Q.F16, "ffn_gate": Q.Q8_0, "ffn_up": Q.Q8_0, "ffn_down": Q.Q8_0}),
    "mistral-full": ("llama", {"*": Q.Q8_0, "attn_q": Q.F16, "attn_k": Q.F16, "output": Q.F16}),
    "tiny-chat": ("llama", {"*": Q.Q8_0}),
}
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
FILE_TYPES = {Q.F32: 0, Q.F16: 1, Q.Q8_0: 7}  # llama.cpp's ftype, informative only


def gguf_name(name: str) -> str:
    """model.layers.0.self_attn.q_proj.weight -> blk.0.attn_q.weight."""
    stem, suffix = name.rsplit(".", 1)
    if stem.startswith("model.layers."):
        _, _, layer, part = stem.split(".", 3)
        return f"blk.{layer}.{NAMES[part]}.{suffix}"
    return f"{NAMES[stem]}.{suffix}"


def heads_of(name: str, config: PreTrainedConfig) -> int | None:
    """How many heads the rows of a permuted tensor make up; None for the tensors that are not permuted."""
    return {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(name.split(".")[-2])


def permute(rows: np.ndarray, heads: int) -> np.ndarray:
    """Half-rotation order to the interleaved order of llama.cpp's arch "llama" (weights and biases)."""
    return rows.reshape(heads, 2, -1, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def unpermute(rows: np.ndarray, heads: int) -> np.ndarray:
    return rows.reshape(heads, -1, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def llama3_rope_factors(scaling: dict, head_dim: int) -> np.ndarray:
    """What each frequency is divided by, float32 [head_dim / 2] (llama.cpp: generate_extra_tensors)."""
    original, factor = scaling["original_max_position_embeddings"], scaling["factor"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    factors = []
    for frequency in 1.0 / scaling["rope_theta"] ** (np.arange(0, head_dim, 2) / head_dim):
        wavelength = 2 * math.pi / frequency
        if wavelength < original / high:
            factors.append(1.0)
        elif wavelength > original / low:
            factors.append(factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, np.float32)


def add_hyperparameters(writer: gguf.GGUFWriter, arch: str, config: PreTrainedConfig) -> None:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if head_dim * config.num_attention_heads != config.hidden_size:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    if arch == "llama":  # llama.cpp writes these two for llama only
        writer.add_vocab_size(config.vocab_size)
        writer.add_rope_dimension_count(head_dim)

    scaling = config.rope_parameters
    writer.add_rope_freq_base(scaling["rope_theta"])
    if scaling["rope_type"] == "llama3":  # a tensor, no metadata
        writer.add_tensor("rope_freqs.weight", llama3_rope_factors(scaling, head_dim))
    elif scaling["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(scaling["factor"])
    elif scaling["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(scaling["factor"])
        writer.add_rope_scaling_orig_ctx_len(scaling["original_max_position_embeddings"])


def tokenizer_of(directory: Path, vocab: int) -> tuple[list[str], list[str], str]:
    """Tokens, merges and the pre-tokenizer's name: those of tokenizer.json, or a made-up byte-level BPE."""
    path = directory / "tokenizer.json"
    if path.exists():
        model = json.loads(path.read_text())["model"]
        tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
        return tokens, [" ".join(merge) for merge in model["merges"]], "smollm"
    merges = ["Ġ t", "h e", "Ġ a", "i n", "r e", "o n", "Ġt he", "e r", "Ġ s", "a t", "n d", "o u", "Ġ w"]
    characters = [chr(code) for code in range(ord("!"), ord("~") + 1)]
    tokens = [*SPECIAL, *characters, "Ġ", "Ċ", *(merge.replace(" ", "") for merge in merges)]
    if len(tokens) != vocab:
        raise RuntimeError(f"the made-up vocabulary has {len(tokens)} tokens, the model {vocab}")
    return tokens, merges, "gpt-2"


def add_tokenizer(writer: gguf.GGUFWriter, directory: Path, config: PreTrainedConfig) -> None:
    tokens, merges, pre = tokenizer_of(directory, config.vocab_size)
    control, normal = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([control if token in SPECIAL else normal for token in tokens])
    writer.add_token_merges(merges)
    writer.add_bos_token_id(config.bos_token_id)
    writer.add_eos_token_id(config.eos_token_id)
    writer.add_pad_token_id(config.pad_token_id)
    writer.add_add_bos_token(False)
    settings = directory / "tokenizer_config.json"
    if settings.exists():
        writer.add_chat_template(json.loads(settings.read_text())["chat_template"])


def write_gguf(directory: Path, model: PreTrainedModel, arch: str, types: dict[str, Q]) -> None:
    writer = gguf.GGUFWriter(directory / "model.gguf", arch)
    writer.add_type("model")
    writer.add_name(directory.name)
    add_hyperparameters(writer, arch, model.config)
    writer.add_file_type(FILE_TYPES[types["*"]])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    add_tokenizer(writer, directory, model.config)
    for hf_name, parameter in model.named_parameters():  # tied embeddings are named once
        name, array = gguf_name(hf_name), parameter.detach().numpy()
        heads = heads_of(name, model.config)
        if arch == "llama" and heads:
            array = permute(array, heads)
        qtype = Q.F32 if array.ndim == 1 else types.get(name.split(".")[-2], types["*"])
        writer.add_tensor(name, gguf.quantize(np.ascontiguousarray(array), qtype), raw_dtype=qtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@torch.no_grad()
def read_back(directory: Path, model: PreTrainedModel, arch: str) -> None:
    """Replaces the model's parameters by what the file holds."""
    reader = gguf.GGUFReader(directory / "model.gguf")
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    for hf_name, parameter in model.named_parameters():
        name = gguf_name(hf_name)
        array = gguf.dequantize(tensors[name].data, tensors[name].tensor_type).astype(np.float32)
        heads = heads_of(name, model.config)
        if arch == "llama" and heads:
            array = unpermute(array, heads)
        parameter.copy_(torch.from_numpy(array.copy()))


def make_twin(case: str) -> None:
    directory = MODELS / case
    arch, types = TWINS[case]
    model = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager", dtype=torch.float32)
    write_gguf(directory, model, arch, types)
    read_back(directory, model, arch)
    original = np.load(directory / "golden.npz")
    arrays = golden(model, original["token_ids"])
    np.savez_compressed(directory / "golden_gguf.npz", **arrays)
    print(f"{np.abs(arrays['logits'] - original['logits']).max():.4f} from f32  ", end="")
    report(case, arrays)


def main() -> None:
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    for case in sys.argv[1:] or TWINS:
        make_twin(case)


if __name__ == "__main__":
    main()
