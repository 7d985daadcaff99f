"""Loading weights: any shards, the overlay, random ones, and what damaged folders say."""

from __future__ import annotations

import errno
import json
import math
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors.torch import load_file, save_file
from torch import Tensor

from shared.errors import ModelLoadError
from tests.golden.checkpoint import load_tensors
from worker.models.minicpmo45 import checkpoint
from worker.models.minicpmo45.checkpoint import TensorFiles, find_folder
from worker.models.minicpmo45.config import CheckpointConfig
from worker.models.minicpmo45.layout import published_shapes
from worker.models.minicpmo45.weights import Parts, load, random_weights

GOLDEN = Path(__file__).parents[2] / "golden" / "data"
CHECKPOINT = GOLDEN / "checkpoint"
SHARD = "model.safetensors"
NORM = "llm.model.norm.weight"
Tensors = dict[str, Tensor]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("config.json", SHARD):
        shutil.copy(CHECKPOINT / name, tmp_path / name)
    return tmp_path


def change(folder: Path, edit: Callable[[Tensors], object]) -> None:
    """Rewrite the folder's weights."""
    tensors = load_file(folder / SHARD)
    edit(tensors)
    save_file(tensors, folder / SHARD)


def read(folder: Path, pt_path: Path | None = None) -> Parts:
    return load(folder, CheckpointConfig.read(folder), pt_path=pt_path)


def state(parts: Parts) -> Tensors:
    modules = {"llm": parts.llm, "vision": parts.vision, "audio": parts.audio}
    modules["speech"] = parts.speech
    return {
        f"{part}.{name}": tensor
        for part, module in modules.items()
        for name, tensor in module.state_dict().items()
    }


def assert_same(ours: Parts, theirs: Parts) -> None:
    first, second = state(ours), state(theirs)
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name


@pytest.fixture(scope="module")
def whole() -> Parts:
    return read(CHECKPOINT)


# ---- whole checkpoints


def test_weights_are_those_of_the_files(whole: Parts) -> None:
    theirs = load_tensors(GOLDEN)

    assert torch.equal(whole.llm.embed.weight, theirs["llm.model.embed_tokens.weight"])
    assert torch.equal(whole.llm.norm.weight, theirs[NORM])
    assert torch.equal(whole.vision.encoder.norm.weight, theirs["vpm.post_layernorm.weight"])
    assert torch.equal(whole.vision.resampler.head.weight.T, theirs["resampler.proj"])
    assert torch.equal(whole.audio.conv1.weight, theirs["apm.conv1.weight"])
    assert torch.equal(whole.speech.emb_text.weight, theirs["tts.emb_text.weight"])


def test_weights_are_ready_to_run(whole: Parts) -> None:
    for name, tensor in state(whole).items():
        assert not tensor.is_meta, name
        assert tensor.dtype == torch.float32, name
    assert not whole.llm.training
    assert not any(p.requires_grad for p in whole.llm.parameters())


def test_dtype_is_the_callers() -> None:
    parts = load(CHECKPOINT, CheckpointConfig.read(CHECKPOINT), dtype=torch.bfloat16)

    assert parts.llm.head.weight.dtype == torch.bfloat16
    assert parts.audio.conv1.weight.dtype == torch.bfloat16


def test_progress_rises_to_one() -> None:
    shares: list[float] = []
    config = CheckpointConfig.read(CHECKPOINT)

    load(CHECKPOINT, config, progress=lambda share, _: shares.append(share))

    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    assert len(shares) == len(published_shapes(config))


def shards(folder: Path, names: list[str]) -> dict[str, str]:
    """Spread the weights over files; return which file each went to."""
    tensors = load_file(folder / SHARD)
    (folder / SHARD).unlink()
    where = {name: names[i % len(names)] for i, name in enumerate(sorted(tensors))}
    for file in names:
        save_file({n: t for n, t in tensors.items() if where[n] == file}, folder / file)
    return where


def test_shards_with_an_index(folder: Path, whole: Parts) -> None:
    where = shards(folder, ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"])
    index = {"metadata": {}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    # Not in the index, so it does not count.
    save_file({NORM: torch.zeros(3)}, folder / "old.safetensors")

    assert_same(read(folder), whole)


def test_shards_without_an_index(folder: Path, whole: Parts) -> None:
    shards(folder, ["b.safetensors", "a.safetensors", "weights-3.safetensors"])

    assert_same(read(folder), whole)


def test_unused_tensors_may_be_missing_or_of_any_size(folder: Path, whole: Parts) -> None:
    def edit(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.startswith("tts.projector_spk.")]:
            del tensors[name]
        tensors["tts.model.embed_tokens.weight"] = torch.zeros(3, 2)
        tensors["llm.model.rotary_emb.inv_freq"] = torch.zeros(16)

    change(folder, edit)

    assert_same(read(folder), whole)


def test_dropped_vision_layer_may_be_there_or_not(folder: Path, whole: Parts) -> None:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(config | {"drop_vision_last_layer": True}))
    there = read(folder)

    change(folder, drop_last_vision_layer)
    gone = read(folder)

    assert_same(there, gone)
    assert len(there.vision.encoder.layers) == 1
    assert there.config.vision.n_layers == 1
    assert torch.equal(
        there.vision.encoder.layers[0].up.weight, whole.vision.encoder.layers[0].up.weight
    )


def test_vision_layers_are_taken_as_found_if_the_config_does_not_say(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    del config["drop_vision_last_layer"]
    (folder / "config.json").write_text(json.dumps(config))
    assert len(read(folder).vision.encoder.layers) == 2

    change(folder, drop_last_vision_layer)

    assert len(read(folder).vision.encoder.layers) == 1


def drop_last_vision_layer(tensors: Tensors) -> None:
    for name in [name for name in tensors if name.startswith("vpm.encoder.layers.1.")]:
        del tensors[name]


def test_tied_head_is_the_embedding(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    written_out = read(folder)

    change(folder, lambda tensors: tensors.pop("llm.lm_head.weight"))

    assert_same(read(folder), written_out)
    assert torch.equal(written_out.llm.head.weight, written_out.llm.embed.weight)


# ---- overlay


def test_overlay_replaces_tensors_of_the_same_name(folder: Path, whole: Parts) -> None:
    path = folder / "extra.pt"
    torch.save({NORM: torch.full((128,), 7.0, dtype=torch.float16)}, path)

    parts = read(folder, path)

    assert torch.equal(parts.llm.norm.weight, torch.full((128,), 7.0))
    assert torch.equal(parts.llm.embed.weight, whole.llm.embed.weight)
    path.write_bytes(b"")  # nothing looks at the file any more
    assert torch.equal(parts.llm.norm.weight, torch.full((128,), 7.0))


def test_overlay_may_be_of_the_old_form_and_nested(folder: Path) -> None:
    path = folder / "extra.pt"
    torch.save({"state_dict": {NORM: torch.ones(128)}}, path, _use_new_zipfile_serialization=False)

    assert torch.equal(read(folder, path).llm.norm.weight, torch.ones(128))


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ({"llm.model.nrom.weight": torch.ones(128)}, r"llm\.model\.nrom\.weight \[128\] belongs"),
        ({NORM: torch.ones(64)}, r"norm\.weight is \[64\], expected \[128\]"),
        ({NORM: torch.ones(128, dtype=torch.int64)}, r"of type torch\.int64"),
        ({NORM: [1.0]}, "something else than named tensors"),
        ([torch.ones(2)], "something else than named tensors"),
        (sys, "damaged or no file of plain tensors"),
    ],
)
def test_overlay_that_does_not_fit_is_refused(folder: Path, content: object, says: str) -> None:
    path = folder / "extra.pt"
    if content is sys:
        path.write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    else:
        torch.save(content, path)

    with pytest.raises(ModelLoadError, match=says) as caught:
        read(folder, path)
    assert "extra.pt" in str(caught.value)


class Code:
    """Something that a torch file may hold and that reading would have to run."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return print, ("ran",)


def cut_in_half(path: Path) -> None:
    torch.save({NORM: torch.ones(128)}, path)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize(
    "make",
    [
        cut_in_half,
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(b"\xff\x65" * 100),
        lambda path: path.write_bytes(bytes(4000)),
        lambda path: path.write_text("llm.model.norm.weight = ones\n"),
        lambda path: path.write_bytes(b"PK\x03\x04" + bytes(60)),
        lambda path: torch.save({NORM: Code()}, path),
        lambda path: torch.save({NORM: Code()}, path, _use_new_zipfile_serialization=False),
    ],
)
def test_a_file_that_torch_cannot_read_is_one_sentence_of_ours(
    folder: Path, make: Callable[[Path], object], capsys: pytest.CaptureFixture[str]
) -> None:
    """torch's own advice is to run the code in the file."""
    path = folder / "extra.pt"
    make(path)

    with pytest.raises(ModelLoadError) as caught:
        read(folder, path)
    assert str(caught.value) == (
        f"{path} is damaged or no file of plain tensors; download it again"
    )
    assert capsys.readouterr().out == ""


def test_a_file_that_the_system_cannot_read_is_not_called_damaged(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    torch.save({NORM: torch.ones(128)}, folder / "extra.pt")
    monkeypatch.setattr(checkpoint.torch, "load", fail)

    with pytest.raises(ModelLoadError, match=r"extra\.pt cannot be read: Permission denied"):
        read(folder, folder / "extra.pt")


def test_missing_overlay_is_named(folder: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"none\.pt does not exist"):
        read(folder, folder / "none.pt")


def test_overlay_that_is_a_folder_is_named(folder: Path) -> None:
    with pytest.raises(ModelLoadError, match=f"^{folder} is a folder, expected a torch file$"):
        read(folder, folder)


# ---- values


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_value_that_is_not_finite_is_refused(
    folder: Path, value: float, dtype: torch.dtype
) -> None:
    """It would be served as silence or nonsense."""

    def spoil(tensors: Tensors) -> None:
        tensors["tts.emb_code.0.weight"] = tensors["tts.emb_code.0.weight"].to(dtype)
        tensors["tts.emb_code.0.weight"][17, 3] = value

    change(folder, spoil)

    with pytest.raises(ModelLoadError) as caught:
        read(folder)
    assert str(caught.value) == (
        f"{folder / SHARD}: tts.emb_code.0.weight holds NaN or infinite values; download it again"
    )


def test_a_value_of_the_overlay_that_is_not_finite_is_refused(folder: Path) -> None:
    torch.save({NORM: torch.full((128,), torch.nan)}, folder / "extra.pt")

    with pytest.raises(ModelLoadError, match=rf"extra\.pt: {NORM} holds NaN or infinite values"):
        read(folder, folder / "extra.pt")


def test_only_what_is_used_has_to_be_finite(folder: Path, whole: Parts) -> None:
    def spoil(tensors: Tensors) -> None:
        tensors[NORM][:] = torch.nan
        tensors["tts.model.embed_tokens.weight"] = torch.full((3, 2), torch.nan)

    norm = load_file(folder / SHARD)[NORM]
    change(folder, spoil)
    torch.save({NORM: norm}, folder / "extra.pt")

    assert_same(read(folder, folder / "extra.pt"), whole)


def test_the_largest_values_of_a_type_are_finite(folder: Path) -> None:
    largest = torch.finfo(load_file(folder / SHARD)[NORM].dtype).max

    change(folder, lambda tensors: tensors[NORM].fill_(largest))

    assert float(read(folder).llm.norm.weight[0]) > 1e38


# ---- what does not fit


def test_all_that_is_wrong_is_said_at_once(folder: Path) -> None:
    def edit(tensors: Tensors) -> None:
        del tensors["apm.conv1.bias"]
        del tensors["llm.model.layers.1.mlp.up_proj.weight"]
        tensors["resampler.proj"] = torch.zeros(128, 64)
        tensors["tts.emb_code.0.weight"] = torch.zeros(6562, 32, dtype=torch.int8)
        tensors["llm.model.layers.2.mlp.up_proj.weight"] = torch.zeros(2)

    change(folder, edit)

    with pytest.raises(ModelLoadError) as caught:
        read(folder)
    start, _, problems = str(caught.value).partition(": ")
    assert start == f"5 tensors of {folder / SHARD} do not fit {folder / 'config.json'}"
    assert set(problems.split("; ")) == {
        "apm.conv1.bias is missing, expected [32]",
        "llm.model.layers.1.mlp.up_proj.weight is missing, expected [256, 128]",
        "resampler.proj is [128, 64], expected [128, 128]",
        "tts.emb_code.0.weight is of type I8, expected BF16, F16 or F32",
        "llm.model.layers.2.mlp.up_proj.weight [2] belongs to no part",
    }


def test_a_long_list_is_counted(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["num_hidden_layers"] = 5
    (folder / "config.json").write_text(json.dumps(config))

    with pytest.raises(ModelLoadError) as caught:
        read(folder)
    assert str(caught.value).startswith("33 tensors of ")
    problems = str(caught.value).split("; ")
    assert len(problems) == 21
    assert problems[-1] == "... and 13 more"


def test_nothing_is_read_of_a_checkpoint_that_does_not_fit(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    change(folder, lambda tensors: tensors.pop(NORM))
    monkeypatch.setattr(checkpoint, "safe_open", lambda *_: pytest.fail("weights were read"))

    with pytest.raises(ModelLoadError) as caught:
        read(folder)
    assert str(caught.value) == (
        f"1 tensor of {folder / SHARD} does not fit {folder / 'config.json'}: "
        f"{NORM} is missing, expected [128]"
    )


def test_a_layer_that_the_config_wants_is_missing(folder: Path) -> None:
    change(folder, drop_last_vision_layer)

    with pytest.raises(ModelLoadError, match=r"vpm\.encoder\.layers\.1\..* is missing"):
        read(folder)


# ---- damaged files


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def cut_in_header(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:1000])


def grow(path: Path) -> None:
    path.write_bytes(path.read_bytes() + bytes(8))


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (truncate, "cut short or damaged"),
        (grow, "cut short or damaged"),
        (cut_in_header, "no safetensors file, or was cut short"),
        (lambda path: path.write_bytes(b""), "no safetensors file, or was cut short"),
        (lambda path: path.write_bytes(b"\x10" + bytes(23)), "no safetensors file"),
        (lambda path: path.write_bytes(b"\xff" * 100), "no safetensors file"),
        (lambda path: path.write_bytes(bytes([5]) + bytes(7) + b'["a"]'), "no safetensors file"),
        (
            lambda path: path.write_bytes(bytes([12]) + bytes(7) + b'{"a":{"b":1}'),
            "no safetensors file",
        ),
        (
            lambda path: path.write_text("version https://git-lfs.github.com/spec/v1\n"),
            "Git LFS pointer",
        ),
        (Path.unlink, r"holds no \*\.safetensors"),
    ],
)
def test_a_damaged_shard_is_one_sentence(
    folder: Path, damage: Callable[[Path], object], says: str
) -> None:
    damage(folder / SHARD)

    with pytest.raises(ModelLoadError, match=says) as caught:
        read(folder)
    assert "\n" not in str(caught.value)


def test_a_shard_that_cannot_be_opened_is_named(folder: Path) -> None:
    (folder / SHARD).unlink()
    (folder / SHARD).mkdir()

    with pytest.raises(ModelLoadError, match=r"model\.safetensors cannot be read: Is a directory"):
        read(folder)


def test_a_link_to_nothing_is_called_that(folder: Path) -> None:
    (folder / SHARD).unlink()
    (folder / SHARD).symlink_to(folder / "gone")

    with pytest.raises(ModelLoadError, match=f"{SHARD} is a link to a file that does not exist"):
        read(folder)


def test_index_that_names_a_missing_shard(folder: Path) -> None:
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    where = shards(folder, names)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    (folder / names[1]).unlink()

    with pytest.raises(ModelLoadError, match=f"lacks {names[1]}, named in its index"):
        read(folder)


@pytest.mark.parametrize(
    ("index", "says"),
    [
        ({"weight_map": {"x": SHARD}}, "names 1 tensor that no file holds: x; download"),
        (
            {"weight_map": {"y": SHARD, "x": SHARD}},
            "names 2 tensors that no file holds, first x; download",
        ),
        ({"weight_map": {"x": "../up.safetensors"}}, "no name of a file in its folder"),
        ({"weight_map": {"x": 3}}, "no name of a file"),
        ({"weight_map": {}}, "no weight_map"),
        ({}, "no weight_map"),
    ],
)
def test_an_odd_index_is_one_sentence(folder: Path, index: dict, says: str) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))

    with pytest.raises(ModelLoadError, match=says):
        read(folder)


def test_a_tensor_in_two_files_is_refused(folder: Path) -> None:
    save_file({NORM: torch.zeros(128)}, folder / "again.safetensors")

    with pytest.raises(ModelLoadError, match=f"{NORM} is in again.safetensors and in {SHARD}"):
        read(folder)


def test_a_file_that_shrinks_under_way_is_a_load_error(folder: Path) -> None:
    source = TensorFiles(folder, "cpu", torch.float32)
    truncate(folder / SHARD)

    with pytest.raises(ModelLoadError, match=f"{NORM} cannot be read"):
        source[NORM]


# ---- the folder


def test_folder_is_taken_as_it_is(folder: Path) -> None:
    assert find_folder(str(folder)) == folder


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("/no/such/place", "does not exist; expected the folder"),
        ("no folder", "does not exist"),
        ("a/b/c", "does not exist"),
        (__file__, "is a file, expected a folder"),
    ],
)
def test_a_path_that_is_no_checkpoint_is_one_sentence(
    name: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "snapshot_download", lambda *_, **__: pytest.fail("asked"))

    with pytest.raises(ModelLoadError, match=says):
        find_folder(name)


def test_hub_id_is_downloaded_without_code(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {}

    def download(name: str, allow_patterns: list[str]) -> str:
        asked[name] = allow_patterns
        return str(folder)

    monkeypatch.setattr(checkpoint, "snapshot_download", download)

    assert find_folder("openbmb/MiniCPM-o-4_5") == folder
    assert not any("py" in pattern for pattern in asked["openbmb/MiniCPM-o-4_5"])


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (LocalEntryNotFoundError("no net\nlong story"), "cannot be reached"),
        (OSError(errno.ENOSPC, "No space left on device"), "the disk is full"),
        (OSError(errno.EACCES, "Permission denied", "/cache"), "Permission denied: /cache"),
        (ConnectionError("offline\nmode"), "failed: offline$"),
        (ValueError("401 Client Error"), "failed: 401 Client Error"),
    ],
)
def test_a_failed_download_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, error: Exception, says: str
) -> None:
    def fail(*_: object, **__: object) -> str:
        raise error

    monkeypatch.setattr(checkpoint, "snapshot_download", fail)

    with pytest.raises(ModelLoadError, match=says) as caught:
        find_folder("openbmb/MiniCPM-o-4_5")
    assert "\n" not in str(caught.value)


# ---- random


@pytest.fixture(scope="module")
def random() -> Parts:
    return random_weights(CheckpointConfig.read(CHECKPOINT), seed=3)


def test_random_weights_have_the_shapes_of_real_ones(random: Parts, whole: Parts) -> None:
    ours, theirs = state(random), state(whole)

    assert {n: (t.shape, t.dtype) for n, t in ours.items()} == {
        n: (t.shape, t.dtype) for n, t in theirs.items()
    }
    assert all(bool(t.isfinite().all()) for t in ours.values())


def test_random_weights_depend_on_the_seed_only(random: Parts) -> None:
    config = random.config

    assert_same(random, random_weights(config, seed=3))
    other = random_weights(config, seed=4)
    assert not torch.equal(other.llm.embed.weight, random.llm.embed.weight)
    # Tensors of one size are not copies of one another.
    assert not torch.equal(random.llm.layers[0].qkv.weight, random.llm.layers[1].qkv.weight)


def test_random_logits_have_a_spread(random: Parts) -> None:
    """Neither uniform nor certain, so that sampling does real work."""
    llm = random.llm
    hidden = llm.norm(torch.randn(64, 128, generator=torch.Generator().manual_seed(0)))
    logits = llm.head(hidden)
    codes = random.speech.head_code(torch.randn(64, 32, generator=torch.Generator().manual_seed(0)))

    assert 2 < float(logits.std()) < 4
    assert 2 < float(codes.std()) < 4


def test_random_global_state_is_untouched() -> None:
    before = torch.random.get_rng_state()

    random_weights(CheckpointConfig.read(CHECKPOINT))

    assert torch.equal(torch.random.get_rng_state(), before)


def test_a_tensor_of_random_size_keeps_activations_about_as_large(random: Parts) -> None:
    for layer in random.llm.layers:
        weight = layer.down.weight
        assert math.isclose(float(weight.std()), weight.shape[1] ** -0.5, rel_tol=0.1)
        assert torch.equal(layer.attn_norm.weight, torch.ones(128))
