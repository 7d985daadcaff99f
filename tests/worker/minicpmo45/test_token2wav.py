"""Token2wav of both generations: files, rows, turns, and what damaged folders say."""

from __future__ import annotations

import dataclasses
import math
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from shared.errors import ModelLoadError
from worker.models.minicpmo45.checkpoint import read_torch
from worker.models.minicpmo45.token2wav import (
    MAX_PROMPT_FRAMES,
    Token2Wav,
    random_token2wav,
    read_token2wav,
)
from worker.models.minicpmo45.voice import VoiceFeatures
from worker.models.minicpmo45.voice_config import read_flow_config, read_hift_config, read_yaml
from worker.models.minicpmo45.voice_layout import flow_shapes, hift_shapes
from worker.nn.flow import FlowConfig
from worker.nn.hift import HiftConfig, legacy_config

CHECKPOINT = Path(__file__).parents[2] / "golden" / "data" / "checkpoint"
LEGACY = CHECKPOINT / "assets" / "token2wav"
CAUSAL = CHECKPOINT / "assets_causal" / "token2wav"
KINDS = pytest.mark.parametrize("assets", [LEGACY, CAUSAL], ids=["legacy", "causal"])

N_STEPS = 2


@pytest.fixture(autouse=True)
def _inference() -> object:
    with torch.inference_mode():
        yield


def opened(assets: Path, n_rows: int = 3) -> Token2Wav:
    token2wav = read_token2wav(assets, N_STEPS)
    token2wav.allocate(n_rows, max_prompt_frames=40)
    return token2wav


def voice(n_codes: int = 10, seed: int = 1) -> VoiceFeatures:
    generator = torch.Generator().manual_seed(seed)
    return VoiceFeatures(
        codes=torch.randint(6561, (n_codes,), generator=generator),
        mel24k=torch.randn((2 * n_codes, 80), generator=generator),
        speaker=torch.randn(192, generator=generator),
    )


def turn(seed: int, sizes: tuple[int, ...] = (12, 8, 6)) -> list[list[int]]:
    """Codes of a turn's calls; each begins with the three that the one before looked ahead at."""
    codes = np.random.default_rng(seed).integers(0, 6561, sum(sizes)).tolist()
    calls, at = [], 0
    for size in sizes:
        calls.append(codes[at : at + size])
        at += size - 3
    return calls


def speak(
    token2wav: Token2Wav, row: int, features: VoiceFeatures, calls: list[list[int]]
) -> NDArray[np.float32]:
    token2wav.start_turn([row], token2wav.set_voice(features))
    return np.concatenate(
        [
            token2wav.stream([row], [codes], index == len(calls) - 1)[0]
            for index, codes in enumerate(calls)
        ]
    )


def assert_close(ours: NDArray[np.float32], theirs: NDArray[np.float32]) -> None:
    """Phases are integrals of F0, so rounding adds up: compare as the golden traces do."""
    assert ours.shape == theirs.shape
    error = float(np.sqrt(np.mean((ours - theirs) ** 2)))
    assert error <= 0.02 * float(np.sqrt(np.mean(theirs**2)))


# ---- files


def test_generation_is_told_by_the_files() -> None:
    legacy, causal = read_token2wav(LEGACY), read_token2wav(CAUSAL)

    assert not legacy.is_causal
    assert causal.is_causal
    assert legacy.flow.config.n_timesteps == 5
    assert torch.equal(legacy.flow.codes.weight, causal.flow.codes.weight)


@KINDS
def test_shapes_are_those_of_the_published_files(assets: Path) -> None:
    flow = read_torch(assets / "flow.pt")
    hift = {n.removeprefix("generator."): t for n, t in read_torch(assets / "hift.pt").items()}
    config = legacy_config(hift) if assets == LEGACY else read_hift_config(assets / "config.yaml")

    assert flow_shapes(read_flow_config(assets / "flow.yaml", 5, "intended")) == shapes(flow)
    assert hift_shapes(config) == shapes(hift)


def shapes(tensors: dict[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def test_full_size_has_as_many_values_as_published() -> None:
    def count(expected: dict[str, tuple[int, ...]]) -> int:
        return sum(math.prod(shape) for shape in expected.values())

    assert count(flow_shapes(FlowConfig())) == 155_802_352
    assert count(hift_shapes(HiftConfig(is_causal=False))) == 20_821_295
    assert count(hift_shapes(HiftConfig(is_causal=True))) == 20_779_887


def test_flow_settings_are_those_of_the_file() -> None:
    config = read_flow_config(LEGACY / "flow.yaml", 7, "packed")

    assert (config.encoder.n_blocks, config.encoder.n_up_blocks) == (2, 1)
    assert (config.encoder.width, config.encoder.ffn_size, config.encoder.n_heads) == (16, 56, 2)
    assert (config.dit.width, config.dit.depth, config.dit.n_heads) == (32, 2, 2)
    assert config.dit.head_dim == 16
    assert (config.cfg_rate, config.n_timesteps, config.encoder.trim) == (0.7, 7, "packed")


def test_tags_of_yaml_become_plain_data(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text("a: !new:os.system\n  command: [1, 2]\nb: !name:x.y\nc: !apply:f [3]\n")

    assert read_yaml(path).values == {"a": {"command": [1, 2]}, "b": {}, "c": [3]}


# ---- rows and turns


@KINDS
def test_samples_last_as_long_as_the_codes(assets: Path) -> None:
    """40 ms a code; what is held back at first comes out at the end."""
    token2wav = opened(assets)
    calls = turn(1)
    begun = token2wav.set_voice(voice())

    token2wav.start_turn([0], begun)
    lengths = [
        len(token2wav.stream([0], [codes], is_last)[0])
        for codes, is_last in zip(calls, (False, False, True), strict=True)
    ]

    held_back = 3840
    assert lengths == [9 * 960, 5 * 960, 6 * 960 + held_back]


@KINDS
def test_rows_in_one_call_sound_as_alone(assets: Path) -> None:
    token2wav = opened(assets)
    voices = [voice(10, 1), voice(7, 2)]
    calls = [turn(3), turn(4)]
    alone = [speak(token2wav, 0, voices[i], calls[i]) for i in range(2)]

    begun = [token2wav.set_voice(features) for features in voices]
    for row, base in zip((2, 1), begun, strict=True):
        token2wav.start_turn([row], base)
    pieces = [
        token2wav.stream([2, 1], [calls[0][step], calls[1][step]], step == 2) for step in range(3)
    ]

    for index in range(2):
        assert_close(np.concatenate([piece[index] for piece in pieces]), alone[index])


@KINDS
def test_a_row_in_its_second_second_beside_one_in_its_first(assets: Path) -> None:
    token2wav = opened(assets)
    first, second = turn(5), turn(6, (8, 6))
    alone = speak(token2wav, 0, voice(), first), speak(token2wav, 0, voice(), second)
    base = token2wav.set_voice(voice())

    token2wav.start_turn([0], base)
    begun = token2wav.stream([0], [first[0]], False)[0]
    token2wav.start_turn([1], base)
    both = token2wav.stream([0, 1], [first[1], second[0]], False)

    assert_close(both[0], alone[0][len(begun) :][: len(both[0])])
    assert_close(both[1], alone[1][: len(both[1])])


@KINDS
def test_a_poisoned_row_sounds_like_a_fresh_one(assets: Path) -> None:
    token2wav = opened(assets)
    fresh = speak(token2wav, 1, voice(), turn(7))
    token2wav.poison(1)

    again = speak(token2wav, 1, voice(), turn(7))

    assert np.isfinite(again).all()
    assert_close(again, fresh)


@KINDS
def test_a_turn_knows_nothing_of_the_one_before(assets: Path) -> None:
    token2wav = opened(assets)
    first = speak(token2wav, 0, voice(), turn(8))
    speak(token2wav, 0, voice(9, 5), turn(9))

    assert_close(speak(token2wav, 0, voice(), turn(8)), first)


@KINDS
def test_restored_turn_goes_on_as_if_nothing_had_happened(assets: Path) -> None:
    token2wav = opened(assets)
    calls = turn(10)
    whole = speak(token2wav, 0, voice(), calls)

    base = token2wav.set_voice(voice())
    token2wav.start_turn([0], base)
    start = token2wav.stream([0], [calls[0]], False)[0]
    saved = token2wav.save(0)
    speak(token2wav, 0, voice(5, 9), turn(11))
    token2wav.restore(2, saved)
    rest = [token2wav.stream([2], [calls[1]], False)[0], token2wav.stream([2], [calls[2]], True)[0]]

    assert_close(np.concatenate([start, *rest]), whole)


@KINDS
def test_a_long_voice_is_cut_to_the_rows(assets: Path) -> None:
    token2wav = opened(assets)
    long = voice(30)
    cut = VoiceFeatures(long.codes[:20], long.mel24k[:40], long.speaker)

    assert token2wav.set_voice(long).n_frames == 40
    assert_close(speak(token2wav, 0, long, turn(1)), speak(token2wav, 1, cut, turn(1)))


@pytest.mark.parametrize("n_codes", [1, 2])
@KINDS
def test_a_voice_of_a_single_code_can_speak(assets: Path, n_codes: int) -> None:
    """The newer generation looks ahead at the prompt's first three codes."""
    assert np.isfinite(speak(opened(assets), 0, voice(n_codes), turn(1))).all()


@KINDS
def test_a_whole_utterance_needs_no_row(assets: Path) -> None:
    token2wav = read_token2wav(assets, N_STEPS)

    samples = token2wav.whole(turn(2)[0], voice())

    assert samples.shape == (12 * 960,)
    assert np.isfinite(samples).all()


def test_given_noise_takes_the_place_of_our_own() -> None:
    usual = speak(opened(CAUSAL), 0, voice(), turn(1))
    token2wav = read_token2wav(CAUSAL, N_STEPS)
    token2wav.set_noise(torch.zeros(1, 80, 256), torch.zeros(2400, 9))
    token2wav.allocate(1, max_prompt_frames=40)

    assert not np.allclose(speak(token2wav, 0, voice(), turn(1)), usual)


# ---- random


@pytest.mark.parametrize("is_causal", [False, True])
def test_random_nets_speak(is_causal: bool) -> None:
    flow = read_flow_config(LEGACY / "flow.yaml", 5, "intended")
    hift = HiftConfig(is_causal=is_causal, base_channels=16, f0_channels=24)

    token2wav = random_token2wav(N_STEPS, flow=flow, hift=hift)
    token2wav.allocate(1, max_prompt_frames=40)
    samples = speak(token2wav, 0, voice(), turn(1))

    assert token2wav.flow.config.n_timesteps == N_STEPS
    assert np.isfinite(samples).all()
    assert 0.001 < float(np.abs(samples[3840:]).mean()) < 0.9


def test_random_nets_have_the_published_sizes_by_default() -> None:
    """Built from the published configuration; only one block of each kind is made here."""
    small = dataclasses.replace(
        FlowConfig(),
        encoder=dataclasses.replace(FlowConfig().encoder, n_blocks=1, n_up_blocks=1),
        dit=dataclasses.replace(FlowConfig().dit, depth=1),
    )

    token2wav = random_token2wav(flow=small, hift=HiftConfig(is_causal=False, base_channels=16))

    assert token2wav.flow.config.encoder.width == 512
    assert token2wav.max_prompt_frames == MAX_PROMPT_FRAMES == 850


# ---- damaged folders


@pytest.fixture
def folder(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    target = tmp_path / "token2wav"
    shutil.copytree(getattr(request, "param", LEGACY), target)
    return target


def test_missing_folder_names_what_is_needed(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"flow\.pt, hift\.pt, which make the") as caught:
        read_token2wav(tmp_path / "none")
    assert "lacks flow.yaml, flow.pt" in str(caught.value)
    assert "audio.enabled" in str(caught.value)


@pytest.mark.parametrize("name", ["flow.yaml", "flow.pt", "hift.pt"])
def test_a_missing_file_is_named(folder: Path, name: str) -> None:
    (folder / name).unlink()

    with pytest.raises(ModelLoadError, match=f"lacks {name}, which makes the voice;"):
        read_token2wav(folder)


@pytest.mark.parametrize("name", ["config.yaml", "hift_original.pt"])
@pytest.mark.parametrize("folder", [CAUSAL], indirect=True)
def test_half_a_newer_folder_is_not_an_older_one(folder: Path, name: str) -> None:
    (folder / name).unlink()

    with pytest.raises(ModelLoadError, match=f"lacks {name},"):
        read_token2wav(folder)


def test_files_of_different_generations_do_not_fit(folder: Path) -> None:
    shutil.copy(CAUSAL / "hift.pt", folder / "hift.pt")

    with pytest.raises(ModelLoadError, match=r"hift\.pt"):
        read_token2wav(folder)


def set_yaml(path: Path, old: str, new: str) -> None:
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new), encoding="utf-8")


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("num_blocks: 2", "num_blocks: 3", r"flow\.pt do not fit flow\.yaml:.*encoders\.2\."),
        ("depth: 2", "depth: 1", r"blocks\.1\..* belongs to no part"),
        ("depth: 2", "depth: 1000000000", "depth is 1000000000, .* at most 512"),
        ("num_blocks: 2", "num_blocks: 1000000000", "num_blocks is 1000000000, .* at most 512"),
        ("num_up_blocks: 1", "num_up_blocks: 513", "num_up_blocks is 513, .* at most 512"),
        ("depth: 2", "depth: 0x1" + 5000 * "0", "depth is too long to be shown, .* at most 512"),
        ("depth: 2", "depth: " + 5000 * "9", "damaged"),
        ("depth: 2", "depth: 2\n      mlp_ratio: 1.0e+300", r"mlp_ratio is 1e\+300, .* at most"),
        ("linear_units: 56", "linear_units: 64", r"w_1\.weight is \[56, 16\], expected \[64, 16\]"),
        ("up_stride: 2", "up_stride: 3", r"up_stride is 3, expected 2"),
        ("depth: 2", "depth: two", "estimator.depth is 'two'"),
        ("in_channels: 320", "in_channels: 240", "in_channels is 240, expected 320"),
        ("attention_heads: 2", "attention_heads: 3", "attention_heads is 3, expected a divisor"),
        ("rel_selfattn", "abs", "selfattention_layer_type is 'abs'"),
        ("flow: ", "flaw: ", "flow is missing"),
        ("flow: ", "flow: [", "damaged"),
        ("flow: !new:", "flow: !!python/object/apply:", "damaged"),
    ],
)
def test_an_odd_flow_configuration_is_refused(folder: Path, old: str, new: str, says: str) -> None:
    set_yaml(folder / "flow.yaml", old, new)

    with pytest.raises(ModelLoadError, match=f"(?s){says}"):
        read_token2wav(folder)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("base_channels: 16", "base_channels: 32", r"conv_pre\.bias is \[16\], expected \[32\]"),
        ("[8, 5, 3]", "[8, 5]", "upsample_kernel_sizes"),
        ("[8, 5, 3]", "[8, 5, 2]", "480 samples"),
        ("[8, 5, 3]", "[8, 5, 1000000000]", "upsample_rates is .* at most 8000000"),
        ("[8, 5, 3]", "8", "a list of whole numbers"),
        ("[[1, 3, 5], [1, 3, 5], [1, 3, 5]]", "[[1, 3, 5]]", "one list per kernel size"),
        ("[7, 7, 11]", "[7, 7]", "one per upsampling rate"),
        ("nsf_sigma: 0.003", "nsf_sigma: x", "nsf_sigma is 'x'"),
        ("sampling_rate: 24000", "sampling_rate: 22050", "sampling_rate is 22050"),
    ],
)
@pytest.mark.parametrize("folder", [CAUSAL], indirect=True)
def test_an_odd_vocoder_configuration_is_refused(
    folder: Path, old: str, new: str, says: str
) -> None:
    set_yaml(folder / "config.yaml", old, new)

    with pytest.raises(ModelLoadError, match=says):
        read_token2wav(folder)


@pytest.mark.parametrize("name", ["flow.pt", "hift.pt"])
@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
        lambda path: path.write_bytes(b""),
        lambda path: torch.save({"a": 1}, path),
    ],
)
def test_a_damaged_file_is_one_sentence(
    folder: Path, name: str, damage: Callable[[Path], object]
) -> None:
    damage(folder / name)

    with pytest.raises(ModelLoadError, match=name) as caught:
        read_token2wav(folder)
    assert "\n" not in str(caught.value)
    assert "cannot be read" not in str(caught.value)


@pytest.mark.parametrize("name", ["flow.pt", "hift.pt", "hift_original.pt"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("folder", [CAUSAL], indirect=True)
def test_a_value_that_is_not_finite_is_refused(folder: Path, name: str, value: float) -> None:
    tensors = {n: t.clone() for n, t in read_torch(folder / name).items()}
    spoilt = list(tensors)[-1]
    tensors[spoilt].view(-1)[-1] = value
    torch.save(tensors, folder / name)

    with pytest.raises(ModelLoadError) as caught:
        read_token2wav(folder)
    assert str(caught.value) == (
        f"{folder / name}: {spoilt.removeprefix('generator.')} holds NaN or infinite values; "
        "download it again"
    )


def test_a_missing_tensor_is_listed(folder: Path) -> None:
    tensors = read_torch(folder / "hift.pt")
    kept = {n: t.clone() for n, t in tensors.items() if "resblocks.4.convs2.1.bias" not in n}
    torch.save(kept, folder / "hift.pt")

    with pytest.raises(ModelLoadError, match=r"resblocks\.4\.convs2\.1\.bias is missing"):
        read_token2wav(folder)
