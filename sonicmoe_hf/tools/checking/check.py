"""check_adapter: the log-probabilities that places give with an adapter, beside those of the model that was trained."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from transformers import AutoTokenizer

from ...adapters.convert import is_adapter
from ...checkpoints.reading.files import local_folder
from ...checkpoints.writing.companions import has_tokenizer
from ...errors import CheckpointError
from ...formats.json_files import read_json
from .adapted_model import adapted
from .models import Loading
from .place_judge import JudgedPlace, PlaceJudge
from .places import Observation, observe_adapted, observe_merged, observe_server
from .scores import scores_of
from .server import Server
from .texts import Text, texts_for
from .trained_adapter import TrainedAdapter

FIRST_TEXTS = 8  # which places are judged by
MAX_TEXTS = 32  # where the first ones leave a verdict open


class Check(NamedTuple):
    """The result of a check. change: mean |difference| of log p between adapter and base; tokens: how many it is the mean
    of."""

    change: float
    tokens: int
    places: list[JudgedPlace]


def check_adapter(
    base: str,
    adapter: str,
    folders: list[str],
    server: str | None = None,
    model: str = "",
    text: str | None = None,
    loading: Loading | None = None,
    say: Callable[[str], None] = lambda sentence: None,
) -> Check:
    """Compare an adapter's effect in each place with its effect on its base under PEFT.

    Args:
        base, adapter: folders or hub ids. folders: merged checkpoints, and the adapter in other forms.
        server, model: the URL of an OpenAI-compatible server, and the adapter's or merged model's name there.
        text: a file with text. loading: of models. say: called with what is done next.
    Raises:
        CheckpointError: a folder cannot be read, or the server does not answer; the message has its words. Or there is
            neither, or no tokenizer, or a model's log-probabilities are not finite.
    """
    if not folders and server is None:
        raise CheckpointError(
            "there is nothing to compare with the adapter: name a FOLDER where it went, or a --server"
        )
    loading = loading or Loading()
    base_folder, adapter_folder = local_folder(base), local_folder(adapter)
    paths = {folder: local_folder(folder) for folder in folders}
    in_other_forms = {folder: path for folder, path in paths.items() if is_adapter(path)}
    merged = {folder: path for folder, path in paths.items() if folder not in in_other_forms}
    with_tokenizer = [folder for folder in (adapter_folder, base_folder) if has_tokenizer(folder)]
    if not with_tokenizer:
        raise CheckpointError(f"neither {base} nor {adapter} has a tokenizer; save the model's into one of them")
    tokenizer = _read_tokenizer(with_tokenizer[0])
    texts = texts_for(tokenizer, text, MAX_TEXTS)
    client = None if server is None else Server(server, tokenizer)

    def observe_served(texts: list[Text]) -> list[Observation]:
        return [] if client is None else list(observe_server(client, model, texts, say))

    served = observe_served(texts[:FIRST_TEXTS])
    in_folders = list(observe_merged(base_folder, merged, loading, texts, say))  # one model is in memory at a time
    as_stored = None
    if loading.experts_quantization is not None and any(each.dtype is not None for each in in_folders):
        say(f"loading {base} as it is stored")
        as_stored = scores_of(loading._replace(experts_quantization=None).load(base_folder), texts, base, say)
    say(f"loading {base}")
    base_model = loading.load(base_folder)
    if as_stored is not None:
        as_loaded = scores_of(base_model, texts, base, say)
        in_folders = [each.with_nearer_base(as_stored, as_loaded) for each in in_folders]
    with tempfile.TemporaryDirectory(prefix="sonicmoe-hf-check-") as temporary:
        new = Path(temporary)
        in_folders += observe_adapted(base_model, base_folder, in_other_forms, texts, new, say)
        with adapted(base_model, base_folder, adapter_folder, new / "adapter") as (wrapped, biases):
            trained = TrainedAdapter(wrapped, biases, base_model.dtype)
            judge = PlaceJudge(trained, say).judge
            places = [judge(each) for each in [*served, *(each.cut_to(FIRST_TEXTS) for each in in_folders)]]
            if any(place.is_unknown for place in places) and len(texts) > FIRST_TEXTS:
                say("asking for more texts")
                places = [judge(each) for each in [*observe_served(texts), *in_folders]]
                change = trained.change(texts)
            else:
                change = trained.change(texts[:FIRST_TEXTS])
    places.sort(key=lambda each: folders.index(each.place) if each.place in folders else -1)
    return Check(change.abs().mean().item(), len(change), places)


def _read_tokenizer(folder: Path) -> Any:
    """Read the tokenizer in a folder. Raises CheckpointError, which names the file, where it is damaged."""
    for file in folder.glob("tokenizer*.json"):
        read_json(file)
    return AutoTokenizer.from_pretrained(folder)
