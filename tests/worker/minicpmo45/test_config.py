"""Reading the JSON files of a checkpoint: what is taken, and what is refused by name."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shared.errors import ModelLoadError
from worker.models.minicpmo45.config import FULL_SIZE, CheckpointConfig
from worker.models.minicpmo45.layout import UNUSED, published_shapes

CHECKPOINT = Path(__file__).parents[2] / "golden" / "data" / "checkpoint"
Edit = Callable[..., CheckpointConfig]


@pytest.fixture
def read(tmp_path: Path) -> Edit:
    """Return a function that reads the tiny config with changes: `path__to__key=value`.

    `...` removes a key.
    """

    def run(**changes: Any) -> CheckpointConfig:
        for name in ("config.json", "preprocessor_config.json"):
            value = json.loads((CHECKPOINT / name).read_text(encoding="utf-8"))
            if name == "config.json":
                for path, change in changes.items():
                    *parents, key = path.split("__")
                    node = value
                    for parent in parents:
                        node = node[parent]
                    node.pop(key, None)
                    if change is not ...:
                        node[key] = change
            (tmp_path / name).write_text(json.dumps(value), encoding="utf-8")
        return CheckpointConfig.read(tmp_path)

    return run


def test_sizes_are_those_of_the_file() -> None:
    config = CheckpointConfig.read(CHECKPOINT)

    llm = config.llm
    assert (llm.vocab_size, llm.hidden_size, llm.n_layers, llm.n_heads, llm.n_kv_heads) == (
        448,
        128,
        2,
        4,
        2,
    )
    assert (llm.head_dim, llm.ffn_size, llm.rope_theta, llm.norm_eps) == (32, 256, 1e6, 1e-6)
    assert llm.qk_norm
    assert not llm.tied_head
    assert (config.vision.width, config.vision.n_layers, config.vision.n_positions_side) == (
        32,
        2,
        70,
    )
    assert (config.resampler.n_queries, config.resampler.n_heads) == (64, 1)
    assert (config.audio.width, config.audio.n_layers, config.audio.max_positions) == (32, 2, 1500)
    assert (config.audio.pool_step, config.audio.chunk_s) == (5, 1.0)
    speech = config.speech
    assert (speech.hidden_size, speech.n_heads, speech.head_dim, speech.ffn_size) == (32, 4, 8, 96)
    assert (speech.n_codes, speech.n_text_tokens) == (6562, 480)
    assert (speech.audio_bos_id, speech.text_eos_id) == (353, 358)
    assert (speech.top_p, speech.top_k, speech.repetition_penalty) == (0.85, 25, 1.05)
    assert speech.normalize
    assert config.slices.max_slice_nums == 9
    assert config.max_positions == 8192
    assert config.has_last_vision_layer is True
    assert config.tts_attention == "full_attention"


def test_full_size_has_the_tensors_of_the_published_checkpoint() -> None:
    """1414 tensors, 9 371 787 666 values, of which two parts are not used."""
    n_unused = 32_000 * 768 + 3_737_088

    shapes = published_shapes(FULL_SIZE)

    assert len(shapes) == 1414 - 5
    assert sum(math.prod(shape) for shape in shapes.values()) + n_unused == 9_371_787_666
    assert not any(UNUSED.fullmatch(name) for name in shapes)


def test_full_size_is_what_reading_published_values_gives(read: Edit) -> None:
    config = read(
        vocab_size=151_748,
        hidden_size=4096,
        intermediate_size=12_288,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=...,
        max_position_embeddings=40_960,
        vision_config={
            "hidden_size": 1152,
            "intermediate_size": 4304,
            "num_attention_heads": 16,
            "num_hidden_layers": 27,
            "patch_size": 14,
            "image_size": 980,
        },
        audio_config={
            "d_model": 1024,
            "encoder_layers": 24,
            "encoder_attention_heads": 16,
            "encoder_ffn_dim": 4096,
        },
        tts_config={
            "llm_dim": 4096,
            "num_audio_tokens": 6562,
            "num_text_tokens": 152_064,
            "audio_bos_token_id": 151_687,
            "text_eos_token_id": 151_692,
            "top_p": 0.85,
            "top_k": 25,
            "repetition_penalty": 1.05,
            "normalize_projected_hidden": True,
            "attention_type": "full_attention",
        },
    )

    assert config == FULL_SIZE


# ---- rotation


@pytest.mark.parametrize("place", ["rope_parameters", "rope_scaling"])
def test_rotation_base_may_stand_in_the_newer_place(read: Edit, place: str) -> None:
    config = read(rope_theta=..., **{place: {"rope_type": "default", "rope_theta": 5e5}})

    assert config.llm.rope_theta == 5e5


def test_rotation_base_has_no_default(read: Edit) -> None:
    """A silent 10 000 would make nonsense of every answer."""
    with pytest.raises(ModelLoadError, match="rope_theta is missing"):
        read(rope_theta=...)


def test_two_rotation_bases_that_differ_are_refused(read: Edit) -> None:
    with pytest.raises(ModelLoadError, match=r"rope_theta is 1000000\.0, expected 10000\.0"):
        read(rope_parameters={"rope_theta": 10_000.0})


@pytest.mark.parametrize(
    "scaling",
    [{"rope_type": "yarn", "factor": 4.0}, {"type": "linear", "factor": 2.0}, {"factor": 8.0}],
)
def test_scaled_rotation_is_refused(read: Edit, scaling: dict[str, Any]) -> None:
    with pytest.raises(ModelLoadError, match=r"rope_scaling\."):
        read(rope_scaling=scaling)


def test_head_size_defaults_to_that_of_qwen3_not_to_a_quotient(read: Edit) -> None:
    assert read(head_dim=...).llm.head_dim == 128


# ---- the last vision layer


def test_last_vision_layer_goes_if_the_file_says_so(read: Edit) -> None:
    kept, dropped = read(), read(drop_vision_last_layer=True)

    assert (kept.vision.n_layers, kept.has_last_vision_layer) == (2, True)
    assert (dropped.vision.n_layers, dropped.has_last_vision_layer) == (1, False)
    assert dropped.for_weights(["vpm.encoder.layers.1.mlp.fc1.bias"]) == dropped


def test_last_vision_layer_is_taken_as_found_if_the_file_does_not_say(read: Edit) -> None:
    config = read(drop_vision_last_layer=...)
    names = ["vpm.encoder.layers.0.mlp.fc1.bias", "vpm.encoder.layers.1.mlp.fc1.bias"]

    assert config.has_last_vision_layer is None
    assert config.for_weights(names).vision.n_layers == 2
    assert config.for_weights(names).has_last_vision_layer is True
    assert config.for_weights(names[:1]).vision.n_layers == 1
    assert config.for_weights(names[:1]).has_last_vision_layer is False


# ---- other settings


def test_settings_of_the_programs_are_taken(read: Edit) -> None:
    config = read(
        use_image_id=False,
        vision_batch_size=3,
        audio_chunk_length=2.0,
        audio_pool_step=2,
        tie_word_embeddings=True,
        tts_config__attention_type="reindex",
        tts_config__temperature=0.5,
        tts_config__normalize_projected_hidden=False,
    )

    assert not config.use_image_id
    assert config.vision_batch_size == 3
    assert (config.audio.chunk_s, config.audio.pool_step) == (2.0, 2)
    assert config.llm.tied_head
    assert config.tts_attention == "reindex"
    assert config.speech.temperature == 0.5
    assert not config.speech.normalize


def test_slices_come_from_the_image_processor_before_the_model(read: Edit, tmp_path: Path) -> None:
    assert read(slice_config__max_slice_nums=4).slices.max_slice_nums == 9

    (tmp_path / "preprocessor_config.json").unlink()

    assert CheckpointConfig.read(tmp_path).slices.max_slice_nums == 4


def test_without_any_slice_settings_pictures_are_not_cut(read: Edit, tmp_path: Path) -> None:
    read(slice_config=...)
    (tmp_path / "preprocessor_config.json").write_text("{}", encoding="utf-8")

    slices = CheckpointConfig.read(tmp_path).slices

    assert (slices.max_slice_nums, slices.scale_resolution) == (1, 448)


def test_a_tokenizer_with_more_ids_than_embeddings_is_refused() -> None:
    FULL_SIZE.check_tokenizer(151_748)

    with pytest.raises(ModelLoadError, match="ids up to 151748"):
        FULL_SIZE.check_tokenizer(151_749)


# ---- refused


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model_type": "minicpmv"}, r"model_type is 'minicpmv', expected 'minicpmo'"),
        ({"model_type": ...}, "model_type is missing"),
        ({"architectures": ["Qwen3ForCausalLM"]}, "architectures is"),
        ({"architectures": 3}, "architectures is 3"),
        ({"version": "2.6"}, "version is '2.6'.*other versions"),
        ({"version": ...}, "version is missing"),
        ({"hidden_size": ...}, "hidden_size is missing"),
        ({"hidden_size": 100}, "hidden_size is 100, expected a multiple of 128"),
        ({"hidden_size": "128"}, "hidden_size is '128', expected a whole number"),
        ({"hidden_size": True}, "hidden_size is True"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000, .* at most 512"),
        ({"vision_config__num_hidden_layers": 513}, "num_hidden_layers is 513, .* at most 512"),
        ({"audio_config__encoder_layers": 513}, "encoder_layers is 513, .* at most 512"),
        ({"tts_config__num_hidden_layers": 513}, "num_hidden_layers is 513, .* at most 512"),
        ({"intermediate_size": 10**9}, "intermediate_size is 1000000000, .* at most 8000000"),
        (
            {"hidden_size": 10**4000},
            r"hidden_size is 1000+\.\.\., .* at most 8000000",
        ),
        ({"rms_norm_eps": 10**400}, r"rms_norm_eps is 1000+\.\.\., .* at most 1e\+12"),
        ({"num_key_value_heads": 3}, "num_key_value_heads is 3, expected a divisor"),
        ({"head_dim": 33}, "head_dim is 33, expected an even number"),
        ({"rms_norm_eps": -1}, "rms_norm_eps is -1"),
        ({"rope_theta": float("inf")}, "rope_theta is inf"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu', expected 'silu'"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"use_sliding_window": True}, "use_sliding_window is True"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings is 1, expected true or false"),
        ({"query_num": None}, "query_num is None"),
        ({"vision_config": ...}, "vision_config is missing, expected an object"),
        ({"vision_config__hidden_act": "gelu"}, "vision_config.hidden_act"),
        ({"vision_config__image_size": 975}, "image_size is 975, expected a multiple"),
        ({"vision_config__num_attention_heads": 5}, "num_attention_heads is 5"),
        ({"audio_config__encoder_ffn_dim": 64}, "encoder_ffn_dim is 64, expected 4 x d_model"),
        ({"audio_config__num_mel_bins": 128}, "num_mel_bins is 128"),
        ({"audio_config__activation_function": "relu"}, "activation_function"),
        ({"audio_config__scale_embedding": True}, "scale_embedding"),
        ({"tts_config__llm_dim": 2560}, "tts_config.llm_dim is 2560, expected 128"),
        ({"tts_config__llm_dim": ...}, "tts_config.llm_dim is missing"),
        ({"tts_config__top_p": ...}, "tts_config.top_p is missing"),
        ({"tts_config__num_vq": 4}, "num_vq is 4"),
        ({"tts_config__interleaved": True}, "interleaved is True"),
        ({"tts_config__projector_type": "linear"}, "projector_type is 'linear'"),
        ({"tts_config__condition_type": "x"}, "condition_type is 'x'"),
        ({"tts_config__attention_type": "ring"}, "attention_type is 'ring'"),
        ({"tts_config__audio_bos_token_id": 480}, "audio_bos_token_id is 480"),
        ({"tts_config__num_text_tokens": 447}, "num_text_tokens is 447, expected at least"),
        ({"slice_config__patch_size": 16}, "slice_config.patch_size is 16"),
        ({"drop_vision_last_layer": "no"}, "drop_vision_last_layer is 'no'"),
        (
            {"drop_vision_last_layer": True, "vision_config__num_hidden_layers": 1},
            "drop_vision_last_layer is True",
        ),
    ],
)
def test_an_odd_value_is_one_sentence(read: Edit, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ModelLoadError, match=says) as caught:
        read(**changes)
    assert "config.json: " in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"norm_mean": [0.4, 0.5, 0.5]}, "norm_mean"),
        ({"image_feature_size": 32}, "image_feature_size is 32, expected 64"),
        ({"patch_size": 16}, "patch_size is 16, expected 14"),
    ],
)
def test_another_image_processor_is_refused(
    read: Edit, tmp_path: Path, change: dict[str, Any], says: str
) -> None:
    read()
    path = tmp_path / "preprocessor_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change), encoding="utf-8")

    with pytest.raises(ModelLoadError, match=f"preprocessor_config.json: {says}"):
        CheckpointConfig.read(tmp_path)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"{", "damaged"),
        (b"[]", "no JSON object"),
        (b"\xff\xfe", "no UTF-8"),
        (b'{"version": ' + 5000 * b"9" + b"}", "damaged: no JSON"),
        (None, "not exist"),
    ],
)
def test_a_damaged_file_is_one_sentence(tmp_path: Path, content: bytes | None, says: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)

    with pytest.raises(ModelLoadError, match=says) as caught:
        CheckpointConfig.read(tmp_path)
    assert "config.json" in str(caught.value)
