"""What a checkpoint's JSON files say, as the configurations of our parts.

Everything is checked while it is read: what this implementation does not do (another activation,
scaled rotation, biases) is refused by name rather than computed wrongly. Field names and the
published values: MiniCPM-o 4.5, `config.json`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from shared.errors import ModelLoadError
from worker.models.minicpmo45.checkpoint import read_json
from worker.models.minicpmo45.images import SliceConfig
from worker.nn.audio_encoder import AudioEncoderConfig
from worker.nn.decoder import DecoderConfig
from worker.nn.resampler import ResamplerConfig
from worker.nn.siglip import VisionConfig
from worker.nn.speech import SpeechConfig

MAX_LAYERS = 512
MAX_SIZE = 8_000_000
MAX_NUMBER = 1e12
"""Far above any model's; a damaged number would make a list of tensors that never ends."""

MAX_SHOWN = 200
"""Characters of a value that an error repeats."""

TtsAttention = Literal["full_attention", "sliding_window", "sliding_recompute", "reindex"]
RESAMPLER_HEAD_DIM = 128


@dataclass(frozen=True, slots=True)
class CheckpointConfig:
    """Sizes of all parts, and the few settings that programs need."""

    llm: DecoderConfig
    vision: VisionConfig
    resampler: ResamplerConfig
    audio: AudioEncoderConfig
    speech: SpeechConfig
    slices: SliceConfig
    max_positions: int
    """Positions that the language model was trained for."""
    has_last_vision_layer: bool | None
    """Whether the last layer of `vision_config` is used. False: `vision.n_layers` is already one
    less. None: the file does not say, so it depends on whether the weights have it."""
    vision_batch_size: int = 16
    use_image_id: bool = True
    """Chat pictures are numbered."""
    tts_attention: TtsAttention = "full_attention"
    """What the speech head of half duplex keeps from chunk to chunk."""

    @classmethod
    def read(cls, folder: Path) -> CheckpointConfig:
        """Read `config.json` and, where it is there, `preprocessor_config.json`.

        `generation_config.json` is left alone: every program says how it samples.

        Raises:
            ModelLoadError: a file is missing or damaged, another model's, or asks for what this
                implementation does not do.
        """
        top = Section.of(folder / "config.json")
        check_kind(top)
        path = folder / "preprocessor_config.json"
        processor = Section.of(path) if path.is_file() else Section(str(path), {})
        llm = read_llm(top)
        vision, has_last = read_vision(top)
        resampler = ResamplerConfig(
            llm_dim=llm.hidden_size,
            vision_width=vision.width,
            n_queries=top.whole("query_num"),
            n_heads=llm.hidden_size // RESAMPLER_HEAD_DIM,
        )
        check_processor(processor, resampler.n_queries)
        return cls(
            llm=llm,
            vision=vision,
            resampler=resampler,
            audio=read_audio(top, llm.hidden_size),
            speech=read_speech(top, llm),
            slices=read_slices(top, processor, vision.patch_size),
            max_positions=top.whole("max_position_embeddings", 40_960),
            has_last_vision_layer=has_last,
            vision_batch_size=top.whole("vision_batch_size", 16),
            use_image_id=top.flag("use_image_id", processor.flag("use_image_id", True)),
            tts_attention=top.section("tts_config").one_of(
                "attention_type", get_args(TtsAttention), "sliding_recompute"
            ),
        )

    def check_tokenizer(self, n_ids: int) -> None:
        """Refuse a tokenizer with ids that have no embedding. Raises ModelLoadError."""
        if n_ids > self.llm.vocab_size:
            raise ModelLoadError(
                f"the tokenizer has ids up to {n_ids - 1}, config.json gives vocab_size "
                f"{self.llm.vocab_size}; are both files of the same checkpoint?"
            )

    def for_weights(self, names: Collection[str]) -> CheckpointConfig:
        """Return the configuration once it is known which tensors there are.

        Settles whether the vision tower's last layer is used if the file does not say so.
        """
        if self.has_last_vision_layer is not None:
            return self
        n_layers = self.vision.n_layers
        last = f"vpm.encoder.layers.{n_layers - 1}."
        has_last = any(name.startswith(last) for name in names)
        vision = dataclasses.replace(self.vision, n_layers=n_layers - (not has_last))
        return dataclasses.replace(self, vision=vision, has_last_vision_layer=has_last)


FULL_SIZE = CheckpointConfig(
    llm=DecoderConfig(
        vocab_size=151_748,
        hidden_size=4096,
        n_layers=36,
        n_heads=32,
        n_kv_heads=8,
        head_dim=128,
        ffn_size=12_288,
        rope_theta=1e6,
        norm_eps=1e-6,
        qk_norm=True,
        tied_head=False,
    ),
    vision=VisionConfig(
        width=1152,
        n_layers=27,
        n_heads=16,
        ffn_size=4304,
        patch_size=14,
        n_positions_side=70,
        norm_eps=1e-6,
    ),
    resampler=ResamplerConfig(llm_dim=4096, vision_width=1152, n_queries=64, n_heads=32),
    audio=AudioEncoderConfig(width=1024, n_layers=24, n_heads=16, ffn_size=4096, llm_dim=4096),
    speech=SpeechConfig(
        llm_dim=4096,
        hidden_size=768,
        n_layers=20,
        n_heads=12,
        n_kv_heads=12,
        head_dim=64,
        ffn_size=3072,
        n_codes=6562,
        n_text_tokens=152_064,
        audio_bos_id=151_687,
        text_eos_id=151_692,
    ),
    slices=SliceConfig(patch_size=14, scale_resolution=448, max_slice_nums=9),
    max_positions=40_960,
    has_last_vision_layer=True,
)
"""The published model."""


class Section:
    """One object of a JSON file; every getter refuses what it does not expect."""

    def __init__(self, place: str, values: Mapping[str, Any]) -> None:
        self.place = place
        self.values = values

    @classmethod
    def of(cls, path: Path) -> Section:
        return cls(f"{path}: ", read_json(path))

    def section(self, name: str) -> Section:
        values = self.values.get(name)
        if not isinstance(values, dict):
            raise self.wrong(name, "an object")
        return Section(f"{self.place}{name}.", values)

    def wrong(self, name: str, expected: str) -> ModelLoadError:
        """Return the error for a field that is missing or odd."""
        if name not in self.values:
            return ModelLoadError(
                f"{self.place}{name} is missing, expected {expected}; is this the config of "
                "MiniCPM-o 4.5?"
            )
        value = shown(self.values[name])
        return ModelLoadError(f"{self.place}{name} is {value}, expected {expected}")

    def whole(self, name: str, default: int | None = None, most: int = MAX_SIZE) -> int:
        """Return a whole number above 0; without a default it has to be there."""
        value = self.values.get(name, default)
        if type(value) is not int or not 0 < value <= most:
            raise self.wrong(name, f"a whole number above 0, at most {most}")
        return value

    def layers(self, name: str, default: int | None = None) -> int:
        """Return a number of layers; without a default it has to be there."""
        return self.whole(name, default, MAX_LAYERS)

    def number(self, name: str, default: float | None = None) -> float:
        """Return a finite number above 0."""
        value = self.values.get(name, default)
        if type(value) not in (int, float) or not (0 < value <= MAX_NUMBER):
            raise self.wrong(name, f"a number above 0, at most {MAX_NUMBER:g}")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self.values.get(name, default)
        if type(value) is not bool:
            raise self.wrong(name, "true or false")
        return value

    def one_of(self, name: str, allowed: Collection[Any], default: Any) -> Any:
        """Return a value that must be one of those that this implementation knows."""
        value = self.values.get(name, default)
        if value not in allowed:
            raise self.wrong(name, " or ".join(repr(choice) for choice in allowed))
        return value


def shown(value: object) -> str:
    """Return a value of a file as a sentence can hold it."""
    try:
        text = repr(value)
    except ValueError:  # Python refuses to print the longest numbers
        return "too long to be shown"
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


def check_kind(top: Section) -> None:
    """Refuse another model's configuration."""
    if top.values.get("model_type") != "minicpmo":
        raise top.wrong("model_type", "'minicpmo'")
    architectures = top.values.get("architectures")
    if not isinstance(architectures, list) or architectures[:1] != ["MiniCPMO"]:
        raise top.wrong("architectures", "['MiniCPMO']")
    if str(top.values.get("version")) != "4.5":
        raise top.wrong("version", "'4.5'; other versions of MiniCPM-o are not supported")


def read_llm(top: Section) -> DecoderConfig:
    top.one_of("hidden_act", ("silu",), "silu")
    top.one_of("attention_bias", (False,), False)
    top.one_of("use_sliding_window", (False,), False)
    width = top.whole("hidden_size")
    if width % RESAMPLER_HEAD_DIM:
        raise top.wrong("hidden_size", f"a multiple of {RESAMPLER_HEAD_DIM}")
    n_heads = top.whole("num_attention_heads")
    n_kv_heads = top.whole("num_key_value_heads", n_heads)
    if n_heads % n_kv_heads:
        raise top.wrong("num_key_value_heads", f"a divisor of the {n_heads} attention heads")
    return DecoderConfig(
        vocab_size=top.whole("vocab_size"),
        hidden_size=width,
        n_layers=top.layers("num_hidden_layers"),
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        # Qwen3's default is a number, not hidden_size / heads.
        head_dim=even(top, "head_dim", top.whole("head_dim", 128)),
        ffn_size=top.whole("intermediate_size"),
        rope_theta=rope_theta(top),
        norm_eps=top.number("rms_norm_eps", 1e-6),
        qk_norm=True,
        tied_head=top.flag("tie_word_embeddings", False),
    )


def even(section: Section, name: str, value: int) -> int:
    if value % 2:
        raise section.wrong(name, "an even number: rotation works on pairs")
    return value


def rope_theta(top: Section) -> float:
    """Return the base of the rotation, which newer files keep in `rope_parameters`.

    There is no default: a wrong base goes unnoticed until the answers are nonsense.
    """
    for name in ("rope_scaling", "rope_parameters"):
        if top.values.get(name) is None:
            continue
        scaling = top.section(name)
        for kind in ("rope_type", "type"):
            scaling.one_of(kind, ("default",), "default")
        if scaling.values.get("factor", 1) != 1:
            raise scaling.wrong("factor", "1: scaled rotation is not supported")
        if "rope_theta" in scaling.values:
            theta = scaling.number("rope_theta")
            if top.values.get("rope_theta", theta) != theta:
                raise top.wrong("rope_theta", f"{theta}, as {name}.rope_theta says")
            return theta
    return top.number("rope_theta")


def read_vision(top: Section) -> tuple[VisionConfig, bool | None]:
    """Return the vision tower's sizes, and whether its last layer is used (None: not said)."""
    section = top.section("vision_config")
    section.one_of("hidden_act", ("gelu_pytorch_tanh",), "gelu_pytorch_tanh")
    section.one_of("num_channels", (3,), 3)
    patch, size = section.whole("patch_size"), section.whole("image_size")
    if size % patch:
        raise section.wrong("image_size", f"a multiple of patch_size {patch}")
    n_layers = section.layers("num_hidden_layers")
    drops: bool | None = None
    if top.values.get("drop_vision_last_layer") is not None:
        drops = top.flag("drop_vision_last_layer", False)
    if drops and n_layers == 1:
        raise top.wrong("drop_vision_last_layer", "false, as there is only one layer")
    return VisionConfig(
        width=section.whole("hidden_size"),
        n_layers=n_layers - bool(drops),
        n_heads=divisor(section, "num_attention_heads", section.whole("hidden_size")),
        ffn_size=section.whole("intermediate_size"),
        patch_size=patch,
        n_positions_side=size // patch,
        norm_eps=section.number("layer_norm_eps", 1e-6),
    ), None if drops is None else not drops


def divisor(section: Section, name: str, whole: int, default: int | None = None) -> int:
    """Return a number of heads that the width divides into."""
    value = section.whole(name, default)
    if whole % value:
        raise section.wrong(name, f"a divisor of the width {whole}")
    return value


def read_audio(top: Section, llm_dim: int) -> AudioEncoderConfig:
    section = top.section("audio_config")
    section.one_of("activation_function", ("gelu",), "gelu")
    section.one_of("scale_embedding", (False,), False)
    width, ffn = section.whole("d_model"), section.whole("encoder_ffn_dim")
    if ffn != 4 * width:
        # The projector's input size is taken from it: ffn / 4.
        raise section.wrong("encoder_ffn_dim", f"4 x d_model = {4 * width}")
    return AudioEncoderConfig(
        width=width,
        n_layers=section.layers("encoder_layers"),
        n_heads=divisor(section, "encoder_attention_heads", width),
        ffn_size=ffn,
        llm_dim=llm_dim,
        n_mels=section.one_of("num_mel_bins", (80,), 80),
        max_positions=section.whole("max_source_positions", 1500),
        pool_step=top.whole("audio_pool_step", 5),
        chunk_s=top.number("audio_chunk_length", 1.0),
    )


def read_speech(top: Section, llm: DecoderConfig) -> SpeechConfig:
    """Sizes have the published values as defaults: the weights' shapes tell if they differ."""
    section = top.section("tts_config")
    section.one_of("backbone_model", ("llama",), "llama")
    section.one_of("condition_type", ("hidden_text_merge",), "hidden_text_merge")
    section.one_of("projector_type", ("mlp",), "mlp")
    section.one_of("hidden_act", ("silu",), "silu")
    section.one_of("num_vq", (1,), 1)
    section.one_of("interleaved", (False,), False)
    section.one_of("llm_dim", (llm.hidden_size,), None)
    width = section.whole("hidden_size", 768)
    n_heads = divisor(section, "num_attention_heads", width, 12)
    n_text_tokens = section.whole("num_text_tokens", 152_064)
    if n_text_tokens < llm.vocab_size:
        raise section.wrong("num_text_tokens", f"at least vocab_size, {llm.vocab_size}")
    rows = {}
    for name in ("audio_bos_token_id", "text_eos_token_id"):
        rows[name] = section.whole(name)
        if rows[name] >= n_text_tokens:
            raise section.wrong(name, f"a row of the {n_text_tokens} of the text embedding")
    return SpeechConfig(
        llm_dim=llm.hidden_size,
        hidden_size=width,
        n_layers=section.layers("num_hidden_layers", 20),
        n_heads=n_heads,
        n_kv_heads=section.whole("num_key_value_heads", n_heads),
        head_dim=even(section, "num_attention_heads", width // n_heads),
        ffn_size=section.whole("intermediate_size", 3072),
        n_codes=section.whole("num_audio_tokens"),
        n_text_tokens=n_text_tokens,
        audio_bos_id=rows["audio_bos_token_id"],
        text_eos_id=rows["text_eos_token_id"],
        temperature=section.number("temperature", 0.8),
        top_p=section.number("top_p"),
        top_k=section.whole("top_k"),
        repetition_penalty=section.number("repetition_penalty"),
        normalize=section.flag("normalize_projected_hidden", False),
    )


def read_slices(top: Section, processor: Section, patch_size: int) -> SliceConfig:
    """Return how pictures are sliced; the image processor's file comes first."""
    section = Section(top.place, {})
    if top.values.get("slice_config") is not None:
        section = top.section("slice_config")
    for place in (section, processor):
        place.one_of("patch_size", (patch_size,), patch_size)

    def value(name: str, default: int) -> int:
        return processor.whole(name, section.whole(name, default))

    return SliceConfig(
        patch_size=patch_size,
        scale_resolution=value("scale_resolution", 448),
        max_slice_nums=value("max_slice_nums", 1),
    )


def check_processor(processor: Section, n_queries: int) -> None:
    """Refuse what the image and audio paths do not do."""
    processor.one_of("image_feature_size", (n_queries,), n_queries)
    for name in ("norm_mean", "norm_std"):
        processor.one_of(name, ([0.5] * 3,), [0.5] * 3)
