"""Text and token ids: byte-level BPE of the Qwen2 kind, special tokens by their string.

Ids of special tokens differ between checkpoints, so nothing here or elsewhere knows a number: the
programs ask `Tokenizer.ids` by name. Source of the pre-tokenizer: the published Qwen2 tokenizer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from jinja2 import Template, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as BpeTokenizer

from shared.errors import BadMessage, ModelLoadError
from worker.models.minicpmo45.checkpoint import first_line, read_json, read_text
from worker.models.minicpmo45.vocabulary import (
    BUILT_IN_ADDED,
    BUILT_IN_VOCABULARY,
    BYTES,
    DEFAULT_TEMPLATE,
    VISIBLE_ADDED,
)

QWEN2_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Where text is cut before merges apply."""


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """Ids of the tokens that programs name."""

    endoftext: int
    im_start: int
    im_end: int
    think_start: int
    think_end: int
    unk: int
    """Placeholder that image and audio embeddings overwrite."""
    eos_alt: int
    """`</s>`; `im_end` in a vocabulary without it."""
    image_start: int
    image_end: int
    slice_start: int
    slice_end: int
    image_id_start: int
    image_id_end: int
    unit_start: int
    unit_end: int
    audio_start: int
    audio: int
    audio_end: int
    spk_bos: int
    spk: int
    spk_eos: int
    tts_bos: int
    tts_eos: int
    tts_pad: int
    listen: int
    speak: int
    interrupt: int
    vad_start: int
    vad_end: int
    turn_bos: int
    turn_eos: int
    chunk_bos: int
    chunk_eos: int
    chunk_tts_bos: int
    chunk_tts_eos: int


STRINGS = {
    "eos_alt": "</s>",
    "unk": "<unk>",
    "think_start": "<think>",
    "think_end": "</think>",
    "image_start": "<image>",
    "image_end": "</image>",
    "slice_start": "<slice>",
    "slice_end": "</slice>",
    "image_id_start": "<image_id>",
    "image_id_end": "</image_id>",
    "unit_start": "<unit>",
    "unit_end": "</unit>",
}
"""String of a name in `SpecialTokens`; every other name `x` is `<|x|>`."""


ROLES = ("bos_token", "eos_token", "pad_token", "unk_token")
"""Keys of `tokenizer_config.json` and `special_tokens_map.json`."""


class Tokenizer:
    """Text to ids and back, and the chat template. Safe to use from several threads."""

    ids: SpecialTokens
    bad_ids: frozenset[int]
    """Ids that are never to be spoken (`bad_token_ids` of the checkpoint)."""
    special_ids: frozenset[int]
    """Ids that `decode` leaves out."""

    def __init__(
        self,
        bpe: BpeTokenizer,
        bad_ids: frozenset[int] = frozenset(),
        template: str | None = None,
        roles: Mapping[str, str] | None = None,
    ) -> None:
        """Take a ready tokenizer.

        Args:
            template: Jinja source of the chat template; None = the built-in one.
            roles: strings that the template knows by a name, such as "eos_token".

        Raises:
            ModelLoadError: a special token is missing, a bad id does not exist, or the template is
                no Jinja.
        """
        self._bpe = bpe
        self.ids = special_tokens(bpe)
        self.bad_ids = bad_ids
        added = bpe.get_added_tokens_decoder()
        self._added = frozenset(added)
        self.special_ids = frozenset(index for index, token in added.items() if token.special)
        self.n_ids = 1 + max(bpe.get_vocab(with_added_tokens=True).values())
        """The highest id plus one: the least number of rows that embeddings need."""
        if not all(0 <= index < self.n_ids for index in bad_ids):
            raise ModelLoadError(
                f"tokenizer_config.json: bad_token_ids must be ids from 0 to {self.n_ids - 1}"
            )
        self._template = compile_template(template or DEFAULT_TEMPLATE)
        self._roles = dict(roles or {})

    @classmethod
    def read(cls, folder: Path) -> Tokenizer:
        """Read the tokenizer of a checkpoint folder.

        `vocab.json` and `merges.txt` with the added tokens of `tokenizer_config.json` and
        `added_tokens.json`, or else `tokenizer.json`.

        Raises:
            ModelLoadError: a file is missing or damaged, or a special token is not in it.
        """
        config = read_json(folder / "tokenizer_config.json")
        if (folder / "vocab.json").is_file() or not (folder / "tokenizer.json").is_file():
            bpe = from_vocabulary(folder, config)
        else:
            bpe = from_tokenizer_json(folder / "tokenizer.json")
        bad = config.get("bad_token_ids") or []
        if not isinstance(bad, list) or not all(type(index) is int for index in bad):
            raise ModelLoadError(
                f"{folder / 'tokenizer_config.json'}: bad_token_ids must be a list of ids"
            )
        return cls(bpe, frozenset(bad), read_template(folder, config), token_roles(folder, config))

    @classmethod
    def built_in(cls) -> Tokenizer:
        """Return a tokenizer that needs no file: one token per byte, and the special tokens of
        MiniCPM-o 4.5 at their published ids. All other ids decode to ""."""
        return cls(build_bpe(BUILT_IN_VOCABULARY, [], BUILT_IN_ADDED))

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text; strings of special tokens in it become those tokens."""
        return list(self._bpe.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Return the text of ids; bytes that are no UTF-8 become U+FFFD, unknown ids nothing."""
        return str(self._bpe.decode(ids, skip_special_tokens=skip_special))

    def token_bytes(self, index: int, skip_special: bool = True) -> bytes:
        """Return what one id adds to a text; characters may be split over several ids."""
        token = self._bpe.id_to_token(index)
        if token is None or (skip_special and index in self.special_ids):
            return b""
        if index in self._added:
            return token.encode()
        return b"".join(BYTES.get(char) or char.encode() for char in token)

    def is_special(self, index: int) -> bool:
        """Whether `decode` leaves this id out."""
        return index in self.special_ids

    def token_id(self, token: str) -> int | None:
        """Return the id of a whole vocabulary entry, or None if there is no such entry."""
        index = self._bpe.token_to_id(token)
        return None if index is None else int(index)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, str]],
        add_generation_prompt: bool = False,
        enable_thinking: bool = False,
        use_tts_template: bool = False,
    ) -> str:
        """Return the text of a conversation in the checkpoint's chat template.

        Args:
            messages: each with "role" and "content".
            add_generation_prompt: open the answer at the end.
            enable_thinking: leave the thoughts to the model instead of closing them at once.
            use_tts_template: open the answer as a spoken one.

        Raises:
            BadMessage: the template refuses these messages.
        """
        try:
            return self._template.render(
                **self._roles,
                messages=[dict(message) for message in messages],
                add_generation_prompt=add_generation_prompt,
                enable_thinking=enable_thinking,
                use_tts_template=use_tts_template,
                tools=None,
            )
        except TemplateError as error:
            raise BadMessage(f"the chat template refuses these messages: {error}") from error


def special_tokens(bpe: BpeTokenizer) -> SpecialTokens:
    """Look all special tokens up. Raises ModelLoadError with the names of those missing."""
    strings = {f.name: STRINGS.get(f.name, f"<|{f.name}|>") for f in fields(SpecialTokens)}
    found: dict[str, int] = {}
    missing = []
    for name, string in strings.items():
        index = bpe.token_to_id(string)
        if index is not None:
            found[name] = index
        elif name != "eos_alt":
            missing.append(string)
    if missing:
        raise ModelLoadError(
            f"the tokenizer has no {', '.join(missing)}; MiniCPM-o 4.5 needs them: are "
            "tokenizer_config.json and added_tokens.json those of the checkpoint?"
        )
    return SpecialTokens(**{"eos_alt": found["im_end"], **found})


# ---- reading


def from_vocabulary(folder: Path, config: Mapping[str, Any]) -> BpeTokenizer:
    """Build from `vocab.json`, `merges.txt` and the lists of added tokens."""
    path = folder / "vocab.json"
    vocabulary = read_json(path)
    if not all(type(index) is int for index in vocabulary.values()):
        raise ModelLoadError(f"{path}: every entry must be a string and its id")
    n_missing = len(set(BYTES) - set(vocabulary))
    if n_missing:
        raise ModelLoadError(
            f"{path} lacks {n_missing} of the 256 single bytes; expected the byte-level "
            "vocabulary of Qwen2"
        )
    merges = [
        tuple(line.split(" "))
        for line in read_text(folder / "merges.txt").splitlines()
        if line and not line.startswith("#version")
    ]
    try:
        return build_bpe(vocabulary, merges, added_tokens(folder, config, vocabulary))
    except Exception as error:
        raise ModelLoadError(
            f"{folder / 'merges.txt'} does not fit vocab.json: {first_line(error)}"
        ) from error


def from_tokenizer_json(path: Path) -> BpeTokenizer:
    """Read the one-file form."""
    text = read_text(path)
    try:
        return BpeTokenizer.from_str(text)
    except Exception as error:
        raise ModelLoadError(f"{path} is damaged or no tokenizer: {first_line(error)}") from error


def added_tokens(
    folder: Path, config: Mapping[str, Any], vocabulary: Mapping[str, int]
) -> dict[str, tuple[int, bool]]:
    """Return id of every added token, and whether `decode` leaves it out.

    `added_tokens_decoder` knows both; what stands in `added_tokens.json` alone is special unless
    the published tokenizer shows it. Entries of the vocabulary that have a role (`<unk>` is one)
    are special too, as in transformers.
    """
    added: dict[str, tuple[int, bool]] = {}
    path = folder / "added_tokens.json"
    try:
        for token, index in (read_json(path) if path.is_file() else {}).items():
            added[token] = (int(index), token not in VISIBLE_ADDED)
    except (TypeError, ValueError) as error:
        raise ModelLoadError(f"{path}: every entry must be a string and its id") from error
    try:
        for index, entry in (config.get("added_tokens_decoder") or {}).items():
            added[str(entry["content"])] = (int(index), bool(entry.get("special", False)))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ModelLoadError(
            f"{folder / 'tokenizer_config.json'}: every entry of added_tokens_decoder must be an "
            "id and its token"
        ) from error
    for token in (*token_roles(folder, config).values(), *additional_tokens(folder, config)):
        if token in vocabulary:
            added.setdefault(token, (vocabulary[token], True))
    return added


def token_roles(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Return the strings that have a role: "bos_token", "eos_token", "pad_token", "unk_token"."""
    roles: dict[str, str] = {}
    for source in (special_tokens_map(folder), config):
        for name in ROLES:
            content = token_content(source.get(name))
            if content is not None:
                roles[name] = content
    return roles


def additional_tokens(folder: Path, config: Mapping[str, Any]) -> list[str]:
    """Return the strings of `additional_special_tokens`."""
    listed: list[str] = []
    for source in (special_tokens_map(folder), config):
        entries = source.get("additional_special_tokens") or []
        contents = map(token_content, entries if isinstance(entries, list) else [])
        listed += [content for content in contents if content is not None]
    return listed


def special_tokens_map(folder: Path) -> Mapping[str, Any]:
    path = folder / "special_tokens_map.json"
    return read_json(path) if path.is_file() else {}


def token_content(entry: Any) -> str | None:
    """Return the string of a token that is given as it is, or as an object with flags."""
    content = entry.get("content") if isinstance(entry, dict) else entry
    return content if isinstance(content, str) else None


def build_bpe(
    vocabulary: Mapping[str, int],
    merges: Sequence[Any],
    added: Mapping[str, tuple[int, bool]],
) -> BpeTokenizer:
    """Put a byte-level BPE together.

    Added tokens are entered into the vocabulary as well: the library then takes their ids from
    there instead of counting them up, so gaps and any order are right.
    """
    ids = {token: index for token, (index, _) in added.items()}
    bpe = BpeTokenizer(models.BPE({**vocabulary, **ids}, list(merges)))
    bpe.normalizer = normalizers.NFC()
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN2_WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    bpe.add_tokens(
        [
            AddedToken(token, special=special, normalized=False)
            for token, (_, special) in added.items()
        ]
    )
    return bpe


# ---- chat template


def read_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    """Return the source of the checkpoint's chat template, or None if it has none."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return read_text(path)
    template = config.get("chat_template")
    if isinstance(template, list):  # several, by name
        template = next((t["template"] for t in template if t.get("name") == "default"), None)
    return template if isinstance(template, str) else None


def compile_template(source: str) -> Template:
    """Compile as transformers does: sandboxed, blocks without their line ends."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.globals["raise_exception"] = refuse
    try:
        return environment.from_string(source)
    except TemplateError as error:
        raise ModelLoadError(
            f"the checkpoint's chat template is no Jinja: {first_line(error)}"
        ) from error


def refuse(reason: str) -> None:
    """What a template calls to refuse messages."""
    raise TemplateError(reason)
