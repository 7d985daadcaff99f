"""Names and shapes of all tensors in a published checkpoint of a given configuration.

MiniCPM-o 4.5, `model-*.safetensors`: 1414 tensors at full size. With this list a checkpoint is
checked by its headers alone, in the names that its owner knows, and random weights can take the
same way into the parts as real ones.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from shared.errors import ModelLoadError
from worker.models.minicpmo45.checkpoint import Entry
from worker.models.minicpmo45.config import CheckpointConfig
from worker.nn.audio_encoder import AudioEncoderConfig
from worker.nn.decoder import DecoderConfig
from worker.nn.resampler import ResamplerConfig
from worker.nn.siglip import VisionConfig
from worker.nn.speech import SpeechConfig

Shapes = dict[str, tuple[int, ...]]

MAX_PROBLEMS = 20
"""In one sentence; more are counted."""

UNUSED = re.compile(
    r"tts\.model\.embed_tokens\.weight"  # the reference's Llama has one, and never looks at it
    r"|tts\.projector_spk\..*"  # trained for voices, not used at inference
    r"|vpm\.head\..*"  # SigLIP's pooling
    r"|.*\.rotary_emb\.inv_freq|.*\.position_ids"  # constants that old files kept
)
"""Tensors that may be there and are left alone."""

VISION_LAYER = re.compile(r"vpm\.encoder\.layers\.(\d+)\..*")


def check_tensors(
    entries: Mapping[str, Entry], expected: Shapes, is_spare: Callable[[str], bool], by: str
) -> None:
    """Compare what there is with what the parts need.

    Args:
        entries: what the files hold.
        is_spare: whether a tensor may be there that no part needs.
        by: what the expected shapes come from, for the message.

    Raises:
        ModelLoadError: with the list of all tensors that are missing, of another shape or type,
            or that no part knows.
    """
    problems = [
        f"{name} is missing, expected {list(shape)}"
        for name, shape in expected.items()
        if name not in entries
    ]
    paths = {entry.path: None for entry in entries.values()}  # in order, each once
    for name, entry in entries.items():
        shape = expected.get(name)
        place = f"{entry.path.name}: " if len(paths) > 1 else ""
        if shape is None and not is_spare(name):
            problems.append(f"{place}{name} {list(entry.shape)} belongs to no part")
        elif shape is not None and entry.shape != shape:
            problems.append(f"{place}{name} is {list(entry.shape)}, expected {list(shape)}")
        elif shape is not None and not entry.is_float:
            problems.append(f"{place}{name} is of type {entry.dtype}, expected BF16, F16 or F32")
    if not problems:
        return
    files = str(next(iter(paths), "no file"))
    if len(paths) > 1:
        files += f" and {len(paths) - 1} more"
    shown = problems[:MAX_PROBLEMS]
    if len(problems) > len(shown):
        shown.append(f"... and {len(problems) - len(shown)} more")
    start = "1 tensor" if len(problems) == 1 else f"{len(problems)} tensors"
    verb = "does" if len(problems) == 1 else "do"
    # One line: whoever logs the reason escapes line breaks.
    raise ModelLoadError(f"{start} of {files} {verb} not fit {by}: {'; '.join(shown)}")


def published_shapes(config: CheckpointConfig) -> Shapes:
    """Return every tensor that the parts need."""
    return {
        **below("llm.", decoder_shapes(config.llm)),
        **below("vpm.", vision_shapes(config.vision)),
        **below("resampler.", resampler_shapes(config.resampler)),
        **audio_shapes(config.audio),
        **below("tts.", speech_shapes(config.speech)),
    }


def may_be_left(config: CheckpointConfig) -> Callable[[str], bool]:
    """Return a test for the names that a checkpoint may have in addition."""

    def test(name: str) -> bool:
        layer = VISION_LAYER.fullmatch(name)
        if layer is not None:  # `drop_vision_last_layer` with the layer still in the file
            return not config.has_last_vision_layer and int(layer[1]) == config.vision.n_layers
        if name == "llm.lm_head.weight":  # tied, but written out
            return config.llm.tied_head
        return UNUSED.fullmatch(name) is not None

    return test


def below(prefix: str, shapes: Shapes) -> Shapes:
    return {f"{prefix}{name}": shape for name, shape in shapes.items()}


def affine(name: str, n_out: int, *n_in: int) -> Shapes:
    """Return a weight and its bias; without `n_in` those of a norm."""
    return {f"{name}.weight": (n_out, *n_in), f"{name}.bias": (n_out,)}


def decoder_shapes(config: DecoderConfig) -> Shapes:
    """Names as in `Qwen3ForCausalLM`."""
    shapes = {
        "model.embed_tokens.weight": (config.vocab_size, config.hidden_size),
        **below("model.", stack_shapes(config)),
    }
    if not config.tied_head:
        shapes["lm_head.weight"] = (config.vocab_size, config.hidden_size)
    return shapes


def stack_shapes(config: DecoderConfig) -> Shapes:
    """The blocks and the closing norm."""
    width, ffn, d = config.hidden_size, config.ffn_size, config.head_dim
    n_query, n_key = config.n_heads * d, config.n_kv_heads * d
    layer: Shapes = {
        "self_attn.q_proj.weight": (n_query, width),
        "self_attn.k_proj.weight": (n_key, width),
        "self_attn.v_proj.weight": (n_key, width),
        "self_attn.o_proj.weight": (width, n_query),
        "mlp.gate_proj.weight": (ffn, width),
        "mlp.up_proj.weight": (ffn, width),
        "mlp.down_proj.weight": (width, ffn),
        "input_layernorm.weight": (width,),
        "post_attention_layernorm.weight": (width,),
    }
    if config.qk_norm:
        layer |= {"self_attn.q_norm.weight": (d,), "self_attn.k_norm.weight": (d,)}
    shapes: Shapes = {"norm.weight": (width,)}
    for index in range(config.n_layers):
        shapes |= below(f"layers.{index}.", layer)
    return shapes


def vision_shapes(config: VisionConfig) -> Shapes:
    width, ffn, patch = config.width, config.ffn_size, config.patch_size
    shapes = {
        **affine("embeddings.patch_embedding", width, 3, patch, patch),
        "embeddings.position_embedding.weight": (config.n_positions_side**2, width),
        **affine("post_layernorm", width),
    }
    for index in range(config.n_layers):
        layer = {
            **affine("layer_norm1", width),
            **affine("layer_norm2", width),
            **affine("mlp.fc1", ffn, width),
            **affine("mlp.fc2", width, ffn),
        }
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            layer |= affine(f"self_attn.{name}", width, width)
        shapes |= below(f"encoder.layers.{index}.", layer)
    return shapes


def resampler_shapes(config: ResamplerConfig) -> Shapes:
    width = config.llm_dim
    return {
        "query": (config.n_queries, width),
        "kv_proj.weight": (width, config.vision_width),
        "attn.in_proj_weight": (3 * width, width),
        "attn.in_proj_bias": (3 * width,),
        **affine("attn.out_proj", width, width),
        **affine("ln_q", width),
        **affine("ln_kv", width),
        **affine("ln_post", width),
        "proj": (width, width),
    }


def audio_shapes(config: AudioEncoderConfig) -> Shapes:
    width, ffn = config.width, config.ffn_size
    shapes = {
        **affine("apm.conv1", width, config.n_mels, 3),
        **affine("apm.conv2", width, width, 3),
        "apm.embed_positions.weight": (config.max_positions, width),
        **affine("apm.layer_norm", width),
        **affine("audio_projection_layer.linear1", config.llm_dim, width),
        **affine("audio_projection_layer.linear2", config.llm_dim, config.llm_dim),
    }
    for index in range(config.n_layers):
        layer = {
            **affine("self_attn_layer_norm", width),
            **affine("final_layer_norm", width),
            **affine("fc1", ffn, width),
            **affine("fc2", width, ffn),
            "self_attn.k_proj.weight": (width, width),  # Whisper's keys have no bias
        }
        for name in ("q_proj", "v_proj", "out_proj"):
            layer |= affine(f"self_attn.{name}", width, width)
        shapes |= below(f"apm.layers.{index}.", layer)
    return shapes


def speech_shapes(config: SpeechConfig) -> Shapes:
    width = config.hidden_size
    head = "head_code.0.parametrizations.weight"  # weight norm: length and direction of a row
    return {
        "emb_text.weight": (config.n_text_tokens, width),
        "emb_code.0.weight": (config.n_codes, width),
        **below("model.", stack_shapes(config.decoder)),
        **affine("projector_semantic.linear1", width, config.llm_dim),
        **affine("projector_semantic.linear2", width, width),
        f"{head}.original0": (config.n_codes, 1),
        f"{head}.original1": (config.n_codes, width),
    }
