"""config.json: strict, explained, and laid over by the command line."""

import json

import pytest

from shared.config import COMPILE_MODULES, Config, load_config
from shared.errors import ConfigError


def write(tmp_path, content):
    path = tmp_path / "config.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_the_shipped_config_is_valid_and_has_no_notices(pytestconfig):
    loaded = load_config(pytestconfig.rootpath / "config.json")

    assert loaded.notices == ()
    assert loaded.config.backend == "cascade"


def test_defaults_are_those_of_the_reference():
    service = Config().service

    assert (service.gateway_port, service.worker_base_port) == (8006, 22400)
    assert (service.max_queue_size, service.request_timeout) == (1000, 300.0)
    assert Config().duplex.pause_timeout == 60.0
    assert Config().audio.playback_delay_ms == 200


def test_an_unknown_key_is_named_with_the_nearest_valid_one(tmp_path):
    path = write(tmp_path, {"service": {"gateway_prot": 1}})

    with pytest.raises(
        ConfigError, match=r"service\.gateway_prot; did you mean service\.gateway_port"
    ):
        load_config(path)


def test_an_unknown_section_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"unknown key servise; did you mean service"):
        load_config(write(tmp_path, {"servise": {}}))


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("service", "gateway_port", 70000),
        ("service", "gateway_port", "many"),
        ("audio", "playback_delay_ms", -1),
        ("duplex", "pause_timeout", -5),
        ("service", "compile", "sometimes"),
        ("model", "backend", "gpt"),
        ("service", "sessions_per_worker", 0),
        ("service", "bind", "300.1.1.1"),
        ("compile", "mode", "fast"),
        ("compile", "dynamic", "maybe"),
        ("compile", "modules", "llm"),
        ("compile", "modules", []),
        ("compile", "cache_dir", ""),
        ("compile", "on_cold", "wait"),
        ("compile", "on_recompile", "ignore"),
    ],
)
def test_a_bad_value_is_named_with_its_key(tmp_path, section, key, value):
    with pytest.raises(ConfigError) as caught:
        load_config(write(tmp_path, {section: {key: value}}))

    assert f"{section}.{key} is {value!r}" in str(caught.value)


@pytest.mark.parametrize("key", ["model_path", "pt_path"])
def test_an_empty_path_of_the_model_is_refused(tmp_path, key):
    """It would mean the current folder."""
    with pytest.raises(ConfigError, match=rf"model\.{key} is '': .* at least 1 character"):
        load_config(write(tmp_path, {"model": {key: ""}}))


@pytest.mark.parametrize("content", ["{", "[]", '"x"', "\x00"])
def test_a_file_that_is_no_json_object_is_refused(tmp_path, content):
    with pytest.raises(ConfigError, match=r"config\.json"):
        load_config(write(tmp_path, content))


def test_a_folder_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        load_config(tmp_path)


def test_nesting_without_end_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="not valid JSON"):
        load_config(write(tmp_path, "[" * 100_000))


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="no such file"):
        load_config(tmp_path / "nothing.json")


def test_the_command_line_wins_over_the_file(tmp_path):
    path = write(tmp_path, {"service": {"gateway_port": 1111}})

    assert load_config(path, {"service.gateway_port": 2222}).config.service.gateway_port == 2222
    assert load_config(path, {"service.gateway_port": None}).config.service.gateway_port == 1111


def test_a_retired_key_of_the_reference_brings_a_notice(tmp_path):
    loaded = load_config(write(tmp_path, {"service": {"eta_streaming_s": 30}}))

    assert loaded.notices == ("service.eta_streaming_s is retired and has no effect; remove it",)


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("audio", "chat_vocoder", "cosyvoice2"),
        ("model", "attn_implementation", "eager"),
        ("audio", "ref_audio_path", "voice.wav"),
        ("duplex", "sliding_window_mode", "context"),
        ("duplex", "max_context_tokens", 4096),
        ("compat", "voice_through_int16", True),
    ],
)
def test_a_key_whose_feature_is_missing_brings_a_notice_when_it_is_set(
    tmp_path, section, key, value
):
    loaded = load_config(write(tmp_path, {section: {key: value}}))

    assert len(loaded.notices) == 1
    assert f"{section}.{key} is accepted but has no effect" in loaded.notices[0]


@pytest.mark.parametrize(
    ("raw", "keys"),
    [
        ({"model": {"random_weights": True}}, []),
        ({"model": {"random_weights": True}, "service": {"compile": False}}, []),
        ({"model": {"random_weights": True}, "service": {"compile": True}}, []),
        ({"model": {"random_weights": True}, "compile": {"modules": ["llm"]}}, []),
        ({"compile": {"encoders": False}}, ["compile.encoders"]),
        ({"compile": {"cache_dir": "x", "mode": "max-autotune"}}, []),
        ({"model": {"random_weights": True, "model_path": "x"}}, ["model.model_path"]),
        ({"model": {"backend": "cascade", "model_path": "x"}}, ["model.model_path"]),
        ({"model": {"model_path": "x"}, "compat": {"voice_through_int16": True}}, []),
    ],
)
def test_what_a_back_end_has_no_use_for_brings_a_notice(tmp_path, raw, keys):
    notices = load_config(write(tmp_path, raw)).notices

    assert [notice.split(" is accepted")[0] for notice in notices] == keys


def test_every_key_of_the_reference_is_accepted(tmp_path):
    """A user of the reference brings the file along."""
    reference = {
        "model": {"model_path": "x/y", "pt_path": None, "attn_implementation": "auto"},
        "audio": {"ref_audio_path": "a.wav", "playback_delay_ms": 200, "chat_vocoder": "token2wav"},
        "service": {
            "gateway_port": 8006,
            "worker_base_port": 22400,
            "max_queue_size": 1000,
            "request_timeout": 300.0,
            "compile": False,
            "data_dir": "data",
            "eta_chat_s": 15,
            "eta_half_duplex_s": 180,
            "eta_audio_duplex_s": 120,
            "eta_omni_duplex_s": 90,
            "eta_ema_alpha": 0.3,
            "eta_ema_min_samples": 3,
        },
        "duplex": {"pause_timeout": 60.0},
        "recording": {"enabled": True, "session_retention_days": -1, "max_storage_gb": -1},
    }

    assert load_config(write(tmp_path, reference)).config.backend == "minicpmo45"


@pytest.mark.parametrize(
    ("model", "backend"),
    [
        ({}, "cascade"),
        ({"model_path": "openbmb/MiniCPM-o-4_5"}, "minicpmo45"),
        ({"random_weights": True}, "minicpmo45"),
        ({"backend": "cascade", "model_path": "x"}, "cascade"),
    ],
)
def test_auto_chooses_the_back_end(tmp_path, model, backend):
    assert load_config(write(tmp_path, {"model": model})).config.backend == backend


def test_an_unknown_module_is_named_with_the_nearest_one(tmp_path):
    path = write(tmp_path, {"compile": {"modules": ["llm", "resampeler"]}})

    with pytest.raises(ConfigError, match="no module 'resampeler'; did you mean resampler"):
        load_config(path)


@pytest.mark.parametrize(
    ("section", "chosen"),
    [
        ({}, COMPILE_MODULES),
        ({"modules": ["tts", "llm", "tts"]}, ("llm", "tts")),
        ({"encoders": False}, ("llm", "tts", "flow", "vocoder", "heads")),
        ({"modules": ["vpm", "heads"], "encoders": False}, ("heads",)),
    ],
)
def test_what_is_compiled_follows_from_two_switches(tmp_path, section, chosen):
    loaded = load_config(write(tmp_path, {"compile": section}))

    assert loaded.config.compile.chosen_modules == chosen


def test_reduce_overhead_is_another_name_of_the_default(tmp_path):
    """Two names of one thing would be two caches."""
    loaded = load_config(write(tmp_path, {"compile": {"mode": "reduce-overhead"}}))

    assert loaded.config.compile == Config().compile


def test_what_may_be_a_key_is_not_shown(tmp_path):
    path = write(tmp_path, {"security": {"api_keys": "my-secret", "admin_keys": [{"k": "mine"}]}})

    with pytest.raises(ConfigError, match=r"security\.api_keys: .* list") as caught:
        load_config(path)
    assert "my-secret" not in str(caught.value)
    assert "mine" not in str(caught.value)


@pytest.mark.parametrize("key", ["", "  ", "\t", "\u3000", "\ud800secret"])
@pytest.mark.parametrize("setting", ["api_keys", "admin_keys"])
def test_a_key_that_no_client_can_send_is_refused(tmp_path, setting, key):
    path = write(tmp_path, {"security": {setting: ["a-fine-one", key]}})

    with pytest.raises(ConfigError, match=rf"security\.{setting}: key 2 ") as caught:
        load_config(path)

    assert "fine" not in str(caught.value)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"service": {"gateway_port": 1}, "service": {}}', "'service' is there more than once"),
        ('{"service": {"cpu_workers": 1, "cpu_workers": 2}}', "'cpu_workers' is there more"),
        ('{"service": {"gateway_port": ' + 5001 * "9" + "}}", "not valid JSON"),
    ],
)
def test_what_no_reader_would_take_as_it_is_meant_is_refused(tmp_path, content, words):
    with pytest.raises(ConfigError, match=words):
        load_config(write(tmp_path, content))
