"""The replays hold for other golden sets than the one that is here, and none of them is lenient.

The sets are derived from ours, see `variants.py`. Those with other sizes, other options and other
inputs need the original model; what can be said without it is said here.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.golden import variants
from tests.golden.replay_half_duplex import _script
from tests.golden.replays import replayed
from tests.golden.variants import GoldenSet

GOLDEN = Path(__file__).parent / "data"


def read(*traces: str) -> GoldenSet:
    return GoldenSet.read(GOLDEN, traces)


def problems(name: str, folder: Path) -> list[str]:
    return replayed(name, folder).problems()


# ---- other files, the same model


@pytest.fixture(scope="module")
def restacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards with an index, of all dtypes; deeper, no shared key heads, a layer left unused."""
    golden = read("audio", "llm_tts", "duplex_greedy_omni")
    variants.deepen(golden)
    variants.ungroup(golden)
    variants.drop_vision_layer(golden, is_in_file=True)
    variants.mix_dtypes(golden)
    variants.shorten_table(golden, n_positions=400)
    variants.shorten_session(golden, "duplex_greedy_omni", n_units=3)
    return golden.write(tmp_path_factory.mktemp("golden") / "set", n_shards=3, has_index=True)


@pytest.mark.parametrize("name", ["audio", "llm_tts", "vision", "duplex_greedy_omni"])
def test_a_model_of_other_layers_in_other_files(restacked: Path, name: str) -> None:
    assert problems(name, restacked) == []


def test_shards_without_an_index(tmp_path: Path) -> None:
    golden = read("duplex_hd")
    variants.drop_vision_layer(golden, is_in_file=False)
    variants.shorten_session(golden, "duplex_hd", n_units=1)

    assert problems("duplex_hd", golden.write(tmp_path / "set", n_shards=4)) == []


# ---- another order of the vocabulary


REORDERED = (
    *("chat", "sampler", "llm_tts", "half_duplex"),
    *("duplex_forced", "duplex_greedy_omni", "duplex_window_context"),
)


@pytest.fixture(scope="module")
def reordered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    golden = read(*REORDERED)
    cases = golden.fields["chat"]["cases"]
    cases[:] = [case for case in cases if case["name"] != "image_sliced"]
    variants.drop_tensors(golden, "chat", ("image_sliced.",))
    variants.shorten_session(golden, "duplex_forced", n_units=12)
    variants.shorten_session(golden, "duplex_greedy_omni", n_units=4)
    variants.reorder_vocabulary(golden)
    return golden.write(tmp_path_factory.mktemp("golden") / "set")


@pytest.mark.parametrize("name", REORDERED)
def test_a_vocabulary_of_another_order(reordered: Path, name: str) -> None:
    assert problems(name, reordered) == []


# ---- less to compare


def test_shorter_traces_with_fewer_tensors(tmp_path: Path) -> None:
    golden = read("audio", "duplex_sampled", "duplex_window_basic", "token2wav_causal")
    del golden.fields["audio"]["streaming"][5:]
    variants.drop_units(golden.tensors["audio"], "stream.", 5)
    variants.drop_tensors(golden, "audio", ("stream.last_kv", "offline.mid.emb_full"))
    variants.shorten_session(golden, "duplex_sampled", n_units=2)
    variants.shorten_session(golden, "duplex_window_basic", n_units=7)
    for name in ("duplex_sampled", "duplex_window_basic"):
        tensors = golden.tensors[name]
        for key in [k for k in tensors if k.endswith((".wav_i16", ".tts_hidden", ".tts_cond"))]:
            del tensors[key]
    variants.shorten_turns(golden, "token2wav_causal", n_chunks=3)
    folder = golden.write(tmp_path / "set")

    for name in golden.fields:
        assert problems(name, folder) == []


def test_other_samples_of_a_tensor(tmp_path: Path) -> None:
    golden = read("prompt_features", "half_duplex")
    for stem in ("fbank_minus_mean", "s3.mel", "prompt_mel24k"):
        variants.thin_out(golden, "prompt_features", stem, dim=0 if "fbank" in stem else -1)
    for number in range(3):
        variants.thin_out(golden, "half_duplex", f"text.p{number}.embeds", factor=3, dim=0)
    folder = golden.write(tmp_path / "set")

    for name in golden.fields:
        assert problems(name, folder) == []


def test_texts_of_a_script_may_hold_anything() -> None:
    source = torch.arange(100, dtype=torch.int16).numpy()
    text = r'system: ["a; b: [\"c\"]; ", base_pcm[3:9], "d"]; user: [image(4,5, 6)]; generate'

    first, second, third = _script(text, source)

    assert first is not None
    assert second is not None
    assert (first.role, first.parts[0], first.parts[2]) == ("system", 'a; b: ["c"]; ', "d")
    assert len(first.parts[1].samples) == 6  # type: ignore[union-attr]
    assert second.parts[0].pixels.shape == (5, 4, 3)  # type: ignore[union-attr]
    assert third is None


# ---- nothing gets through

Tamper = Callable[[GoldenSet], None]


def change_codes(golden: GoldenSet) -> None:
    golden.tensors["prompt_features"]["s3.full.codes"][0, 0] += 1


def change_mel(golden: GoldenSet) -> None:
    golden.tensors["prompt_features"]["prompt_mel24k_sub3"] *= 1.001


def blank_mel(golden: GoldenSet) -> None:
    golden.tensors["prompt_features"]["prompt_mel24k_sub3"][:] = torch.nan


def change_count(golden: GoldenSet) -> None:
    golden.fields["prompt_features"]["fbank_frames"] += 1


def add_field(golden: GoldenSet) -> None:
    golden.fields["prompt_features"]["s3_full"]["more"] = 1


def add_tensor(golden: GoldenSet) -> None:
    golden.tensors["prompt_features"]["more"] = torch.zeros(1)


@pytest.mark.parametrize(
    ("tamper", "says"),
    [
        (change_codes, "s3.full.codes: 1 of"),
        (change_mel, "prompt_mel24k_sub3: differs by"),
        (blank_mel, "prompt_mel24k_sub3: differs by nan"),
        (change_count, "fbank_frames: 318, expected 319"),
        (add_field, "1 tensors and fields were not compared: ['s3_full.more']"),
        (add_tensor, "1 tensors and fields were not compared: ['more']"),
    ],
)
def test_a_changed_result_is_found(tmp_path: Path, tamper: Tamper, says: str) -> None:
    golden = read("prompt_features")
    tamper(golden)

    (found,) = problems("prompt_features", golden.write(tmp_path / "set"))

    assert says in found


@pytest.mark.parametrize("name", ["s3.full.codes", "fbank_minus_mean_sub3"])
def test_a_missing_tensor_is_found(tmp_path: Path, name: str) -> None:
    golden = read("prompt_features")
    del golden.tensors["prompt_features"][name]

    with pytest.raises(KeyError):
        problems("prompt_features", golden.write(tmp_path / "set"))


@pytest.mark.parametrize(
    "path",
    [
        *("text", "cache_finalize", "tts_start_pos_after", "token2wav_buffer", "samples_out"),
        *("terminator", "is_listen", "end_of_turn", "turn_ended", "generated_tokens_len"),
    ],
)
def test_a_changed_field_of_a_unit_is_found(short_session: GoldenSet, path: str) -> None:
    """All at once would hide which of them is compared, so each is asked for by name."""
    assert f"units[1].{path}: " in short_session.fields["found"]


@pytest.fixture(scope="module")
def short_session(tmp_path_factory: pytest.TempPathFactory) -> GoldenSet:
    """A session whose unit 1 has everything changed; what was found is in its fields."""
    golden = read("duplex_forced")
    variants.shorten_session(golden, "duplex_forced", n_units=2)
    unit = golden.fields["duplex_forced"]["units"][1]
    for key, value in unit.items():
        if type(value) is bool and key not in ("pending", "prefill_ok"):
            unit[key] = not value
        elif type(value) is int and key not in ("samples", "max_slice_nums"):
            unit[key] = value + 1
        elif type(value) is str:
            unit[key] = value + "!"
    folder = golden.write(tmp_path_factory.mktemp("golden") / "set")
    golden.fields["found"] = "\n".join(problems("duplex_forced", folder))
    return golden
