"""Golden sets made of another one: what the same model and its traces are in another form.

The original is not needed for them, since every change is one whose effect is known: other files
hold the same weights, another order of the vocabulary gives other ids for the same tokens, a layer
that adds nothing changes nothing, and a session that ends earlier is the first part of a session.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from worker.models.minicpmo45.tokenizer import Tokenizer

JSON_FILES = ("config", "tokenizer_config", "vocab", "added_tokens", "generation_config")


@dataclass
class GoldenSet:
    """A golden folder in memory, to be changed and written somewhere else."""

    source: Path
    files: dict[str, dict[str, Any]]
    """JSON files of the checkpoint by their stems."""
    weights: dict[str, Tensor]
    fields: dict[str, Any]
    tensors: dict[str, dict[str, Tensor]]
    """JSON and tensors of every trace that was read."""

    @classmethod
    def read(cls, source: Path, traces: Iterable[str]) -> GoldenSet:
        checkpoint, folder = source / "checkpoint", source / "traces"
        names = list(traces)
        return cls(
            source,
            {stem: read_json(checkpoint / f"{stem}.json") for stem in JSON_FILES},
            {
                name: tensor
                for shard in sorted(checkpoint.glob("*.safetensors"))
                for name, tensor in load_file(shard).items()
            },
            {name: read_json(folder / f"{name}.json") for name in names},
            {name: load_file(folder / f"{name}.safetensors") for name in names},
        )

    @property
    def config(self) -> dict[str, Any]:
        return self.files["config"]

    def write(self, folder: Path, n_shards: int = 1, has_index: bool = False) -> Path:
        """Write the set; traces that were not read and assets become links to the source's.

        Args:
            n_shards: files that the weights are spread over, in no order.
            has_index: a file says which tensor is where; others hold garbage of the same names.
        """
        checkpoint, traces = folder / "checkpoint", folder / "traces"
        checkpoint.mkdir(parents=True)
        traces.mkdir()
        for path in (self.source / "checkpoint").iterdir():
            if path.suffix != ".safetensors" and path.stem not in self.files:
                (checkpoint / path.name).symlink_to(path)
        for stem, values in self.files.items():
            (checkpoint / f"{stem}.json").write_text(json.dumps(values), encoding="utf-8")
        self._write_weights(checkpoint, n_shards, has_index)
        for path in (self.source / "traces").iterdir():
            if path.stem not in self.fields:
                (traces / path.name).symlink_to(path)
        for name, fields in self.fields.items():
            (traces / f"{name}.json").write_text(json.dumps(fields), encoding="utf-8")
            tensors = {key: t.contiguous() for key, t in self.tensors[name].items()}
            save_file(tensors, traces / f"{name}.safetensors")
        return folder

    def _write_weights(self, checkpoint: Path, n_shards: int, has_index: bool) -> None:
        names = sorted(self.weights, key=lambda name: name[::-1])
        where: dict[str, str] = {}
        for number in range(n_shards):
            file = f"part {number}.safetensors" if n_shards > 1 else "weights.safetensors"
            part = names[number::n_shards]
            where |= dict.fromkeys(part, file)
            save_file({name: self.weights[name].contiguous() for name in part}, checkpoint / file)
        if has_index:
            index = {"metadata": {}, "weight_map": where}
            path = checkpoint / "model.safetensors.index.json"
            path.write_text(json.dumps(index), encoding="utf-8")
            garbage = {names[0]: torch.full_like(self.weights[names[0]], torch.nan)}
            save_file(garbage, checkpoint / "left over.safetensors")


def read_json(path: Path) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return value


# ---- the same weights in another form


def mix_dtypes(golden: GoldenSet) -> None:
    """Store a third of the tensors as fp32, and a third as fp16 where that holds their values."""
    for number, (name, tensor) in enumerate(sorted(golden.weights.items())):
        half = tensor.half()
        if number % 3 == 1:
            golden.weights[name] = tensor.float()
        elif number % 3 == 2 and torch.equal(half.float(), tensor.float()):
            golden.weights[name] = half


def deepen(golden: GoldenSet) -> None:
    """Give every stack one more layer, which adds nothing to its input."""
    config = golden.config
    for section, key, stem, silent in (
        (config, "num_hidden_layers", "llm.model.layers", ("o_proj", "down_proj")),
        (config["tts_config"], "num_hidden_layers", "tts.model.layers", ("o_proj", "down_proj")),
        (config["audio_config"], "encoder_layers", "apm.layers", ("out_proj", "fc2")),
        (config["vision_config"], "num_hidden_layers", "vpm.encoder.layers", ("out_proj", "fc2")),
    ):
        n_layers = section[key]
        for name in [name for name in golden.weights if name.startswith(f"{stem}.0.")]:
            is_silent = name.split(".")[-2] in silent
            copy = golden.weights[name].clone()
            golden.weights[name.replace(f"{stem}.0.", f"{stem}.{n_layers}.")] = (
                torch.zeros_like(copy) if is_silent else copy
            )
        section[key] = n_layers + 1


def ungroup(golden: GoldenSet) -> None:
    """Give every query head of the language model its own key head: a copy of the shared one."""
    config = golden.config
    n_heads, n_shared = config["num_attention_heads"], config["num_key_value_heads"]
    times = n_heads // n_shared
    for index in range(config["num_hidden_layers"]):
        for side in "kv":
            name = f"llm.model.layers.{index}.self_attn.{side}_proj.weight"
            heads = golden.weights[name].unflatten(0, (n_shared, -1))
            golden.weights[name] = heads.repeat_interleave(times, 0).flatten(0, 1)
    config["num_key_value_heads"] = n_heads
    for tensors in golden.tensors.values():
        for name in [name for name in tensors if name.startswith("cache.layer")]:
            tensors[name] = tensors[name].repeat_interleave(times, 0)


def drop_vision_layer(golden: GoldenSet, is_in_file: bool) -> None:
    """Let the vision tower have a last layer that is not used, in the file or not."""
    vision = golden.config["vision_config"]
    n_layers = vision["num_hidden_layers"]
    vision["num_hidden_layers"] = n_layers + 1
    golden.config["drop_vision_last_layer"] = True
    stem = "vpm.encoder.layers"
    for name in [name for name in golden.weights if name.startswith(f"{stem}.0.")]:
        if is_in_file:
            unused = torch.full_like(golden.weights[name], torch.nan)
            golden.weights[name.replace(f"{stem}.0.", f"{stem}.{n_layers}.")] = unused


def shorten_table(golden: GoldenSet, n_positions: int) -> None:
    """Cut the audio encoder's table of positions, and the trace to what still holds with it."""
    golden.weights["apm.embed_positions.weight"] = golden.weights["apm.embed_positions.weight"][
        :n_positions
    ].clone()
    golden.config["audio_config"]["max_source_positions"] = n_positions
    units = golden.fields["audio"]["streaming"]
    kept = [unit for unit in units if unit["kv_before"] + 52 < n_positions]
    units[:] = units[: next((i for i, unit in enumerate(units) if unit not in kept), len(units))]
    drop_tensors(golden, "audio", ("offline.long.emb", "stream.last_kv"))
    drop_units(golden.tensors["audio"], "stream.", len(units))


# ---- another order of the vocabulary

MAPPED_FIELDS = frozenset(
    {"ids", "decoded", "scripted", "ids_to_tts", "terminator", "previous_ids", "total_ids"}
    | {"generated_tokens", "generated_ids", "prompt_text_ids", "histories", "forbidden", "special"}
    | {"listen_id_used_by_reference", "direct_return", "greedy"}
)
"""Fields that hold ids of text tokens."""
UNMAPPED_BRANCHES = frozenset({"tts_penalty", "tts", "tts_generate"})
"""They hold speech tokens under such names."""
MAPPED_TENSORS = frozenset({"ids", "tts.text_ids"})
MAPPED_COLUMNS = ("logits", "probs_after_filters")
"""Ends of names of tensors with a column per text token."""
MAPPED_ROWS = ("llm.model.embed_tokens.weight", "llm.lm_head.weight", "tts.emb_text.weight")


def reorder_vocabulary(golden: GoldenSet, seed: int = 0) -> None:
    """Give all tokens other ids, but for id 0: the original drops it from answers.

    Does not hold for drawn text (`duplex_sampled`): which token a number draws depends on the
    order. `<unk>` becomes an ordinary entry of the vocabulary, as it is in the published files.
    """
    n_ids = golden.config["vocab_size"]
    order = torch.randperm(n_ids - 1, generator=torch.Generator().manual_seed(seed)) + 1
    new_ids = torch.cat((torch.zeros(1, dtype=torch.int64), order))
    mapped = new_ids.tolist()

    for name in MAPPED_ROWS:
        rows = golden.weights[name]
        golden.weights[name] = rows.clone()
        golden.weights[name][new_ids] = rows[:n_ids]
    for stem in ("vocab", "added_tokens"):
        ids = {token: mapped[index] for token, index in golden.files[stem].items()}
        golden.files[stem] = dict(sorted(ids.items(), key=lambda item: item[1]))
    tokens = golden.files["tokenizer_config"]
    tokens["added_tokens_decoder"] = {
        str(mapped[int(index)]): entry
        for index, entry in tokens["added_tokens_decoder"].items()
        if entry["content"] != "<unk>"
    }
    tokens["bad_token_ids"] = sorted(map(mapped.__getitem__, tokens["bad_token_ids"]))
    for values in (golden.config, golden.files["generation_config"], golden.config["tts_config"]):
        for name in [name for name in values if name.endswith("_token_id")]:
            values[name] = renamed(values[name], mapped)
    for name, fields in golden.fields.items():
        golden.fields[name] = map_fields(fields, mapped)
        for key, tensor in golden.tensors[name].items():
            if key in MAPPED_TENSORS:
                golden.tensors[name][key] = new_ids[tensor]
            elif key.endswith(MAPPED_COLUMNS) and tensor.shape[-1] == n_ids:
                moved = torch.empty_like(tensor)
                moved[..., new_ids] = tensor
                golden.tensors[name][key] = moved


def map_fields(node: Any, mapped: list[int]) -> Any:
    if isinstance(node, list):
        return [map_fields(item, mapped) for item in node]
    if not isinstance(node, dict):
        return node
    return {
        key: renamed(value, mapped)
        if key in MAPPED_FIELDS
        else value
        if key in UNMAPPED_BRANCHES
        else map_fields(value, mapped)
        for key, value in node.items()
    }


def renamed(ids: Any, mapped: list[int]) -> Any:
    """Ids in whatever form: one, none, a list, a mapping."""
    if isinstance(ids, Mapping):
        return {key: renamed(value, mapped) for key, value in ids.items()}
    if isinstance(ids, list):
        return [renamed(value, mapped) for value in ids]
    return ids if ids is None else mapped[ids]


# ---- less of everything


def drop_tensors(golden: GoldenSet, name: str, prefixes: tuple[str, ...]) -> None:
    tensors = golden.tensors[name]
    golden.tensors[name] = {k: t for k, t in tensors.items() if not k.startswith(prefixes)}


def drop_units(tensors: dict[str, Tensor], prefix: str, n_units: int) -> None:
    """Remove tensors `<prefix>uNN.` of units from `n_units` on."""
    for name in list(tensors):
        unit = name.removeprefix(prefix).split(".")[0]
        if name.startswith(f"{prefix}u") and unit[1:].isdigit() and int(unit[1:]) >= n_units:
            del tensors[name]


def shorten_session(golden: GoldenSet, name: str, n_units: int) -> None:
    """End a duplex session after some units."""
    fields, tokenizer = golden.fields[name], Tokenizer.read(golden.source / "checkpoint")
    units = fields["units"] = fields["units"][:n_units]
    drop_units(golden.tensors[name], "", n_units)
    if "inputs" in fields:
        del fields["inputs"][n_units:]

    def fed(unit: dict[str, Any], key: str) -> list[int]:
        return [index for feed in unit[key] for index in feed["ids"]]

    decided = [
        index
        for unit in units
        if not unit["options"].get("force_listen_override")
        for index in fed(unit, "generate_feeds")
        if index != tokenizer.ids.speak
    ]
    fields["res_text"] = tokenizer.decode(decided, skip_special=False)
    fields["total_ids"] = [
        index for unit in units for key in FED for index in fed(unit, f"{key}_feeds")
    ]
    del fields["generated_tokens"][units[-1]["generated_tokens_len"] :]
    end = "</unit>"
    fields["schema"] = end.join(fields["schema"].split(end)[:n_units]) + end


FED = ("generate", "finalize")


def shorten_turns(golden: GoldenSet, name: str, n_chunks: int) -> None:
    """End a token2wav trace after some chunks."""
    chunks = golden.fields[name]["chunks"]
    gone = tuple(f"{chunk['name']}." for chunk in chunks[n_chunks:])
    del chunks[n_chunks:]
    drop_tensors(golden, name, gone)


def thin_out(golden: GoldenSet, name: str, stem: str, factor: int = 2, dim: int = -1) -> None:
    """Keep fewer entries of a tensor whose name says how many of them there are."""
    tensors = golden.tensors[name]
    (old,) = (key for key in tensors if key.startswith(stem))
    base, _, step = old.rpartition("_sub")
    index = torch.arange(0, tensors[old].shape[dim], factor)
    tensors[f"{base}_sub{int(step) * factor}"] = tensors.pop(old).index_select(dim, index)
