"""What the configuration files of token2wav say: `flow.yaml`, and `config.yaml` of the newer kind.

They are written in hyperpyyaml, whose tags name Python classes to build; here they are plain data.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from shared.errors import ModelLoadError
from worker.models.minicpmo45.checkpoint import first_line, read_text
from worker.models.minicpmo45.config import MAX_SIZE, Section
from worker.nn.conformer import FRAMES_PER_TOKEN, ConformerConfig, Trim
from worker.nn.dit import DitConfig
from worker.nn.flow import FlowConfig
from worker.nn.hift import HiftConfig


class PlainLoader(yaml.SafeLoader):
    """Reads hyperpyyaml files as plain data: a tag says which class its values are for."""

    def untagged(self, _suffix: str, node: yaml.Node) -> Any:
        if isinstance(node, yaml.MappingNode):
            return self.construct_mapping(node, deep=True)
        if isinstance(node, yaml.SequenceNode):
            return self.construct_sequence(node, deep=True)
        return {}


for _tag in ("!new:", "!name:", "!apply:"):
    PlainLoader.add_multi_constructor(_tag, PlainLoader.untagged)


def read_yaml(path: Path) -> Section:
    """Return what a hyperpyyaml file says. Raises ModelLoadError."""
    try:
        values = yaml.load(read_text(path), PlainLoader)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        # The last: a number with thousands of digits, a date that does not exist.
        raise ModelLoadError(f"{path} is damaged: {first_line(error)}") from error
    if not isinstance(values, dict):
        raise ModelLoadError(f"{path} is damaged: no mapping")
    return Section(f"{path}: ", values)


def read_flow_config(path: Path, n_timesteps: int, trim: Trim) -> FlowConfig:
    """Raises ModelLoadError."""
    flow = read_yaml(path).section("flow")
    encoder, decoder = flow.section("encoder"), flow.section("decoder")
    estimator = decoder.section("estimator")
    encoder.one_of("input_layer", ("linear",), "linear")
    encoder.one_of("pos_enc_layer_type", ("rel_pos_espnet",), "rel_pos_espnet")
    encoder.one_of("selfattention_layer_type", ("rel_selfattn",), "rel_selfattn")
    encoder.one_of("normalize_before", (True,), True)
    encoder.one_of("up_scale_factor", (FRAMES_PER_TOKEN,), FRAMES_PER_TOKEN)
    width, n_bands = encoder.whole("output_size"), flow.whole("output_size")
    n_heads = encoder.whole("attention_heads")
    if width % n_heads:
        raise encoder.wrong("attention_heads", f"a divisor of output_size {width}")
    return FlowConfig(
        input_size=flow.whole("input_size"),
        output_size=n_bands,
        speaker_size=flow.whole("spk_embed_dim"),
        vocab_size=flow.whole("vocab_size"),
        encoder=ConformerConfig(
            input_size=encoder.whole("input_size"),
            width=width,
            n_heads=n_heads,
            ffn_size=encoder.whole("linear_units"),
            n_blocks=encoder.layers("num_blocks"),
            n_up_blocks=encoder.layers("num_up_blocks", 4),
            up_stride=encoder.one_of("up_stride", (FRAMES_PER_TOKEN,), FRAMES_PER_TOKEN),
            n_lookahead=encoder.whole("pre_lookahead_len", 3),
            key_bias=encoder.flag("key_bias", True),
            trim=trim,
        ),
        dit=DitConfig(
            in_size=estimator.one_of("in_channels", (4 * n_bands,), None),
            out_size=estimator.one_of("out_channels", (n_bands,), None),
            depth=estimator.layers("depth"),
            n_heads=estimator.whole("num_heads"),
            head_dim=estimator.whole("head_dim"),
            width=estimator.whole("hidden_size"),
            mlp_ratio=estimator.number("mlp_ratio", 4.0),
        ),
        cfg_rate=decoder.number("inference_cfg_rate"),
        n_timesteps=n_timesteps,
    )


def read_hift_config(path: Path) -> HiftConfig:
    """Return the sizes of a causal net. Raises ModelLoadError."""
    hift = read_yaml(path).section("hift")
    f0, transform = hift.section("f0_predictor"), hift.section("istft_params")
    config = HiftConfig(
        is_causal=True,
        n_mels=hift.whole("in_channels"),
        base_channels=hift.whole("base_channels"),
        n_overtones=hift.whole("nb_harmonics"),
        sample_rate_hz=hift.one_of("sampling_rate", (24_000,), None),
        sine_amplitude=hift.number("nsf_alpha"),
        noise_std=hift.number("nsf_sigma"),
        voiced_threshold_hz=hift.number("nsf_voiced_threshold"),
        upsample_rates=numbers(hift, "upsample_rates"),
        upsample_kernels=numbers(hift, "upsample_kernel_sizes"),
        n_fft=transform.whole("n_fft"),
        fft_hop=transform.whole("hop_len"),
        block_kernels=numbers(hift, "resblock_kernel_sizes"),
        block_dilations=number_lists(hift, "resblock_dilation_sizes"),
        source_kernels=numbers(hift, "source_resblock_kernel_sizes"),
        source_dilations=number_lists(hift, "source_resblock_dilation_sizes"),
        slope=hift.number("lrelu_slope", 0.1),
        audio_limit=hift.number("audio_limit", 0.99),
        look_right=hift.one_of("conv_pre_look_right", (4,), 4),
        f0_channels=f0.whole("cond_channels"),
    )
    n_stages = len(config.upsample_rates)
    if len(config.upsample_kernels) != n_stages:
        raise hift.wrong("upsample_kernel_sizes", f"{n_stages} numbers, one per upsampling rate")
    if len(config.block_dilations) != len(config.block_kernels):
        raise hift.wrong("resblock_dilation_sizes", "one list per kernel size")
    if {len(config.source_kernels), len(config.source_dilations)} != {n_stages}:
        raise hift.wrong("source_resblock_kernel_sizes", "one per upsampling rate, with dilations")
    if config.hop != 480:
        raise hift.wrong("upsample_rates", "rates that make 480 samples of a mel frame")
    return config


def numbers(section: Section, name: str) -> tuple[int, ...]:
    return checked_numbers(section, name, section.values.get(name))


def number_lists(section: Section, name: str) -> tuple[tuple[int, ...], ...]:
    values = section.values.get(name)
    if not isinstance(values, list) or not values:
        raise section.wrong(name, "lists of whole numbers above 0")
    return tuple(checked_numbers(section, name, value) for value in values)


def checked_numbers(section: Section, name: str, value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or not value or not all(is_size(v) for v in value):
        raise section.wrong(name, f"a list of whole numbers above 0, at most {MAX_SIZE}")
    return tuple(value)


def is_size(value: object) -> bool:
    return type(value) is int and 0 < value <= MAX_SIZE
