"""What the owner of a service is told about a configuration that is valid."""

from __future__ import annotations

import pytest

from shared.cautions import cautions
from shared.config import Config

KEYS = ["0-Aa!#~"]


@pytest.mark.parametrize(
    ("host", "limit", "n_cautions"),
    [("127.0.0.1", 0, 0), ("0.0.0.0", 0, 1), ("::", 0, 1), ("0.0.0.0", 8, 0)],
)
def test_a_public_service_without_a_limit_per_client_is_warned_of(host, limit, n_cautions):
    security = {"api_keys": KEYS, "max_sessions_per_client": limit}

    found = cautions(Config.model_validate({"security": security}), host)

    assert len(found) == n_cautions
    assert all("max_sessions_per_client" in caution and host in caution for caution in found)


@pytest.mark.parametrize(
    ("host", "keys", "is_told"),
    [("127.0.0.1", [], False), ("0.0.0.0", KEYS, False), ("0.0.0.0", [], True)],
)
def test_a_public_service_without_keys_is_warned_of(host, keys, is_told):
    found = cautions(Config.model_validate({"security": {"api_keys": keys}}), host)

    assert any("without an API key" in caution for caution in found) == is_told


@pytest.mark.parametrize("setting", ["api_keys", "admin_keys"])
@pytest.mark.parametrize(
    ("key", "is_for_headers"),
    [
        *((key, True) for key in ("a;b", "a,b", 'a"b', "a\\b", "a b")),
        *(
            (key, False)
            for key in ("schlüssel", "密钥", "a\tb", "a\nb", "a\x7fb", " edge", "edge ")
        ),
    ],
)
def test_a_key_that_no_page_can_use_is_warned_of_without_being_shown(setting, key, is_for_headers):
    config = Config.model_validate({"security": {setting: [*KEYS, key]}})

    (caution,) = cautions(config, "127.0.0.1")

    assert caution.startswith(f"security.{setting}: key 2 ")
    assert key not in caution
    assert "\n" not in caution
    assert ("Authorization" in caution) != is_for_headers
